"""An encoder on the ALiBi transformer: tokens in, embeddings of texts out."""

from __future__ import annotations

from typing import Any

import array_api_compat.torch as xp
import numpy as np
import torch
from torch import Tensor, nn

from alibi_core.backend import checks
from alibi_core.backend.checks import explains_keywords
from alibi_core.backend.models import MOST_PACKED, POOLING, TextRows, check_config
from alibi_torch.nn._transformer import AlibiConfig, AlibiTransformer, AttentionFactory, looked_up, norm_layer, scaled


class AlibiEncoder(nn.Module):
    """Embed texts of any length, as vectors.

    Tokens see those before and after them. ``config`` may ask for embeddings of token types, added to those of the
    tokens, and for a layer norm of the sum.

    Args:
        config: Shape of the model; must not be causal.
        vocab_size: Number of different tokens.
        attention: As for :class:`AlibiTransformer`.

    Raises:
        TypeError: If ``vocab_size`` is no integer.
        ValueError: If it is below 1, or ``config`` describes a decoder.

    Example:
        >>> model = AlibiEncoder(AlibiConfig(num_layers=1, is_causal=False, dropout=0.0), vocab_size=256)
        >>> texts = torch.tensor([list(b"train short"), list(b"test long..")])
        >>> model(texts).shape
        torch.Size([2, 11, 256])
        >>> model.encode(texts, lengths=[11, 9]).shape
        torch.Size([2, 256])
    """

    def __init__(self, config: AlibiConfig, vocab_size: int, *, attention: AttentionFactory | None = None) -> None:
        super().__init__()
        self.config = check_config(config, is_causal=False)
        self.embedding = nn.Embedding(checks.positive_int("vocab_size", vocab_size), config.embed_dim)
        if config.token_types:
            self.token_type_embedding = nn.Embedding(config.token_types, config.embed_dim)
        for table in self.children():
            nn.init.normal_(table.weight, std=config.embed_dim**-0.5)
        if config.embedding_norm:
            self.embedding_norm = norm_layer(config)
        self.transformer = AlibiTransformer(config, attention=attention)

    def forward(
        self,
        tokens: Tensor,
        *,
        mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        token_types: Tensor | None = None,
    ) -> Tensor:
        """Return a vector for each token.

        Args:
            tokens: ``[batch, length]`` integers below ``vocab_size``.
            mask, segment_ids: As for :meth:`AlibiTransformer.forward`. All of ``tokens`` are computed, padding too;
                see :meth:`encode`.
            token_types: ``[batch, length]`` integers below ``config.token_types``. Default: all 0.

        Returns:
            ``[batch, length, embed_dim]``.

        Raises:
            ValueError: If ``token_types`` have another shape, or are given to a model without such embeddings.
        """
        return self.transformer(self.embed(tokens, token_types=token_types), mask=mask, segment_ids=segment_ids)

    def embed(self, tokens: Tensor, *, token_types: Tensor | None = None) -> Tensor:
        """Return what the transformer is given for ``tokens``: ``[batch, length, embed_dim]``."""
        token_types = checks.token_types(token_types, checks.tokens(tokens, xp), self.config.token_types, xp)
        x = scaled(looked_up(self.embedding, tokens), self.config.embedding_factor)
        if self.config.token_types:
            of_types = self.token_type_embedding
            x = x + (of_types.weight[0] if token_types is None else looked_up(of_types, token_types))
        return self.embedding_norm(x) if self.config.embedding_norm else x

    @explains_keywords
    def encode(
        self,
        tokens: Tensor,
        *,
        lengths: Tensor | Any | None = None,
        mask: Tensor | Any | None = None,
        token_types: Tensor | None = None,
        pooling: str = "mean",
    ) -> Tensor:
        """Return a vector for each text.

        Padding is not computed: texts of several lengths are packed into rows, and cost what their tokens cost.
        Padding between tokens of one text counts in the distances and is computed. Where the padding is, the host has
        to know, so an accelerator waits once.

        Args:
            tokens: ``[batch, length]`` integers below ``vocab_size``; those of padding may be any.
            lengths: ``[batch]`` integers, how many tokens of each row are text, from the first on.
            mask: ``[batch, length]`` booleans or integers, 0 for padding, in place of lengths.
            token_types: As for :meth:`forward`.
            pooling: ``"mean"``: the mean of the vectors of a text's tokens. ``"cls"``: that of its first token.

        Returns:
            ``[batch, embed_dim]``, in float32 at least: zeros for a row without text.

        Raises:
            TypeError: If an argument is of the wrong kind.
            ValueError: If both ``lengths`` and ``mask`` are given, an argument does not fit ``tokens``, or the model
                has no embedding of a token of text.
        """
        checks.one_of("pooling", pooling, POOLING)
        checks.token_types(token_types, checks.tokens(tokens, xp), self.config.token_types, xp)
        rows = TextRows.check(tuple(tokens.shape), _on_host(lengths), _on_host(mask))
        rows.check_in_table("tokens", tokens, len(self.embedding.weight))
        rows.check_in_table("token_types", token_types, self.config.token_types)
        vectors = self._of_text(tokens, token_types, rows)  # [tokens of text, embed_dim]
        vectors = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
        pooled = vectors.new_zeros(tokens.shape[0], vectors.shape[-1])
        for row, text in enumerate(vectors.split(rows.counts)):
            if len(text):
                pooled[row] = text[0] if pooling == "cls" else text.mean(dim=0)
        return pooled

    def _of_text(self, tokens: Tensor, token_types: Tensor | None, rows: TextRows) -> Tensor:
        """Return the vectors of the tokens that are text, ``[tokens of text, embed_dim]``, row by row."""
        if rows.is_full:
            return self(tokens, token_types=token_types).flatten(0, 1)
        if rows.has_gaps:
            text = torch.from_numpy(rows.text).to(tokens.device)
            # Whatever number stands for padding, the tables of embeddings need not have it.
            tokens, token_types = (None if x is None else x.where(text, 0) for x in (tokens, token_types))
            return self(tokens, mask=text[:, None, None], token_types=token_types)[text]

        def vectors_of(*pack: np.ndarray) -> Tensor:
            places, segment_ids = (torch.from_numpy(x).to(tokens.device) for x in pack)
            types = None if token_types is None else token_types.flatten()[places][None]
            return self(tokens.flatten()[places][None], segment_ids=segment_ids[None], token_types=types)[0]

        most = MOST_PACKED["cpu" if tokens.device.type == "cpu" else "accelerator"]
        return torch.cat([vectors_of(*pack) for pack in rows.packs(most)])


def _on_host(value: Any) -> Any:
    return value.cpu().numpy() if isinstance(value, Tensor) else value
