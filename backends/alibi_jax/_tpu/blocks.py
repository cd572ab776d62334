"""The bias and the mask of one block of scores.

Scores are in powers of two: ``log2(e)`` is part of the scale and the slopes, because a TPU's exponential is ``2**x``.

The bias of query ``i`` and key ``j`` is formed from positions, in float32, in one of two ways. In a block that lies
before (or after) all its queries a row of numbers, ``slope * (j - base)``, is added to the scores, with ``base`` the
position of a key near the block of queries, and ``-slope * (i - base)``, constant along each row, to each row's maximum
instead. Both are small where weights are large, so no digits are lost. Only where the diagonal crosses a block is the
distance formed for each pair.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from alibi_jax._tpu.shape import LANES, KernelShape

LOG2_E = 1.4426950408889634
# Numbers that are float32 also where float64 is enabled, which the kernels' compiler lacks.
HIDDEN = np.float32(-1e30)  # the score of a masked key: finite, so that differences of two are no NaN
ZERO, ONE = np.float32(0), np.float32(1)


class Place(NamedTuple):
    """Where a block of scores is: scalars, in tokens."""

    q_start: Any  # position of the block's first query
    kv_start: Any  # position of its first key
    base: Any  # position that others are counted from


class Bias(NamedTuple):
    """How one block's scores become logits: ``scores * scale + keys + queries``."""

    keys: Any  # a number for each key, or for each pair
    queries: Any | None  # a number for each query, which may be added where it costs least; None for zeros
    visible: Any | None  # where a query may look; None for everywhere


class Branch(NamedTuple):
    """One way to treat a block, and when it applies."""

    applies: Any  # scalar boolean
    side: str  # "past", "future" or "both": where its keys are, seen from its queries
    is_masked: bool


def branches(shape: KernelShape, place: Place) -> list[Branch]:
    """Return the ways to treat a block, of which exactly one applies: cheap ones where nothing is to be masked."""
    q_last, kv_last = place.q_start + shape.q_block - 1, place.kv_start + shape.kv_block - 1
    if shape.has_segments:
        return [Branch(True, "both", True)]
    whole = kv_last < shape.call.kv_len
    past, future = kv_last <= place.q_start, place.kv_start >= q_last
    if shape.call.window_size is not None:
        past &= q_last - place.kv_start <= shape.call.window_size
        future &= kv_last - place.q_start <= shape.call.window_size
    past &= whole
    if shape.call.is_causal:
        return [Branch(past, "past", False), Branch(jnp.logical_not(past), "both", True)]
    future &= whole & jnp.logical_not(past)
    return [
        Branch(past, "past", False),
        Branch(future, "future", False),
        Branch(jnp.logical_not(past | future), "both", True),
    ]


def bias_of(
    shape: KernelShape, branch: Branch, place: Place, slopes: tuple[Any, Any], own: Any, ids: Any, q_axis: int
) -> Bias:
    """Return what turns a block's scores into logits.

    Slopes are scalars, for keys behind and ahead, times log2(e); own positions are from :func:`own_positions`, one
    column or row, or several that are the same; ids tell, for each pair, whether segments are equal. Queries are along
    ``q_axis`` of the block, 0 or 1, keys along the other.
    """
    if branch.side == "both":
        behind = distances(shape, place, own, q_axis)
        ahead = None if shape.call.is_causal else slopes[1] * behind
        biases = -slopes[0] * behind
        biases = biases if ahead is None else jnp.where(behind >= 0, biases, ahead)
        return Bias(biases, None, _visible(shape, place, q_axis, ids) if branch.is_masked else None)
    slope = slopes[0] if branch.side == "past" else -slopes[1]
    return Bias(slope * _keys(shape, place, 1 - q_axis), -slope * own, None)


def own_positions(shape: KernelShape, place: Place, limits: tuple[Any, Any], size: tuple[int, int], axis: int) -> Any:
    """Return the positions of a block's queries, less the base, as float32 of a size, along one of its two axes.

    Of a query that stands beyond the keys it needs, whose first and last positions are ``limits``, the position of the
    nearest of them: the rest of the way is the same for all, unless there are other keys besides.
    """
    positions = jax.lax.broadcasted_iota(jnp.int32, size, axis) + place.q_start
    positions = positions if shape.has_other_keys else jnp.clip(positions, *limits)
    return (positions - place.base).astype(jnp.float32)


def distances(shape: KernelShape, place: Place, own: Any, q_axis: int) -> Any:
    """Return how far keys are behind queries, float32 for each pair, negative where they are ahead."""
    return lanes(own, shape.kv_block) - _keys(shape, place, 1) if q_axis == 0 else own - _keys(shape, place, 0)


def _keys(shape: KernelShape, place: Place, axis: int) -> Any:
    """Return the positions of a block's keys, less the base: float32, ``[kv_block, 1]`` or ``[1, kv_block]``."""
    size = (shape.kv_block, 1) if axis == 0 else (1, shape.kv_block)
    return (jax.lax.broadcasted_iota(jnp.int32, size, axis) + (place.kv_start - place.base)).astype(jnp.float32)


def _visible(shape: KernelShape, place: Place, q_axis: int, ids: Any) -> Any:
    size = (shape.q_block, shape.kv_block) if q_axis == 0 else (shape.kv_block, shape.q_block)
    queries, keys = (jax.lax.broadcasted_iota(jnp.int32, size, axis) for axis in (q_axis, 1 - q_axis))
    behind = queries - keys  # but for where the block is
    shift = place.kv_start - place.q_start
    visible = keys < shape.call.kv_len - place.kv_start
    if shape.call.is_causal:
        visible &= behind >= shift
    if shape.call.window_size is not None:
        distance = behind - shift
        visible &= (distance if shape.call.is_causal else jnp.abs(distance)) <= shape.call.window_size
    return visible if ids is None else visible & ids


def quotient(number: Any, divisor: int) -> Any:
    """Return ``number // divisor`` of what is not negative: int32 whatever is enabled, without asking for a sign."""
    return jax.lax.div(number, jnp.int32(divisor))


def column_of(row: Any) -> Any:
    """Return ``[1, n]`` as ``[n, LANES]``, each lane the same: what varies along the rows of a block."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def lanes(column: Any, width: int) -> Any:
    """Return ``[n, LANES]``, each lane the same, ``width`` wide."""
    if width <= LANES:
        return column[:, :width]
    whole = jnp.concatenate([column] * -(-width // LANES), axis=1)
    return whole[:, :width]


def product(one: Any, other: Any, contract: tuple[int, int]) -> Any:
    """Return the float32 product of two matrices along these axes, float32 ones to their full precision."""
    precision = jax.lax.Precision.HIGHEST if one.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(one, other, dimensions, precision=precision, preferred_element_type=jnp.float32)
