"""What all kernels share: blocks of rows, the keys that queries see, and scores with their bias.

Scores are in base 2. Distances count from the nearest visible key of each row: softmax ignores a constant along a row,
and large penalties would cost float32 digits. ``pos`` are positions of queries, ``at`` those of keys, ``near`` the
distance of each query's nearest key; their shapes broadcast, ``[rows, 1]`` and ``[1, keys]`` or the transposes.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LARGEST = tl.constexpr(3.0e38)
# Numbers that change from call to call: no kernel is compiled again where one is 1 or a multiple of 16.
VARYING = ("q_len", "kv_len", "offset", "window", "q_blocks", "kv_blocks", "norm_blocks", "norm_block", "step", "count")
VARYING += ("splits",)


def jit(function):
    """Compile a kernel for all lengths at once."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return triton.jit(function, do_not_specialize=[name for name in names if name in VARYING])


@triton.jit
def dot(a, b, acc=None):
    """Return ``a @ b`` in float32, of float32 numbers too."""
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def of(rows, b, h):
    """Return the pointer to the rows of a batch entry and a head."""
    return rows.base + b * rows.b + h * rows.h


@triton.jit
def load_block(base, start, stride, length, BLOCK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
               WHOLE: tl.constexpr = False):  # fmt: skip
    """Load the rows from ``start`` on, ``[BLOCK, DP]``, zeros past ``length`` and D; WHOLE: no row is past it.

    A block spans less than 2**31 elements, a tensor may span more.
    """
    n, d = tl.arange(0, BLOCK), tl.arange(0, DP)
    pointers = base + tl.cast(start, tl.int64) * stride + (n[:, None] * stride + d[None, :])
    if WHOLE and D == DP:
        return tl.load(pointers)
    elif WHOLE:
        return tl.load(pointers, mask=d[None, :] < D, other=0.0)
    else:
        return tl.load(pointers, mask=(n[:, None] < length - start) & (d[None, :] < D), other=0.0)


