"""The rectangles of the score matrix to compute, joined into few kernel calls.

The plan (:func:`key_ranges`) says which keys are needed. This module turns its ranges, on the host, into calls of a
kernel that computes a rectangle with a given bias: PyTorch's attention on the CPU, MLX's on any device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from alibi_core._call import AttentionCall
from alibi_core._horizon.measure import KeyNorms, host_ranges
from alibi_core._horizon.ranges import KeyRanges
from alibi_core._horizon.tiling import Tiling

Ints = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Job:
    """Work for a kernel, in one call or a few: rectangles of ``rows`` queries and ``kv_len`` keys, with the same bias.

    There are either ``tiles`` rectangles in one batch entry, each ``rows`` queries and ``rows`` keys after the one
    before, or one rectangle in each of several batch entries. Each is computed for all ``heads``: heads of one group,
    which share their keys, or heads of a call without groups.
    """

    batch: slice
    heads: slice
    q_start: int
    rows: int
    tiles: int
    kv_start: int
    kv_len: int

    @property
    def back(self) -> int:
        """The number of keys before the first query's own key, if the offset is 0."""
        return self.q_start - self.kv_start

    @property
    def queries(self) -> slice:
        """The queries of the first tile."""
        return slice(self.q_start, self.q_start + self.rows)

    @property
    def keys(self) -> slice:
        """The keys of the first tile."""
        return slice(self.kv_start, self.kv_start + self.kv_len)


def entry_of(call: AttentionCall, index: int) -> AttentionCall:
    """Return the call restricted to one batch entry, with an int offset."""
    entry = call.tile(batch=slice(index, index + 1))
    return replace(
        entry, q_offset=int(call.xp.reshape(entry.q_offset, (-1,))[0] if call.has_offset_array else entry.q_offset)
    )


