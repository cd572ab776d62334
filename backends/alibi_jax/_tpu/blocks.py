"""The bias and the mask of one block of scores.

Scores are in base 2: ``log2(e)`` is part of the scale and the slopes, because a TPU's exponential is ``2**x``.

The bias of query ``i`` and key ``j`` is formed from positions, in float32, in one of two ways. If all keys of a block
are before (or after) all queries, ``slope * (j - base)``, one number per key, is added to the scores, and
``-slope * (i - base)``, one number per query, to each row's maximum. ``base`` is the position of a key near the
queries, so both numbers are small where weights are large, and no digits are lost. Only if the diagonal crosses the
block is the distance formed for each pair.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from alibi_jax._call import lowest_scores
from alibi_jax._tpu.shape import LANES, KernelShape

LOG2_E = 1.4426950408889634
# NumPy float32 scalars: with jax_enable_x64, Python floats would become float64, which the TPU compiler lacks.
ZERO, ONE = np.float32(0), np.float32(1)
BLIND, OVERFLOWN = lowest_scores(np.float32)


class Place(NamedTuple):
    """The positions of a block of scores: scalars, in tokens."""

    q_start: Any  # position of the block's first query
    kv_start: Any  # position of its first key
    base: Any  # origin of relative positions
    overlap: Any = 0  # number of keys that belong to the block before, of folded heads


class Bias(NamedTuple):
    """The bias of one block; logits are ``scores * scale + keys + queries``."""

    keys: Any  # one number per key, or per pair
    queries: Any | None  # one number per query, to be added to the row's maximum; None for zeros
    visible: Any | None  # booleans per pair; None if all are visible


class Branch(NamedTuple):
    """One way to compute a block, and the condition for it."""

    applies: Any  # scalar boolean, traced
    side: str  # the keys are before ("past") or after ("future") all queries, or "both"
    is_masked: bool  # whether pairs may be masked


def branches(shape: KernelShape, place: Place) -> list[Branch]:
    """Return the possible branches for a block, cheap ones for blocks without masked pairs; exactly one applies."""
    q_last, kv_last = place.q_start + shape.q_block - 1, place.kv_start + shape.kv_block - 1
    # Segments may mask any pair, and folded heads have several slopes, so one general branch serves all blocks.
    if shape.has_segments or shape.is_folded:
        return [Branch(True, "both", True)]
    whole = kv_last < shape.call.kv_len  # no padding among the keys
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
    shape: KernelShape,
    branch: Branch,
    place: Place,
    slopes: tuple[Any, Any],
    own: Any,
    ids: Any,
    q_axis: int,
    index: Any = None,
) -> Bias:
    """Return a block's bias.

    ``slopes`` are scalars, or arrays per pair, for keys behind and ahead, times log2(e). ``own`` comes from
    :func:`own_positions`: a row, or equal columns. ``ids`` are booleans per pair, True if the segments are equal.
    Queries are along ``q_axis`` of the block, 0 or 1, keys along the other axis. ``index``, ``[q_block, LANES]``, says
    which query each row is, if that is not the row's number.
    """
    if branch.side == "both":
        behind = distances(shape, place, own, q_axis)
        ahead = None if shape.call.is_causal else slopes[1] * behind
        biases = -slopes[0] * behind
        biases = biases if ahead is None else jnp.where(behind >= 0, biases, ahead)
        return Bias(biases, None, _visible(shape, place, q_axis, ids, index) if branch.is_masked else None)
    slope = slopes[0] if branch.side == "past" else -slopes[1]
    return Bias(slope * _keys(shape, place, 1 - q_axis), -slope * own, None)


def own_positions(
    shape: KernelShape, place: Place, limits: tuple[Any, Any], size: tuple[int, int], axis: int, index: Any = None
) -> Any:
    """Return the positions of a block's queries minus the base, as float32 ``size``, varying along ``axis``.

    ``limits`` are the positions of the first and last needed keys. A query outside of them is moved to the nearer one:
    this changes all distances of its row by a constant, which cancels in softmax. With other keys, which need the true
    distances too, it is not moved.
    """
    positions = (jax.lax.broadcasted_iota(jnp.int32, size, axis) if index is None else index) + place.q_start
    positions = positions if shape.has_other_keys else jnp.clip(positions, *limits)
    return (positions - place.base).astype(jnp.float32)


def distances(shape: KernelShape, place: Place, own: Any, q_axis: int) -> Any:
    """Return query minus key position for each pair, float32; negative if the key is ahead."""
    return lanes(own, shape.kv_block) - _keys(shape, place, 1) if q_axis == 0 else own - _keys(shape, place, 0)


def _keys(shape: KernelShape, place: Place, axis: int) -> Any:
    """Return the positions of a block's keys minus the base: float32, ``[kv_block, 1]`` or ``[1, kv_block]``."""
    size = (shape.kv_block, 1) if axis == 0 else (1, shape.kv_block)
    return (jax.lax.broadcasted_iota(jnp.int32, size, axis) + (place.kv_start - place.base)).astype(jnp.float32)


def _visible(shape: KernelShape, place: Place, q_axis: int, ids: Any, index: Any) -> Any:
    size = (shape.q_block, shape.kv_block) if q_axis == 0 else (shape.kv_block, shape.q_block)
    queries, keys = (jax.lax.broadcasted_iota(jnp.int32, size, axis) for axis in (q_axis, 1 - q_axis))
    queries = queries if index is None else lanes(index, shape.kv_block)
    behind = queries - keys  # distance within the block; `shift` adds the block's place
    shift = place.kv_start - place.q_start
    visible = keys < shape.call.kv_len - place.kv_start
    if shape.is_folded:
        visible &= keys >= place.overlap
    if shape.call.is_causal:
        visible &= behind >= shift
    if shape.call.window_size is not None:
        distance = behind - shift
        visible &= (distance if shape.call.is_causal else jnp.abs(distance)) <= shape.call.window_size
    return visible if ids is None else visible & ids


def quotient(number: Any, divisor: int) -> Any:
    """Return ``number // divisor`` for a non-negative number: int32 also with x64, and without sign handling."""
    return jax.lax.div(number, jnp.int32(divisor))


def column_of(row: Any) -> Any:
    """Transpose ``[1, n]`` to ``[n, LANES]`` with equal lanes."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def lanes(column: Any, width: int) -> Any:
    """Resize ``[n, LANES]`` with equal lanes to ``[n, width]``."""
    if width <= LANES:
        return column[:, :width]
    whole = jnp.concatenate([column] * -(-width // LANES), axis=1)
    return whole[:, :width]


def product(one: Any, other: Any, contract: tuple[int, int]) -> Any:
    """Return the float32 product of two matrices, contracted along these axes; at full precision for float32."""
    precision = jax.lax.Precision.HIGHEST if one.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(one, other, dimensions, precision=precision, preferred_element_type=jnp.float32)
