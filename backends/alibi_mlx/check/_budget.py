"""How far a result of :mod:`alibi_mlx.check` is from the core's reference, and how far rounding may move it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

import alibi_core

ROWS = 128  # queries compared at a time, which bounds the memory
U = 2.0**-24  # unit roundoff of float32, in which scores and sums are
ROUNDOFF = {mx.float32: U, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}
SMALLEST = {mx.float32: 2.0**-126, mx.float16: 2.0**-24, mx.bfloat16: 2.0**-126}  # error of what rounds to zero
TF32 = 2.0**-11

Values = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Deviation:
    """How far a result is off.

    Attributes:
        error: The largest distance of an element from the reference; NaN if one is not finite.
        share: The largest part of its budget that an element takes up. More than 1 is wrong.
    """

    error: float
    share: float


def deviation(
    tensors: tuple[mx.array, mx.array, mx.array],
    result: mx.array,
    slopes: Values,
    *,
    features: int,
    tolerance: float,
    fold_bounds: Values,
    factor_roundoff: float,
) -> Deviation:
    """Compare a causal result, whose last query is at the last key, with ``alibi_core.attention`` in float64.

    The budget is the sum of what rounding does at most, to first order, plus an eighth of that for the higher orders:

    1. A score is off by ``(features + 8) u`` times the sum of its products' sizes, by ``8 u`` times the falls of its
       bias and of its exponent, by twice the rounding of each product's factors, and by what folding does.
    2. Each weight is then off by as much, relatively, and by the mean of that over the row; by the rounding of the
       exponential, of a sum of ``kv_len``, and of being kept in the tensors' dtype.
    3. Values are added up, ``kv_len`` of them, and the result is rounded to the dtype.
    4. What is tiny, a weight or the result, may become zero.
    5. Keys may be left out that together weigh less than the tolerance.

    Args:
        tensors: Query, key and value, ``[batch, heads, length, head_dim]``.
        result: ``[batch, heads, q_len, head_dim]``.
        slopes: ``[heads]``, float64.
        features: Products that a score is a sum of; zeros need not be counted.
        tolerance: Share of the weight that may be left out.
        fold_bounds: ``[heads]``, how far folding may move a score.
        factor_roundoff: Relative error that the device puts on the factors of products of float32; 0 for none.
    """
    query, key, value, actual = (_float64(x) for x in (*tensors, result))
    q_len, kv_len, scale = query.shape[2], key.shape[2], query.shape[3] ** -0.5
    group = query.shape[1] // key.shape[1]
    keys, sizes_of_values = (np.repeat(x, group, axis=1) for x in (key, np.abs(value)))
    by_head = [x[:, None, None] for x in (slopes, fold_bounds)]
    roundoff = ROUNDOFF[tensors[0].dtype]
    relative = (2 * kv_len + 8) * U + 2 * factor_roundoff + 2 * roundoff
    largest = float(np.abs(value).max())
    error, share = 0.0, 0.0
    for start in range(0, q_len, ROWS):
        part = slice(start, min(start + ROWS, q_len))
        first = kv_len - q_len + start
        expected = alibi_core.attention(query[:, :, part], key, value, slopes, q_offset=first)
        back = first + np.arange(part.stop - part.start)[:, None] - np.arange(kv_len)
        scores = scale * query[:, :, part] @ keys.swapaxes(-1, -2) - by_head[0] * back
        scores = np.where(back >= 0, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        sizes = scale * np.abs(query[:, :, part]) @ np.abs(keys).swapaxes(-1, -2)
        falls = by_head[0] * np.maximum(back, 0) + sizes.max(axis=-1, keepdims=True)
        moved = ((features + 8) * U + 2 * factor_roundoff) * sizes + 8 * U * falls + by_head[1]
        moved = weights * moved
        size = weights @ sizes_of_values
        budget = moved @ sizes_of_values + (moved.sum(axis=-1, keepdims=True) + relative) * size
        tiny = SMALLEST[tensors[0].dtype] * (1 + (back >= 0) @ sizes_of_values)
        budget = 1.125 * budget + 2 * tolerance * largest + tiny
        distance = np.abs(actual[:, :, part] - expected)
        if not np.isfinite(distance).all():
            return Deviation(math.nan, math.inf)
        error, share = max(error, float(distance.max())), max(share, float((distance / budget).max()))
    return Deviation(error, share)


def factor_roundoff(q_len: int, head_dim: int) -> float:
    """Return by how much, relatively, MLX rounds float32 factors in attention of such a shape on the default device.

    Tensor units may round them to TF32, which ``MLX_ENABLE_TF32=0`` forbids. A mean of values ``1 + 2**-12``, which
    TF32 takes for 1, tells.
    """
    query, key = mx.zeros((1, 1, q_len, head_dim)), mx.zeros((1, 1, 64, head_dim))
    out = mx.fast.scaled_dot_product_attention(query, key, key + (1 + 2.0**-12), scale=1.0)
    return 0.0 if mx.min(out).item() > 1 + 2.0**-13 else TF32


def _float64(array: mx.array) -> Values:
    return np.asarray(array.astype(mx.float32)).astype(np.float64)
