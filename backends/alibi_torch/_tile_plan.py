"""Which rectangles of the score matrix to compute, and in how few kernel calls."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from alibi_core import AttentionCall, KeyRanges, ScoreBounds, key_ranges
from alibi_core._checks import MAX_POSITION
from alibi_core._horizon import by_block, log_sum_exp_of_mean

SHORT = 1024  # keys; so few are attended to whole, for all batch entries and heads at once
FEW = 16  # queries; so few are decoding steps, where calls cost more than scores
ROWS = (64, 256)  # queries in a tile: at least, at most
BIAS_ELEMENTS = 2**22  # in the bias of one call, at most (but for a single head)
KV_BLOCK = 128  # keys, at least, that one bound of their norms is held for
BLOCKS = 512  # of queries or of keys, that score bounds are held for, at most
PART_ELEMENTS = 2**20  # of queries or keys measured at a time
_FIELDS = ("first", "stop", "past", "future")  # of KeyRanges

WORTHWHILE = 20  # what slope times distance must be, at least, for keys to be left out, about
CALL_SCORES = 15_000  # as many scores take as long as a kernel call's overhead


@dataclass(frozen=True)
class Job:
    """One kernel call: rectangles of ``rows`` queries and ``kv_len`` keys, all with the same bias.

    ``tiles`` of them follow one another in the sequence, ``rows`` apart, queries and keys alike; or there is one for
    each of several batch entries. In either case for each of ``heads``, which share their keys or are ungrouped.
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
        """How many keys come before the place of the first query's own, were the offset 0."""
        return self.q_start - self.kv_start

    @property
    def queries(self) -> slice:
        """Of the first tile."""
        return slice(self.q_start, self.q_start + self.rows)

    @property
    def keys(self) -> slice:
        """Of the first tile."""
        return slice(self.kv_start, self.kv_start + self.kv_len)


@dataclass(frozen=True)
class KeyNorms:
    """Bounds of the norms of keys that somebody already knows: ``[batch or 1, num_kv_heads or 1, blocks]``, float."""

    values: Tensor
    block: int  # keys that each column bounds

    def of_entries(self, batch: slice) -> KeyNorms:
        """Return what is known of these batch entries."""
        return self if len(self.values) == 1 else replace(self, values=self.values[batch])


