"""Which keys the queries need, from what is measured of them, and so which rectangles of scores to compute."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from alibi_core import AttentionCall, KeyRanges, ScoreBounds, key_ranges
from alibi_core.backend import (
    FIELDS,
    Job,
    TileSizes,
    by_block,
    entry_of,
    jobs_of_entry,
    log_sum_exp_of_mean,
    nearest_keys,
    parts_of,
    plain_jobs,
)

SHORT = 1024  # keys; so few are attended to whole, for all batch entries and heads at once
SIZES = TileSizes(rows=(64, 256), bias_elements=2**22, call_scores=15_000, few=16)
KV_BLOCK = 128  # keys, at least, that one bound of their norms is held for
BLOCKS = 512  # of queries or of keys, that score bounds are held for, at most
PART_ELEMENTS = 2**20  # of queries or keys measured at a time

WORTHWHILE = 20  # what slope times distance must be, at least, for keys to be left out, about


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
        yield from plain_jobs(call, SIZES)
        return
    for index in range(call.batch[0]):
        entry = entry_of(call, index)
        one = slice(index, index + 1)
        known = None if norms is None else norms.of_entries(one)
        ranges = needed_keys(entry, query[one], key[one], tolerance, known)
        yield from jobs_of_entry(entry, ranges, index, SIZES)


# --- What is needed ------------------------------------------------------------------------------------------------


def needed_keys(
    call: AttentionCall, query: Tensor, key: Tensor, tolerance: float, norms: KeyNorms | None = None
) -> KeyRanges:
    """Return the core's plan for one batch entry, as NumPy arrays ``[num_heads, q_blocks]``."""
    q_block = max(SIZES.rows[1], -(-call.q_len // BLOCKS // SIZES.rows[1]) * SIZES.rows[1])
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
    whole = {name: np.concatenate([getattr(part, name)[0].cpu().numpy() for part in parts]) for name in FIELDS}
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
    if norms is None and call.q_len <= SIZES.few:
        norms = KeyNorms(norm_bounds(key, key.dtype), 1)
        kv_block = max(KV_BLOCK, -(-call.kv_len // BLOCKS // 64) * 64)
        key_norms = by_block(call.xp, norms.values, kv_block).amax(dim=-1).to(statistics)
    elif norms is None:
        kv_block = max(KV_BLOCK, -(-call.kv_len // BLOCKS // 64) * 64)
        # Softmax does not notice a vector taken from every key; without their mean they are smaller.
        centre = key.mean(dim=2, keepdim=True, dtype=statistics)  # [1, num_kv_heads, 1, head_dim]
        parts = [
            norm_bounds(key[:, :, part].to(statistics) - centre)
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
        q_norms[:, :, part] = norm_bounds(queries)
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
        nearest_keys(call, PART_ELEMENTS),
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
    if call.mask is not None or call.q_segment_ids is not None or call.q_len <= SIZES.few:
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
        found = log_sum_exp_of_mean(slope, scores * call.scale, distance, count)
        # A sum of large keys may have overflowed, which would bound by infinity.
        bounds[start : start + len(queries)] = torch.where(torch.isfinite(found), found, -torch.inf)


def _parts(length: int, elements: int) -> Iterator[slice]:
    """Yield slices of a length, each of as many tokens (of so many elements) as are to be measured at a time."""
    return parts_of(length, elements, PART_ELEMENTS)
