"""The backward kernels: gradients of queries and of slopes by blocks of queries, of keys and values by blocks of keys.

Weights are computed anew from each row's largest score and sum of weights, which stay apart: their sum, the
log-sum-exp, would be too coarse for large scores.
"""

import triton
import triton.language as tl

from alibi_torch._triton.scores import (
    block_of,
    clamped,
    dot,
    first_position,
    jit,
    load_block,
    of,
    queries_of,
    rows_of,
    scored,
    slopes_of,
    spans_of,
    store_block,
)


@triton.jit
def _weights(scores, most, share):
    """Return softmax weights; scores may round above the largest of the forward pass, weights not above 1."""
    return tl.exp2(tl.minimum(scores - most, 0.0)) * share


@jit
def by_queries(q, k, v, out, grad, STATS, DELTA, CENTRE, dq, D_SLOPES, rules, plan, scale, scale2, q_len, kv_len,
               offset, window, q_blocks, H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
               CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, HIDES: tl.constexpr, PLAN: tl.constexpr,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, LEARNS: tl.constexpr):  # fmt: skip
    """Write the gradients of a block of queries, their sums with results, and sums over the block for the slopes."""
    (block, bh, b, h, hk), rates, (rows, pos, near, _, ids), (spans, whole, others), query = queries_of(
        q, rules, plan, q_len, kv_len, offset, window, q_blocks, H, GROUP, D, DP, CAUSAL, WINDOWED, HIDES, PLAN,
        BLOCK_M, BLOCK_N)  # fmt: skip
    start_m = block * BLOCK_M
    do = load_block(of(grad, b, h), start_m, grad.n, q_len, BLOCK_M, D, DP)
    result = load_block(of(out, b, h), start_m, out.n, q_len, BLOCK_M, D, DP)
    delta = tl.sum(result.to(tl.float32) * do.to(tl.float32), axis=1)
    tl.store(DELTA + bh * q_len + rows, delta, mask=rows < q_len)
    most = tl.load(STATS + bh * 2 * q_len + rows, mask=rows < q_len, other=float("inf"))
    share = tl.load(STATS + bh * 2 * q_len + q_len + rows, mask=rows < q_len, other=0.0)
    total = tl.zeros([BLOCK_M, DP], tl.float32)
    rest = tl.zeros([BLOCK_M], tl.float32)
    by_past, by_future, excess, past, ahead_of = rest, rest, rest, rest, rest
    for kind in tl.static_range(HIDES, 2):
        for index in tl.range(0, others if kind else whole, num_stages=1 if kind else STAGES):
            start = block_of(spans, index, kind == 0, BLOCK_N)
            keys = load_block(of(k, b, hk), start, k.n, kv_len, BLOCK_N, D, DP, kind == 0)
            values = load_block(of(v, b, hk), start, v.n, kv_len, BLOCK_N, D, DP, kind == 0)
            scores, shift = scored(dot(query, tl.trans(keys)) * scale2, pos, near, ids, start, start >= spans[3], rules,
                                   b, h, rates[0], rates[1], kv_len, window, 1, BLOCK_N, CAUSAL, WINDOWED,
                                   kind == 0)  # fmt: skip
            weights = _weights(scores, (most - shift)[:, None], share[:, None])
            by_score = weights * (dot(do, tl.trans(values)) - delta[:, None])
            if LEARNS:
                ahead = (start + tl.arange(0, BLOCK_N))[None, :] - pos[:, None]
                distance = (tl.abs(ahead) - near[:, None]).to(tl.float32)
                before, after = tl.where(ahead > 0, 0.0, distance), tl.where(ahead > 0, distance, 0.0)
                by_past += tl.sum(by_score * before, axis=1)
                by_future += tl.sum(by_score * after, axis=1)
                excess += tl.sum(by_score, axis=1)
                past += tl.sum(weights * before, axis=1)
                ahead_of += tl.sum(weights * after, axis=1)
            by_score = by_score.to(keys.dtype)
            rest += tl.sum(by_score.to(tl.float32), axis=1)
            total = dot(by_score, keys, total)
    # Gradients of a row's scores sum to 0 but for rounding, which a large mean of keys would multiply.
    mean = tl.load(CENTRE + (b * (H // GROUP) + hk) * DP + tl.arange(0, DP))
    total -= rest[:, None] * mean[None, :]
    store_block(of(dq, b, h), start_m, dq.n, q_len, total * scale, BLOCK_M, D, DP)
    if LEARNS:  # [2, batch, heads, q_blocks]
        # Their excess, of weights that the forward pass rounded, is as large a share of all weights.
        tl.store(D_SLOPES + bh * q_blocks + block, tl.sum(excess * past - by_past, axis=0))
        tl.store(D_SLOPES + tl.num_programs(0) + bh * q_blocks + block, tl.sum(excess * ahead_of - by_future, axis=0))


@jit
def by_keys(q, k, v, grad, STATS, DELTA, dk, dv, rules, plan, scale, scale2, q_len, kv_len, offset, window, kv_blocks,
            H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CAUSAL: tl.constexpr,
            WINDOWED: tl.constexpr, HIDES: tl.constexpr, PLAN: tl.constexpr, BLOCK_M: tl.constexpr,
            BLOCK_N: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Write the gradients of a block of keys and values, summed over the query heads that share them."""
    start_n = tl.program_id(0) % kv_blocks * BLOCK_N
    bk = (tl.program_id(0) // kv_blocks).to(tl.int64)
    b, hk = bk // (H // GROUP), bk % (H // GROUP)
    keys = load_block(of(k, b, hk), start_n, k.n, kv_len, BLOCK_N, D, DP)
    values = load_block(of(v, b, hk), start_n, v.n, kv_len, BLOCK_N, D, DP)
    by_key, by_value = tl.zeros([BLOCK_N, DP], tl.float32), tl.zeros([BLOCK_N, DP], tl.float32)
    begin = first_position(rules, b, offset)
    # The first and the last key, counted in queries.
    lowest = start_n.to(tl.int64) - begin
    highest = lowest + BLOCK_N - 1
    for g in range(GROUP):
        h = hk * GROUP + g
        bh = b * H + h
        slope, future = slopes_of(rules, b, h)
        first, stop = lowest * 0, lowest * 0 + q_len
        if plan.first is not None:
            # All blocks of queries between the first and the last that need these keys: what the forward pass left
            # out among them weighs no more than the tolerance.
            blocks = (q_len + PLAN - 1) // PLAN
            plan_first, plan_stop = blocks, 0
            for chunk in range(0, blocks, PLAN):
                index = chunk + tl.arange(0, PLAN)
                needs = tl.load(of(plan.first, b, h) + index, mask=index < blocks, other=2**30) <= start_n // PLAN
                needs = needs & (tl.load(of(plan.stop, b, h) + index, mask=index < blocks, other=0) > start_n // PLAN)
                plan_first = tl.minimum(plan_first, tl.min(tl.where(needs, index, blocks), axis=0))
                plan_stop = tl.maximum(plan_stop, tl.max(tl.where(needs, index + 1, 0), axis=0))
            first += plan_first * PLAN
            stop = tl.minimum(stop, lowest * 0 + plan_stop * PLAN)
        if CAUSAL:
            first = tl.maximum(first, lowest)
        if WINDOWED:
            first = tl.maximum(first, lowest - window)
            stop = tl.minimum(stop, highest + window + 1)
        first = first // BLOCK_M * BLOCK_M
        stop = tl.maximum((stop + BLOCK_M - 1) // BLOCK_M * BLOCK_M, first)
        # The same as for keys around queries, but causal queries are after the keys.
        spans, whole, others = spans_of(
            first, stop, lowest, highest, window, not (CAUSAL or HIDES), not HIDES, WINDOWED, BLOCK_M
        )
        for kind in tl.static_range(HIDES, 2):
            for index_m in tl.range(0, others if kind else whole, num_stages=1 if kind else STAGES):
                start = block_of(spans, index_m, kind == 0, BLOCK_M)
                rows = start + tl.arange(0, BLOCK_M)
                query = load_block(of(q, b, h), start, q.n, q_len, BLOCK_M, D, DP)
                do = load_block(of(grad, b, h), start, grad.n, q_len, BLOCK_M, D, DP)
                # Weights of queries past the last are 0.
                most = tl.load(STATS + bh * 2 * q_len + rows, mask=rows < q_len, other=float("inf"))
                share = tl.load(STATS + bh * 2 * q_len + q_len + rows, mask=rows < q_len, other=0.0)
                delta = tl.load(DELTA + bh * q_len + rows, mask=rows < q_len, other=0.0)
                pos = begin + rows
                near, _, ids = rows_of(rules, plan, b, h, rows, pos, q_len, kv_len, window, CAUSAL, WINDOWED)
                scores, shift = scored(dot(keys, tl.trans(query)) * scale2, pos, near, ids, start_n, start < spans[3],
                                       rules, b, h, clamped(slope), clamped(future), kv_len, window, 0, BLOCK_N, CAUSAL,
                                       WINDOWED, kind == 0)  # fmt: skip
                weights = _weights(scores, (most - shift)[None, :], share[None, :])
                by_value = dot(weights.to(do.dtype), do, by_value)
                by_score = weights * (dot(values, tl.trans(do)) - delta[None, :])
                by_key = dot(by_score.to(query.dtype), query, by_key)
    store_block(of(dk, b, hk), start_n, dk.n, kv_len, by_key * scale, BLOCK_N, D, DP)
    store_block(of(dv, b, hk), start_n, dv.n, kv_len, by_value, BLOCK_N, D, DP)
