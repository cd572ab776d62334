"""Which keys each tile of queries needs, computed on the device from what is measured of queries and keys."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from alibi_core.backend import (
    FIELDS,
    MAX_POSITION,
    AttentionCall,
    KeyNorms,
    KeyRanges,
    Measured,
    ScoreBounds,
    Tiling,
    by_block,
    by_query_head,
    key_ranges,
    measure,
    nearest_keys,
    norm_bounds,
    score_rounding,
)
from alibi_jax._call.operands import Operands, Rules, put_together

NORM_BLOCK = 128  # keys that one of Operands.key_norms bounds


class Needed(NamedTuple):
    """The keys that tiles of queries need, in tokens: int32 ``[batch, num_heads, tiles]``. None where first == stop."""

    first: jax.Array
    stop: jax.Array


def needed_keys(rules: Rules, operands: Operands, q_tile: int, kv_tile: int) -> Needed:
    """Return which keys each tile of ``q_tile`` queries needs; the others weigh no more than the tolerance.

    Takes memory in proportion to the lengths. Nothing is read on the host. Norms are bounded, at best, for ``kv_tile``
    keys, which are to be taken or left together.
    """
    call, ranges = put_together(rules, operands), ranges_of(rules, operands, q_tile, kv_tile)
    # From blocks of queries to the tiles they consist of.
    starts = jnp.arange(-(-call.q_len // q_tile), dtype=jnp.int32) * q_tile
    first, stop, past, future = (getattr(ranges, x)[..., starts // ranges.q_block] for x in FIELDS)
    offset = call.q_offset[:, None, None] if call.has_offset_array else call.q_offset
    lowest = starts + offset
    highest = jnp.minimum(starts + q_tile, call.q_len) - 1 + offset
    # The larger of first and lowest - past + 1, and the smaller of stop and highest + future, which int32 may not hold.
    first = lowest + jnp.maximum(first - lowest, 1 - past)
    stop = highest + jnp.minimum(stop - highest, future)
    if call.mask is not None and call.mask.shape[-2] == 1:  # of the first and last that padding leaves
        shown = _shown_keys(call)
        some = jnp.any(shown, axis=-1, keepdims=True)
        first = jnp.maximum(first, jnp.where(some, jnp.argmax(shown, axis=-1, keepdims=True), 0).astype(jnp.int32))
        last = call.kv_len - jnp.argmax(jnp.flip(shown, axis=-1), axis=-1, keepdims=True).astype(jnp.int32)
        stop = jnp.minimum(stop, jnp.where(some, last, 0))
    return Needed(jnp.minimum(first, jnp.maximum(stop, 0)), jnp.maximum(stop, 0))


def _shown_keys(call: AttentionCall) -> jax.Array:
    """Return a mask that is one for all queries, as padding is: ``[batch or 1, heads or 1, kv_len]``."""
    return jnp.broadcast_to(call.mask, (*call.mask.shape[:3], call.kv_len))[:, :, 0]


def ranges_of(rules: Rules, operands: Operands, q_tile: int, kv_tile: int) -> KeyRanges:
    """Return the core's plan for blocks of a multiple of ``q_tile`` queries, ``[batch, num_heads, q_blocks]``."""
    call = put_together(rules, operands)
    bounds = _bounds(rules, operands, call, Tiling(q_block=q_tile, kv_block=kv_tile))
    ranges = key_ranges(call, bounds, rules.tolerance)
    shape = (call.batch[0], call.num_heads, bounds.excess.shape[-1])
    return KeyRanges(bounds.q_block, *(jnp.broadcast_to(getattr(ranges, x), shape) for x in FIELDS))


def _bounds(rules: Rules, operands: Operands, call: AttentionCall, how: Tiling) -> ScoreBounds:
    if call.tolerance == 0:  # nothing to measure
        return ScoreBounds.unmeasured(call, q_block=how.q_block_of(call.q_len), kv_block=call.kv_len)
    query, key = jnp.swapaxes(operands.query, 1, 2), operands.key
    key = key if rules.kv_heads_first else jnp.swapaxes(key, 1, 2)
    measured = measure(call, query, key, how, _known_norms(call, operands, how))
    if operands.lower is not None:
        measured = replace(measured, lower=_of_centred_scores(call, query, operands.lower, measured))
    return measured.bounds(call, _nearest_keys(call))


def _known_norms(call: AttentionCall, operands: Operands, how: Tiling) -> KeyNorms | None:
    """Return what is known of keys' norms, of no more blocks than score bounds are held for."""
    if operands.key_norms is None:
        return None
    block = replace(how, kv_block=NORM_BLOCK).kv_block_of(call.kv_len)
    return KeyNorms(by_block(jnp, operands.key_norms, block // NORM_BLOCK).max(axis=-1), block)


def _of_centred_scores(call: AttentionCall, query: jax.Array, lower: jax.Array, measured: Measured) -> jax.Array:
    """Return lower bounds of log-sum-exps, of scores with keys as they are, for those with centred keys."""
    if measured.centre is None:
        return lower
    centre = by_query_head(call, measured.centre[:, :, 0])  # [batch, num_heads, head_dim]
    shift = jnp.sum(query.astype(centre.dtype) * centre[:, :, None], axis=-1) * call.scale
    rounding = score_rounding(call.head_dim) * measured.q_norms * norm_bounds(centre)[..., None]
    return lower - shift - rounding


def _nearest_keys(call: AttentionCall) -> jax.Array:
    """Return the distance of each query's nearest key in memory that grows with the lengths alone.

    A query whose own key is hidden counts as far from all keys, where it takes more than that to find the nearest:
    then its block needs all keys that it sees.
    """
    if call.sees_own_key:
        return jnp.zeros(call.q_len, jnp.int32)
    if call.mask is None and call.q_segment_ids is None:
        return nearest_keys(call)
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
    shown = _shown_keys(call)
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
