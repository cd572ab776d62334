"""An encoder on the ALiBi transformer: tokens in, embeddings of texts out."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from alibi_core.backend import checks
from alibi_core.backend.checks import explains_keywords
from alibi_core.backend.models import POOLING, AlibiConfig, TextRows, check_config
from alibi_jax.nn._transformer import AlibiTransformer, AttentionFactory, is_traced, norm_layer, scaled

LEAST_PACKED = 64  # tokens: shorter rows of packed texts all share a program


class AlibiEncoder(nnx.Module):
    """Embed texts of any length, as vectors.

    Tokens see those before and after them. ``config`` may ask for embeddings of token types, added to those of the
    tokens, and for a layer norm of the sum.

    Args:
        config: Shape of the model; must not be causal.
        vocab_size: Number of different tokens.
        attention, dtype, param_dtype, rngs: As for :class:`AlibiTransformer`.

    Raises:
        TypeError: If ``vocab_size`` is no integer.
        ValueError: If it is below 1, or ``config`` describes a decoder.

    Example:
        >>> model = AlibiEncoder(AlibiConfig(num_layers=1, is_causal=False, dropout=0.0), 256, rngs=nnx.Rngs(0))
        >>> texts = jnp.asarray([list(b"train short"), list(b"test long..")])
        >>> model(texts).shape
        (2, 11, 256)
        >>> model.encode(texts, lengths=[11, 9]).shape
        (2, 256)
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
        self.config = check_config(config, is_causal=False)
        drawn = {"embedding_init": nnx.initializers.normal(config.embed_dim**-0.5)}
        vocab_size = checks.positive_int("vocab_size", vocab_size)
        self.embedding = nnx.Embed(vocab_size, config.embed_dim, **drawn, **options)
        if config.token_types:
            self.token_type_embedding = nnx.Embed(config.token_types, config.embed_dim, **drawn, **options)
        if config.embedding_norm:
            self.embedding_norm = norm_layer(config, **options)
        self.transformer = AlibiTransformer(config, attention=attention, **options)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        token_types: jax.Array | None = None,
    ) -> jax.Array:
        """Return a vector for each token.

        Args:
            tokens: ``[batch, length]`` integers below ``vocab_size``.
            mask, segment_ids: As for :class:`AlibiTransformer`. All of ``tokens`` are computed, padding too; see
                :meth:`encode`.
            token_types: ``[batch, length]`` integers below ``config.token_types``. Default: all 0.

        Returns:
            ``[batch, length, embed_dim]``.

        Raises:
            ValueError: If ``token_types`` have another shape, or are given to a model without such embeddings.
        """
        return self.transformer(self.embed(tokens, token_types=token_types), mask=mask, segment_ids=segment_ids)

    def embed(self, tokens: jax.Array, *, token_types: jax.Array | None = None) -> jax.Array:
        """Return what the transformer is given for ``tokens``: ``[batch, length, embed_dim]``."""
        token_types = checks.token_types(token_types, checks.tokens(tokens), self.config.token_types)
        x = scaled(self.embedding(tokens), self.config.embedding_factor)
        if self.config.token_types:
            x = x + self.token_type_embedding(jnp.zeros_like(tokens) if token_types is None else token_types)
        return self.embedding_norm(x) if self.config.embedding_norm else x

    @explains_keywords
    def encode(
        self,
        tokens: jax.Array,
        *,
        lengths: jax.Array | Any | None = None,
        mask: jax.Array | Any | None = None,
        token_types: jax.Array | None = None,
        pooling: str = "mean",
    ) -> jax.Array:
        """Return a vector for each text.

        Padding is not computed: texts of several lengths are packed into one row, and cost what their tokens cost.
        The row is filled up by an eighth, or to a multiple of 64 tokens: batches of other lengths mostly find their
        program compiled. Padding between tokens of one text counts in the distances and is computed. Dropout is off.
        Where arrays are traced (under ``jax.jit`` or ``jax.grad``, say), nobody knows where padding is: all of it is
        computed and masked there, and dropout is as the model has it.

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
        checks.token_types(token_types, checks.tokens(tokens), self.config.token_types)
        arrays = {"tokens": tokens, "token_types": token_types}
        if is_traced(nnx.state(self), lengths, mask, tokens):
            return self._encode_padded(arrays, _text_of(tokens, lengths, mask), pooling)
        rows = TextRows.check(tuple(tokens.shape), _on_host(lengths), _on_host(mask))
        rows.check_in_table("tokens", tokens, self.embedding.num_embeddings)
        rows.check_in_table("token_types", token_types, self.config.token_types)
        graph, state = nnx.split(self)
        if rows.is_full or rows.has_gaps:
            return _encode_padded(graph, state, arrays, jnp.asarray(rows.text), pooling)
        count, batch = len(rows.places), tokens.shape[0]
        spare = _filled(count) - count
        places = np.pad(rows.places, (0, spare), constant_values=rows.places[0] if count else 0)
        arrays = {name: None if x is None else x.reshape(-1)[places][None] for name, x in arrays.items()}
        segment_ids = np.pad(rows.row_of_place, (0, spare), constant_values=batch)  # of nobody
        return _encode_packed(graph, state, arrays, jnp.asarray(segment_ids), batch, pooling)

    def _encode_padded(self, arrays: dict[str, Any], text: jax.Array, pooling: str) -> jax.Array:
        """Return the vectors of texts, ``[batch, embed_dim]``, of which ``text`` masks the padding."""
        # Whatever number stands for padding, the tables of embeddings need not have it: NaN comes of such.
        arrays = {name: None if x is None else jnp.where(text, x, 0) for name, x in arrays.items()}
        hidden = _at_least_float32(self(**arrays, mask=text[:, None, None]))
        if pooling == "cls":
            text = text & (jnp.cumsum(text, axis=1) == 1)  # the first of each row
        hidden = jnp.where(text[..., None], hidden, 0)  # padding may be NaN, which no factor of 0 removes
        return hidden.sum(axis=1) / jnp.maximum(text.sum(axis=1), 1).astype(hidden.dtype)[:, None]


@partial(jax.jit, static_argnums=(0, 4))
def _encode_padded(graph: Any, state: Any, arrays: dict[str, Any], text: jax.Array, pooling: str) -> jax.Array:
    return _without_dropout(graph, state)._encode_padded(arrays, text, pooling)


@partial(jax.jit, static_argnums=(0, 4, 5))
def _encode_packed(
    graph: Any, state: Any, arrays: dict[str, Any], segment_ids: jax.Array, batch: int, pooling: str
) -> jax.Array:
    """Return the vectors of texts, ``[batch, embed_dim]``, that are packed into one row."""
    hidden = _at_least_float32(_without_dropout(graph, state)(**arrays, segment_ids=segment_ids[None])[0])
    if pooling == "cls":
        is_first = jnp.concatenate([jnp.ones(1, bool), segment_ids[1:] != segment_ids[:-1]])
        segment_ids = jnp.where(is_first, segment_ids, batch)
    # One row more than there are, for what is nobody's.
    sums = jax.ops.segment_sum(hidden, segment_ids, batch + 1, indices_are_sorted=pooling == "mean")[:batch]
    counts = jnp.bincount(segment_ids, length=batch + 1)[:batch]
    return sums / jnp.maximum(counts, 1).astype(sums.dtype)[:, None]


def _without_dropout(graph: Any, state: Any) -> AlibiEncoder:
    model = nnx.merge(graph, state)
    model.eval()
    return model


def _text_of(tokens: jax.Array, lengths: Any, mask: Any) -> jax.Array:
    """Return where text is, ``[batch, length]``, of a call where some values are not known."""
    if not is_traced(lengths, mask):
        return jnp.asarray(TextRows.check(tokens.shape, _on_host(lengths), _on_host(mask)).text)
    TextRows.check_form(tokens.shape, lengths, mask)
    if lengths is not None:
        return jnp.arange(tokens.shape[1]) < lengths[:, None]
    return mask.astype(bool)


def _filled(count: int) -> int:
    """Return how long a row of so many packed tokens is made: of eight lengths between two powers of two, or of 64."""
    step = max(LEAST_PACKED, 1 << max(count.bit_length() - 4, 0))
    return max(1, -(-count // step)) * step


def _at_least_float32(hidden: jax.Array) -> jax.Array:
    return hidden.astype(np.promote_types(hidden.dtype, np.float32))  # JAX may be told to promote nothing


def _on_host(value: Any) -> Any:
    return np.asarray(value) if isinstance(value, jax.Array) else value