def plain_jobs(call: AttentionCall, tiling: Tiling) -> Iterator[Job]:
    """Yield jobs without a plan: several batch entries and heads a job, all keys that direction and window allow.

    Shapes alone decide: no array is read. If the offset is an array, each job gets all keys.
    """
    group = call.num_heads // call.num_kv_heads
    # A kernel call takes all heads, or the heads of one group, which share keys.
    at_once = call.num_heads if group == 1 else group
    # Above 1 if masks, ids, points or slopes differ between batch entries: then entries cannot all share one bias.
    by_token = call.mask, call.q_segment_ids, call.kv_segment_ids, call.q_points, call.kv_points
    varies = max(1 if x is None else x.shape[0] for x in by_token)
    for x, axes in ((call.slopes, 1), (call.future_slopes, 1), (call.log_gates, 2)):
        varies = max(varies, 1 if x is None or x.ndim == axes else x.shape[0])
    rows = min(tiling.rows[1], call.q_len)
    # Halve tiles until the bias of one head is small enough.
    while rows > tiling.step_queries and rows * call.kv_len > tiling.bias_elements:
        rows = -(-rows // 2)
    limit = max(1, tiling.bias_elements // (rows * call.kv_len))
    # The most heads whose biases fit, as a divisor, so that no job is smaller.
    heads = max(n for n in range(1, min(at_once, limit) + 1) if at_once % n == 0)
    # Batch entries that share one bias cost no more memory.
    entries = max(1, call.batch[0] if varies == 1 else limit // heads)
    for index, head in itertools.product(range(0, call.batch[0], entries), range(0, call.num_heads, heads)):
        batch = slice(index, min(index + entries, call.batch[0]))
        for q_start in range(0, call.q_len, rows):
            count = min(rows, call.q_len - q_start)
            first, stop = map(int, visible_keys(call, q_start, q_start + count - 1))
            if first >= stop:
                first, stop = 0, 1  # one key for fully masked rows, whose result becomes zeros
            yield Job(batch, slice(head, head + heads), q_start, count, 1, first, stop - first)


def visible_keys(call: AttentionCall, lowest: Any, highest: Any) -> tuple[Any, Any]:
    """Return the keys that direction and window let queries ``lowest`` to ``highest`` see: the first, the last + 1.

    Query indices count from 0: ints, or NumPy arrays. The result is all keys with points, or if the offset is an array.
    """
    if call.has_offset_array or call.q_points is not None:
        return 0, call.kv_len
    # 2**40: more than any distance.
    window = 2**40 if call.window_size is None else call.window_size
    first = np.maximum(lowest + call.q_offset - window, 0)
    stop = np.minimum(highest + call.q_offset + (1 if call.is_causal else window + 1), call.kv_len)
    return np.minimum(first, call.kv_len), np.maximum(stop, 0)


def needed_jobs(
    call: AttentionCall, query: Any, key: Any, tiling: Tiling, known: KeyNorms | None = None
) -> Iterator[Job]:
    """Yield the jobs of a call with one batch axis, for the keys that matter, planned in NumPy by batch entry.

    Args:
        call: The call. Its mask and segment ids are read on the host.
        query: ``[batch, num_heads, q_len, head_dim]``.
        key: ``[batch, num_kv_heads, kv_len, head_dim]``.
        tiling: The sizes of blocks and tiles.
        known: Bounds of the norms of keys; if given, keys are not measured.
    """
    for index in range(call.batch[0]):
        entry, one = entry_of(call, index), slice(index, index + 1)
        ranges = host_ranges(
            entry, query[one, ...], key[one, ...], tiling, None if known is None else known.of_entries(one)
        )
        if call.q_len <= tiling.step_queries:
            by_head = _few_jobs(entry, ranges, index)
        else:
            by_head = [_head_jobs(entry, ranges, head, index, tiling) for head in range(call.num_heads)]
        yield from _shared(by_head, call.num_heads // call.num_kv_heads, tiling.bias_elements)


def _few_jobs(call: AttentionCall, ranges: KeyRanges, index: int) -> list[list[Job]]:
    """Return one job for each head of one batch entry: with few queries, calls cost more time than scores."""
    first, stop, past, future = (x.astype(np.int64) for x in ranges[1:])
    # [num_heads]: the union over all blocks of queries
    widest = first.min(axis=1), stop.max(axis=1), past.max(axis=1), future.max(axis=1)
    first, stop = _needed(widest, call.q_offset, call.q_len)
    # Round widths up to powers of sqrt(2), so that heads with similar widths share one call.
    widths = np.exp2(np.ceil(np.log2(np.maximum(stop - first, 16)) * 2) / 2).astype(np.int64)
    first = np.maximum(stop - widths, 0)
    batch = slice(index, index + 1)
    return [
        [Job(batch, slice(head, head + 1), 0, call.q_len, 1, begin, end - begin)]
        for head, (begin, end) in enumerate(zip(first.tolist(), stop.tolist(), strict=True))
    ]


def _needed(of_block: tuple[Ints, ...], lowest: Any, counts: Any) -> tuple[Ints, Ints]:
    """Return the first and the last + 1 key that ``counts`` queries from position ``lowest`` on need.

    ``of_block`` are the ranges of the blocks of these queries. Fully masked queries get one key, the first: their
    result becomes zeros.
    """
    first, stop, past, future = of_block
    first, stop = np.maximum(first, lowest - past + 1), np.minimum(stop, lowest + counts - 1 + future)
    nothing = first >= stop
    return np.where(nothing, 0, first), np.where(nothing, 1, stop)


def _head_jobs(call: AttentionCall, ranges: KeyRanges, head: int, index: int, tiling: Tiling) -> list[Job]:
    """Return the jobs of one head of one batch entry.

    Adjacent tiles share one kernel call with the widest key range that any of them needs. A tile joins the call if the
    extra scores cost less than another call, and if the wider ranges lie inside the sequence.
    """
    fields = [x[head].astype(np.int64) for x in ranges[1:]]
    # The median width of ranges, without the width of the block itself.
    rows = _rows(call, int(np.median(fields[1] - fields[0])) - min(ranges.q_block, call.q_len), tiling)
    rows = math.gcd(rows, ranges.q_block)  # a tile needs the keys of one block, so it must lie within one
    starts = np.arange(0, call.q_len, rows)
    counts = np.minimum(rows, call.q_len - starts)
    block = starts // ranges.q_block
    first, stop = _needed(tuple(x[block] for x in fields), starts + call.q_offset, counts)
    alike = (_depends_on_distance_alone(call, starts, counts, first, stop) & (counts == rows)).tolist()
    lowest = (starts + call.q_offset).tolist()
    # Keys before and after the tile's first position.
    backs, aheads = (starts + call.q_offset - first).tolist(), (stop - starts - call.q_offset).tolist()
    may_widen = call.mask is None and call.q_segment_ids is None  # otherwise further keys need their own mask
    result, tile = [], 0
    while tile < len(lowest):
        back, ahead, last = backs[tile], aheads[tile], tile + 1
        while alike[tile] and last < len(lowest) and alike[last]:
            needs = backs[last], aheads[last]
            wider = max(back, needs[0]), max(ahead, needs[1])
            if wider != needs or wider != (back, ahead):  # a range must widen: weigh extra scores against a call
                # Extra keys, summed over the tiles of the call.
                extra = (last - tile + 1) * sum(wider) - (last - tile) * (back + ahead) - sum(needs)
                exist = wider[0] <= lowest[tile] and lowest[last] + wider[1] <= call.kv_len
                if not (may_widen and exist and extra * rows <= tiling.call_scores):
                    break
                back, ahead = wider
            last += 1
        batch, heads = slice(index, index + 1), slice(head, head + 1)
        kv_start = lowest[tile] - back
        result.append(Job(batch, heads, int(starts[tile]), int(counts[tile]), last - tile, kv_start, back + ahead))
        tile = last
    return result


def _rows(call: AttentionCall, width: int, tiling: Tiling) -> int:
    """Return the number of queries in a tile if each query needs ``width`` keys.

    Larger tiles use the kernel better, smaller tiles waste less: each query of a tile computes ``rows`` extra scores.
    """
    rows = tiling.rows[0]
    while rows < tiling.rows[1] and 4 * rows < width:
        rows *= 2
    while rows > tiling.step_queries and rows * (width + rows) > tiling.bias_elements:
        rows //= 2
    return rows


def _depends_on_distance_alone(call: AttentionCall, starts: Ints, counts: Ints, first: Ints, stop: Ints) -> Ints:
    """Return for each tile whether its bias is Toeplitz: no mask or segment boundary inside, and all keys exist."""
    lowest = starts + call.q_offset
    if call.log_gates is not None:
        return np.zeros_like(starts, dtype=bool)
    result: Ints = (lowest >= 0) & (lowest + counts <= call.kv_len)
    if call.q_segment_ids is not None and call.kv_segment_ids is not None:
        q_ids, kv_ids = (np.asarray(ids[0, ...]) for ids in (call.q_segment_ids, call.kv_segment_ids))
        # All ids in the tile are equal: number the runs of equal ids, and compare the first and the last element.
        q_changes, kv_changes = (np.concatenate([[0], np.cumsum(ids[1:] != ids[:-1])]) for ids in (q_ids, kv_ids))
        # Queries of one run, keys of one run, and the same id.
        result &= q_changes[starts] == q_changes[starts + counts - 1]
        result &= kv_changes[first] == kv_changes[stop - 1]
        result &= q_ids[starts] == kv_ids[first]
    if call.mask is not None:
        # A mask that differs by query is never Toeplitz.
        if call.mask.shape[-2] > 1:
            return np.zeros_like(result)
        shown: Ints = np.all(np.asarray(call.mask[0, ...]), axis=0)[0]  # [kv_len], True where visible to all heads
        # hidden[n]: masked keys among the first n; equal at both ends of a range without any.
        hidden = np.concatenate([[0], np.cumsum(~shown)])
        result &= hidden[stop] == hidden[first]
    return result


def _shared(by_head: list[list[Job]], group: int, bias_elements: int) -> Iterator[Job]:
    """Yield jobs; jobs of adjacent heads that are otherwise equal become one."""
    waiting: dict[tuple[int, ...], Job] = {}
    for job in (job for of_head in by_head for job in of_head):
        shape = (job.q_start, job.rows, job.tiles, job.kv_start, job.kv_len)
        before = waiting.get(shape)
        if before is not None and _may_share(before, job, group, bias_elements):
            waiting[shape] = replace(before, heads=slice(before.heads.start, job.heads.stop))
            continue
        if before is not None:
            yield before
        waiting[shape] = job
    yield from waiting.values()


def _may_share(one: Job, other: Job, group: int, bias_elements: int) -> bool:
    """Whether two jobs have adjacent heads that share keys (or no groups), and a bias that is small enough."""
    heads = slice(one.heads.start, other.heads.stop)
    return (
        one.heads.stop == other.heads.start
        and (group == 1 or heads.start // group == (heads.stop - 1) // group)
        and bool((heads.stop - heads.start) * one.rows * one.kv_len <= bias_elements)
    )
