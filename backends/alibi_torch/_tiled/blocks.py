"""How short calls are cut up: blocks of queries, each with the keys that its heads need.

Where it pays, the largest norms of queries and keys are measured for each head. They prove beyond how many tokens no
key matters. There a bias is -inf, and heads that look back about as far share the calls that leave those keys out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from alibi_core import AttentionCall
from alibi_core.backend import (
    LARGEST_TOLERANCE,
    Job,
    Tiling,
    namespace_of,
    reach,
    score_rounding,
    seen_keys,
    tolerance_of,
)
from alibi_torch._tiled import onednn, step
from alibi_torch._tiled.configuration import largest_norms, tiling
from alibi_torch._tiled.kernels import Bias

KEPT_PLANS = 16  # of a call that comes again with other norms, as from layer to layer


# How many queries a block has: pairs of the most keys and queries, measured with AVX-512. More queries waste scores on
# keys that only the last ones see, fewer take more calls, and slower products.
BLOCKS = (320, 64), (math.inf, 192)
BLOCKS_OF_INTEL = (256, 256), (math.inf, 192)
AT_ONCE = 2**19  # scores: so few take less time in one call, with those that are wasted
EXCESS = 8  # Scores that exceed others by so many more times this have the same plan.
MOST_EXCESS = 12  # times that: larger ones leave all keys where they are
EXPECTED_EXCESS = 4  # times that
MEASURED = 0.1  # scores in whose time a number of queries and keys is measured
PIECE = 64  # queries that the kernel computes at a time
WHOLE = 0.8  # of its time a score takes where one call computes all queries: larger products, and nothing to be joined
# Intel's processors take a hundred times as long for numbers too small for the precision of their dtype. Biases of this
# size, two thirds of the logarithm of the least number that is not, make them of weights and gradients. Where their
# share of the scores is larger than the next numbers (forward, backward), leaving them out saves time.
TINY = {torch.float32: 58.0, torch.float64: 472.0}
LEAST_TINY = (0.05, 0.01)


@dataclass
class Plan:
    """How a short call is computed.

    ``levels`` say, for each head, by how much scores may exceed others, in units of ``EXCESS``; () for by anything.
    """

    how: Tiling
    levels: tuple[int, ...]
    jobs: list[Job]  # blocks of queries, and of heads, each with the keys that it sees
    biases: list[Bias] | None = None  # of the jobs, once they are asked for


def plan(call: AttentionCall, query: Tensor, key: Tensor, *, differentiates: bool = False) -> Plan:
    """Return how a call is computed: without keys that the norms prove not to matter, where that takes less time."""
    if not is_measured(call, differentiates):
        return planned(call, ())
    return planned(call, _levels(call, query, key))


def lowest_bias(call: AttentionCall, query: Tensor, key: Tensor, *, differentiates: bool) -> Tensor | None:
    """Return by how much a bias falls below the largest of its row, ``[num_heads]``, where keys no longer matter.

    None where leaving out such keys of a short call saves no time.
    """
    if call.kv_len > tiling().short or not has_tiny(call, differentiates) or not _may_be_measured(call):
        return None
    levels = _levels(call, query, key)
    if not levels:
        return None
    with np.errstate(invalid="ignore"):  # of slopes of 0
        falls = [(rates * tokens).max(axis=0) for rates, tokens in _reaches(call, levels)]
    return torch.from_numpy(-np.nan_to_num(np.max(falls, axis=0), nan=math.inf)).to(call.working_dtype)


def _levels(call: AttentionCall, query: Tensor, key: Tensor) -> tuple[int, ...]:
    """Return the levels that norms prove, see :class:`Plan`."""
    q_norms, kv_norms = map(largest_norms, (query, key))
    added, spreads = call.added_key_bias, [0.0] * call.num_heads
    if added is not None:  # [..., num_heads or 1, kv_len]
        added = added.reshape(-1, *added.shape[-2:])
        spread = added.amax(dim=(0, 2)) - added.amin(dim=(0, 2))
        spreads = spread.expand(call.num_heads).tolist()
    group, levels = call.num_heads // call.num_kv_heads, []
    factor = 2 * abs(call.scale) * (1 + 2 * score_rounding(call.head_dim))
    for head, norm in enumerate(q_norms):
        level = (norm * kv_norms[head // group] * factor + spreads[head]) / EXCESS
        # Neither NaN nor what overflows is less than any number.
        levels.append(math.ceil(level) if level < MOST_EXCESS else MOST_EXCESS)
    return () if min(levels) == MOST_EXCESS else tuple(levels)


def is_measured(call: AttentionCall, differentiates: bool) -> bool:
    """Whether norms that are not known are likely to save more time than it takes to measure them."""
    kind = is_measured, differentiates
    known = call.worked_out.get(kind)
    if known is None or known[0] is not tiling():
        known = call.worked_out[kind] = tiling(), _may_save(call, differentiates)
    found: bool = known[1]
    return found


def _may_save(call: AttentionCall, differentiates: bool) -> bool:
    if is_little(call) and call.q_len >= call.kv_len and not _is_intel():  # one block, which needs all keys
        return False
    if not _may_be_measured(call) or onednn.suits(call, call.dtype):
        return False
    if has_tiny(call, differentiates):
        return True
    whole, expected = (planned(call, levels) for levels in ((), (EXPECTED_EXCESS,) * call.num_heads))
    numbers = call.batch[0] * (call.num_heads * call.q_len + call.num_kv_heads * call.kv_len) * call.head_dim
    return _time(expected.jobs) + MEASURED * numbers < _time(whole.jobs)


def _may_be_measured(call: AttentionCall) -> bool:
    return call.q_len > tiling().sizes.few and tolerance_of(call) > 0 and min(x.min() for x in _slopes(call)) >= 0


def has_tiny(call: AttentionCall, differentiates: bool) -> bool:
    """Whether enough of a call's weights are so small that they take long."""
    if not _is_intel():
        return False
    biases = np.maximum(*_slopes(call)).mean(axis=0) * call.kv_len  # of the farthest keys
    share = np.square(1 - np.fmin(TINY[call.working_dtype] / np.fmax(biases, 1), 1)).mean()
    return bool(share > LEAST_TINY[differentiates])


