"""An encoder on the ALiBi transformer: tokens in, embeddings of texts out."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from alibi_core.backend import models
from alibi_core.backend.models import AlibiConfig
from alibi_jax.nn._transformer import AttentionFactory, Parts, is_traced

LEAST_PACKED = 64  # Packed rows up to this many tokens are padded to it, so that they share one compiled program.


class AlibiEncoder(nnx.Module, models.BaseEncoder):
    """Embed texts of any length as vectors: each token sees the tokens before and after it.

    ``encode`` packs texts into one row and pads it by up to an eighth, or to a multiple of 64 tokens, so that batches
    of different lengths reuse a few compiled programs. Dropout is off in it. If arrays are traced (under ``jax.jit`` or
    ``jax.grad``), the places of padding are unknown: padding is then computed and masked, and dropout depends on the
    model's mode.

    Args:
        config: Shape of the model; must not be causal.
        vocab_size: Number of different tokens.
        attention, dtype, param_dtype, rngs: As in :class:`AlibiTransformer`.

    Raises:
        TypeError: If ``vocab_size`` is no integer.
        ValueError: If ``vocab_size`` is below 1, or ``config`` describes a decoder.

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
        parts = Parts(config, attention, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self._build(parts, vocab_size, is_causal=False)

    def _encode(
        self, tokens: jax.Array, token_types: jax.Array | None, lengths: Any, mask: Any, pooling: str
    ) -> jax.Array:
        arrays = {"tokens": tokens, "token_types": token_types}
        if is_traced(nnx.state(self), lengths, mask, tokens):
            if lengths is mask is None or is_traced(lengths, mask):
                return self._encode_padded(arrays, models.text_of(tokens, lengths, mask), pooling)
            text = models.TextRows.check(tokens.shape, lengths, mask).text
            return self._encode_padded(arrays, jnp.asarray(text), pooling)
        rows = self._text_rows(tokens, token_types, lengths, mask)
        graph, state = nnx.split(self)
        if rows.is_full or rows.has_gaps:
            return _encode_padded(graph, state, arrays, jnp.asarray(rows.text), pooling)
        count, batch = len(rows.places), tokens.shape[0]
        spare = _filled(count) - count
        places = np.pad(rows.places, (0, spare), constant_values=rows.places[0] if count else 0)
        arrays = {name: None if x is None else x.reshape(-1)[places][None] for name, x in arrays.items()}
        segment_ids = np.pad(rows.row_of_place, (0, spare), constant_values=batch)  # padding: segment of no text
        return _encode_packed(graph, state, arrays, jnp.asarray(segment_ids), batch, pooling)


@partial(jax.jit, static_argnums=(0, 4))
def _encode_padded(graph: Any, state: Any, arrays: dict[str, Any], text: jax.Array, pooling: str) -> jax.Array:
    return _without_dropout(graph, state)._encode_padded(arrays, text, pooling)


@partial(jax.jit, static_argnums=(0, 4, 5))
def _encode_packed(
    graph: Any, state: Any, arrays: dict[str, Any], segment_ids: jax.Array, batch: int, pooling: str
) -> jax.Array:
    """Return the vectors of texts packed into one row, ``[batch, embed_dim]``."""
    hidden = _at_least_float32(_without_dropout(graph, state)(**arrays, segment_ids=segment_ids[None])[0])
    if pooling == "cls":
        is_first = jnp.concatenate([jnp.ones(1, bool), segment_ids[1:] != segment_ids[:-1]])
        segment_ids = jnp.where(is_first, segment_ids, batch)
    # Segment `batch` collects the tokens that belong to no vector, and is dropped.
    sums = jax.ops.segment_sum(hidden, segment_ids, batch + 1, indices_are_sorted=pooling == "mean")[:batch]
    counts = jnp.bincount(segment_ids, length=batch + 1)[:batch]
    return sums / jnp.maximum(counts, 1).astype(sums.dtype)[:, None]


def _without_dropout(graph: Any, state: Any) -> AlibiEncoder:
    model = nnx.merge(graph, state)
    model.eval()
    return model


def _filled(count: int) -> int:
    """Return the padded length of a row of ``count`` packed tokens: eight lengths per power of two, multiples of 64."""
    step = max(LEAST_PACKED, 1 << max(count.bit_length() - 4, 0))
    return max(1, -(-count // step)) * step


def _at_least_float32(hidden: jax.Array) -> jax.Array:
    return hidden.astype(np.promote_types(hidden.dtype, np.float32))  # explicit, for jax_numpy_dtype_promotion="strict"
