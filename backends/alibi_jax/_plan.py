"""The keys that each tile of queries needs, computed on the device from norms of queries and keys."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from alibi_core.backend import AttentionCall
from alibi_core.backend.checks import MAX_POSITION
from alibi_core.backend.horizon import (
    KeyNorms,
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
from alibi_jax._call import Operands

NORM_BLOCK = 128  # Each number of Operands.key_norms bounds the norms of this many keys.


class Needed(NamedTuple):
    """The range of keys that each tile of queries needs: int32 ``[batch, num_heads, tiles]``; may be empty."""

    first: jax.Array
    stop: jax.Array


def needed_keys(operands: Operands, q_tile: int, kv_tile: int, *, by_entry: bool = False) -> Needed:
    """Return the range of keys that each tile of ``q_tile`` queries needs; other keys weigh at most the tolerance.

    Memory is linear in the lengths, and the host reads nothing. One bound of norms covers ``kv_tile`` or more keys.
    ``by_entry``: keys of known norms are read in a loop over the batch; XLA on TPUs copies what it gathers from.
    """
    call, bounds = operands.call, _score_bounds(operands, Tiling(q_block=q_tile, kv_block=kv_tile), by_entry)
    ranges = key_ranges(call, bounds)
    # [batch, num_heads, q_blocks] becomes [batch, num_heads, tiles]: a block of queries is one tile or several.
    starts = jnp.arange(-(-call.q_len // q_tile), dtype=jnp.int32) * q_tile
    shape = (*call.batch, call.num_heads, bounds.excess.shape[-1])
    first, stop, past, future = (jnp.broadcast_to(x, shape)[..., starts // ranges.q_block] for x in ranges[1:])
    offset = call.q_offset[:, None, None] if call.has_offset_array else call.q_offset
    # Positions of the first and last query of each tile.
    lowest = starts + offset
    highest = jnp.minimum(starts + q_tile, call.q_len) - 1 + offset
    # max(first, lowest - past + 1) and min(stop, highest + future), written so that int32 does not overflow.
    first = lowest + jnp.maximum(first - lowest, 1 - past)
    stop = highest + jnp.minimum(stop - highest, future)
    if call.mask is not None and call.mask.shape[-2] == 1:  # narrow to the unmasked keys
        shown = call.mask[:, :, 0]  # padding: [batch or 1, heads or 1, kv_len]
        some = jnp.any(shown, axis=-1, keepdims=True)
        first = jnp.maximum(first, jnp.where(some, jnp.argmax(shown, axis=-1, keepdims=True), 0).astype(jnp.int32))
        last = call.kv_len - jnp.argmax(jnp.flip(shown, axis=-1), axis=-1, keepdims=True).astype(jnp.int32)
        stop = jnp.minimum(stop, jnp.where(some, last, 0))
    return Needed(jnp.minimum(first, jnp.maximum(stop, 0)), jnp.maximum(stop, 0))


def _score_bounds(operands: Operands, how: Tiling, by_entry: bool) -> ScoreBounds:
    call = operands.call
    if call.tolerance == 0:  # nothing to measure
        return ScoreBounds.unmeasured(call, q_block=how.q_block_of(call.q_len), kv_block=call.kv_len)
    known = None
    if operands.key_norms is not None:  # merge bounds of neighbouring blocks if the plan uses larger blocks
        block = replace(how, kv_block=NORM_BLOCK).kv_block_of(call.kv_len)
        known = KeyNorms(by_block(jnp, operands.key_norms, block // NORM_BLOCK).max(axis=-1), block)
    if known is not None and by_entry and call.q_len <= call.kv_len:
        own_keys = replace(call, q_offset=0, kv_len=call.q_len)
        measured = measure(own_keys, operands.query, _own_keys(operands), how, known)
    else:
        measured = measure(call, operands.query, operands.key, how, known)
    if operands.other_keys is not None and operands.other_keys.lower is not None:
        measured = replace(measured, lower=_of_centred_scores(operands, operands.other_keys.lower, measured))
    return measured.bounds(call, _nearest_keys(call))


def _own_keys(operands: Operands) -> jax.Array:
    """Return the key at the position of each query, any key if there is none: ``[batch, heads, q_len, head_dim]``."""
    key, call = operands.key, operands.call
    offset = jnp.broadcast_to(jnp.asarray(call.q_offset, jnp.int32), call.batch)
    start = jnp.clip(offset, 0, call.kv_len - call.q_len)

    def put(entry: jax.Array, found: jax.Array) -> jax.Array:
        sizes = (1, key.shape[1], call.q_len, call.head_dim)
        keys = jax.lax.dynamic_slice(key, (entry, 0, start[entry], 0), sizes)
        keys = jnp.roll(keys, start[entry] - offset[entry], axis=2)
        return jax.lax.dynamic_update_slice_in_dim(found, keys, entry, axis=0)

    found = jnp.zeros((*key.shape[:2], call.q_len, call.head_dim), key.dtype)
    return jax.lax.fori_loop(np.int32(0), np.int32(key.shape[0]), put, found)


def _of_centred_scores(operands: Operands, lower: jax.Array, measured: Measured) -> jax.Array:
    """Convert lower bounds of log-sum-exps from scores with the original keys to scores with centred keys."""
    if measured.centre is None:
        return lower
    call = operands.call
    centre = by_query_head(call, measured.centre[:, :, 0])  # [batch, num_heads, head_dim]
    shift = jnp.sum(operands.query.astype(centre.dtype) * centre[:, :, None], axis=-1) * call.scale
    rounding = score_rounding(call.head_dim) * measured.q_norms * norm_bounds(centre)[..., None]
    return lower - shift - rounding


def _nearest_keys(call: AttentionCall) -> jax.Array:
    """Return the distance of each query's nearest visible key, in memory linear in the lengths.

    With segments or a full mask, searching would need more memory: a query whose own key is masked then counts as
    infinitely far from all keys, so its block needs all visible keys.
    """
    is_padding = call.q_segment_ids is None and (call.mask is None or call.mask.shape[-2] == 1)
    if call.sees_own_key or is_padding:
        return nearest_keys(call, part_elements=1)
    # Check only the key at each query's own position: linear memory.
    queries = call.positions()[0].reshape(-1, 1, call.q_len)  # [batch or 1, 1, q_len]
    own = jnp.clip(queries, 0, call.kv_len - 1)
    visible = queries == own
    if call.q_segment_ids is not None:
        visible &= call.q_segment_ids[:, None] == jnp.take_along_axis(call.kv_segment_ids[:, None], own, axis=-1)
    if call.mask is not None:
        mask = jnp.broadcast_to(call.mask, (*call.mask.shape[:2], call.q_len, call.kv_len))
        visible &= jnp.take_along_axis(mask, own[..., None], axis=-1)[..., 0]
    return jnp.where(visible, 0, MAX_POSITION)
