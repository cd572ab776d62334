"""The forward kernel: one block of queries of one head, over the keys that the plan keeps.

In a block of keys on one side of all its queries the bias is a vector, equal for all rows but for a constant of each
row, which the running maximum takes up. So there are no positions, no masks and no products with slopes by score.
"""

import triton
import triton.language as tl

from alibi_torch._triton.scores import (
    block_of,
    dot,
    jit,
    load_block,
    of,
    queries_of,
    scored,
    store_block,
)


@triton.jit
def added(acc, most, total, scores, shift, values, RECORDED: tl.constexpr = False):
    """Return the running sums with a block's values added; ``shift`` is what each row's scores lack, ``[rows]``."""
    new = tl.maximum(most, tl.max(scores, axis=1) + shift)
    # A row that has seen nothing has the maximum -inf, and -inf - -inf is NaN.
    origin = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(scores - (origin - shift)[:, None])
    rest = tl.exp2(most - origin)
    rounded = weights.to(values.dtype)
    if RECORDED:  # the sum of rounded weights: then the result is exact in what all values have in common
        weights = rounded.to(tl.float32)
    total = total * rest + tl.sum(weights, axis=1)
    return dot(rounded, values, acc * rest[:, None]), new, total


@jit
def attend(q, k, v, out, STATS, rules, plan, scale2, q_len, kv_len, offset, window, q_blocks, H: tl.constexpr,
           GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
           HIDES: tl.constexpr, PLAN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
           STAGES: tl.constexpr):  # fmt: skip
    """Write results, and of each row the maximum of its scores and the inverse of the sum of its weights."""
    (block, bh, b, h, hk), rates, (rows, pos, near, attends, ids), (spans, whole, others), query = queries_of(
        q, rules, plan, q_len, kv_len, offset, window, q_blocks, H, GROUP, D, DP, CAUSAL, WINDOWED, HIDES, PLAN,
        BLOCK_M, BLOCK_N)  # fmt: skip
    acc = tl.zeros([BLOCK_M, DP], tl.float32)
    most, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    for kind in tl.static_range(HIDES, 2):
        for index in tl.range(0, others if kind else whole, num_stages=1 if kind else STAGES):
            start = block_of(spans, index, kind == 0, BLOCK_N)
            keys = load_block(of(k, b, hk), start, k.n, kv_len, BLOCK_N, D, DP, kind == 0)
            values = load_block(of(v, b, hk), start, v.n, kv_len, BLOCK_N, D, DP, kind == 0)
            scores, shift = scored(dot(query, tl.trans(keys)) * scale2, pos, near, ids, start, start >= spans[3], rules,
                                   b, h, rates[0], rates[1], kv_len, window, 1, BLOCK_N, CAUSAL, WINDOWED,
                                   kind == 0)  # fmt: skip
            acc, most, total = added(acc, most, total, scores, shift, values, STATS is not None)
    total = tl.where(attends, total, 1.0)
    result = tl.where(attends[:, None], acc / total[:, None], 0.0)
    store_block(of(out, b, h), block * BLOCK_M, out.n, q_len, result, BLOCK_M, D, DP)
    if STATS is not None:  # [batch, heads, 2, q_len]; a row that sees nothing has weights of 0
        at = STATS + bh * 2 * q_len + rows
        tl.store(at, tl.where(attends, most, float("inf")), mask=rows < q_len)
        tl.store(at + q_len, tl.where(attends, 1.0 / total, 0.0), mask=rows < q_len)