def jobs(call: AttentionCall, query: Tensor, key: Tensor, tolerance: float, norms: KeyNorms | None) -> Iterator[Job]:
    """Yield the jobs that make up ``call``, whose offset is an int.

    Query and key are ``[batch, heads, length, head_dim]``.
    """
    if call.kv_len <= SHORT:
        yield from _short_jobs(call)
        return
    for index in range(call.batch[0]):
        entry = entry_of(call, index)
        one = slice(index, index + 1)
        known = None if norms is None else norms.of_entries(one)
        ranges = needed_keys(entry, query[one], key[one], tolerance, known)
        by_head = [_head_jobs(entry, ranges, head, index) for head in range(call.num_heads)]
        yield from _shared(by_head, call.num_heads // call.num_kv_heads)


def entry_of(call: AttentionCall, index: int) -> AttentionCall:
    """Return the part of a call that concerns one batch entry, its offset as an int."""
    whole = slice(0, call.num_heads), slice(0, call.q_len), slice(0, call.kv_len)
    entry = call.tile(batch=slice(index, index + 1), heads=whole[0], queries=whole[1], keys=whole[2])
    if call.q_segment_ids is call.kv_segment_ids:  # which tells that each query's own key is visible
        entry = replace(entry, kv_segment_ids=entry.q_segment_ids)
    return replace(entry, q_offset=int(entry.q_offset))


# --- What is needed ------------------------------------------------------------------------------------------------


def needed_keys(
    call: AttentionCall, query: Tensor, key: Tensor, tolerance: float, norms: KeyNorms | None = None
) -> KeyRanges:
    """Return the core's plan for one batch entry, as NumPy arrays ``[num_heads, q_blocks]``."""
    q_block = max(ROWS[1], -(-call.q_len // BLOCKS // ROWS[1]) * ROWS[1])
    if tolerance == 0:  # nothing to measure
        zeros = torch.zeros(1, call.num_heads, 1, device=call.device)
        blocks = torch.zeros(1, call.num_heads, -(-call.q_len // q_block), device=call.device)
        bounds = ScoreBounds(q_block, call.kv_len, blocks, blocks, blocks, blocks, zeros)
    else:
        bounds = _measure(call, query, key, norms, q_block)
    # A few heads at a time: the plan of all could take more memory than the attention itself.
    step = max(1, PART_ELEMENTS // (bounds.excess.shape[-1] * bounds.key_norm.shape[-1]))
    heads = (slice(head, min(head + step, call.num_heads)) for head in range(0, call.num_heads, step))
    parts = [_ranges_of_heads(call, bounds, some, tolerance) for some in heads]
    whole = {name: np.concatenate([getattr(part, name)[0].cpu().numpy() for part in parts]) for name in _FIELDS}
    return KeyRanges(q_block, **whole)


def _ranges_of_heads(call: AttentionCall, bounds: ScoreBounds, heads: slice, tolerance: float) -> KeyRanges:
    part = call.tile(batch=slice(0, 1), heads=heads, queries=slice(0, call.q_len), keys=slice(0, call.kv_len))
    names = ("excess", "anchor", "q_least", "q_most", "key_norm")
    return key_ranges(part, replace(bounds, **{name: getattr(bounds, name)[:, heads] for name in names}), tolerance)


def _measure(call: AttentionCall, query: Tensor, key: Tensor, norms: KeyNorms | None, q_block: int) -> ScoreBounds:
    """Measure queries and keys, a part at a time, so that no copy of either is ever whole."""
    group = call.num_heads // call.num_kv_heads
    statistics = call.working_dtype
    centre = None
    if norms is None and call.q_len <= FEW:
        norms = KeyNorms(norm_bounds(key, key.dtype), 1)
        kv_block = max(KV_BLOCK, -(-call.kv_len // BLOCKS // 64) * 64)
        key_norms = by_block(call.xp, norms.values, kv_block).amax(dim=-1).to(statistics)
    elif norms is None:
        kv_block = max(KV_BLOCK, -(-call.kv_len // BLOCKS // 64) * 64)
        # Softmax does not notice a vector taken from every key; without their mean they are smaller.
        centre = key.mean(dim=2, keepdim=True, dtype=statistics)  # [1, num_kv_heads, 1, head_dim]
        parts = [
            torch.linalg.vector_norm(key[:, :, part].to(statistics) - centre, dim=-1)
            for part in _parts(call.kv_len, call.num_kv_heads * call.head_dim)
        ]
        key_norms = by_block(call.xp, torch.cat(parts, dim=-1), kv_block).amax(dim=-1)
    else:
        kv_block = norms.block
        key_norms = norms.values.to(statistics).expand(-1, call.num_kv_heads, -1)
    q_norms = torch.empty(1, call.num_heads, call.q_len, dtype=statistics, device=call.device)
    own_scores = torch.zeros_like(q_norms)
    for part in _parts(call.q_len, call.num_heads * call.head_dim):
        queries = query[:, :, part].to(statistics)
        torch.linalg.vector_norm(queries, dim=-1, out=q_norms[:, :, part])
        # The queries whose positions are those of keys: from `start` on, up to `stop`.
        start, stop = (min(max(n, part.start), part.stop) for n in (-call.q_offset, call.kv_len - call.q_offset))
        if start < stop:
            own = key[:, :, start + call.q_offset : stop + call.q_offset].to(statistics)
            own = own if centre is None else own - centre
            same = queries[:, :, start - part.start : stop - part.start].unflatten(1, (-1, group))
            own_scores[:, :, start:stop] = (same * own[:, :, None]).sum(dim=-1).flatten(1, 2)
    return ScoreBounds.of_tokens(
        call,
        q_norms * abs(call.scale),
        own_scores * call.scale,
        key_norms.repeat_interleave(group, dim=1),
        _nearest_keys(call),
        _lower_bounds(call, query, key, centre),
        q_block=q_block,
        kv_block=kv_block,
    )


def norm_bounds(key: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return what no norm of keys ``[..., head_dim]`` exceeds, however sums of squares are rounded: float32 or float64.

    Args:
        key: Keys.
        dtype: What to measure them in. Default float32 or more; in a low precision of their own it is far faster.
    """
    statistics = torch.promote_types(key.dtype, torch.float32)
    dtype = statistics if dtype is None else dtype
    head_dim = key.shape[-1]
    # Each addition may round down, the result too, and the square of what is tiny may vanish.
    rounding = (head_dim + 2) * torch.finfo(statistics).eps + 2 * torch.finfo(dtype).eps
    vanishing = (head_dim * torch.finfo(statistics).tiny) ** 0.5 + torch.finfo(dtype).tiny
    return torch.linalg.vector_norm(key, dim=-1, dtype=dtype).to(statistics) * (1 + rounding) + vanishing


def _lower_bounds(call: AttentionCall, query: Tensor, key: Tensor, centre: Tensor | None) -> Tensor | None:
    """Return lower bounds of log-sum-exps, ``[1, num_heads, q_len]``, each from the mean of the keys some way back."""
    if call.mask is not None or call.q_segment_ids is not None or call.q_len <= FEW:
        return None  # not known to be visible, or not worth it
    if call.q_offset < 0 or call.q_offset + call.q_len > call.kv_len or call.slopes.min() < 0:
        return None
    group = call.num_heads // call.num_kv_heads
    bounds = torch.full((1, call.num_heads, call.q_len), -torch.inf, dtype=call.working_dtype, device=call.device)
    slopes = call.slopes.expand(1, -1)[0].tolist()
    for head, slope in enumerate(slopes):
        # Their number grows with count, their weight falls with slope * distance: the best is between.
        count = 2 ** round(math.log2(min(max(0.7 / max(slope, 1e-6), 1), 512)))
        visible = call.window_size is None or 2 * count <= call.window_size
        # Of steep heads it would shorten little, of those that reach farther than the sequence nothing.
        if count < 16 or slope * call.kv_len < WORTHWHILE or not visible:
            continue
        middle = None if centre is None else centre[0, head // group]
        _bound_by_means(call, bounds[0, head], query[0, head], key[0, head // group], middle, slope, count)
    return bounds


def _bound_by_means(
    call: AttentionCall, bounds: Tensor, query: Tensor, key: Tensor, middle: Tensor | None, slope: float, count: int
) -> None:
    """Write one head's bounds: of each query, from the last ``count`` keys that end where a block of queries begins."""
    before = call.q_offset // count  # blocks of keys that end at or before the first query
    shift = call.q_offset % count
    skipped = count if before == 0 else 0  # queries without such a block
    for start in range(skipped, call.q_len, max(count, PART_ELEMENTS // call.head_dim // count * count)):
        queries = query[start : start + max(count, PART_ELEMENTS // call.head_dim // count * count)]
        blocks = -(-len(queries) // count)
        kv_start = shift + (start // count + before - 1) * count
        keys = key[kv_start : kv_start + blocks * count].to(call.working_dtype)
        means = keys.unflatten(0, (blocks, count)).mean(dim=1)  # [blocks, head_dim]
        means = means if middle is None else means - middle
        queries = queries.to(call.working_dtype)
        whole = len(queries) // count * count
        scores = torch.bmm(queries[:whole].unflatten(0, (-1, count)), means[: whole // count, :, None]).flatten()
        if whole < len(queries):
            scores = torch.cat([scores, queries[whole:] @ means[-1]])
        distance = torch.arange(len(queries), device=call.device) % count + (count + 1) / 2
        bounds[start : start + len(queries)] = log_sum_exp_of_mean(slope, scores * call.scale, distance, count)


def _parts(length: int, elements: int) -> Iterator[slice]:
    """Yield slices of a length, each of as many tokens (of so many elements) as are to be measured at a time."""
    step = max(1, PART_ELEMENTS // elements)
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def _nearest_keys(call: AttentionCall) -> Tensor:
    """Return ``call.nearest_keys()``, without ever holding something of ``q_len * kv_len``."""
    if call.every_query_attends and 0 <= call.q_offset <= call.kv_len - call.q_len:
        return torch.zeros(call.q_len, dtype=torch.int32, device=call.device)
    if call.mask is None and call.q_segment_ids is None:
        return call.nearest_keys()
    if call.q_segment_ids is None and call.mask.shape[-2] == 1:
        return _nearest_of_masked_keys(call)
    heads, keys = slice(0, call.num_heads), slice(0, call.kv_len)
    width = call.kv_len * (1 if call.mask is None else call.mask.shape[1])
    parts = [
        call.tile(batch=slice(0, 1), heads=heads, queries=part, keys=keys).nearest_keys()
        for part in _parts(call.q_len, width)
    ]
    return torch.cat(parts, dim=-1)


def _nearest_of_masked_keys(call: AttentionCall) -> Tensor:
    """Return the same for a mask that is one for all queries, as padding is: from running maxima."""
    queries, keys = call.positions()
    shown = call.mask.expand(*call.mask.shape[:-1], call.kv_len)[:, :, 0]  # [1, heads or 1, kv_len]
    inside = queries.clamp(0, call.kv_len - 1).long()
    before = torch.cummax(torch.where(shown, keys, -1), dim=-1).values[..., inside]
    nearest = torch.where((queries >= 0) & (before >= 0), queries - before, MAX_POSITION)  # farther than any key is
    if not call.is_causal:
        after = torch.cummin(torch.where(shown, keys, MAX_POSITION).flip(-1), dim=-1).values.flip(-1)[..., inside]
        is_ahead = (queries < call.kv_len) & (after < MAX_POSITION)
        nearest = torch.minimum(nearest, torch.where(is_ahead, after - queries, MAX_POSITION))
    limit = MAX_POSITION - 1 if call.window_size is None else min(call.window_size, MAX_POSITION - 1)
    return torch.where(nearest <= limit, nearest, -1).to(torch.int32)


# --- What to call --------------------------------------------------------------------------------------------------


def _short_jobs(call: AttentionCall) -> Iterator[Job]:
    """Yield jobs for all batch entries and heads at once, their keys whole but for what masks by position hide."""
    group = call.num_heads // call.num_kv_heads
    at_once = call.num_heads if group == 1 else group
    varies = max(1 if x is None else x.shape[0] for x in (call.mask, call.q_segment_ids, call.kv_segment_ids))
    varies = max(varies, call.slopes.shape[0] if call.slopes.ndim > 1 else 1)
    limit = max(1, BIAS_ELEMENTS // (min(ROWS[1], call.q_len) * call.kv_len))
    heads = max(n for n in range(1, min(at_once, limit) + 1) if at_once % n == 0)
    entries = call.batch[0] if varies == 1 else max(1, limit // heads)
    for index, head in itertools.product(range(0, call.batch[0], entries), range(0, call.num_heads, heads)):
        batch = slice(index, min(index + entries, call.batch[0]))
        for q_start in range(0, call.q_len, ROWS[1]):
            rows = min(ROWS[1], call.q_len - q_start)
            first, stop = _seen(call, q_start, rows)
            if first >= stop:
                first, stop = 0, 1  # something to see nothing of: such rows become zeros like all that see nothing
            yield Job(batch, slice(head, head + heads), q_start, rows, 1, first, stop - first)


def _seen(call: AttentionCall, q_start: int, rows: int) -> tuple[int, int]:
    """Return the first key, and the one after the last, that masks by position let some of these queries see."""
    lowest, highest = q_start + call.q_offset, q_start + call.q_offset + rows - 1
    window = call.kv_len + abs(call.q_offset) + call.q_len if call.window_size is None else call.window_size
    return max(0, lowest - window), min(call.kv_len, highest + 1 + (0 if call.is_causal else window))


def _head_jobs(call: AttentionCall, ranges: KeyRanges, head: int, index: int) -> list[Job]:
    """Return the jobs of one head of one batch entry."""
    first, stop, past, future = (getattr(ranges, name)[head].astype(np.int64) for name in _FIELDS)
    rows = _rows(call, int(np.median(stop - first)) - min(ranges.q_block, call.q_len))
    starts = np.arange(0, call.q_len, rows)
    counts = np.minimum(rows, call.q_len - starts)
    block = starts // ranges.q_block
    lowest = starts + call.q_offset  # position of each tile's first query
    first = np.maximum(first[block], lowest - past[block] + 1)
    stop = np.minimum(stop[block], lowest + counts - 1 + future[block])
    nothing = first >= stop
    first, stop = np.where(nothing, 0, first), np.where(nothing, 1, stop)
    if call.q_len <= FEW:
        first = _rounded_out(first, stop)
    alike = _untouched(call, starts, counts, first, stop) & (counts == rows)
    may_widen = call.mask is None and call.q_segment_ids is None
    tiles = _Tiles(*(x.tolist() for x in (alike, lowest, first, stop)), rows, call.kv_len, may_widen)
    result = []
    tile = 0
    while tile < len(starts):
        last, kv_start, kv_stop = tiles.run(tile)
        batch, heads = slice(index, index + 1), slice(head, head + 1)
        job = Job(batch, heads, int(starts[tile]), int(counts[tile]), last - tile, kv_start, kv_stop - kv_start)
        result.append(job)
        tile = last
    return result


def _rows(call: AttentionCall, width: int) -> int:
    """Return how many queries a tile is to have where each needs ``width`` keys.

    More make better use of the kernel, fewer waste less: a tile computes ``rows`` keys more than each query needs.
    """
    rows = ROWS[0]
    while rows < ROWS[1] and 4 * rows < width:
        rows *= 2
    while rows > FEW and rows * (width + rows) > BIAS_ELEMENTS:
        rows //= 2
    return min(rows, call.q_len)


def _rounded_out(first: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """Return where to begin so that heads of about the same width have the same, and one call serves them."""
    widths = np.exp2(np.ceil(np.log2(np.maximum(stop - first, 16)) * 2) / 2).astype(np.int64)
    return np.maximum(stop - widths, 0)


def _untouched(
    call: AttentionCall, starts: np.ndarray, counts: np.ndarray, first: np.ndarray, stop: np.ndarray
) -> np.ndarray:
    """Return for which tiles the bias depends on nothing but how far queries and keys are apart."""
    lowest = starts + call.q_offset
    result = (lowest >= 0) & (lowest + counts <= call.kv_len)
    if call.q_segment_ids is not None and call.kv_segment_ids is not None:
        q_ids, kv_ids = (ids[0].numpy() for ids in (call.q_segment_ids, call.kv_segment_ids))
        # A run of equal ids, without a change in between, on both sides.
        q_changes, kv_changes = (np.concatenate([[0], np.cumsum(ids[1:] != ids[:-1])]) for ids in (q_ids, kv_ids))
        result &= q_changes[starts] == q_changes[starts + counts - 1]
        result &= kv_changes[first] == kv_changes[stop - 1]
        result &= q_ids[starts] == kv_ids[first]
    if call.mask is not None:
        if call.mask.shape[-2] > 1:
            return result & False
        shown = call.mask.expand(*call.mask.shape[:-1], call.kv_len)[0].all(dim=0)[0].numpy()
        hidden = np.concatenate([[0], np.cumsum(~shown)])
        result &= hidden[stop] == hidden[first]
    return result


@dataclass(frozen=True)
class _Tiles:
    """The tiles of one head, in order: the position of each one's first query, and the keys it needs."""

    alike: list[bool]
    lowest: list[int]
    first: list[int]
    stop: list[int]
    rows: int
    kv_len: int
    may_widen: bool  # whether further keys can be told from those needed by their distance alone

    def run(self, tile: int) -> tuple[int, int, int]:
        """Return where the run of tiles from ``tile`` on that one call serves ends, and the keys of its first tile.

        All of a run see as far back, and ahead, as the one that needs most. Another joins where that costs less than
        a call of its own, and where the keys exist.
        """
        lowest = self.lowest[tile]
        back, ahead = lowest - self.first[tile], self.stop[tile] - lowest
        last = tile + 1
        while self.alike[tile] and last < len(self.alike) and self.alike[last]:
            needs = self.lowest[last] - self.first[last], self.stop[last] - self.lowest[last]
            wider = max(back, needs[0]), max(ahead, needs[1])
            if wider != needs or wider != (back, ahead):
                extra = (last - tile + 1) * sum(wider) - (last - tile) * (back + ahead) - sum(needs)
                exist = wider[0] <= lowest and self.lowest[last] + wider[1] <= self.kv_len
                if not (self.may_widen and exist and extra * self.rows <= CALL_SCORES):
                    break
                back, ahead = wider
            last += 1
        return last, lowest - back, lowest + ahead


def _shared(by_head: list[list[Job]], group: int) -> Iterator[Job]:
    """Yield jobs, those of neighbouring heads that differ in nothing else as one."""
    waiting: dict[tuple[int, ...], Job] = {}
    for job in (job for of_head in by_head for job in of_head):
        shape = (job.q_start, job.rows, job.tiles, job.kv_start, job.kv_len)
        before = waiting.get(shape)
        if before is not None and _may_share(before, job, group):
            waiting[shape] = replace(before, heads=slice(before.heads.start, job.heads.stop))
            continue
        if before is not None:
            yield before
        waiting[shape] = job
    yield from waiting.values()


def _may_share(one: Job, other: Job, group: int) -> bool:
    heads = slice(one.heads.start, other.heads.stop)
    return (
        one.heads.stop == other.heads.start
        and (group == 1 or heads.start // group == (heads.stop - 1) // group)
        and (heads.stop - heads.start) * one.rows * one.kv_len <= BIAS_ELEMENTS
    )
