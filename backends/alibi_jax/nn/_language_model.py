"""A language model on the ALiBi transformer: tokens in, logits out, and text that goes on from a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from alibi_core.backend import checks
from alibi_core.backend.checks import explains_keywords
from alibi_core.backend.models import AlibiConfig, Generation, check_config
from alibi_jax.nn._transformer import AlibiTransformer, AttentionFactory, is_traced, norm_layer, scaled


class AlibiLanguageModel(nnx.Module):
    """Predict each next token from those before it, at any length.

    One matrix embeds the tokens and reads out the logits. Its entries start with a variance of ``1 / embed_dim``, which
    gives logits of unit variance; embeddings are multiplied by ``sqrt(embed_dim)``, which gives them the same.
    ``config`` may ask for a head of its own, another scale of embeddings or logits, or the norm of embeddings.

    Args:
        config: Shape of the model; must be causal.
        vocab_size: Number of different tokens.
        attention, dtype, param_dtype, rngs: As for :class:`AlibiTransformer`.

    Raises:
        TypeError: If ``vocab_size`` is no integer.
        ValueError: If it is below 1, or ``config`` describes an encoder.

    Example:
        >>> model = AlibiLanguageModel(AlibiConfig(num_layers=1), vocab_size=256, rngs=nnx.Rngs(0))
        >>> prompt = jnp.asarray([list(b"train short")])
        >>> model(prompt).shape
        (1, 11, 256)
        >>> model.generate(prompt, max_new_tokens=5).shape
        (1, 16)
    """

    def __init__(
        self,
        config: AlibiConfig,
        vocab_size: int,
        *,
        attention: AttentionFactory | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.config = check_config(config, is_causal=True)
        init = nnx.initializers.normal(config.embed_dim**-0.5)
        vocab_size = checks.positive_int("vocab_size", vocab_size)
        self.embedding = nnx.Embed(vocab_size, config.embed_dim, embedding_init=init, **options)
        if config.embedding_norm:
            self.embedding_norm = norm_layer(config, **options)
        self.transformer = AlibiTransformer(config, attention=attention, **options)
        if not config.tied_head:
            self.head = nnx.Linear(config.embed_dim, vocab_size, use_bias=False, **options)

    @explains_keywords
    def __call__(
        self,
        tokens: jax.Array,
        *,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
        caches: Sequence[Any] | None = None,
    ) -> jax.Array | tuple[jax.Array, list[Any]]:
        """Return the logits of the token after each of ``tokens``.

        Args:
            tokens: ``[batch, length]`` integers below ``vocab_size``.
            mask, segment_ids, caches: As for :class:`AlibiTransformer`.

        Returns:
            ``[batch, length, vocab_size]``; with caches, the pair of that and the longer caches.
        """
        hidden = self.transformer(self.embed(tokens), mask=mask, segment_ids=segment_ids, caches=caches)
        if caches is None:
            return self.read_out(hidden)
        return self.read_out(hidden[0]), hidden[1]

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Return what the transformer is given for ``tokens``: ``[batch, length, embed_dim]``."""
        x = scaled(self.embedding(checks.tokens(tokens)), self.config.embedding_factor)
        return self.embedding_norm(x) if self.config.embedding_norm else x

    def read_out(self, hidden: jax.Array) -> jax.Array:
        """Return the logits, ``[..., vocab_size]``, of the transformer's output, ``[..., embed_dim]``."""
        logits = self.embedding.attend(hidden) if self.config.tied_head else self.head(hidden)
        return scaled(logits, self.config.logit_scale)

    @explains_keywords
    def generate(
        self,
        tokens: jax.Array,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Return ``tokens`` and ``max_new_tokens`` more, each predicted from all before it, without dropout.

        Two programs are compiled, one for the prompt and one for each token after it.

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
            key: Of ``jax.random.key``, from which the draws follow; must be given where there are any.

        Returns:
            ``[batch, length + max_new_tokens]``, of the dtype of ``tokens``.

        Raises:
            TypeError: If an argument is of the wrong kind.
            ValueError: If a number is out of range, ``top_k`` or ``top_p`` come without a temperature, a key is
                missing, or ``tokens`` is not ``[batch, length]`` with a token in each row, or has one that the model
                has no embedding of.
        """
        rules = Generation.check(
            tokens,
            max_new_tokens,
            self.embedding.num_embeddings,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
        )
        if rules.temperature > 0 and key is None:
            raise ValueError("key must be given with a temperature above 0, got None; jax.random.key makes one")
        if max_new_tokens == 0:
            return tokens
        # Modules of its own, to turn dropout off in.
        model = nnx.merge(*nnx.split(self))
        model.eval()
        graph, state = nnx.split(model)
        batch_size, length = tokens.shape
        # The last token is never fed back, so the caches need no room for it.
        caches = self.transformer.make_caches(batch_size, length + max_new_tokens - 1)
        keys = [None] * max_new_tokens if key is None else jax.random.split(key, max_new_tokens)
        extend = _extend if is_traced(state, tokens, key) else _extend_in_place
        found, unread, ended = [tokens], tokens, None
        for step, step_key in enumerate(keys, 1):
            had_ended = ended
            unread, ended, caches = extend(graph, state, unread, caches, rules, step_key, ended)
            found.append(unread)
            # Of the step before, which need not be waited for.
            if had_ended is not None and not is_traced(had_ended) and had_ended.all():
                found.append(jnp.full((batch_size, max_new_tokens - step), rules.pad_token_id, tokens.dtype))
                break
        return jnp.concatenate(found, axis=1)


def _extended(
    graph: Any,
    state: Any,
    tokens: jax.Array,
    caches: list[Any],
    rules: Generation,
    key: jax.Array | None,
    ended: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None, list[Any]]:
    """Return the tokens, ``[batch, 1]``, that follow ``tokens``, which rows end, and the caches with ``tokens``."""
    model = nnx.merge(graph, state)
    hidden, caches = model.transformer(model.embed(tokens), caches=caches)
    logits = model.read_out(hidden[:, -1])  # [batch, vocab_size]
    if rules.temperature == 0:
        chosen = logits.argmax(axis=-1)
    else:
        chosen = jax.random.categorical(key, rules.to_draw_from(jnp, logits))
    return *rules.followed(jnp, chosen[:, None].astype(tokens.dtype), ended), caches


_extend = jax.jit(_extended, static_argnums=(0, 4))
# Under jax.vmap the first caches have no mapped axis, and cannot become those that it returns, which JAX warns of.
_extend_in_place = jax.jit(_extended, static_argnums=(0, 4), donate_argnums=3)
