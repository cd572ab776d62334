"""How far each query's nearest key is, in memory that grows with the lengths alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from alibi_core._arrays import MAX_POSITION, asarray, astype, running_max
from alibi_core._call import AttentionCall


def nearest_keys(call: AttentionCall, part_elements: int | None = None) -> Any:
    """Return ``call.nearest_keys()`` for one batch entry whose offset is an int.

    Where there are segments, or a mask of queries and keys, it takes time in proportion to ``q_len * kv_len``.

    Args:
        call: With one batch axis, of length 1.
        part_elements: Of what is as large as ``q_len * kv_len``, how much may be held at a time.
    """
    xp = call.xp
    if call.sees_own_key:
        return xp.zeros_like(call.positions()[0])
    if call.mask is None and call.q_segment_ids is None:
        return call.nearest_keys()
    if call.q_segment_ids is None and call.mask is not None and call.mask.shape[-2] == 1:
        return _under_one_mask(call, call.mask)
    heads, keys = slice(0, call.num_heads), slice(0, call.kv_len)
    width = call.kv_len * (1 if call.mask is None else call.mask.shape[1])
    parts = [
        call.tile(batch=slice(0, 1), heads=heads, queries=part, keys=keys).nearest_keys()
        for part in parts_of(call.q_len, width, part_elements)
    ]
    return xp.concat(parts, axis=-1)


def parts_of(length: int, elements: int, part_elements: int | None) -> Iterator[slice]:
    """Yield slices of a length, each of as many tokens (of so many elements) as ``part_elements`` allows; None: all."""
    if part_elements is None:  # without a range, for which torch.compile would compile each length by itself
        return iter((slice(0, length),))
    step = max(1, part_elements // elements)
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def _under_one_mask(call: AttentionCall, mask: Any) -> Any:
    """Return the distances under a mask that is one for all queries, as padding is: from running maxima."""
    xp = call.xp
    queries, keys = call.positions()
    far, none = (asarray(xp, n, xp.int32, call.device) for n in (MAX_POSITION, -1))  # farther than any key is; nothing
    shown = xp.broadcast_to(mask, (*mask.shape[:-1], call.kv_len))[:, :, 0, :]  # [1, heads or 1, kv_len]
    inside = xp.clip(queries, 0, call.kv_len - 1)
    before = xp.take(running_max(xp, xp.where(shown, keys, none)), inside, axis=-1)
    nearest = xp.where((queries >= 0) & (before >= 0), queries - before, far)
    if not call.is_causal:
        # Of the reversed row, the key before is the one after.
        last = call.kv_len - 1
        ahead = running_max(xp, xp.where(xp.flip(shown, axis=-1), keys, none))
        after = xp.take(ahead, last - inside, axis=-1)
        is_ahead = (queries <= last) & (after >= 0)
        distance = xp.where(is_ahead, last - after - queries, far)
        nearest = xp.where(distance < nearest, distance, nearest)
    limit = MAX_POSITION - 1 if call.window_size is None else min(call.window_size, MAX_POSITION - 1)
    return astype(xp, xp.where(nearest <= limit, nearest, none), xp.int32)
