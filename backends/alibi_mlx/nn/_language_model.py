"""A language model on the ALiBi transformer: tokens in, logits out, and text that goes on from a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx import nn

from alibi_core.backend import checks
from alibi_core.backend.checks import explains_keywords, namespace_of
from alibi_core.backend.models import AlibiConfig, Generation, check_config
from alibi_mlx.nn._transformer import AlibiTransformer, AttentionFactory, norm_layer, scaled


class AlibiLanguageModel(nn.Module):
    """Predict each next token from those before it, at any length.

    One matrix embeds the tokens and reads out the logits. Its entries start with a variance of ``1 / embed_dim``, which
    gives logits of unit variance; embeddings are multiplied by ``sqrt(embed_dim)``, which gives them the same.
    ``config`` may ask for a head of its own, another scale of embeddings or logits, or the norm of embeddings.
    mlx-lm runs the model as it is: ``mlx_lm.generate(model, tokenizer, prompt)``, after ``model.eval()`` if it has
    dropout. Its options ``max_kv_size`` and ``kv_bits`` are for caches of its own, and change nothing.

    Args:
        config: Shape of the model; must be causal.
        vocab_size: Number of different tokens.
        attention: As for :class:`AlibiTransformer`.

    Raises:
        TypeError: If ``vocab_size`` is no integer.
        ValueError: If it is below 1, or ``config`` describes an encoder.

    Example:
        >>> model = AlibiLanguageModel(AlibiConfig(num_layers=1), vocab_size=256)
        >>> prompt = mx.array([list(b"train short")])
        >>> model(prompt).shape
        (1, 11, 256)
        >>> model.generate(prompt, max_new_tokens=5).shape
        (1, 16)
    """

    def __init__(self, config: AlibiConfig, vocab_size: int, *, attention: AttentionFactory | None = None) -> None:
        super().__init__()
        self.config = check_config(config, is_causal=True)
        self.embedding = nn.Embedding(checks.positive_int("vocab_size", vocab_size), config.embed_dim)
        self.embedding.weight = mx.random.normal(self.embedding.weight.shape, scale=config.embed_dim**-0.5)
        if config.embedding_norm:
            self.embedding_norm = norm_layer(config)
        self.transformer = AlibiTransformer(config, attention=attention)
        if not config.tied_head:
            self.head = nn.Linear(config.embed_dim, vocab_size, bias=False)

    @explains_keywords
    def __call__(
        self,
        tokens: mx.array,
        *,
        mask: mx.array | None = None,
        segment_ids: mx.array | tuple[mx.array, mx.array] | None = None,
        caches: Sequence[Any] | None = None,
        cache: Sequence[Any] | None = None,
    ) -> mx.array:
        """Return the logits of the token after each of ``tokens``.

        Args:
            tokens: ``[batch, length]`` integers below ``vocab_size``.
            mask, segment_ids, caches: As for :class:`AlibiTransformer`.
            cache: The same as ``caches``, in the words of mlx-lm.

        Returns:
            ``[batch, length, vocab_size]``.

        Raises:
            ValueError: If both ``caches`` and ``cache`` are given; and as for :class:`AlibiTransformer`.
        """
        if cache is not None:
            if caches is not None:
                raise ValueError("cache must be None where caches are given: both mean one cache a block")
            caches = cache
        return self.read_out(self.transformer(self.embed(tokens), mask=mask, segment_ids=segment_ids, caches=caches))

    def embed(self, tokens: mx.array) -> mx.array:
        """Return what the transformer is given for ``tokens``: ``[batch, length, embed_dim]``."""
        x = scaled(self.embedding(checks.tokens(tokens, mx)), self.config.embedding_factor)
        return self.embedding_norm(x) if self.config.embedding_norm else x

    def read_out(self, hidden: mx.array) -> mx.array:
        """Return the logits, ``[..., vocab_size]``, of the transformer's output, ``[..., embed_dim]``."""
        logits = self.embedding.as_linear(hidden) if self.config.tied_head else self.head(hidden)
        return scaled(logits, self.config.logit_scale)

    @property
    def layers(self) -> list[Any]:
        """The blocks, as mlx-lm counts them."""
        return self.transformer.blocks

    def make_cache(self) -> list[Any]:
        """Return an empty cache for each block, for any number of sequences and tokens, as mlx-lm asks for them."""
        return self.transformer.make_caches()

    @explains_keywords
    def generate(
        self,
        tokens: mx.array,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        key: mx.array | None = None,
    ) -> mx.array:
        """Return ``tokens`` and ``max_new_tokens`` more, each predicted from all before it. Dropout is off meanwhile.

        Args:
            tokens: ``[batch, length]`` integers, the prompts, of at least one token.
            max_new_tokens: How many tokens to add to each; may be 0.
            temperature: 0 takes the likeliest token. Otherwise tokens are drawn, with the logits divided by this: 1 is
                the model's own distribution, less is more cautious.
            top_k: Draw from this many of the likeliest tokens alone.
            top_p: Then draw from the likeliest of those alone, as many as it takes for their share of the probability
                to reach this.
            eos_token_id: A token, or several, that ends a row.
            pad_token_id: What a row that has ended is filled with. Default ``eos_token_id``, the first of several.
            key: Of ``mx.random.key``, from which the draws follow. Default MLX's global one.

        Returns:
            ``[batch, length + max_new_tokens]``, of the dtype of ``tokens``.

        Raises:
            TypeError: If an argument is of the wrong kind.
            ValueError: If a number is out of range, ``top_k`` or ``top_p`` come without a temperature, or ``tokens`` is
                not ``[batch, length]`` with a token in each row, or has one that the model has no embedding of.
        """
        rules = Generation.check(
            tokens,
            max_new_tokens,
            self.embedding.weight.shape[0],
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
        )
        if max_new_tokens == 0:
            return mx.array(tokens)
        before = [(module, module.training) for module in self.modules()]  # each before those that it is made of
        self.eval()
        try:
            return self._extend(tokens, max_new_tokens, rules, key)
        finally:
            for module, training in before:
                module.train(training)

    def _extend(self, tokens: mx.array, max_new_tokens: int, rules: Generation, key: mx.array | None) -> mx.array:
        batch_size, length = tokens.shape
        # The last token is never fed back, so the caches need no room for it.
        caches = self.transformer.make_caches(batch_size, length + max_new_tokens - 1)
        keys = [None] * max_new_tokens if key is None else mx.random.split(key, max_new_tokens)
        found, unread, ended, xp = [tokens], tokens, None, namespace_of(xp=mx)
        for step, step_key in enumerate(keys, 1):
            had_ended = ended
            hidden = self.transformer(self.embed(unread), caches=caches)
            logits = self.read_out(hidden[:, -1])  # [batch, vocab_size]
            chosen = _choose(logits, rules, step_key)[:, None].astype(tokens.dtype)  # [batch, 1]
            unread, ended = rules.followed(xp, chosen, ended)
            mx.async_eval(unread)  # while the next step is being put together
            found.append(unread)
            # Of the step before, which need not be waited for.
            if had_ended is not None and had_ended.all().item():
                found.append(mx.full((batch_size, max_new_tokens - step), rules.pad_token_id, tokens.dtype))
                break
        return mx.concatenate(found, axis=1)


def _choose(logits: mx.array, rules: Generation, key: mx.array | None) -> mx.array:
    if rules.temperature == 0:
        return logits.argmax(axis=-1)
    return mx.random.categorical(rules.to_draw_from(namespace_of(xp=mx), logits), axis=-1, key=key)
