"""Measurements of queries and keys that horizons are computed from.

Arrays belong to any library and stay on their device. :func:`measure` takes tensors; :meth:`Measured.bounds` takes the
results, in the namespace of the call. A backend that plans on the host copies the results between the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from alibi_core._arrays import (
    DType,
    Namespace,
    along_axis,
    arange,
    asarray,
    astype,
    at_least,
    at_most,
    device_of,
    is_numpy,
    namespace_of,
    on_host,
)
from alibi_core._bias import working_dtype
from alibi_core._call import AttentionCall
from alibi_core._horizon.nearest import nearest_keys, parts_of
from alibi_core._horizon.ranges import KeyRanges, ScoreBounds, by_block, key_ranges, score_rounding
from alibi_core._horizon.tiling import Tiling


@dataclass(frozen=True)
class KeyNorms:
    """Known bounds of the norms of keys, so that keys need not be measured."""

    values: Any  # [batch or 1, num_kv_heads or 1, blocks], floating
    block: int  # keys in a block

    def of_entries(self, batch: slice) -> KeyNorms:
        """Return the bounds of these batch entries."""
        return self if self.values.shape[0] == 1 else replace(self, values=self.values[batch, ...])


@dataclass(frozen=True)
class Measured:
    """The results of :func:`measure`."""

    q_block: int  # queries that share one bound
    kv_block: int  # keys that share one bound
    q_norms: Any  # [batch, num_heads, q_len]: bounds of norms, times abs(scale)
    # [batch, num_heads, q_len]: scaled scores of the key at the query's own position; any number if there is none
    own_scores: Any
    key_norms: Any  # [batch or 1, num_kv_heads or 1, kv_blocks]: bounds of norms of centred keys
    centre: Any | None  # [batch, num_kv_heads, 1, head_dim]: the mean, subtracted from all keys; None if not centred
    # [batch, num_heads, q_len]: lower bounds of log-sum-exps of scores with centred keys; -inf where unknown, inf for a
    # query that needs no key
    lower: Any | None

    def bounds(self, call: AttentionCall, nearest: Any) -> ScoreBounds:
        """Return the score bounds of these measurements.

        If a score, a norm or a product of norms is NaN or infinite, its query needs every visible key.

        Args:
            call: The call whose queries and keys were measured.
            nearest: Distances of nearest keys, from :func:`nearest_keys`.
        """
        xp = call.xp
        rounding = score_rounding(call.head_dim)  # of the products here and of the measured scores
        # Replace NaN by inf first: max() ignores NaN under XLA on CPUs.
        q_norms, key_norms = (_nan_to_inf(xp, x) for x in (self.q_norms, self.key_norms))
        # [..., num_heads, kv_blocks]
        shape = (*key_norms.shape[:-2], call.num_kv_heads, key_norms.shape[-1])
        key_norms = by_query_head(call, xp.broadcast_to(key_norms, shape))
        # [..., num_heads, 1]
        largest = xp.max(key_norms, axis=-1, keepdims=True)
        # Cauchy-Schwarz: no scaled score of the query exceeds this in size.
        bound = _nan_to_inf(xp, q_norms * largest)
        # The nearest key may lie on either side: take the steeper slope.
        slopes = call.slopes if call.future_slopes is None else xp.maximum(call.slopes, call.future_slopes)
        # For queries far from all keys the penalty is rounded about 12 times; 1 + 2**-20 covers that.
        lowest = -bound - slopes[..., None] * astype(xp, nearest, slopes.dtype) * (1 + 2.0**-20)
        # nearest == 0: the key at the query's own position is visible.
        anchors = xp.where(nearest == 0, self.own_scores, lowest)
        # -1 marks fully masked queries.
        needs_none = nearest < 0
        if self.lower is not None:
            anchors = at_least(xp, anchors, self.lower)
            needs_none = needs_none | (self.lower == math.inf)
        anchors = anchors - rounding * bound
        if call.added_key_bias is not None and call.kv_len > 0:  # it may raise any score and lower the anchor's score
            spread = xp.max(call.added_key_bias, axis=-1) - xp.min(call.added_key_bias, axis=-1)
            anchors = anchors - spread[..., None]
        if call.log_gates is not None:
            # Gates weigh on the nearest key, too, if that is not the query's own, or hide it: every key is needed.
            anchors, needs_none = xp.where(nearest == 0, anchors, -math.inf), nearest != nearest
        # Differences of infinite bounds are NaN: use the anchor -inf, with which every key is needed.
        anchors = xp.where((bound < math.inf) & (xp.abs(anchors) < math.inf), anchors, -math.inf)
        # A query that sees no key gets excess -inf, and so needs none.
        excess = xp.where(needs_none, -math.inf, (1 + rounding) * bound - anchors)
        anchors = xp.where(needs_none, math.inf, anchors)
        return ScoreBounds(
            q_block=self.q_block,
            kv_block=self.kv_block,
            excess=xp.max(by_block(xp, excess, self.q_block), axis=-1),
            anchor=xp.min(by_block(xp, anchors, self.q_block), axis=-1),
            q_least=xp.min(by_block(xp, q_norms, self.q_block), axis=-1),
            q_most=xp.max(by_block(xp, q_norms, self.q_block), axis=-1) * (1 + rounding),
            key_norm=key_norms,
        )


def measure(call: AttentionCall, query: Any, key: Any, tiling: Tiling, known: KeyNorms | None = None) -> Measured:
    """Measure the norms of queries and keys, and each query's score with the key at its own position.

    Args:
        call: The call, with one batch axis. Its arrays may belong to another namespace than the tensors if its offset
            is an int.
        query: ``[batch, num_heads, q_len, head_dim]``.
        key: ``[batch, num_kv_heads, kv_len, head_dim]``.
        tiling: Sizes of blocks and of parts processed at a time.
        known: Bounds of the norms of keys; if given, keys are not measured.
    """
    xp, dtype, centre = namespace_of(query), _statistics(query), None
    if known is None:
        kv_block = tiling.kv_block_of(call.kv_len)
        parts = list(parts_of(call.kv_len, call.num_kv_heads * call.head_dim, tiling.part_elements))
        if call.q_len > tiling.step_queries:
            # Center keys on their mean: softmax is invariant to it, and norms become smaller. Sum in parts if keys
            # must be cast, to avoid a full copy.
            cast = parts if key.dtype != dtype else [slice(0, call.kv_len)]
            # [batch, num_kv_heads, 1, head_dim]
            sums = [xp.sum(astype(xp, key[..., part, :], dtype), axis=-2, keepdims=True) for part in cast]
            centre = sum(sums[1:], sums[0]) / call.kv_len
        norms = [tiling.norm_bounds(_centred(xp, key[..., part, :], centre)) for part in parts]
        key_norms = xp.max(by_block(xp, _joined(xp, norms), kv_block), axis=-1)
    else:
        kv_block, key_norms = known.block, astype(xp, known.values, dtype)
    q_norms, own_scores = [], []
    for part in parts_of(call.q_len, call.num_heads * call.head_dim, tiling.part_elements):
        queries = astype(xp, query[..., part, :], dtype)
        q_norms.append(tiling.norm_bounds(queries))
        # [batch, num_kv_heads, part, head_dim]
        own = _centred(xp, _own_keys(xp, call, key, part), centre)
        # [batch, num_kv_heads, group, part, head_dim]
        grouped = xp.reshape(queries, (queries.shape[0], call.num_kv_heads, -1, *queries.shape[2:]))
        scores = xp.sum(grouped * astype(xp, own, dtype)[:, :, None, ...], axis=-1)
        own_scores.append(xp.reshape(scores, queries.shape[:3]))
    return Measured(
        tiling.q_block_of(call.q_len),
        kv_block,
        _joined(xp, q_norms) * abs(call.scale),
        _joined(xp, own_scores) * call.scale,
        key_norms,
        centre,
        lower_bounds(call, query, key, centre, tiling),
    )


def lower_bounds(call: AttentionCall, query: Any, key: Any, centre: Any | None, tiling: Tiling) -> Any | None:
    """Return lower bounds of log-sum-exps, ``[1, num_heads, q_len]``, each from the mean of a block of earlier keys.

    Args:
        call: The call of one batch entry, with an int offset. Its slopes are read on the host.
        query: ``[1, num_heads, q_len, head_dim]``.
        key: ``[1, num_kv_heads, kv_len, head_dim]``.
        centre: As in :class:`Measured`: the vector subtracted from all keys.
        tiling: As in :func:`measure`: sizes of blocks and parts.

    Returns:
        The bounds; None where they would not shorten horizons, or the earlier keys may be masked.
    """
    if tiling.least_decay is None or call.q_len <= tiling.step_queries:
        return None
    if any(x is not None for x in (call.mask, call.q_segment_ids, call.log_gates)):
        return None
    # Read on the host: branches below depend on each slope.
    slopes = np.broadcast_to(on_host(call.xp, call.slopes), (1, call.num_heads))[0].tolist()
    if call.q_offset < 0 or call.q_offset + call.q_len > call.kv_len or min(slopes) < 0:
        return None
    xp, dtype, group = namespace_of(query), _statistics(query), call.num_heads // call.num_kv_heads
    nothing = xp.broadcast_to(asarray(xp, -math.inf, dtype, device_of(xp, query)), (call.q_len,))
    found = []
    for head, slope in enumerate(slopes):
        # More keys add log(count) but lie farther away; 0.7 / slope is near the best.
        count = 2 ** round(math.log2(min(max(0.7 / max(slope, 1e-6), 1), 512)))
        # A query is up to 2 * count - 1 tokens after the first key of the block before its own.
        visible = call.window_size is None or 2 * count <= call.window_size
        # Skip heads with steep slopes, whose horizons are short anyway, and heads whose horizon exceeds the sequence.
        if count < 16 or slope * call.kv_len < tiling.least_decay or not visible:
            found.append(nothing)
            continue
        middle = None if centre is None else centre[0, head // group, ...]
        queries, keys = query[0, head, ...], key[0, head // group, ...]
        found.append(_bound_by_means(call, queries, keys, middle, nothing, slope, count, tiling))
    return None if all(x is nothing for x in found) else xp.stack(found)[None, ...]


def _bound_by_means(
    call: AttentionCall,
    query: Any,
    key: Any,
    centre: Any | None,
    nothing: Any,
    slope: float,
    count: int,
    tiling: Tiling,
) -> Any:
    """Return one head's bounds: queries are cut into blocks of ``count``, each bounded by the ``count`` keys before it.

    ``query`` and ``key`` are ``[length, head_dim]``, ``centre`` is ``[1, head_dim]``; ``nothing``, ``[q_len]`` of -inf,
    holds the bounds of queries without a preceding block of keys.
    """
    xp, dtype = namespace_of(query), nothing.dtype
    before, shift = divmod(call.q_offset, count)  # before: full blocks of keys that precede the first query
    skipped = min(count, call.q_len) if before == 0 else 0  # queries without a preceding block of keys
    if skipped == call.q_len:
        return nothing
    found = [nothing[:skipped]]
    # Each part is a slice of query blocks.
    for part in parts_of(-(-(call.q_len - skipped) // count), count * call.head_dim, tiling.part_elements):
        blocks, start = part.stop - part.start, skipped + part.start * count
        length = min(blocks * count, call.q_len - start)
        queries = astype(xp, query[start : start + length, :], dtype)
        if length < blocks * count:  # pad the last block with copies of the last query
            filling = xp.broadcast_to(queries[-1:, :], (blocks * count - length, call.head_dim))
            queries = xp.concat([queries, filling], axis=0)
        first = shift + (start // count + before - 1) * count
        keys = xp.reshape(astype(xp, key[first : first + blocks * count, :], dtype), (blocks, count, -1))
        # [blocks, head_dim]
        means = _centred(xp, xp.sum(keys, axis=1) / count, centre)
        # [blocks, count, head_dim] @ [blocks, head_dim, 1]: the mean score is the score of the mean key.
        scores = xp.matmul(xp.reshape(queries, (blocks, count, -1)), means[..., None])
        # Mean distance from a query to the keys of the block before its own.
        distance = astype(xp, arange(xp, length, device_of(xp, query)) % count, dtype) + (count + 1) / 2
        # The exponential is convex: the sum is at least `count` times the exponential of the mean.
        mean = xp.reshape(scores, (-1,))[:length] * call.scale - slope * distance
        found.append(mean + math.log(count))
    bounds = _joined(xp, found)
    # A sum of large keys may overflow to inf, which is no lower bound: use -inf.
    return xp.where(bounds < math.inf, bounds, nothing)


def host_ranges(call: AttentionCall, query: Any, key: Any, tiling: Tiling, known: KeyNorms | None = None) -> KeyRanges:
    """Return the plan of one batch entry, as NumPy arrays ``[num_heads, q_blocks]``.

    The arguments are those of :func:`measure`. Heads are planned in groups: the plan of all heads at once could take
    more memory than the attention itself.
    """
    parts = []
    with np.errstate(all="ignore"):  # sums of large numbers overflow to inf; then all keys are needed
        # Masks alone decide, so nothing is measured.
        if call.tolerance == 0:
            bounds = ScoreBounds.unmeasured(call, q_block=tiling.q_block_of(call.q_len), kv_block=call.kv_len)
        else:
            measured = measure(call, query, key, tiling, known)
            # The call is on the host: copy the measurements there, too.
            if is_numpy(call.slopes):
                xp, names = namespace_of(query), ("q_norms", "own_scores", "key_norms", "lower")
                found: dict[str, Any] = {name: getattr(measured, name) for name in names}
                found = {name: on_host(xp, x) for name, x in found.items() if x is not None}
                measured = replace(measured, **found)
            bounds = measured.bounds(call, nearest_keys(call, tiling.part_elements))
        # Elements a head in key_ranges: q_blocks * kv_blocks.
        width = bounds.excess.shape[-1] * bounds.key_norm.shape[-1]
        for heads in parts_of(call.num_heads, width, tiling.part_elements):
            ranges = key_ranges(call.tile(heads=heads), bounds.of_heads(heads))
            parts.append([on_host(call.xp, x)[0] for x in ranges[1:]])
    return KeyRanges(bounds.q_block, *map(np.concatenate, zip(*parts, strict=True)))


def by_query_head(call: AttentionCall, of_keys: Any) -> Any:
    """Return ``[..., num_kv_heads, n]`` as ``[..., num_heads, n]``: each query head gets its key head's row."""
    if call.num_heads == call.num_kv_heads:
        return of_keys
    # [*batch, num_kv_heads, 1, n] -> [*batch, num_kv_heads, group, n] -> [*batch, num_heads, n]
    *batch, heads, length = of_keys.shape
    repeated = call.xp.broadcast_to(of_keys[..., None, :], (*batch, heads, call.num_heads // heads, length))
    return call.xp.reshape(repeated, (*batch, call.num_heads, length))


def _own_keys(xp: Namespace, call: AttentionCall, key: Any, queries: slice) -> Any:
    """Return the key at the position of each of these queries; the nearest key if there is none."""
    if not call.has_offset_array and 0 <= call.q_offset <= call.kv_len - call.q_len:
        return key[..., call.q_offset + queries.start : call.q_offset + queries.stop, :]
    offset = call.q_offset[..., None] if call.has_offset_array else call.q_offset
    positions = arange(xp, queries.stop - queries.start, device_of(xp, key)) + (offset + queries.start)
    # Indices must be valid, also for queries without a key at their position.
    positions = at_most(xp, at_least(xp, positions, 0), call.kv_len - 1)
    return along_axis(xp, key, xp.reshape(positions, (-1, 1, queries.stop - queries.start, 1)), -2)


def _centred(xp: Namespace, keys: Any, centre: Any | None) -> Any:
    """Return keys minus ``centre``, in its dtype; unchanged if it is None."""
    return keys if centre is None else astype(xp, keys, centre.dtype) - centre


def _joined(xp: Namespace, parts: list[Any]) -> Any:
    """Return arrays concatenated along the last axis."""
    return parts[0] if len(parts) == 1 else xp.concat(parts, axis=-1)


def _statistics(array: Any) -> DType:
    """Return the dtype to measure an array in."""
    return working_dtype(namespace_of(array), array.dtype)


def _nan_to_inf(xp: Namespace, sizes: Any) -> Any:
    """Return ``sizes`` with inf in place of NaN."""
    return xp.where(sizes < math.inf, sizes, math.inf)
