"""A decoding step: one query a row over a cache, the heads that share keys in one tile, the keys split among programs.

The first kernel plans for itself, by the cache's norms; the second joins the splits. Positions may lie on the device:
one program serves all steps, and a CUDA graph may hold it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from alibi_core.backend import AttentionCall
from alibi_core.backend.horizon import KeyNorms
from alibi_torch._triton.forward import added
from alibi_torch._triton.launch import FEW, Rows, Tile, launch
from alibi_torch._triton.plan import PLAN, droppable, largest_norm, norm_bounds
from alibi_torch._triton.scores import LOG2E, clamped, dot, first_position, jit, load_block, of, outside

PER_SPLIT = 512  # Each split has about this many keys if all are needed: enough programs for a GPU, few to join.
MOST_SPLITS = 64


def is_step(call: AttentionCall) -> bool:
    """Whether a call has one query with keys up to it alone, none of them hidden."""
    is_last = call.is_causal or (not call.has_offset_array and call.q_offset >= call.kv_len - 1)
    return call.q_len == 1 and is_last and call.mask is None and call.q_segment_ids is None


@jit
def split(q, k, v, norms_of, SUMS, STATS, rules, scale, scale2, log_side, kv_len, offset, window, splits, norm_blocks,
          norm_block, H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, WINDOWED: tl.constexpr,
          PLAN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Write the sums of an equal share of the needed keys, for the heads of a group: ``[batch, heads, splits, DP]``."""
    part, bk = tl.program_id(0) % splits, (tl.program_id(0) // splits).to(tl.int64)
    b, hk = bk // (H // GROUP), bk % (H // GROUP)
    g, d = tl.arange(0, BLOCK_M), tl.arange(0, DP)
    h = hk * GROUP + tl.minimum(g, GROUP - 1)  # rows past the group repeat its last head
    pos = first_position(rules, b, offset)
    near = outside(pos, kv_len)
    stop = tl.minimum(tl.maximum(pos + 1, 0), kv_len)
    first = 0
    if WINDOWED:
        first = tl.maximum(tl.maximum(pos, 0) - window, 0)
        stop = tl.where(near > window, 0, stop)
    least = first
    slope = tl.load(of(rules.slopes, b, h))
    slope2 = clamped(slope)
    query = tl.load(of(q, b, h)[:, None] + d[None, :], mask=d[None, :] < D, other=0.0)
    if norms_of is not None:
        inf = float("inf")
        rounding: tl.constexpr = (D + 8) * 2.0**-23
        of_keys = of(norms_of, b, hk)
        largest = largest_norm(of_keys, norm_blocks, PLAN)
        wide = query.to(tl.float32)
        norm = norm_bounds(wide, D) * tl.abs(scale)
        bound = norm * largest
        last = of(k, b, hk) + tl.maximum(stop - 1, 0).to(tl.int64) * k.n + d
        own = tl.sum(wide * tl.load(last, mask=d < D, other=0.0).to(tl.float32)[None, :], axis=1) * scale
        anchor = own - slope * near.to(tl.float32) * (1 + 2.0**-20) - rounding * bound
        anchor = tl.where((bound < inf) & (tl.abs(anchor) < inf), anchor, -inf)[:, None]
        most = (norm * (1 + rounding))[:, None]
        blocks = tl.minimum(stop // norm_block + 1, norm_blocks)
        dropped = droppable(of_keys, blocks, pos, slope[:, None], most * largest - anchor, anchor, most, most, largest,
                            log_side, kv_len, norm_blocks, norm_block, True, PLAN)  # fmt: skip
        first = tl.maximum(first, tl.min(dropped, axis=0) * norm_block)
    first = tl.minimum(first, tl.maximum(stop - 1, 0)) // BLOCK_N * BLOCK_N
    share = (stop - first + splits * BLOCK_N - 1) // (splits * BLOCK_N) * BLOCK_N
    begin = first + part * share
    end = tl.minimum(begin + share, stop)
    acc = tl.zeros([BLOCK_M, DP], tl.float32)
    top, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        keys = load_block(of(k, b, hk), start, k.n, end, BLOCK_N, D, DP)
        values = load_block(of(v, b, hk), start, v.n, end, BLOCK_N, D, DP)
        at = (start + tl.arange(0, BLOCK_N))[None, :]
        scores = dot(query, tl.trans(keys)) * scale2 - slope2[:, None] * (pos - near - at).to(tl.float32)
        if rules.bias is not None:
            bias = of(rules.bias, b, h)[:, None] + at * rules.bias.n
            scores += tl.load(bias, mask=at < end, other=0.0) * LOG2E
        scores = tl.where((at < end) & (at >= least), scores, float("-inf"))
        acc, top, total = added(acc, top, total, scores, tl.zeros([BLOCK_M], tl.float32), values)
    # A query that sees no key: in each split, a weight of 1 on zeros.
    top, total = tl.where(stop > 0, top, 0.0), tl.where(stop > 0, total, 1.0)
    place = (b * H + h) * splits + part
    tl.store(SUMS + place[:, None] * DP + d[None, :], acc, mask=(g < GROUP)[:, None])
    tl.store(STATS + place * 2, top, mask=g < GROUP)
    tl.store(STATS + place * 2 + 1, total, mask=g < GROUP)


@jit
def join(SUMS, STATS, out, splits, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr):
    """Write results from the sums of all splits."""
    bh = tl.program_id(0).to(tl.int64)
    d, part = tl.arange(0, DP), tl.arange(0, SPLITS)
    place = bh * splits + part
    top = tl.load(STATS + place * 2, mask=part < splits, other=float("-inf"))
    total = tl.load(STATS + place * 2 + 1, mask=part < splits, other=0.0)
    most = tl.max(top, axis=0)
    shares = tl.exp2(top - tl.where(most == float("-inf"), 0.0, most))
    sums = tl.load(SUMS + place[:, None] * DP + d[None, :], mask=(part < splits)[:, None], other=0.0)
    result = tl.sum(sums * shares[:, None], axis=0) / tl.sum(total * shares, axis=0)
    tl.store(of(out, bh // H, bh % H) + d, result.to(out.base.dtype.element_ty), mask=d < D)


def attend_step(call: AttentionCall, given: dict[str, Any], result: Tensor, known: KeyNorms | None) -> None:
    """Write the result of a call for which :func:`is_step` holds."""
    batch, heads, kv_heads = call.batch[0], call.num_heads, call.num_kv_heads
    splits = min(MOST_SPLITS, triton.next_power_of_2(-(-call.kv_len // PER_SPLIT)))
    norms, norm_block = None, 1
    if known is not None and call.tolerance > 0 and call.added_key_bias is None:
        norms, norm_block = known.values.to(torch.float32), known.block
    sums = torch.empty(batch * heads * splits * (given["DP"] + 2), dtype=torch.float32, device=result.device)
    given |= {"norms_of": Rows.of(norms), "norm_block": norm_block, "PLAN": PLAN, "out": Rows.of(result)}
    given |= {"norm_blocks": 0 if norms is None else norms.shape[-1], "splits": splits, "SPLITS": splits}
    given |= {"SUMS": sums, "STATS": sums[batch * heads * splits * given["DP"] :]}
    tile = Tile(max(FEW, triton.next_power_of_2(heads // kv_heads)), 64, 4, 2)
    launch(split, splits * batch * kv_heads, given, tile)
    launch(join, batch * heads, given, tile)