@triton.jit
def store_block(base, start, stride, length, block, BLOCK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    n, d = tl.arange(0, BLOCK), tl.arange(0, DP)
    pointers = base + tl.cast(start, tl.int64) * stride + (n[:, None] * stride + d[None, :])
    tl.store(pointers, block.to(base.dtype.element_ty), mask=(n[:, None] < length - start) & (d[None, :] < D))


@triton.jit
def clamped(rate):
    """Return a slope in base 2, finite."""
    return tl.minimum(tl.maximum(rate * LOG2E, -LARGEST), LARGEST)


@triton.jit
def slopes_of(rules, b, h):
    """Return the slopes of keys up to the query and after it."""
    slope = tl.load(of(rules.slopes, b, h))
    future = slope
    if rules.future is not None:
        future = tl.load(of(rules.future, b, h))
    return slope, future


@triton.jit
def first_position(rules, b, offset):
    """Return the position of the first query of a batch entry."""
    if rules.offsets is not None:
        offset = tl.load(rules.offsets + b)
    return offset


@triton.jit
def outside(pos, kv_len):
    """Return the distance of each position from the range of all keys; 0 inside it."""
    return tl.maximum(tl.maximum(-pos, pos - (kv_len - 1)), 0)


@triton.jit
def rows_of(rules, plan, b, h, rows, pos, q_len, kv_len, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):
    """Return, for each row, the distance that counts as 0, whether the query sees any key, and its segment."""
    near = outside(pos, kv_len)
    attends = near >= 0
    ids = rows
    if plan.near is not None:  # -1 for no key
        known = tl.load(of(plan.near, b, h) + rows, mask=rows < q_len, other=-1)
        attends = known >= 0
        # With two slopes and keys on both sides, no distance is one penalty for all of them.
        near = known if rules.future is None else tl.where(near > 0, known, 0)
        if rules.q_ids is not None:
            ids = tl.load(of(rules.q_ids, b, 0) + rows * rules.q_ids.n, mask=rows < q_len, other=0)
    else:
        if CAUSAL:
            attends = pos >= 0
        if WINDOWED:
            attends = attends & (near <= window)
    return near, attends, ids


@triton.jit
def seen_by(rules, b, h, at, ids, kv_len, visible):
    """Return which of the visible keys neither the mask nor segments hide."""
    if rules.kv_ids is not None:
        known = tl.load(of(rules.kv_ids, b, 0) + at * rules.kv_ids.n, mask=at < kv_len, other=0)
        visible = visible & (known == ids)
    if rules.mask is not None:
        visible = visible & (tl.load(of(rules.mask, b, h) + at * rules.mask.n, mask=at < kv_len, other=0) != 0)
    return visible


@triton.jit
def scored(products, pos, near, ids, start, is_ahead, rules, b, h, slope2, future2, kv_len, window, Q: tl.constexpr,
           BLOCK: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """Return products plus bias, -inf where a key is hidden, and what each row's scores lack, ``[rows]``.

    WHOLE: every query sees all keys of the block, which starts at ``start``, and they are on one side of all queries:
    after them if ``is_ahead``. Then the bias is a vector, from the key nearest to the queries on. Q is the axis of
    products along which queries do not vary: 1, or 0 for the transpose.
    """
    n = tl.arange(0, BLOCK)
    at = tl.expand_dims(start + n, 1 - Q)
    shift = tl.zeros(pos.shape, tl.float32)
    rate = slope2
    if WHOLE:
        edge = BLOCK - 1
        if not CAUSAL:
            rate, edge = tl.where(is_ahead, -future2, slope2), tl.where(is_ahead, 0, edge)
        scores = products + tl.expand_dims(rate * (n - edge).to(tl.float32), 1 - Q)
        shift = rate * (start + edge - tl.minimum(tl.maximum(pos, 0), kv_len - 1)).to(tl.float32)
    else:
        place, near = tl.expand_dims(pos, Q), tl.expand_dims(near, Q)
        visible = at < kv_len
        if CAUSAL:
            visible = visible & (at <= place)
            distance = (place - near) - at
            if WINDOWED:
                visible = visible & (at >= place - window)
        else:
            distance = tl.abs(at - place)
            rate = tl.where(at > place, future2, slope2)
            if WINDOWED:
                visible = visible & (distance <= window)
            distance -= near
        visible = seen_by(rules, b, h, at, tl.expand_dims(ids, Q), kv_len, visible)
        scores = tl.where(visible, products - rate * distance.to(tl.float32), float("-inf"))
    if rules.bias is not None:
        scores += tl.load(of(rules.bias, b, h) + at * rules.bias.n, mask=at < kv_len, other=0.0) * LOG2E
    return scores, shift


@triton.jit
def spans_of(first, stop, lowest, highest, window, BEFORE: tl.constexpr, AFTER: tl.constexpr, WINDOWED: tl.constexpr,
             BLOCK: tl.constexpr):  # fmt: skip
    """Return the first block, two ranges of whole blocks (see :func:`scored`), and the numbers of whole and of other
    blocks. The ranges lie up to ``lowest`` and from ``highest`` on; BEFORE and AFTER say which may be whole.
    """  # noqa: D205
    before = first
    after_stop = stop // BLOCK * BLOCK
    before_stop = tl.minimum(stop, tl.maximum(lowest + 1, 0)) // BLOCK * BLOCK
    if WINDOWED:
        before = tl.maximum(before, (tl.maximum(highest - window, 0) + BLOCK - 1) // BLOCK * BLOCK)
        after_stop = tl.minimum(after_stop, tl.maximum(lowest + window + 1, 0) // BLOCK * BLOCK)
    if not BEFORE:
        before_stop = before
    before_stop = tl.maximum(before, before_stop)
    after = (tl.maximum(before_stop, tl.minimum(highest, stop)) + BLOCK - 1) // BLOCK * BLOCK
    if not AFTER:
        after_stop = after
    after_stop = tl.maximum(after, after_stop)
    whole = (before_stop - before + after_stop - after) // BLOCK
    others = (stop - first + BLOCK - 1) // BLOCK - whole
    spans = (
        first.to(tl.int32),
        before.to(tl.int32),
        before_stop.to(tl.int32),
        after.to(tl.int32),
        after_stop.to(tl.int32),
    )
    return spans, whole.to(tl.int32), others.to(tl.int32)


@triton.jit
def block_of(spans, index, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the start of a block, by its index among the whole blocks or among the others."""
    first, before, before_stop, after, after_stop = spans
    if WHOLE:
        start = before + index * BLOCK
        return start + tl.where(start >= before_stop, after - before_stop, 0)
    else:
        start = first + index * BLOCK
        start += tl.where(start >= before, before_stop - before, 0)
        return start + tl.where(start >= after, after_stop - after, 0)


@triton.jit
def queries_of(q, rules, plan, q_len, kv_len, offset, window, q_blocks, H: tl.constexpr, GROUP: tl.constexpr,
               D: tl.constexpr, DP: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, HIDES: tl.constexpr,
               PLAN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Return the queries of a program, in groups: its block, batch entry and heads; rates in base 2; the rows and
    :func:`rows_of` them; :func:`spans_of` the keys that they need; and their features. Most keys come first.
    """  # noqa: D205
    index = q_blocks - 1 - tl.program_id(0) % q_blocks
    start, bh = index * BLOCK_M, (tl.program_id(0) // q_blocks).to(tl.int64)
    b, h, hk = bh // H, bh % H, bh % H // GROUP
    begin = first_position(rules, b, offset) + start
    lowest = begin.to(tl.int64)
    highest = lowest + tl.minimum(BLOCK_M, q_len - start) - 1
    first = lowest * 0
    stop = first + kv_len
    if plan.first is not None:
        block = start // PLAN
        first += tl.load(of(plan.first, b, h) + block).to(tl.int64) * PLAN
        stop = tl.minimum(stop, tl.load(of(plan.stop, b, h) + block).to(tl.int64) * PLAN)
    if CAUSAL:
        stop = tl.minimum(stop, highest + 1)
    if WINDOWED:
        first = tl.maximum(first, lowest - window)
        stop = tl.minimum(stop, highest + window + 1)
    first = first // BLOCK_N * BLOCK_N
    stop = tl.maximum(stop, first)
    spans = spans_of(first, stop, lowest, highest, window, not HIDES, not (CAUSAL or HIDES), WINDOWED, BLOCK_N)
    slope, future = slopes_of(rules, b, h)
    rows, pos = start + tl.arange(0, BLOCK_M), begin + tl.arange(0, BLOCK_M)
    near, attends, ids = rows_of(rules, plan, b, h, rows, pos, q_len, kv_len, window, CAUSAL, WINDOWED)
    query = load_block(of(q, b, h), start, q.n, q_len, BLOCK_M, D, DP)
    return (index, bh, b, h, hk), (clamped(slope), clamped(future)), (rows, pos, near, attends, ids), spans, query
