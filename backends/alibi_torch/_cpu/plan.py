"""The plan of a call: independent parts, and the rectangles of scores to compute in each.

Each packed sequence and each padded text is a part, so that its bias depends on distance alone. With up to ``SHORT``
keys, or at tolerance 0, the rectangles of a part are blocks of queries. With more keys, measured norms bound the range
of keys that each block needs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import array_api_compat.numpy as numpy_namespace
import numpy as np
import torch
from torch import Tensor

from alibi_core.backend import AttentionCall, GateTotals
from alibi_core.backend.horizon import (
    ENDLESS,
    Job,
    KeyNorms,
    Tiling,
    current_tiling,
    entry_of,
    needed_jobs,
    plain_jobs,
    reach,
    score_rounding,
)

SHORT = 2048  # Up to this many keys, only the largest norm of each head is measured; beyond, the norms of each block.
LEAST_MEASURED = 256  # Below this many keys nothing is measured: biases rarely fall far enough for denormal weights.
LONG = 2**21  # Below this many elements in all keys, one query reads all of them without using norms.
LEAST_SPLIT = 128  # Below this many tokens per row, a dense mask is faster than one kernel call per sequence.
LEAST_MEAN_LENGTH = 16  # Below this mean length of packed sequences (tokens), a dense mask is faster too.


DEFAULT = Tiling(
    q_block=256,
    kv_block=128,
    part_elements=2**18,
    least_decay=20,
    norm_bounds=lambda vectors: norm_bounds(vectors, vectors.dtype),
    step_queries=16,
    rows=(64, 256),
    bias_elements=2**22,
    call_scores=15_000,
    short=SHORT,
)


def tiling() -> Tiling:
    """Return the block sizes in use: ``DEFAULT``, unless ``tiled_as`` overrides them."""
    return current_tiling(DEFAULT)


def norm_bounds(vectors: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return upper bounds of the norms of ``[..., head_dim]``, rounding errors included, as float32 or float64.

    ``dtype`` is that of the sums of squares. Default: at least float32. The vectors' own low precision is far faster.
    """
    statistics = torch.promote_types(vectors.dtype, torch.float32)
    dtype = statistics if dtype is None else dtype
    head_dim, info = vectors.shape[-1], torch.finfo(statistics)
    # Each addition and the result may round down, and the squares of tiny elements may underflow to 0.
    rounding = (head_dim + 2) * info.eps + 2 * torch.finfo(dtype).eps
    vanishing = (head_dim * info.tiny) ** 0.5 + torch.finfo(dtype).tiny
    return torch.linalg.vector_norm(vectors, dim=-1, dtype=dtype).to(statistics) * (1 + rounding) + vanishing


