"""What ALiBi is, in float64 NumPy, written without a look at the code that it judges, and how far rounding may move it.

Shapes: query ``[batch, heads, q_len, head_dim]``, key and value ``[batch, kv_heads, kv_len, head_dim]``, slopes
``[heads]`` or ``[batch, heads]``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

Values = np.ndarray[Any, Any]

U32 = 2.0**-24  # unit roundoff of float32
UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": U32, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# The absolute error of rounding something tiny: the smallest normal number, where subnormal ones may be flushed.
SMALLEST = {"float64": 2.0**-1022, "float32": 2.0**-126, "bfloat16": 2.0**-126, "float16": 2.0**-24}


def rounded(values: Any, dtype: str) -> Values:
    """Return float64 values rounded to ``dtype``, to even between two, by way of float32 where that is lower.

    Example:
        >>> rounded([0.1, 1.0], "bfloat16").tolist()
        [0.10009765625, 1.0]
    """
    if dtype == "float64":
        return np.asarray(values, np.float64)
    result = np.asarray(values).astype(np.float32)
    if dtype == "float16":
        result = result.astype(np.float16)
    if dtype == "bfloat16":  # NumPy has none: its bits are float32's upper half
        bits = np.ascontiguousarray(result).view(np.uint32)
        last_kept = (bits >> np.uint32(16)) & np.uint32(1)
        upper = (bits + np.uint32(0x7FFF) + last_kept) & np.uint32(0xFFFF0000)
        result = np.where(np.isfinite(result), upper.view(np.float32).reshape(result.shape), result)
    return result.astype(np.float64)


@dataclass(frozen=True)
class Rules:
    """The arguments that say which key counts how much, with every default filled in."""

    slopes: Values
    q_offset: int | Values  # one for all, or [batch]
    is_causal: bool = True
    future_slopes: Values | None = None
    q_segment_ids: Values | None = None  # [q_len] or [batch, q_len]
    kv_segment_ids: Values | None = None
    window_size: int | None = None
    mask: Values | None = None  # broadcasts to [batch, heads, q_len, kv_len]

    def reach(self, batch: int, heads: int, q_len: int, kv_len: int) -> Values:
        """Return how large a bias may be that is counted from whichever token of the row, ``[batch, heads, 1, 1]``."""
        offsets = [0, *np.ravel(self.q_offset).tolist()]
        tokens = max(kv_len, max(offsets) + q_len) - min(offsets)
        steepest = self.slopes if self.future_slopes is None else np.maximum(self.slopes, self.future_slopes)
        return np.asarray(np.broadcast_to(steepest, (batch, heads))[..., None, None].astype(np.float64) * tokens)


def penalties(rules: Rules, batch: int, heads: int, q_len: int, kv_len: int) -> Values:
    """Return the bias ``[batch, heads, q_len, kv_len]``, -inf where masked."""
    offsets = np.broadcast_to(rules.q_offset, (batch,))[:, None, None, None]
    ahead = np.arange(kv_len) - (offsets + np.arange(q_len)[:, None])  # how many tokens a key lies after the query
    past = np.broadcast_to(rules.slopes, (batch, heads))[..., None, None].astype(np.float64)
    future = past if rules.future_slopes is None else np.broadcast_to(rules.future_slopes, (batch, heads))
    future = np.reshape(future, (batch, heads, 1, 1)).astype(np.float64)
    visible = np.ones((batch, heads, q_len, kv_len), dtype=bool)
    if rules.is_causal:
        visible &= ahead <= 0
    if rules.window_size is not None:
        visible &= np.abs(ahead) <= rules.window_size
    if rules.q_segment_ids is not None and rules.kv_segment_ids is not None:
        q_ids, kv_ids = (np.broadcast_to(x, (batch, x.shape[-1])) for x in (rules.q_segment_ids, rules.kv_segment_ids))
        visible &= (q_ids[:, :, None] == kv_ids[:, None, :])[:, None]
    if rules.mask is not None:
        visible &= rules.mask
    return np.where(visible, -np.where(ahead > 0, future, past) * np.abs(ahead), -np.inf)


@dataclass(frozen=True)
class Answer:
    """An exact result and how far a float32 computation of it may be off, element by element."""

    value: Values
    budget: Values


@dataclass(frozen=True)
class Attention:
    """Everything about one attention in float64: weights, output, gradients, and their error budgets.

    The budgets follow from the standard model of floating point arithmetic, ``fl(x op y) = (x op y)(1 + e)`` with
    ``|e| <= u``, for a computation with float32 scores and sums, and tensors (among them, possibly, the weights)
    rounded to ``dtype``: a sum of n terms is off by at most n u times the sum of the terms' sizes.
    """

    query: Values
    key: Values
    value: Values
    bias: Values
    scale: float
    dtype: str
    # How large a bias may be, [batch, heads, 1, 1], if it is not counted from the nearest key.
    reach: Values | None = field(default=None, kw_only=True)

    @property
    def group(self) -> int:
        """How many query heads share a key/value head."""
        return int(self.query.shape[1] // self.key.shape[1])

    @property
    def keys(self) -> Values:
        """The keys of each query head."""
        return self.key.repeat(self.group, axis=1)

    @property
    def values(self) -> Values:
        """The values of each query head."""
        return self.value.repeat(self.group, axis=1)

    @property
    def _u(self) -> float:
        """The unit roundoff of scores and sums."""
        return UNIT_ROUNDOFF["float64"] if self.dtype == "float64" else U32

    @property
    def _highest(self) -> Values:
        """The bias of each row's best-placed key, ``[batch, heads, q_len, 1]``; 0 where there is none."""
        highest = self.bias.max(axis=-1, keepdims=True, initial=-np.inf)
        return np.where(np.isfinite(highest), highest, 0.0)

    @property
    def weights(self) -> Values:
        """What each key weighs; nothing, in a row that may look nowhere."""
        scores = self.scale * (self.query @ self.keys.swapaxes(-1, -2)) + (self.bias - self._highest)
        highest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
        weights = np.exp(scores - np.where(np.isfinite(highest), highest, 0.0))
        total = weights.sum(axis=-1, keepdims=True)
        result: Values = weights / np.where(total > 0, total, 1.0)
        return result

    @property
    def _score_error(self) -> Values:
        """How far a row's scores may be off, ``[batch, heads, q_len, 1]``, but for what is constant along the row.

        Softmax ignores that, so a bias need not be exact in itself: its differences along the row must be.
        """
        visible = np.isfinite(self.bias)
        falls = np.where(visible, self._highest - np.where(visible, self.bias, 0), 0)
        falls = falls if self.reach is None else np.maximum(falls, self.reach)
        products = self.scale * (np.abs(self.query) @ np.abs(self.keys).swapaxes(-1, -2))
        sizes = (self.query.shape[-1] + 3) * products + 3 * falls
        largest: Values = np.where(visible, sizes, 0).max(axis=-1, keepdims=True, initial=0)
        return np.asarray(self._u * largest)

    @property
    def _weight_error(self) -> Values:
        """How far a weight may be off relative to itself: scores, exp (4 u), its sum and the division, its storage."""
        relative = (self.key.shape[2] + 8) * self._u + UNIT_ROUNDOFF[self.dtype]
        return np.asarray(2 * self._score_error + relative)

    @property
    def output(self) -> Answer:
        """The result, ``[batch, heads, q_len, head_dim]``."""
        w, sizes = self.weights, np.abs(self.values)
        relative = self._weight_error + self.key.shape[2] * self._u + UNIT_ROUNDOFF[self.dtype]
        # A tiny weight is off by half the spacing of subnormal numbers rather than by a share of itself.
        underflow = (np.isfinite(self.bias) * 1.0) @ sizes
        return Answer(w @ self.values, relative * (w @ sizes) + (1 + underflow) * SMALLEST[self.dtype])

    def output_without(self, share: float) -> Answer:
        """Return the result, where keys may be left out that weigh this share of their row, together."""
        answer = self.output
        largest = np.abs(self.values).max(axis=(2, 3), keepdims=True, initial=0) * 1.01
        return Answer(answer.value, answer.budget + 2 * share * largest)

    def gradients(self, cotangent: Values, distances: Values) -> dict[str, Answer]:
        """Return the gradients of ``sum(output * cotangent)`` by query, key, value and slopes ``[batch, heads]``.

        Args:
            cotangent: ``[batch, heads, q_len, head_dim]``.
            distances: What each bias element is the negated multiple of, per slope: ``[q_len, kv_len]``.
        """
        w, keys, values = self.weights, self.keys, self.values
        d_weights = cotangent @ values.swapaxes(-1, -2)
        d_weights_size = np.abs(cotangent) @ np.abs(values).swapaxes(-1, -2)
        mean = (w * d_weights).sum(axis=-1, keepdims=True)
        d_scores = w * (d_weights - mean)
        size = w * (d_weights_size + (w * d_weights_size).sum(axis=-1, keepdims=True))
        (q_len, head_dim), kv_len = self.query.shape[2:], self.key.shape[2]
        # A weight enters twice; then d_weights, the mean, their difference and product, and the sum at the end.
        relative = 3 * self._weight_error + (2 * head_dim + kv_len * 2 + q_len * self.group + 16) * self._u
        relative = relative + 4 * UNIT_ROUNDOFF[self.dtype]
        # So are tiny weights, which the products below carry on, and the two products that are stored, where tiny.
        tiny = SMALLEST[self.dtype] * np.isfinite(self.bias)
        size = relative * size + tiny * (2 + d_weights_size + d_weights_size.sum(axis=-1, keepdims=True))

        def to_keys(rows: Values, tensor: Values) -> Values:
            return self._per_kv_head(rows.swapaxes(-1, -2) @ tensor)

        pairs = {
            "query": [self.scale * (rows @ tensor) for rows, tensor in ((d_scores, keys), (size, np.abs(keys)))],
            "key": [
                self.scale * to_keys(rows, tensor)
                for rows, tensor in ((d_scores, self.query), (size, np.abs(self.query)))
            ],
            "value": [to_keys(w, cotangent), to_keys(w * relative + tiny, np.abs(cotangent))],
            "slopes": [-(d_scores * distances).sum(axis=(2, 3)), (size * np.abs(distances)).sum(axis=(2, 3))],
        }
        return {name: Answer(value, budget + SMALLEST[self.dtype]) for name, (value, budget) in pairs.items()}

    def gradients_without(self, share: float, cotangent: Values, distances: Values) -> dict[str, Answer]:
        """Return the gradients, where keys may be left out that weigh this share of their row, together.

        Weights w then move by 2 * share in all, along a row. A score's gradient is w * (d - mean), where d, the
        weight's gradient, and their mean are of size D at most: along a row they move by 2 * share * 2 D, and w times
        the mean's move, by another 2 * share * D.
        """
        d_weights = np.abs(cotangent @ self.values.swapaxes(-1, -2))
        by_row = 6.1 * share * np.where(np.isfinite(self.bias), d_weights, 0).max(axis=-1, initial=0)
        by_key = (by_row[..., None] * np.abs(self.query)).sum(axis=2, keepdims=True)
        moved = {
            "query": self.scale * by_row[..., None] * np.abs(self.keys).max(axis=2, keepdims=True, initial=0),
            "key": self.scale * self._per_kv_head(by_key),
            "value": self._per_kv_head(2.1 * share * np.abs(cotangent).sum(axis=2, keepdims=True)),
            "slopes": (by_row * np.abs(distances).max(axis=-1, initial=0)).sum(axis=-1),
        }
        exact = self.gradients(cotangent, distances)
        return {name: Answer(x.value, x.budget + moved[name]) for name, x in exact.items()}

    def _per_kv_head(self, x: Values) -> Values:
        by_group = x.reshape(x.shape[0], x.shape[1] // self.group, self.group, *x.shape[2:])
        return np.asarray(by_group.sum(axis=2))


def summed_over_batch(answer: Answer) -> Answer:
    """Return the gradient of slopes ``[heads]`` that all batch entries share, from that of each, ``[batch, heads]``."""
    rounding = 1 + answer.value.shape[0] * 2**-20
    return Answer(answer.value.sum(axis=0), answer.budget.sum(axis=0) * rounding)


def assert_within(actual: Values, answer: Answer) -> None:
    """Assert that no element is farther from the exact value than its budget."""
    assert actual.shape == answer.value.shape, f"shape {actual.shape}, expected {answer.value.shape}"
    assert np.all(np.isfinite(actual)), "not finite"
    excess = np.abs(actual - answer.value) - answer.budget
    if excess.size and excess.max() > 0:
        worst = np.unravel_index(excess.argmax(), excess.shape)
        raise AssertionError(
            f"at {tuple(map(int, worst))}: {actual[worst]!r}, expected {answer.value[worst]!r} "
            f"within {answer.budget[worst]:.3g}, off by {abs(actual[worst] - answer.value[worst]):.3g}"
        )