def _time(jobs: Sequence[Job]) -> float:
    """Return the time that jobs take, in that of a score."""
    total = 0.0
    for job in jobs:
        entries = (job.batch.stop - job.batch.start) * (job.heads.stop - job.heads.start)
        total += tiling().sizes.call_scores + entries * job.rows * job.kv_len * (WHOLE if len(jobs) == 1 else 1)
    return total


def _slopes(call: AttentionCall) -> tuple[np.ndarray, np.ndarray]:
    """Return the slopes, and those for keys after the query, ``[batch or 1, num_heads]``, on the host in float64."""
    rates = (call.slopes, call.slopes if call.future_slopes is None else call.future_slopes)
    past, future = (x.detach().double().numpy().reshape(-1, call.num_heads) for x in rates)
    return past, future


def planned(call: AttentionCall, levels: tuple[int, ...]) -> Plan:
    """Return the plan of a call at these levels."""
    how, plans = tiling(), call.worked_out.setdefault(planned, {})
    known: Plan | None = plans.get(levels)
    if known is None or known.how is not how:
        if len(plans) >= KEPT_PLANS:
            plans.clear()
        limits = limits_of(call, levels)
        choices = [list(_blocks(call, n, limits)) for n in _rows(call)]
        jobs = min(choices, key=_time)
        known = plans[levels] = Plan(how, levels, jobs)
    return known


