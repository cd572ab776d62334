"""How far a result of :mod:`alibi_mlx.check` is from the exact one, and how far rounding may move it."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np

from alibi_core.backend import install_hint

try:
    from alibi_core.conformance import Attention
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"alibi_mlx.check needs {error.name}; {install_hint('conformance')}") from error

ROWS = 128  # queries compared at a time, which bounds the memory
U = 2.0**-24  # unit roundoff of float32, in which scores and sums are
TF32 = 2.0**-11

Values = np.ndarray[Any, Any]


def deviation(
    tensors: tuple[mx.array, mx.array, mx.array],
    result: mx.array,
    slopes: Values,
    *,
    tolerance: float,
    folded: tuple[int, Values] | None = None,
    factor_roundoff: float = 0.0,
) -> tuple[float, float]:
    """Compare a causal result, whose last query is at the last key, with the exact one, within the kit's budget.

    What the kit does not know of, folding and tensor units, may move a score by ``e`` besides. That multiplies each
    weight by a factor between ``exp(-2 e)`` and ``exp(2 e)``. The factors of weights and values are rounded, too.

    Args:
        tensors: Query, key and value, ``[batch, heads, length, head_dim]``.
        result: ``[batch, heads, q_len, head_dim]``.
        slopes: ``[heads]``, float64.
        tolerance: Share of the weight that may be left out.
        folded: How many features were added, and how far that may move a score, ``[heads]``.
        factor_roundoff: Relative error that the device puts on the factors of products of float32; 0 for none.

    Returns:
        The largest distance of an element from the exact result, and the largest part of its budget that an element
        takes up: more than 1 is wrong. NaN and infinity if an element is not finite.
    """
    dtype = str(tensors[0].dtype).rpartition(".")[2]
    query, key, value, actual = (np.asarray(x.astype(mx.float32)).astype(np.float64) for x in (*tensors, result))
    if not np.isfinite(actual).all():
        return math.nan, math.inf
    features, bounds = (0, np.zeros(len(slopes))) if folded is None else folded
    first, scale = key.shape[2] - query.shape[2], query.shape[3] ** -0.5
    longest = np.linalg.norm(key, axis=-1).max()
    error, share = 0.0, 0.0
    for start in range(0, query.shape[2], ROWS):
        queries, found = (x[:, :, start : start + ROWS] for x in (query, actual))
        back = first + start + np.arange(queries.shape[2])[:, None] - np.arange(key.shape[2])
        bias = np.where(back >= 0, -slopes[:, None, None] * back, -np.inf)[None]
        exact = Attention(queries, key, value, bias, scale, dtype).output_without(tolerance)
        products = scale * np.linalg.norm(queries, axis=-1, keepdims=True) * longest
        moved = bounds[:, None, None] + (features * U + 2 * factor_roundoff) * products
        budget = exact.budget + 2 * (np.expm1(2 * moved) + factor_roundoff) * np.abs(value).max()
        distance = np.abs(found - exact.value)
        error, share = max(error, float(distance.max())), max(share, float((distance / budget).max()))
    return error, share


def factor_roundoff(q_len: int, head_dim: int) -> float:
    """Return by how much, relatively, MLX rounds float32 factors in attention of such a shape on the default device.

    Tensor units may round them to TF32, which ``MLX_ENABLE_TF32=0`` forbids. A mean of values ``1 + 2**-12``, which
    TF32 takes for 1, tells.
    """
    query, key = mx.zeros((1, 1, q_len, head_dim)), mx.zeros((1, 1, 64, head_dim))
    out = mx.fast.scaled_dot_product_attention(query, key, key + (1 + 2.0**-12), scale=1.0)
    return 0.0 if mx.min(out).item() > 1 + 2.0**-13 else TF32
