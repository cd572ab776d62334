"""Which keys each tile of queries needs, computed on the device from what is measured of queries and keys."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from alibi_core import AttentionCall, KeyRanges, ScoreBounds, key_ranges
from alibi_core.backend import MAX_POSITION, by_block
from alibi_jax._call.operands import Operands, Rules, kv_axis, put_together

NORM_BLOCK = 128  # keys that one of Operands.key_norms bounds
BLOCKS = 512  # of queries or keys, that score bounds are held for, at most


class Needed(NamedTuple):
    """The keys that tiles of queries need, in tokens: int32 ``[batch, num_heads, tiles]``. None where first == stop."""

    first: jax.Array
    stop: jax.Array


def needed_keys(rules: Rules, operands: Operands, q_tile: int, kv_tile: int) -> Needed:
    """Return which keys each tile of ``q_tile`` queries needs; the others weigh no more than the tolerance.

    Takes memory in proportion to the lengths. Nothing is read on the host.

    Args:
        rules: Of the call.
        operands: Of the call.
        q_tile: Queries a tile.
        kv_tile: Keys that are to be taken or left together, for which norms are bounded at best.
    """
    ranges = ranges_of(rules, operands, q_tile, kv_tile)
    return _of_tiles(put_together(rules, operands), ranges, q_tile)


def ranges_of(rules: Rules, operands: Operands, q_tile: int, kv_tile: int) -> KeyRanges:
    """Return the core's plan for blocks of a multiple of ``q_tile`` queries, ``[batch, num_heads, q_blocks]``."""
    call = put_together(rules, operands)
    q_block = _multiple(q_tile, call.q_len)
    ranges = key_ranges(call, _bounds(rules, operands, call, q_block, kv_tile), rules.tolerance)
    shape = (call.batch[0], call.num_heads, -(-call.q_len // q_block))
    return KeyRanges(q_block, *(jnp.broadcast_to(getattr(ranges, x), shape) for x in _FIELDS))


_FIELDS = ("first", "stop", "past", "future")


def _of_tiles(call: AttentionCall, ranges: KeyRanges, q_tile: int) -> Needed:
    """Narrow the ranges of blocks of queries to the tiles they consist of."""
    starts = jnp.arange(-(-call.q_len // q_tile), dtype=jnp.int32) * q_tile
    first, stop, past, future = (getattr(ranges, x)[..., starts // ranges.q_block] for x in _FIELDS)
    offset = call.q_offset[:, None, None] if call.has_offset_array else call.q_offset
    lowest = starts + offset
    highest = jnp.minimum(starts + q_tile, call.q_len) - 1 + offset
    # The larger of first and lowest - past + 1, and the smaller of stop and highest + future, which int32 may not hold.
    first = lowest + jnp.maximum(first - lowest, 1 - past)
    stop = highest + jnp.minimum(stop - highest, future)
    if call.mask is not None and call.mask.shape[-2] == 1:  # of the first and last that padding leaves
        shown = jnp.broadcast_to(call.mask, (*call.mask.shape[:3], call.kv_len))  # [batch or 1, heads or 1, 1, kv_len]
        some = jnp.any(shown, axis=-1)
        first = jnp.maximum(first, jnp.where(some, jnp.argmax(shown, axis=-1), 0).astype(jnp.int32))
        last = call.kv_len - jnp.argmax(jnp.flip(shown, axis=-1), axis=-1).astype(jnp.int32)
        stop = jnp.minimum(stop, jnp.where(some, last, 0))
    return Needed(jnp.minimum(first, jnp.maximum(stop, 0)), jnp.maximum(stop, 0))


def _multiple(tile: int, length: int) -> int:
    """Return the least multiple of ``tile`` of which at most ``BLOCKS`` make up ``length``."""
    return tile * max(1, -(-length // (tile * BLOCKS)))


def _bounds(rules: Rules, operands: Operands, call: AttentionCall, q_block: int, kv_tile: int) -> ScoreBounds:
    if call.tolerance == 0:  # nothing to measure
        blocks = jnp.zeros((1, call.num_heads, -(-call.q_len // q_block)), call.working_dtype)
        return ScoreBounds(q_block, call.kv_len, blocks, blocks, blocks, blocks, blocks[..., :1])
    group = call.num_heads // call.num_kv_heads
    query, key, axis = operands.query, operands.key, kv_axis(rules)
    if operands.key_norms is None:
        # Softmax does not notice a vector taken from every key; without their mean they are smaller.
        centre = jnp.mean(key, axis=axis, keepdims=True, dtype=call.working_dtype)
        kv_block = _multiple(kv_tile, call.kv_len)
        norms = norm_bounds(key.astype(call.working_dtype) - centre)
        norms = norms if rules.kv_heads_first else jnp.swapaxes(norms, 1, 2)  # [batch, num_kv_heads, kv_len]
        norms = by_block(jnp, norms, kv_block).max(axis=-1)
    else:
        centre = jnp.zeros((1, 1, 1, 1), call.working_dtype)
        kv_block, norms = NORM_BLOCK, operands.key_norms.astype(call.working_dtype)
        coarser = _multiple(NORM_BLOCK, call.kv_len)
        if coarser > kv_block:
            norms = by_block(jnp, norms, coarser // kv_block).max(axis=-1)
            kv_block = coarser
    own_keys = _at_own_positions(call, key, axis).astype(call.working_dtype) - centre
    own_keys = jnp.swapaxes(own_keys, 1, 2) if rules.kv_heads_first else own_keys  # [batch, q_len, num_kv_heads, ...]
    by_group = query.reshape(*query.shape[:2], call.num_kv_heads, group, call.head_dim).astype(call.working_dtype)
    own_scores = jnp.sum(by_group * own_keys[:, :, :, None], axis=-1).reshape(query.shape[:3])
    q_norms = jnp.swapaxes(norm_bounds(query.astype(call.working_dtype)), 1, 2) * abs(call.scale)
    lower = operands.lower
    if lower is not None and operands.key_norms is None:  # it is of scores with the keys as they are
        centre = centre[:, :, 0] if rules.kv_heads_first else centre[:, 0]  # [batch, num_kv_heads, head_dim]
        of_centre = jnp.sum(by_group * centre[:, None, :, None], axis=-1).reshape(query.shape[:3])
        rounding = 2.0**-23 * (call.head_dim + 8) * q_norms * jnp.repeat(norm_bounds(centre), group, axis=1)[..., None]
        lower = lower - jnp.swapaxes(of_centre, 1, 2) * call.scale - rounding
    return ScoreBounds.of_tokens(
        call,
        q_norms,
        jnp.swapaxes(own_scores, 1, 2) * call.scale,
        jnp.repeat(norms, group, axis=1),
        _nearest_keys(call),
        lower,
        q_block=q_block,
        kv_block=kv_block,
    )


def norm_bounds(vectors: jax.Array) -> jax.Array:
    """Return bounds of the norms of ``[..., head_dim]``, but for rounding: squares of what is tiny may vanish.

    Infinity where a vector holds a NaN, or where squares overflow. A NaN would not do: of some thousand numbers, XLA's
    maximum passes over it on the CPU.
    """
    vanishing = (vectors.shape[-1] * jnp.finfo(vectors.dtype).tiny) ** 0.5
    norms = jnp.sqrt(jnp.sum(vectors * vectors, axis=-1)) + vanishing
    return jnp.where(norms < jnp.inf, norms, jnp.asarray(jnp.inf, norms.dtype))


def _at_own_positions(call: AttentionCall, key: jax.Array, axis: int) -> jax.Array:
    """Return the key at each query's position, along this axis; anything where there is none."""
    if not call.has_offset_array and 0 <= call.q_offset <= call.kv_len - call.q_len:
        return jax.lax.slice_in_dim(key, call.q_offset, call.q_offset + call.q_len, axis=axis)
    positions = jnp.clip(call.positions()[0], 0, call.kv_len - 1)
    shape = [1, 1, 1, 1]
    shape[0], shape[axis] = (positions.shape[0] if positions.ndim > 1 else 1), call.q_len
    return jnp.take_along_axis(key, positions.reshape(shape), axis=axis, mode="clip")


def _nearest_keys(call: AttentionCall) -> jax.Array:
    """Return ``call.nearest_keys()`` in memory that grows with the lengths alone.

    A query whose own key is hidden counts as far from all keys, where it takes more than that to find the nearest:
    then its block needs all keys that it sees.
    """
    if call.every_query_attends and not call.has_offset_array and 0 <= call.q_offset <= call.kv_len - call.q_len:
        return jnp.zeros(call.q_len, jnp.int32)
    if call.mask is None and call.q_segment_ids is None:
        return call.nearest_keys()
    if call.q_segment_ids is None and call.mask.shape[-2] == 1:
        return _nearest_of_masked_keys(call)
    positions = call.positions()[0].reshape(-1, 1, call.q_len)  # [batch or 1, 1, q_len]
    own = jnp.clip(positions, 0, call.kv_len - 1)
    visible = (positions >= 0) & (positions < call.kv_len)
    if call.q_segment_ids is not None:
        ids = jnp.broadcast_to(call.kv_segment_ids[:, None], (*call.kv_segment_ids.shape[:1], 1, call.kv_len))
        visible &= call.q_segment_ids[:, None] == _along_last(ids, own)
    if call.mask is not None:
        mask = jnp.broadcast_to(call.mask, (*call.mask.shape[:2], call.q_len, call.kv_len))
        visible &= _along_last(mask, own[..., None])[..., 0]
    return jnp.where(visible, 0, MAX_POSITION)


def _along_last(array: jax.Array, index: jax.Array) -> jax.Array:
    """``take_along_axis`` along the last axis, the others broadcast."""
    axes = jnp.broadcast_shapes(array.shape[:-1], index.shape[:-1])
    array = jnp.broadcast_to(array, (*axes, array.shape[-1]))
    return jnp.take_along_axis(array, jnp.broadcast_to(index, (*axes, index.shape[-1])), axis=-1)


def _nearest_of_masked_keys(call: AttentionCall) -> jax.Array:
    """Return the distance of each query's nearest key under a mask that is one for all queries, as padding is."""
    queries, keys = call.positions()
    queries = queries.reshape(-1, 1, call.q_len)
    shown = jnp.broadcast_to(call.mask, (*call.mask.shape[:3], call.kv_len))[:, :, 0]
    inside = jnp.clip(queries, 0, call.kv_len - 1)
    before = _along_last(jax.lax.cummax(jnp.where(shown, keys, -1), axis=2), inside)
    nearest = jnp.where((queries >= 0) & (before >= 0), queries - before, MAX_POSITION)  # farther than any key is
    if not call.is_causal:
        after = jax.lax.cummin(jnp.where(shown, keys, MAX_POSITION), axis=2, reverse=True)
        after = _along_last(after, inside)
        is_ahead = (queries < call.kv_len) & (after < MAX_POSITION)
        nearest = jnp.minimum(nearest, jnp.where(is_ahead, after - queries, MAX_POSITION))
    limit = MAX_POSITION - 1 if call.window_size is None else min(call.window_size, MAX_POSITION - 1)
    return jnp.where(nearest <= limit, nearest, -1).astype(jnp.int32)
