"""An encoder on the ALiBi transformer: tokens in, embeddings of texts out."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from alibi_core.backend import checks
from alibi_core.backend.checks import explains_keywords
from alibi_core.backend.models import MOST_PACKED, POOLING, AlibiConfig, TextRows, check_config
from alibi_mlx.nn._transformer import AlibiTransformer, AttentionFactory, norm_layer, scaled


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
        >>> texts = mx.array([list(b"train short"), list(b"test long..")])
        >>> model(texts).shape
        (2, 11, 256)
        >>> model.encode(texts, lengths=[11, 9]).shape
        (2, 256)
    """

    def __init__(self, config: AlibiConfig, vocab_size: int, *, attention: AttentionFactory | None = None) -> None:
        super().__init__()
        self.config = check_config(config, is_causal=False)
        # MLX draws embeddings with a variance of 1 / embed_dim.
        self.embedding = nn.Embedding(checks.positive_int("vocab_size", vocab_size), config.embed_dim)
        if config.token_types:
            self.token_type_embedding = nn.Embedding(config.token_types, config.embed_dim)
        if config.embedding_norm:
            self.embedding_norm = norm_layer(config)
        self.transformer = AlibiTransformer(config, attention=attention)

    def __call__(
        self,
        tokens: mx.array,
        *,
        mask: mx.array | None = None,
        segment_ids: mx.array | None = None,
        token_types: mx.array | None = None,
    ) -> mx.array:
        """Return a vector for each token.

        Args:
            tokens: ``[batch, length]`` integers below ``vocab_size``.
            mask, segment_ids: As for :class:`AlibiTransformer`. All of ``tokens`` are computed, padding too;
                see :meth:`encode`.
            token_types: ``[batch, length]`` integers below ``config.token_types``. Default: all 0.

        Returns:
            ``[batch, length, embed_dim]``.

        Raises:
            ValueError: If ``token_types`` have another shape, or are given to a model without such embeddings.
        """
        return self.transformer(self.embed(tokens, token_types=token_types), mask=mask, segment_ids=segment_ids)

    def embed(self, tokens: mx.array, *, token_types: mx.array | None = None) -> mx.array:
        """Return what the transformer is given for ``tokens``: ``[batch, length, embed_dim]``."""
        token_types = checks.token_types(token_types, checks.tokens(tokens, mx), self.config.token_types, mx)
        x = scaled(self.embedding(tokens), self.config.embedding_factor)
        if self.config.token_types:
            of_types = self.token_type_embedding
            x = x + (of_types.weight[0] if token_types is None else of_types(token_types))
        return self.embedding_norm(x) if self.config.embedding_norm else x

    @explains_keywords
    def encode(
        self,
        tokens: mx.array,
        *,
        lengths: mx.array | Any | None = None,
        mask: mx.array | Any | None = None,
        token_types: mx.array | None = None,
        pooling: str = "mean",
    ) -> mx.array:
        """Return a vector for each text.

        Padding is not computed: texts of several lengths are packed into rows, and cost what their tokens cost.
        Padding between tokens of one text counts in the distances and is computed. Where the padding is, the host has
        to know: this is not for ``mx.compile``.

        Args:
            tokens: ``[batch, length]`` integers below ``vocab_size``; those of padding may be any.
            lengths: ``[batch]`` integers, how many tokens of each row are text, from the first on.
            mask: ``[batch, length]`` booleans or integers, 0 for padding, in place of lengths.
            token_types: As for :meth:`__call__`.
            pooling: ``"mean"``: the mean of the vectors of a text's tokens. ``"cls"``: that of its first token.

        Returns:
            ``[batch, embed_dim]``, in float32 at least: zeros for a row without text.

        Raises:
            TypeError: If an argument is of the wrong kind.
            ValueError: If both ``lengths`` and ``mask`` are given, an argument does not fit ``tokens``, or the model
                has no embedding of a token of text.
        """
        checks.one_of("pooling", pooling, POOLING)
        checks.token_types(token_types, checks.tokens(tokens, mx), self.config.token_types, mx)
        rows = TextRows.check(tuple(tokens.shape), _on_host(lengths), _on_host(mask))
        rows.check_in_table("tokens", tokens, len(self.embedding.weight))
        rows.check_in_table("token_types", token_types, self.config.token_types)
        vectors = self._of_text(tokens, token_types, rows)  # [tokens of text, embed_dim]
        vectors = vectors.astype(mx.float64 if vectors.dtype == mx.float64 else mx.float32)
        zeros = mx.zeros(vectors.shape[-1:], vectors.dtype)
        pooled, start = [], 0
        for count in rows.counts:
            text = vectors[start : start + count]
            pooled.append(zeros if count == 0 else text[0] if pooling == "cls" else text.mean(axis=0))
            start += count
        return mx.stack(pooled) if pooled else vectors

    def _of_text(self, tokens: mx.array, token_types: mx.array | None, rows: TextRows) -> mx.array:
        """Return the vectors of the tokens that are text, ``[tokens of text, embed_dim]``, row by row."""
        if rows.is_full:
            return mx.flatten(self(tokens, token_types=token_types), 0, 1)
        if rows.has_gaps:
            text = mx.array(rows.text)
            # Whatever number stands for padding, the tables of embeddings need not have it.
            tokens, token_types = (None if x is None else mx.where(text, x, 0) for x in (tokens, token_types))
            hidden = self(tokens, mask=text[:, None, None], token_types=token_types)
            return mx.flatten(hidden, 0, 1)[mx.array(rows.places)]

        def vectors_of(*pack: np.ndarray) -> mx.array:
            places, segment_ids = (mx.array(x) for x in pack)
            types = None if token_types is None else mx.flatten(token_types)[places][None]
            return self(mx.flatten(tokens)[places][None], segment_ids=segment_ids[None], token_types=types)[0]

        most = MOST_PACKED["cpu" if mx.default_device() == mx.cpu else "accelerator"]
        return mx.concatenate([vectors_of(*pack) for pack in rows.packs(most)])


def _on_host(value: Any) -> Any:
    return np.array(value) if isinstance(value, mx.array) else value
