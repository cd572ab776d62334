"""The plan: which blocks of keys each block of queries needs, by three small kernels; the host reads no value.

The bound is that of the core (``alibi_core/_horizon``): ``norms`` is its ``measure``, ``ranges`` its ``key_ranges``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from alibi_core.backend import AttentionCall
from alibi_core.backend.horizon import KeyNorms
from alibi_torch._triton.launch import FEW, Rows, launch
from alibi_torch._triton.scores import first_position, jit, load_block, of, outside, seen_by, slopes_of

PLAN = 128  # queries, and keys, in a block of the plan: a multiple of all tiles
SAMPLE = 256  # keys whose mean is subtracted from all: any vector may be
LEAST_MEASURED = 1024  # Below this many keys the plan takes longer than it saves.
ENDLESS = tl.constexpr(2**30)


class Plan(NamedTuple):
    """Needed blocks, and what hidden keys leave of each row; None where shapes alone decide."""

    first: Rows | None = None  # [batch, heads or 1, q_blocks] int32: the first needed block of keys
    stop: Rows | None = None  # the block after the last
    near: Rows | None = None  # [batch, heads or 1, q_len] int32: the distance of the nearest visible key, -1 for none


# --- Kernels ----------------------------------------------------------------------------------------------------------


@jit
def seen(plan, rules, q_len, kv_len, offset, window, q_blocks, HEADS: tl.constexpr, CAUSAL: tl.constexpr,
         WINDOWED: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Write the distance of each query's nearest visible key, and the range of blocks with visible keys."""
    block, bh = tl.program_id(0) % q_blocks, (tl.program_id(0) // q_blocks).to(tl.int64)
    b, h = bh // HEADS, bh % HEADS
    rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = first_position(rules, b, offset)
    pos = (begin + rows)[:, None]
    ids = rows
    if rules.q_ids is not None:
        ids = tl.load(of(rules.q_ids, b, 0) + rows * rules.q_ids.n, mask=rows < q_len, other=0)
    far: tl.constexpr = 2**31 - 1
    near = tl.full([BLOCK_N], far, tl.int32)
    first, stop, end = kv_len + BLOCK_N, 0, kv_len
    if CAUSAL:
        end = tl.maximum(tl.minimum(end, begin + tl.minimum((block + 1) * BLOCK_N, q_len)), 0)
    for start in tl.range(0, end, BLOCK_N):
        at = (start + tl.arange(0, BLOCK_N))[None, :]
        visible = (at < kv_len) & (rows < q_len)[:, None]
        if CAUSAL:
            visible = visible & (at <= pos)
        if WINDOWED:
            visible = visible & (tl.abs(at - pos) <= window)
        visible = seen_by(rules, b, h, at, ids[:, None], kv_len, visible)
        found = tl.min(tl.where(visible, tl.abs(at - pos), far), axis=1)
        near = tl.minimum(near, found)
        is_seen = tl.min(found, axis=0) < far
        first = tl.minimum(first, tl.where(is_seen, start, kv_len + BLOCK_N))
        stop = tl.where(is_seen, start + BLOCK_N, stop)
    tl.store(of(plan.near, b, h) + rows, tl.where(near < far, near, -1), mask=rows < q_len)
    tl.store(of(plan.first, b, h) + block, tl.minimum(first, stop) // BLOCK_N)
    tl.store(of(plan.stop, b, h) + block, stop // BLOCK_N)


@triton.jit
def _rows(base, at, stride, D: tl.constexpr, DP: tl.constexpr):
    """Load rows from anywhere in float32, ``[rows, DP]``, zeros past D."""
    d = tl.arange(0, DP)
    pointers = base + at[:, None].to(tl.int64) * stride + d[None, :]
    return tl.load(pointers, mask=d[None, :] < D, other=0.0).to(tl.float32)


@jit
def mean_of_sample(k, CENTRE, step, count, H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
                   SAMPLE: tl.constexpr):  # fmt: skip
    """Write the mean of some keys, zeros where it is not finite."""
    bh = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, SAMPLE)
    keys = _rows(of(k, bh // (H // GROUP), bh % (H // GROUP)), tl.minimum(index, count - 1) * step, k.n, D, DP)
    mean = tl.sum(tl.where((index < count)[:, None], keys, 0.0), axis=0) / count
    tl.store(CENTRE + bh * DP + tl.arange(0, DP), tl.where(tl.abs(mean) < float("inf"), mean, 0.0))


@triton.jit
def norm_bounds(vectors, D: tl.constexpr):
    """Return upper bounds of norms, rounding included; inf for NaN."""
    norm = tl.sqrt(tl.sum(vectors * vectors, axis=1)) * (1 + (D + 8) * 2.0**-23) + (D * 2.0**-126) ** 0.5
    return tl.where(norm < float("inf"), norm, float("inf"))


@jit
def norms(q, k, CENTRE, Q_NORMS, ANCHORS, NORMS, rules, scale, q_len, kv_len, offset, window, norm_blocks, q_blocks,
          H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, WINDOWED: tl.constexpr,
          HIDES: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Write bounds of norms, of blocks of keys in the first programs of a head, of queries in the others.

    Those write lower bounds of log-sum-exps, too: the score of the own key or, where it gives more, of the mean of the
    128 keys before the block (the exponential is convex); -inf without either.
    """
    programs = norm_blocks + q_blocks
    block, bh = tl.program_id(0) % programs, (tl.program_id(0) // programs).to(tl.int64)
    b, hk = bh // (H // GROUP), bh % (H // GROUP)
    index = tl.arange(0, BLOCK_N)
    centre = tl.zeros([1, DP], tl.float32)
    if CENTRE is not None:
        centre = tl.load(CENTRE + bh * DP + tl.arange(0, DP))[None, :]
    keys = of(k, b, hk)
    if block < norm_blocks:
        at = tl.minimum(block * BLOCK_N + index, kv_len - 1)  # the last key again and again, past it
        norm = norm_bounds(_rows(keys, at, k.n, D, DP) - centre, D)
        tl.store(NORMS + bh * norm_blocks + block, tl.max(norm, axis=0))
    else:
        start = (block - norm_blocks) * BLOCK_N
        begin = first_position(rules, b, offset) + start  # the position of the block's first query
        pos = begin + index
        own = _rows(keys, tl.maximum(tl.minimum(pos, kv_len - 1), 0), k.n, D, DP) - centre
        has_mean = (begin >= BLOCK_N) & (begin <= kv_len)
        if WINDOWED:
            has_mean = has_mean & (window >= 2 * BLOCK_N)
        earlier = tl.maximum(tl.minimum(begin, kv_len) - BLOCK_N, 0) + index
        mean = tl.sum(_rows(keys, tl.minimum(earlier, kv_len - 1), k.n, D, DP) - centre, axis=0)[None, :] / BLOCK_N
        distance = index.to(tl.float32) + (BLOCK_N + 1) / 2  # of the mean
        for g in range(GROUP):
            h = hk * GROUP + g
            query = load_block(of(q, b, h), start, q.n, q_len, BLOCK_N, D, DP).to(tl.float32)
            anchor = tl.where(outside(pos, kv_len) == 0, tl.sum(query * own, axis=1) * scale, float("-inf"))
            if not HIDES:
                slope, _ = slopes_of(rules, b, h)
                other = tl.sum(query * mean, axis=1) * scale - slope * distance + 4.852  # log(128), rounded down
                is_bound = (tl.abs(other) < float("inf")) & has_mean
                anchor = tl.where(is_bound & (other > anchor), other, anchor)
            at = (b * H + h) * q_len + start + index
            tl.store(Q_NORMS + at, norm_bounds(query, D) * tl.abs(scale), mask=start + index < q_len)
            tl.store(ANCHORS + at, anchor, mask=start + index < q_len)


@triton.jit
def _series(slope):
    """Return a bound of 1 / (1 - exp(-slope)), the weight of all keys from one on, in units of its own."""
    x = tl.where(slope > 0, slope, 1.0)
    less = tl.where(x < 0.01, x - 0.5 * x * x, (1.0 - tl.exp(-x)) * (1 - 2.0**-16))
    return (1 + 2.0**-18) / less


@triton.jit
def _reach(excess, slope, log_side):
    """Return the distance from which on keys weigh no more than their share: tokens, ENDLESS for all."""
    heavier = excess - log_side + tl.log(_series(slope))
    tokens = tl.ceil(heavier / tl.where(slope > 0, slope, 1.0) * (1 + 2.0**-20))
    tokens = tl.where(heavier <= 0, 0.0, tl.maximum(tokens, 1.0))
    return tl.where((slope > 0) & (tokens < 1e9), tokens, 1.0 * ENDLESS).to(tl.int32)


@triton.jit
def largest_norm(base, blocks, BLOCK: tl.constexpr):
    largest = 0.0
    for start in range(0, blocks, BLOCK):
        index = start + tl.arange(0, BLOCK)
        norm = tl.load(base + index, mask=index < blocks, other=0.0)
        largest = tl.maximum(largest, tl.max(tl.where(norm < float("inf"), norm, float("inf")), axis=0))
    return largest


@triton.jit
def droppable(base, blocks, position, slope, excess, anchor, least, most, largest, log_side, kv_len, norm_blocks,
              norm_block, LEADING: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Return how many leading (or trailing) blocks weigh no more than the tolerance together, ``[rows]``.

    ``blocks`` of them are looked at; ``position`` is that of the nearest query. Arguments by row are ``[rows, 1]``.
    """
    size = norm_block.to(tl.float32)
    series = tl.minimum(tl.where(slope > 0, _series(slope), size), size)
    total = tl.sum(slope * 0, axis=1)
    dropped = total.to(tl.int32)
    for start in range(0, blocks, CHUNK):
        at = (start + tl.arange(0, CHUNK))[None, :]
        if LEADING:
            distance = position - tl.minimum((at + 1) * norm_block, kv_len) + 1
        else:
            at = norm_blocks - 1 - at
            distance = at * norm_block - position
        exists = (at >= 0) & (at < norm_blocks)
        norm = tl.load(base + at, mask=exists, other=0.0)
        # The logarithm of what the block may weigh, as a share of what may be left out; above 0 is too much.
        logs = tl.minimum(excess - least * (largest - norm), most * norm - anchor) - log_side
        logs = logs - slope * tl.maximum(distance, 0).to(tl.float32) + tl.log(series) + 2.0**-17
        weights = tl.exp(tl.minimum(tl.where(exists & (slope >= 0) & (logs == logs), logs, 1.0), 1.0))
        sums = total[:, None] + tl.cumsum(weights, axis=1)
        dropped += tl.sum((sums * (1 + 2.0**-14) <= 1).to(tl.int32), axis=1)
        total += tl.sum(weights, axis=1)
    return dropped


@jit
def ranges(Q_NORMS, ANCHORS, norms_of, SPREAD, found, plan, rules, log_side, q_len, kv_len, offset, window, norm_blocks,
           norm_block, q_blocks, H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr,
           WINDOWED: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Write the first needed block of keys of a block of queries, and the one after the last."""
    block, bh = tl.program_id(0) % q_blocks, (tl.program_id(0) // q_blocks).to(tl.int64)
    b, h = bh // H, bh % H
    inf = float("inf")
    rounding: tl.constexpr = (D + 8) * 2.0**-23
    slope, future = slopes_of(rules, b, h)
    of_keys = of(norms_of, b, h // GROUP)
    largest = largest_norm(of_keys, norm_blocks, BLOCK_N)
    # --- The queries: how far scores may exceed the lower bound of the log-sum-exp
    index = tl.arange(0, BLOCK_N)
    rows = tl.minimum(block * BLOCK_N + index, q_len - 1)
    begin = first_position(rules, b, offset)
    pos = begin + rows
    near = outside(pos, kv_len)
    needed = near >= 0
    if CAUSAL:
        needed = needed & (pos >= 0)
    if plan.near is not None:
        near = tl.load(of(plan.near, b, h) + rows)
        needed = near >= 0
    if WINDOWED:
        needed = needed & (near <= window)
    norm, own = tl.load(Q_NORMS + bh * q_len + rows), tl.load(ANCHORS + bh * q_len + rows)
    bound = norm * largest
    bound = tl.where(bound < inf, bound, inf)
    lowest_score = -bound - tl.maximum(slope, future) * near.to(tl.float32) * (1 + 2.0**-20)
    if plan.near is not None:  # a mask may hide the own key
        own = tl.where(near == 0, own, -inf)
    anchors = tl.where(own > lowest_score, own, lowest_score) - rounding * bound
    if SPREAD is not None:  # a bias of keys may raise any score and lower the anchor's
        anchors -= tl.load(SPREAD + bh)
    anchors = tl.where((bound < inf) & (tl.abs(anchors) < inf), anchors, -inf)
    excess = tl.max(tl.where(needed, (1 + rounding) * bound - anchors, -inf), axis=0)
    anchor = tl.min(tl.where(needed, anchors, inf), axis=0)
    least, most = tl.min(norm, axis=0), tl.max(norm, axis=0) * (1 + rounding)
    # --- By distance
    lowest = begin + block * BLOCK_N
    highest = begin + tl.minimum((block + 1) * BLOCK_N, q_len) - 1
    past, ahead = _reach(excess, slope, log_side), _reach(excess, future, log_side)
    first = tl.where(past < ENDLESS, tl.maximum(tl.maximum(lowest, 0) - past + 1, 0), 0)
    stop = tl.where(ahead < ENDLESS, tl.minimum(tl.minimum(highest, kv_len) + ahead, kv_len), kv_len)
    if CAUSAL:
        stop = tl.minimum(highest + 1, kv_len)
    # --- By block: leading blocks are left out while they weigh no more than the tolerance together
    row = tl.zeros([1, 1], tl.float32)
    blocks = tl.minimum(tl.maximum(lowest, 0) // norm_block + 1, norm_blocks)
    dropped = droppable(of_keys, blocks, lowest, slope + row, excess + row, anchor, least, most, largest,
                        log_side, kv_len, norm_blocks, norm_block, True, BLOCK_N)  # fmt: skip
    first = tl.maximum(first, tl.minimum(tl.max(dropped, axis=0) * norm_block, kv_len))
    if not CAUSAL:  # and trailing ones
        blocks = norm_blocks - tl.minimum(tl.maximum(highest, 0) // norm_block, norm_blocks)
        dropped = droppable(of_keys, blocks, highest, future + row, excess + row, anchor, least, most, largest,
                            log_side, kv_len, norm_blocks, norm_block, False, BLOCK_N)  # fmt: skip
        stop = tl.minimum(stop, (norm_blocks - tl.max(dropped, axis=0)) * norm_block)
    first, stop = first // BLOCK_N, (tl.maximum(stop, 0) + BLOCK_N - 1) // BLOCK_N
    if plan.first is not None:
        first = tl.maximum(first, tl.load(of(plan.first, b, h) + block))
        stop = tl.minimum(stop, tl.load(of(plan.stop, b, h) + block))
    tl.store(of(found.first, b, h) + block, tl.minimum(first, stop))
    tl.store(of(found.stop, b, h) + block, stop)


# --- The host ---------------------------------------------------------------------------------------------------------


def mean_of_keys(call: AttentionCall, given: dict[str, Any]) -> Tensor:
    """Return the mean of a sample of keys, ``[batch, num_kv_heads, DP]`` float32."""
    count, key = min(SAMPLE, call.kv_len), given["k"].base
    centre = torch.empty(*key.shape[:2], given["DP"], dtype=torch.float32, device=key.device)
    given = given | {"CENTRE": centre, "step": call.kv_len // count, "count": count, "SAMPLE": SAMPLE}
    launch(mean_of_sample, key.shape[0] * key.shape[1], given)
    return centre


def plan_of(call: AttentionCall, given: dict[str, Any], known: KeyNorms | None) -> Plan:
    """Return the plan of a call with one batch axis, whose kernels take the arguments ``given``."""
    batch, heads, kv_heads, q_len, kv_len = call.batch[0], call.num_heads, call.num_kv_heads, call.q_len, call.kv_len
    q_blocks, norm_blocks, norm_block = -(-q_len // PLAN), -(-kv_len // PLAN), PLAN
    device, rules, plan = given["q"].base.device, given["rules"], Plan()

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    given = given | {"q_blocks": q_blocks}
    if given["HIDES"]:
        own = 1 if rules.mask is None else rules.mask.base.shape[1]  # masks may differ between heads
        blocks = empty(2, batch, own, q_blocks, dtype=torch.int32)
        plan = Plan(*map(Rows.of, (blocks[0], blocks[1], empty(batch, own, q_len, dtype=torch.int32))))
        launch(seen, q_blocks * batch * own, given | {"plan": plan, "HEADS": own})
    if call.tolerance == 0 or kv_len < LEAST_MEASURED or (known is None and q_len <= FEW):
        return plan
    centre = of_keys = None
    if known is None:
        centre, of_keys = mean_of_keys(call, given), empty(batch, kv_heads, norm_blocks)
    measured = 0 if known is not None else norm_blocks
    of_queries = empty(2, batch, heads, q_len)
    given |= {"CENTRE": centre, "Q_NORMS": of_queries[0], "ANCHORS": of_queries[1], "NORMS": of_keys}
    launch(norms, (measured + q_blocks) * batch * kv_heads, given | {"norm_blocks": measured})
    if known is not None:
        of_keys, norm_block, norm_blocks = known.values.to(torch.float32), known.block, known.values.shape[-1]
    spread = None
    if call.added_key_bias is not None:
        low, high = call.added_key_bias.aminmax(dim=-1)
        spread = (high - low).expand(batch, heads).contiguous()
    blocks = empty(2, batch, heads, q_blocks, dtype=torch.int32)
    found = Plan(Rows.of(blocks[0]), Rows.of(blocks[1]), plan.near)
    given |= {"norms_of": Rows.of(of_keys), "norm_blocks": norm_blocks, "norm_block": norm_block, "SPREAD": spread}
    launch(ranges, q_blocks * batch * heads, given | {"plan": plan, "found": found})
    return found
