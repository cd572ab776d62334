"""A language model on the ALiBi transformer: tokens in, logits out, and text that goes on from a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alibi_core.backend import checks
from alibi_core.backend.checks import explains_keywords
from alibi_core.backend.models import Generation, check_config
from alibi_torch.nn._transformer import AlibiConfig, AlibiTransformer, AttentionFactory, looked_up, norm_layer, scaled


class AlibiLanguageModel(nn.Module):
    """Predict each next token from those before it, at any length.

    One matrix embeds the tokens and reads out the logits. Its entries start with a variance of ``1 / embed_dim``, which
    gives logits of unit variance; embeddings are multiplied by ``sqrt(embed_dim)``, which gives them the same.
    ``config`` may ask for a head of its own, another scale of embeddings or logits, or the norm of embeddings.

    Args:
        config: Shape of the model; must be causal.
        vocab_size: Number of different tokens.
        attention: As for :class:`AlibiTransformer`.

    Raises:
        TypeError: If ``vocab_size`` is no integer.
        ValueError: If it is below 1, or ``config`` describes an encoder.

    Example:
        >>> model = AlibiLanguageModel(AlibiConfig(num_layers=1), vocab_size=256)
        >>> prompt = torch.tensor([list(b"train short")])
        >>> model(prompt).shape
        torch.Size([1, 11, 256])
        >>> model.generate(prompt, max_new_tokens=5).shape
        torch.Size([1, 16])
    """

    def __init__(self, config: AlibiConfig, vocab_size: int, *, attention: AttentionFactory | None = None) -> None:
        super().__init__()
        self.config = check_config(config, is_causal=True)
        self.embedding = nn.Embedding(checks.positive_int("vocab_size", vocab_size), config.embed_dim)
        nn.init.normal_(self.embedding.weight, std=config.embed_dim**-0.5)
        if config.embedding_norm:
            self.embedding_norm = norm_layer(config)
        self.transformer = AlibiTransformer(config, attention=attention)
        if not config.tied_head:
            self.head = nn.Linear(config.embed_dim, vocab_size, bias=False)

    @explains_keywords
    def forward(
        self,
        tokens: Tensor,
        *,
        mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        caches: Sequence[Any] | None = None,
    ) -> Tensor:
        """Return the logits of the token after each of ``tokens``.

        Args:
            tokens: ``[batch, length]`` integers below ``vocab_size``.
            mask, segment_ids, caches: As for :meth:`AlibiTransformer.forward`.

        Returns:
            ``[batch, length, vocab_size]``.
        """
        return self.read_out(self.transformer(self.embed(tokens), mask=mask, segment_ids=segment_ids, caches=caches))

    def embed(self, tokens: Tensor) -> Tensor:
        """Return what the transformer is given for ``tokens``: ``[batch, length, embed_dim]``."""
        x = scaled(looked_up(self.embedding, checks.tokens(tokens, xp)), self.config.embedding_factor)
        return self.embedding_norm(x) if self.config.embedding_norm else x

    def read_out(self, hidden: Tensor) -> Tensor:
        """Return the logits, ``[..., vocab_size]``, of the transformer's output, ``[..., embed_dim]``."""
        logits = F.linear(hidden, self.embedding.weight if self.config.tied_head else self.head.weight)
        return scaled(logits, self.config.logit_scale)

    @explains_keywords
    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
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
            generator: Source of the draws, on the device of ``tokens``. Default PyTorch's global one.

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
            return tokens.clone()
        training = [module for module in self.modules() if module.training]
        self.eval()
        try:
            return self._extend(tokens, max_new_tokens, rules, generator)
        finally:
            for module in training:
                module.training = True

    def _extend(
        self, tokens: Tensor, max_new_tokens: int, rules: Generation, generator: torch.Generator | None
    ) -> Tensor:
        batch_size, length = tokens.shape
        # The last token is never fed back, so the caches need no room for it.
        caches = self.transformer.make_caches(batch_size, length + max_new_tokens - 1)
        found, unread, ended = [tokens], tokens, None
        for missing in range(max_new_tokens, 0, -1):
            if ended is not None and ended.all():
                found.append(tokens.new_full((batch_size, missing), rules.pad_token_id))
                break
            hidden = self.transformer(self.embed(unread), caches=caches)
            logits = self.read_out(hidden[:, -1])  # [batch, vocab_size]
            chosen = _choose(logits, rules, generator).to(tokens.dtype)  # [batch, 1]
            unread, ended = rules.followed(xp, chosen, ended)
            found.append(unread)
        return torch.cat(found, dim=1)


def _choose(logits: Tensor, rules: Generation, generator: torch.Generator | None) -> Tensor:
    if rules.temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    shares = rules.to_draw_from(xp, logits).softmax(dim=-1)
    return torch.multinomial(shares, num_samples=1, generator=generator)