def _rows(call: AttentionCall) -> list[int]:
    """Return how many queries a block may have: all, too, where they may see the same keys."""
    blocks = BLOCKS_OF_INTEL if _is_intel() else BLOCKS
    if not call.is_causal:
        return sorted({min(call.q_len, blocks[-1][1]), call.q_len}, reverse=True)
    if is_little(call):
        return [call.q_len]
    return [min(call.q_len, next(rows for keys, rows in blocks if call.kv_len <= keys))]


def is_little(call: AttentionCall) -> bool:
    """Whether one call of the kernel takes the least time, whatever keys are hidden."""
    return call.batch[0] * call.num_heads * call.q_len * call.kv_len <= AT_ONCE


def longest(call: AttentionCall) -> float:
    """Return so many times the keys of a short call as are still cut up here in less time than by ``kernel_jobs``."""
    if _is_intel() and is_measured(call, differentiates=False):
        return 2
    if call.is_causal:
        return 1.75
    return 1.25 if stays_low(call.dtype, call.q_len) else 1.5


@functools.cache
def _is_intel() -> bool:
    """Whether MKL, by which the kernel multiplies, was made for this CPU; False where PyTorch cannot tell."""
    found = getattr(torch.cpu, "get_capabilities", dict)()
    return str(found.get("cpu_name", "")).startswith("Intel")


def limits_of(call: AttentionCall, levels: tuple[int, ...]) -> list[int]:
    """Return the distance from which on keys do not matter to each head: tokens."""
    farthest = call.q_len + call.kv_len
    if not levels:
        return [farthest] * call.num_heads
    tokens = [tokens.max(axis=0) for _, tokens in _reaches(call, levels)]
    return np.fmin(np.max(tokens, axis=0), farthest).astype(int).tolist()


def _reaches(call: AttentionCall, levels: tuple[int, ...]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return slopes, and the distance from which on keys do not matter, both ``[batch or 1, num_heads]``, by side."""
    share = min(tolerance_of(call), LARGEST_TOLERANCE) / (1 if call.is_causal else 2)
    excess = np.asarray([math.inf if x == MOST_EXCESS else x * EXCESS for x in levels])
    sides = _slopes(call)[: 1 if call.is_causal else 2]
    with np.errstate(invalid="ignore"):  # of an infinite excess
        return [(x, reach(namespace_of(x), x, excess, share)) for x in sides]


def _blocks(call: AttentionCall, rows: int, limits: list[int]) -> Iterator[Job]:
    """Yield blocks of so many queries, the first of which may be smaller, and of heads that look about as far."""
    batch, threads, call_scores = slice(0, call.batch[0]), torch.get_num_threads(), tiling().sizes.call_scores
    for start in range(call.q_len % rows - rows if call.q_len % rows else 0, call.q_len, rows):
        count = rows + min(start, 0)
        start = max(start, 0)
        lowest, (first, stop) = start + call.q_offset, seen_keys(call, start, count)
        backs = [min(limit - 1, lowest - first) for limit in limits]
        aheads = [min(limit - 1, stop - lowest - count) for limit in limits]
        widths = tuple([back + count + ahead for back, ahead in zip(backs, aheads, strict=True)])
        # Threads share the work of a call by heads and, within a head, by pieces of its queries.
        pieces = max(1, count // PIECE)
        for heads, _ in step.grouped(widths, call.batch[0] * pieces, count // pieces, math.inf, call_scores, threads):
            back, ahead = max(backs[heads]), max(aheads[heads])
            yield Job(batch, heads, start, count, 1, lowest - back, back + count + ahead)


def stays_low(dtype: torch.dtype, q_len: int) -> bool:
    """Whether the kernel takes a low precision as it is: one query reads its keys faster when they are cast."""
    return dtype == torch.bfloat16 and q_len > 1 and _multiplies_bfloat16()


@functools.cache
def _multiplies_bfloat16() -> bool:
    """Whether products of this CPU take bfloat16, so that a cast takes longer than it saves."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