# --- Parts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A part of a call: slices of its batch entries, queries and keys, the call on these, and its key norms."""

    call: AttentionCall
    norms: KeyNorms | None
    batch: slice
    queries: slice
    keys: slice
    is_cut: bool = True  # False: the part is the entire call

    def of_queries(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Return views of ``[batch, num_heads, q_len, ...]``, sliced to this part."""
        return [x[self.batch, :, self.queries] for x in tensors] if self.is_cut else tensors

    def of_keys(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Return views of ``[batch, num_kv_heads, kv_len, head_dim]``, sliced to this part."""
        return [x[self.batch, :, self.keys] for x in tensors] if self.is_cut else tensors


def split(call: AttentionCall, norms: KeyNorms | None) -> list[Part]:
    """Return the parts of a call with one batch axis; ``q_offset`` of each part is an int.

    Queries that are in no part see no key.
    """
    batch, queries, keys = slice(0, call.batch[0]), slice(0, call.q_len), slice(0, call.kv_len)
    if call.has_offset_array:  # one part per batch entry, as their offsets differ
        entries = [slice(index, index + 1) for index in range(call.batch[0])]
        known = [None if norms is None else norms.of_entries(entry) for entry in entries]
        calls = [entry_of(call, entry.start) for entry in entries]
        return [Part(*of_entry, queries, keys) for of_entry in zip(calls, known, entries, strict=True)]
    spans = None
    # Norms of a cache cover blocks of keys, which a part would cut: such a call stays whole. So does one of gates and
    # sinks, whose parts would lack the slopes, which are gates, of the keys between theirs and a query.
    is_whole = norms is not None or (call.log_gates is not None and call.sinks is not None)
    if not is_whole and call.q_len == call.kv_len >= LEAST_SPLIT and call.q_offset == 0:
        spans = _packed_spans(call) if call.mask is None else _padded_spans(call)
    if spans is None:
        return [Part(call, norms, batch, queries, keys, is_cut=False)]
    plain = replace(call, mask=None, q_segment_ids=None, kv_segment_ids=None)
    return [Part(plain.tile(batch=b, queries=q, keys=k), None, b, q, k) for b, q, k in spans]


def _packed_spans(call: AttentionCall) -> list[tuple[slice, slice, slice]] | None:
    """Return batch entry, queries and keys of each packed sequence.

    None without shared ids, or if in any row an id has two runs or sequences are short on average.
    """
    ids, spans = call.q_segment_ids, []
    if ids is None or not call.shares_ids:
        return None
    for index, row in enumerate(ids.expand(call.batch[0], call.q_len)):
        # A sequence starts wherever the id changes; an id that occurs in two runs is not contiguous.
        starts = [0, *(1 + (row[1:] != row[:-1]).nonzero()[:, 0]).tolist()]
        if call.q_len < LEAST_MEAN_LENGTH * len(starts) or len(row[starts].unique()) < len(starts):
            return None
        runs = [slice(*run) for run in itertools.pairwise([*starts, call.q_len])]
        spans += [(slice(index, index + 1), run, run) for run in runs]
    return spans


def _padded_spans(call: AttentionCall) -> list[tuple[slice, slice, slice]] | None:
    """Return batch entries, queries and keys, for a mask that shows one run of keys to all queries and heads.

    Neighbouring entries with the same run share a span. Queries before, inside and after the run are separate spans.
    None for other masks.
    """
    if call.mask is None or call.q_segment_ids is not None:
        return None
    mask = call.mask[(None,) * (4 - call.mask.ndim)]
    # The mask differs between heads or queries: not padding.
    if mask.shape[1] > 1 or mask.shape[2] > 1:
        return None
    shown = mask[:, 0, 0]  # [batch or 1, kv_len]
    begins = shown.clone()
    begins[:, 1:] &= ~shown[:, :-1]  # True at the first key of each run
    # Several runs of visible keys, or none: not padding.
    if (begins.sum(dim=1) != 1).any():
        return None
    texts = zip(begins.int().argmax(dim=1).tolist(), shown.sum(dim=1).tolist(), strict=True)
    spans, entry, times = [], 0, call.batch[0] // len(shown)  # a mask may broadcast over entries
    for (start, count), alike in itertools.groupby(texts):
        batch, keys = slice(entry, entry + times * len(list(alike))), slice(start, start + count)
        for queries in (slice(0, start), keys, slice(keys.stop, call.q_len)):
            # Causal queries before the text see no key: leave them out.
            sees_none = call.is_causal and queries.stop <= start
            if queries.start < queries.stop and not sees_none:
                spans.append((batch, queries, keys))
        entry = batch.stop
    return spans


# --- Rectangles ------------------------------------------------------------------------------------------------------


def is_short(call: AttentionCall) -> bool:
    """Whether blocks of queries are planned from shapes and the largest norm of each head, not from norms by block."""
    return call.kv_len <= tiling().short or call.tolerance == 0


def uses_norms(call: AttentionCall) -> bool:
    """Whether the plan of a call would use key norms that the caller already has."""
    if call.q_len <= tiling().step_queries:
        numbers = call.num_kv_heads * math.prod(call.batch) * call.kv_len * call.head_dim
        return call.q_len == 1 and numbers >= LONG * tiling().short // SHORT
    return not is_short(call) and call.mask is None and call.q_segment_ids is None  # masks may split the call


def jobs(call: AttentionCall, query: Tensor, key: Tensor, norms: KeyNorms | None, limits: Limits | None) -> list[Job]:
    """Return the rectangles of a part that is no decoding step; tensors are ``[batch, heads, length, head_dim]``.

    A short call uses ``limits`` only, a long one ``norms`` only.
    """
    sizes = tiling()
    if is_short(call):
        return list(_blocks(call, sizes, limits))
    return list(needed_jobs(call, query, key, sizes, norms))


class Limits(NamedTuple):
    """The horizon of each head, proved from the largest norms of queries and keys."""

    tokens: list[float]  # by head, the distance from which on keys are negligible
    cutoff: Tensor  # [num_heads], minus the largest penalty at a horizon, over the batch and both sides


@np.errstate(all="ignore")  # norms may be NaN or infinite
def horizons(call: AttentionCall, excess: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return pairs of slopes and the distance from which on keys are negligible: one, or two with future slopes.

    Both are ``[batch or 1, num_heads]``. ``excess``, ``[num_heads]``, bounds how far a score may exceed the lower bound
    of its row's log-sum-exp.
    """
    # Each side of the query gets an equal share of the tolerance.
    share = call.tolerance / (1 if call.is_causal else 2)
    excess, found = np.where(excess < math.inf, excess, math.inf), []  # NaN becomes inf, too
    for rates in (call.slopes, None if call.is_causal else call.future_slopes):
        if rates is not None:
            slopes = rates.detach().double().numpy().reshape(-1, call.num_heads)
            found.append((slopes, reach(numpy_namespace, slopes, excess[None], share)))
    return found


def limits_of(call: AttentionCall, query: Tensor, key: Tensor) -> Limits | None:
    """Return the horizons of a short part of a call; None where measuring saves nothing."""
    if not is_short(call) or call.tolerance == 0 or call.kv_len < min(LEAST_MEASURED, tiling().short):
        return None
    if call.q_len <= tiling().step_queries or call.added_key_bias is not None:
        return None
    # Largest norms by head, over batch and tokens: [num_heads] and [num_kv_heads].
    norms = [norm_bounds(x, x.dtype).amax(dim=(0, 2)).double().numpy() for x in (query, key)]
    rounding, tokens = 1 + 2 * score_rounding(call.head_dim), np.full(call.num_heads, math.inf)
    with np.errstate(all="ignore"):  # norms may be NaN or infinite
        # Two scores of a row differ by at most 2 * |query| * |key| * scale.
        bound = norms[0] * norms[1].repeat(call.num_heads // call.num_kv_heads) * (2 * abs(call.scale) * rounding)
        if call.log_gates is not None:  # so far below its query's own key, kv_len keys weigh the tolerance
            falls = bound - math.log(call.tolerance / call.kv_len)
        else:
            far = horizons(call, bound)
            tokens = np.max([x.max(axis=0) for _, x in far], axis=0)
            falls = np.max([np.where(x < math.inf, slopes * x, math.inf).max(axis=0) for slopes, x in far], axis=0)
    return Limits(np.minimum(tokens, ENDLESS).tolist(), -torch.from_numpy(falls).to(call.working_dtype))


def _blocks(call: AttentionCall, sizes: Tiling, limits: Limits | None) -> Iterator[Job]:
    """Yield blocks of queries for all batch entries, split into runs of heads with the keys within their horizons."""
    # Where the bias is a view, its size sets no limit.
    is_view = call.mask is None and call.q_segment_ids is None and (call.is_linear or call.sees_own_key)
    is_view = is_view and call.log_gates is None
    totals = None if call.log_gates is None or limits is None else GateTotals.of(call.xp, call.log_gates)
    for job in plain_jobs(call, replace(sizes, bias_elements=2**62 if is_view else sizes.bias_elements)):
        if limits is None or not call.sees_own_key:  # without the own key, limits do not apply
            yield job
            continue
        lowest, stop = job.q_start + call.q_offset, job.kv_start + job.kv_len
        spans = [
            (max(job.kv_start, int(lowest - limit) + 1), min(stop, int(lowest + job.rows - 1 + limit)))
            for limit in limits.tokens[job.heads]
        ]
        if totals is not None:  # bounds, [batch entries, heads, kv_len], increase along the keys
            keys, at = torch.arange(job.kv_start, stop), torch.tensor([lowest])
            falls = GateTotals(*(x[job.batch, job.heads] for x in totals)).bounds(call.xp, at, keys)[:, :, 0]
            counts = (falls < limits.cutoff[job.heads, None]).sum(dim=-1).amin(dim=0).tolist()
            spans = [(job.kv_start + count, last) for count, (_, last) in zip(counts, spans, strict=True)]
        entries = job.batch.stop - job.batch.start
        for heads in alike([last - first for first, last in spans], sizes.call_scores / (entries * job.rows)):
            first, last = min(x for x, _ in spans[heads]), max(x for _, x in spans[heads])
            own = slice(job.heads.start + heads.start, job.heads.start + heads.stop)
            yield replace(job, heads=own, kv_start=first, kv_len=last - first)


def alike(widths: Sequence[int], most: float) -> Iterator[slice]:
    """Yield runs of neighbouring heads, each to be computed at its largest width: at most ``most`` extra keys a run."""
    start = 0
    for stop in range(1, len(widths) + 1):
        run = widths[start : stop + 1]
        if stop == len(widths) or max(run) * len(run) - sum(run) > most:
            yield slice(start, stop)
            start = stop
