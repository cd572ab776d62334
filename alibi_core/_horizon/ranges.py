"""The horizon: the distance from which on keys do not matter, proved from the norms of queries and keys.

Softmax weighs a key by ``exp(score - slope * distance)``. A score is at most ``scale * |query| * |key|`` and the bias
falls without bound, so beyond a finite distance all keys together weigh less than a given share of the total. Leaving
out a share ``t`` of the weight moves the result by at most ``2 * t * max|value|``.

The bounds hold for any data: a key with a huge norm, wherever it is, lengthens the horizons that depend on it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from alibi_core._arrays import (
    Array,
    Namespace,
    arange,
    asarray,
    astype,
    at_least,
    at_most,
    checks,
    device_of,
    extended,
    running_sum,
)
from alibi_core._bias import slopes_of_any_sign, with_head_axis
from alibi_core._call import AttentionCall
from alibi_core._distance import LAWS, distance_of_tail
from alibi_core._gates import GateTotals, within

ENDLESS = 2**30  # tokens; larger distances are clipped to this, so that position + distance fits int32


def horizon(
    slopes: int | Array,
    score_range: float | Array,
    *,
    tolerance: float | None = None,
    is_causal: bool = True,
    law: str = "linear",
) -> Any:
    """Return the distance from which on all keys together weigh at most ``tolerance``, in tokens, one a head.

    ``(score_range + ln(1 / (tolerance * (1 - exp(-slope))))) / slope``, rounded up; ``+ ln 2`` in the numerator where
    keys lie on both sides. At slope 1, a range of 0 and a tolerance of 1 %::

        distance             0      1      2      3      4      5   | 6      7  ...
        share of the weight  .632   .233   .086   .031   .012   .004| .0016  .0006   together .0025 <= .01

    Args:
        slopes: ``[num_heads]`` or ``[..., num_heads]``, or an int for that many canonical slopes.
        score_range: The most by which the scaled score of a key may exceed the score of the key at the query's own
            position: a number, or an array that broadcasts against ``slopes``. From norms alone it is ``2 * scale *
            |query| * max|key|``.
        tolerance: The share of the softmax weight that may be left out. Default ``2**-24``, the unit roundoff of
            float32. With 0 every horizon is infinite.
        is_causal: Whether keys lie on one side of the query only.
        law: As in :func:`bias`: how the penalty grows with the distance. Where it is not linear, a sum over far keys is
            bounded by an integral, ``exp(-slope * law(x))`` from half a token before the first of them on.

    Returns:
        Array with the shape of ``slopes`` (broadcast with ``score_range``), integers in the dtype of ``slopes``;
        infinite where a slope is not positive, and with ``law="log"`` up to a slope of 1: such sums have no bound.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If slopes have a wrong shape or are not finite, or the tolerance is negative or NaN.

    Example:
        >>> horizon(8, 14.0).tolist()
        [64.0, 129.0, 263.0, 536.0, 1092.0, 2228.0, 4543.0, 9263.0]

    References:
        Press, Smith, Lewis, "Train Short, Test Long", section 3, arXiv 2108.12409, for the slopes. Bounds of this
        kind: RazorAttention, arXiv 2407.15891; Adaptive Computation Pruning, arXiv 2504.06949.
    """
    checks.boolean("is_causal", is_causal)
    checks.one_of("law", law, LAWS)
    tolerance = 2.0**-24 if tolerance is None else checks.non_negative_number("tolerance", tolerance)
    is_array = hasattr(score_range, "shape") and not isinstance(score_range, np.generic)
    xp, placed = slopes_of_any_sign(slopes, *([score_range] if is_array else []))
    excess: Any = score_range
    if not is_array:
        excess = checks.number_in(placed.dtype, "score_range", score_range)
    else:
        device = device_of(xp, placed)
        if device_of(xp, score_range) != device:
            raise ValueError(f"score_range must be on the device of slopes, {device}, got {device_of(xp, score_range)}")
        excess = astype(xp, checks.floating_array(xp, "score_range", score_range), placed.dtype)
        pairs = zip(reversed(excess.shape), reversed(placed.shape), strict=False)
        if any(n != m and 1 not in (n, m) for n, m in pairs):
            raise ValueError(
                f"score_range must broadcast against slopes, {tuple(placed.shape)}, got {tuple(excess.shape)}"
            )
    by_side = tolerance if is_causal else tolerance / 2
    if law == "linear" or by_side == 0:
        return reach(xp, placed, excess, by_side)
    return distance_of_tail(xp, placed, excess - math.log(by_side), law)


def reach(xp: Namespace, slopes: Any, excess: Any, tolerance: float) -> Any:
    """Return the distance from which on all keys of one side weigh at most ``tolerance``: tokens, >= 0, or inf.

    Args:
        slopes: ``[...]``; a slope that is not positive gives inf.
        excess: The most by which a score exceeds the lower bound of the row's log-sum-exp; broadcasts to ``slopes``.
    """
    falls = slopes > 0
    if tolerance == 0:
        return xp.full_like(slopes * excess, math.inf)
    rates = xp.where(falls, slopes, 1.0)
    # The biases of all keys from distance n on sum to exp(-rate * n) / (1 - exp(-rate)).
    tail = -xp.log(-xp.expm1(-rates)) - math.log(tolerance)
    heavier = excess + tail  # logarithm of the factor by which keys from distance 0 on exceed the tolerance
    tokens = xp.ceil(heavier / rates * (1 + 2.0**-20))  # the factor covers rounding; the quotient may underflow to 0
    return xp.where(falls, xp.where(heavier <= 0, 0.0, at_least(xp, tokens, 1.0)), math.inf)


class ScoreBounds(NamedTuple):
    """Bounds of scores by block, known before any score is computed. A block is a run of consecutive tokens.

    A query's *anchor* is a lower bound of its log-sum-exp, the logarithm of its softmax denominator: the score of the
    key at its own position, or a lower bound of its nearest key's score. Scores include the scale.

    Attributes:
        q_block: Queries in a block.
        kv_block: Keys in a block.
        excess: ``[..., num_heads, q_blocks]``: the most by which any score exceeds the anchor of its query.
        anchor: ``[..., num_heads, q_blocks]``: the smallest anchor in the block.
        q_least: ``[..., num_heads, q_blocks]``: the smallest norm of a query in the block, times the scale.
        q_most: ``[..., num_heads, q_blocks]``: the largest norm of a query in the block, times the scale.
        key_norm: ``[..., num_heads, kv_blocks]``: the largest norm of a key in the block.
    """

    q_block: int
    kv_block: int
    excess: Any
    anchor: Any
    q_least: Any
    q_most: Any
    key_norm: Any

    @classmethod
    def unmeasured(cls, call: AttentionCall, *, q_block: int, kv_block: int) -> ScoreBounds:
        """Return zeros as bounds, for a tolerance of 0: masks alone decide which keys are needed."""
        q_blocks, kv_blocks = (
            call.xp.broadcast_to(asarray(call.xp, 0.0, call.working_dtype, call.device), (1, call.num_heads, blocks))
            for blocks in (-(-call.q_len // q_block), -(-call.kv_len // kv_block))
        )
        return cls(q_block, kv_block, q_blocks, q_blocks, q_blocks, q_blocks, kv_blocks)

    def of_heads(self, heads: slice) -> ScoreBounds:
        """Return the bounds of these heads."""
        return ScoreBounds(self.q_block, self.kv_block, *(x[:, heads, :] for x in self[2:]))


class KeyRanges(NamedTuple):
    """The tile plan: the keys that the queries of each block need. All others together weigh at most the tolerance.

    Both conditions apply: a query at position ``p`` needs the keys ``j`` with ``first <= j < stop`` and
    ``p - past < j < p + future``. The last four fields are int32 arrays ``[..., num_heads, q_blocks]``, in tokens.
    """

    q_block: int
    first: Any
    stop: Any
    past: Any
    future: Any


def key_ranges(call: AttentionCall, bounds: ScoreBounds) -> KeyRanges:
    """Return which keys each block of queries needs, for a result within ``2 * call.tolerance * max|value|``.

    Masks by position (causal, window) narrow the ranges too, and so do segments that are contiguous in a packed row.
    At tolerance 0 masks alone decide. No values are read on the host: shapes alone decide which operations run.

    Example:
        Where scores are alike, a head of slope 0.5 needs few of 4,096 keys, in blocks of 1,024 queries:

        >>> call = AttentionCall.check(*[np.ones((1, 1, 4096, 2))] * 3, np.asarray([0.5]), tolerance=2.0**-24)
        >>> from alibi_core.backend.horizon import Measured
        >>> norms = np.ones((1, 1, 4096))
        >>> measured = Measured(1024, 64, norms, norms, norms[..., ::64], centre=None, lower=None)
        >>> ranges = key_ranges(call, measured.bounds(call, nearest=np.zeros(4096, np.int32)))
        >>> ranges.past[0, 0].tolist(), ranges.first[0, 0].tolist(), ranges.stop[0, 0].tolist()
        ([36, 36, 36, 36], [0, 989, 2013, 3037], [1024, 2048, 3072, 4096])
    """
    xp, device = call.xp, call.device
    q_blocks, kv_blocks = bounds.excess.shape[-1], bounds.key_norm.shape[-1]
    # Keys on both sides share the tolerance.
    side = call.tolerance if call.is_causal else call.tolerance / 2
    q_starts, kv_starts = arange(xp, q_blocks, device) * bounds.q_block, arange(xp, kv_blocks, device) * bounds.kv_block
    q_ends, kv_ends = (
        at_most(xp, starts + block, n) - 1  # index of the block's last token
        for starts, block, n in ((q_starts, bounds.q_block, call.q_len), (kv_starts, bounds.kv_block, call.kv_len))
    )
    offset = call.q_offset[..., None, None] if call.has_offset_array else call.q_offset  # [*batch, 1 (heads), 1] or int
    lowest, highest = q_starts + offset, q_ends + offset  # positions, [q_blocks] or [*batch, 1, q_blocks]

    slopes = call.slopes[..., None]
    future_slopes = slopes if call.future_slopes is None else call.future_slopes[..., None]
    first = xp.zeros_like(lowest) + astype(xp, xp.zeros_like(bounds.excess), xp.int32)
    stop = first + call.kv_len
    past = future = first + ENDLESS
    if side > 0:
        # The horizon of each block of queries, from its excess.
        past = _tokens(xp, reach(xp, slopes, bounds.excess, side))
        # By key block: drop leading blocks while their total weight stays within the tolerance.
        weight = _block_weights(call, bounds) - math.log(side)
        if call.log_gates is not None:
            totals = GateTotals.of(xp, call.log_gates)
            weight = weight + totals.bounds(xp, within(xp, lowest, call.kv_len), kv_ends)
        # [..., q_blocks, kv_blocks]: distance to each block's nearest key
        behind = at_least(xp, lowest[..., :, None] - kv_ends, 0)
        first = _blocks_to_drop(xp, weight, slopes[..., None], behind, bounds.kv_block) * bounds.kv_block
    if call.is_causal:
        # No key after the last query of the block is visible.
        causal_stop = highest + 1
        stop, future = at_most(xp, stop, causal_stop), first * 0 + 1
    elif side > 0:
        future = _tokens(xp, reach(xp, future_slopes, bounds.excess, side))
        ahead = at_least(xp, kv_starts - highest[..., :, None], 0)
        # The same from the end: reversed, trailing blocks come first.
        dropped = _blocks_to_drop(
            xp, xp.flip(weight, axis=-1), future_slopes[..., None], xp.flip(ahead, axis=-1), bounds.kv_block
        )
        stop = at_most(xp, stop, (kv_blocks - dropped) * bounds.kv_block)
    # An endless horizon must cover all keys, also if the query is ENDLESS tokens or more away from them.
    past = at_least(xp, past, xp.where(past < ENDLESS, past, highest + 1))
    future = at_least(xp, future, xp.where(future < ENDLESS, future, call.kv_len - lowest))
    if call.window_size is not None:
        # A window hides keys at distances above window_size.
        shown = min(call.window_size, checks.MAX_POSITION - 1) + 1
        past, future = (at_most(xp, x, shown) for x in (past, future))
    if call.q_segment_ids is not None:
        # Skip blocks whose ids cannot match.
        blocks = _blocks_of_segments(call, bounds)
        first = at_least(xp, first, blocks[0] * bounds.kv_block)
        if call.log_gates is None:  # a gate up to the query may close, whatever its segment
            stop = at_most(xp, stop, blocks[1] * bounds.kv_block)
    first = at_least(xp, first, at_least(xp, lowest, -ENDLESS) - past + 1)
    stop = at_least(xp, at_most(xp, stop, at_most(xp, highest, ENDLESS - 1) + future), 0)
    first = at_most(xp, first, stop)
    # A 64-bit offset promotes these to int64.
    return KeyRanges(bounds.q_block, *(astype(xp, x, xp.int32) for x in (first, stop, past, future)))


def score_rounding(head_dim: int) -> float:
    """Return a bound of the rounding error of a float32 score, relative to ``|query| * |key|``."""
    return 2.0**-23 * (head_dim + 8)


def _block_weights(call: AttentionCall, bounds: ScoreBounds) -> Any:
    """Return the most by which scores exceed anchors, ``[..., num_heads, q_blocks, kv_blocks]``."""
    xp = call.xp
    # [..., num_heads, 1, kv_blocks]
    norms = bounds.key_norm[..., None, :]
    largest = xp.max(norms, axis=-1, keepdims=True)
    # The smaller of two bounds: the first pairs each query with its own anchor, the second is not raised by a single
    # large key in another block.
    one = bounds.excess[..., None] - bounds.q_least[..., None] * (largest - norms)
    other = bounds.q_most[..., None] * norms - bounds.anchor[..., None]
    return at_most(xp, one, other)


def _blocks_to_drop(xp: Namespace, weights: Any, slopes: Any, distance: Any, block: int) -> Any:
    """Return the largest number of leading blocks, of ``block`` keys each, that together weigh at most 1.

    ``weights``, ``[..., blocks]``, bound the logarithm of a key's weight, without its bias; ``distance``, ``[...,
    blocks]``, is that of each block's nearest key, in tokens; ``slopes`` are ``[..., 1]``.
    """
    falls = slopes > 0
    # Sum of exp(-slope * n) for n from 0 on: a block weighs at most this many times its nearest key.
    series = -1 / xp.expm1(-xp.where(falls, slopes, 1.0))
    keys = xp.where(falls & (series < block), series, float(block))
    logarithms = weights - slopes * astype(xp, distance, slopes.dtype) + xp.log(keys)
    logarithms = xp.where(slopes < 0, math.inf, logarithms)
    # Clip at 1, which is too heavy already, so that exp does not overflow. A NaN compares as too heavy.
    total = running_sum(xp, xp.exp(at_most(xp, logarithms, 1.0)))
    return astype(xp, xp.sum(astype(xp, total <= 1, xp.int32), axis=-1), xp.int32)


def _blocks_of_segments(call: AttentionCall, bounds: ScoreBounds) -> tuple[Any, Any]:
    """Return the first and the last + 1 block of keys whose range of segment ids overlaps with the queries' block."""
    xp = call.xp
    queries = by_block(xp, call.q_segment_ids, bounds.q_block)
    keys = by_block(xp, call.kv_segment_ids, bounds.kv_block)
    # Ids of a block as an interval: two blocks may match only if their intervals overlap.
    q_least, q_most = xp.min(queries, axis=-1)[..., :, None], xp.max(queries, axis=-1)[..., :, None]
    kv_least, kv_most = xp.min(keys, axis=-1)[..., None, :], xp.max(keys, axis=-1)[..., None, :]
    meet = with_head_axis((kv_most >= q_least) & (kv_least <= q_most))  # [..., 1, q_blocks, kv_blocks]
    index = arange(xp, meet.shape[-1], call.device)
    first = at_most(xp, xp.min(xp.where(meet, index, ENDLESS), axis=-1), meet.shape[-1])
    return first, xp.max(xp.where(meet, index, -1), axis=-1) + 1


def by_block(xp: Namespace, array: Any, block: int) -> Any:
    """Return ``[..., length]`` as ``[..., blocks, block]``, the last element repeated to fill the last block.

    An array shorter than one block becomes ``[..., 1, length]``, without padding.
    """
    if 0 < array.shape[-1] < block:
        return array[..., None, :]
    # Repeating the last element does not change a minimum or a maximum.
    if missing := -array.shape[-1] % block:
        array = extended(xp, array, missing)
    return xp.reshape(array, (*array.shape[:-1], array.shape[-1] // block, block))


def _tokens(xp: Namespace, distances: Any) -> Any:
    """Return distances as int32; NaN, infinite ones and all from ENDLESS on become ENDLESS."""
    return astype(xp, xp.where(distances < ENDLESS, distances, float(ENDLESS)), xp.int32)
