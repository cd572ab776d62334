"""Who computes attention in MLX: this library, MLX's kernel with a dense mask and without positions, and ``nn.ALiBi``.

What a model builds once for all its layers, a mask, is built before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx
import numpy as np
from mlx import nn

import alibi_mlx
from benchmarks.attention.backend import Contestant
from benchmarks.attention.sizes import Shape

OURS = "alibi_mlx"
NO_POSITIONS, DENSE_MASK = "mx.fast, no positions", "mx.fast, dense mask"

# Takes query, key and value, so that gradients can be asked for.
Attend = Callable[[mx.array, mx.array, mx.array], mx.array]


def this_library() -> Contestant:
    """Return this library, as it is by default."""
    return Contestant(OURS, lambda query, key, value: alibi_mlx.attention)


def without_positions(is_dense: bool) -> Contestant:
    """Return MLX's causal attention with no positions.

    Args:
        is_dense: Whether it computes whole scores: MLX has a fused kernel on Metal alone.
    """
    return Contestant(NO_POSITIONS, lambda query, key, value: partial(fast, mask="causal"), is_dense=is_dense)


def fast(query: mx.array, key: mx.array, value: mx.array, mask: mx.array | str | None = None) -> mx.array:
    """Return MLX's own attention, with the usual scale."""
    return mx.fast.scaled_dot_product_attention(query, key, value, scale=query.shape[-1] ** -0.5, mask=mask)


def slopes_of(num_heads: int) -> mx.array:
    """Return the slopes of a power of two of heads, ``[num_heads]``, float32."""
    return mx.array(np.exp2(-8 / num_heads * np.arange(1, num_heads + 1)), dtype=mx.float32)


def _dense_mask(query: mx.array, key: mx.array, value: mx.array) -> Attend:
    num_heads, length = query.shape[1:3]
    position = mx.arange(length)
    distance = position[:, None] - position
    bias = mx.where(distance < 0, -mx.inf, -slopes_of(num_heads)[:, None, None] * distance)
    mask = bias[None].astype(query.dtype)  # [1, num_heads, length, length]; MLX takes no wider one than the query
    mx.eval(mask)
    return partial(fast, mask=mask)


def _module(query: mx.array, key: mx.array, value: mx.array) -> Attend:
    alibi = nn.ALiBi()
    hidden = nn.MultiHeadAttention.create_additive_causal_mask(query.shape[2], query.dtype)
    mx.eval(hidden)

    def attend(query: mx.array, key: mx.array, value: mx.array) -> mx.array:
        scores = (query * query.shape[-1] ** -0.5) @ key.swapaxes(-1, -2)
        return mx.softmax(alibi(scores, mask=hidden), axis=-1, precise=True) @ value

    return attend


def _bytes(times: int, shape: Shape) -> int:
    """Return the memory of so many float32 arrays of all scores, what it takes to build a mask included."""
    return times * 4 * shape.scores


PEERS = (
    Contestant(
        DENSE_MASK,
        _dense_mask,
        partial(_bytes, 6),
        note="the mask, [1, heads, queries, keys] in the dtype of the query, is built before",
        is_dense=True,
    ),
    Contestant(
        "nn.ALiBi, softmax",
        _module,
        partial(_bytes, 8),
        note="products and a softmax around the module, which builds its biases in each call",
        is_dense=True,
    ),
)
