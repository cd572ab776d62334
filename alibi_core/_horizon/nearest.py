"""The distance of each query's nearest visible key, if possible in memory linear in the lengths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from alibi_core._arrays import along_axis, astype, checks, running_max
from alibi_core._bias import with_head_axis
from alibi_core._call import AttentionCall
from alibi_core._distance import difference


def nearest_keys(call: AttentionCall, part_elements: int | None = None) -> Any:
    """Return the distance of each query's nearest visible key, in tokens; -1 for a fully masked query.

    With segments, or a mask that differs by query, the time is proportional to ``q_len * kv_len``.

    Args:
        call: The call; with one batch axis, if ``part_elements`` is given.
        part_elements: The largest number of the ``q_len * kv_len`` elements to allocate at a time; None for all.

    Returns:
        int32, ``[q_len]``, or ``[..., num_heads or 1, q_len]`` if it varies along those axes.
    """
    xp = call.xp
    if call.sees_own_key:
        return xp.zeros_like(call.positions()[0])
    if (call.mask is None and call.q_segment_ids is None) or call.kv_len == 0:
        return _by_position(call)
    mask = call.mask
    # A mask with one row for all queries needs no [q_len, kv_len] array.
    is_padding = call.q_segment_ids is None and mask is not None and mask.ndim > 1 and mask.shape[-2] == 1
    if is_padding and part_elements is not None:
        return _under_padding(call, mask)
    if part_elements is None:
        return _by_pair(call)
    width = call.kv_len * (1 if mask is None or mask.ndim < 3 else mask.shape[-3])
    parts = parts_of(call.q_len, width, part_elements)
    return xp.concat([_by_pair(call.tile(queries=x)) for x in parts], axis=-1)


def parts_of(length: int, elements: int, part_elements: int | None) -> Iterator[slice]:
    """Yield slices of ``length`` tokens, ``elements`` each, of about ``part_elements`` elements; None: one slice."""
    if part_elements is None:  # no range(): torch.compile would specialise on its length
        return iter((slice(0, length),))
    step = max(1, part_elements // elements)
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def _by_position(call: AttentionCall) -> Any:
    """Return the distances if only direction and window mask keys."""
    xp, positions = call.xp, call.positions()[0]
    nearest = call.distance_to_keys(positions)
    # Without a mask the nearest key is at the range's end, or the query's own.
    if call.window_size is not None:
        nearest = xp.where(nearest > call.window_size, -1, nearest)
    if call.is_causal:
        nearest = xp.where(positions < 0, -1, nearest)
    if call.kv_len == 0:
        nearest = xp.full_like(nearest, -1)
    return nearest[..., None, :] if call.has_offset_array else nearest


def _by_pair(call: AttentionCall) -> Any:
    """Return the distances as a minimum over all pairs of a query and a key."""
    relative = with_head_axis(difference(*call.positions()))
    nearest = call.nearest_visible(relative, call.visible(relative))[..., 0]
    return call.xp.where(nearest == checks.MAX_POSITION, -1, nearest)


def _under_padding(call: AttentionCall, mask: Any) -> Any:
    """Return the distances under a mask that is the same for all queries, such as padding, by running maxima."""
    xp, last = call.xp, call.kv_len - 1
    queries, keys = call.positions()
    queries = queries[..., None, :] if call.has_offset_array else queries  # [q_len] or [*batch, 1, q_len]
    shown = mask[..., 0, :]  # without the query axis: [..., heads or 1, kv_len]
    inside = xp.clip(queries, 0, last)

    def nearest_before(shown: Any, places: Any) -> Any:
        """Return the index of the last unmasked key up to each place, -1 if there is none."""
        found = running_max(xp, xp.where(shown, keys, -1))
        # Add leading axes to match the mask.
        places = xp.reshape(places, (*[1] * (found.ndim - places.ndim), *places.shape))
        return along_axis(xp, found, places, -1)

    before = nearest_before(shown, inside)
    nearest = xp.where((queries >= 0) & (before >= 0), queries - before, checks.MAX_POSITION)
    if not call.is_causal:  # in the reversed row, the next key is the key before
        after = nearest_before(xp.flip(shown, axis=-1), last - inside)
        ahead = xp.where((queries <= last) & (after >= 0), last - after - queries, checks.MAX_POSITION)
        nearest = xp.where(ahead < nearest, ahead, nearest)
    window = checks.MAX_POSITION if call.window_size is None else call.window_size
    return astype(xp, xp.where(nearest <= min(window, checks.MAX_POSITION - 1), nearest, -1), xp.int32)
