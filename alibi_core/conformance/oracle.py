"""Exact ALiBi attention and gradients in float64 NumPy, with error budgets that bound rounding.

Shapes: query ``[batch, heads, q_len, head_dim]``, key and value ``[batch, kv_heads, kv_len, head_dim]``, slopes
``[heads]`` or ``[batch, heads]``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from alibi_core.conformance.reference import Computation, Values, compute_bias, highest_of

U32 = 2.0**-24  # unit roundoff of float32
UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": U32, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# The absolute rounding error of tiny numbers: the smallest normal number, because denormals may be flushed to 0.
SMALLEST = {"float64": 2.0**-1022, "float32": 2.0**-126, "bfloat16": 2.0**-126, "float16": 2.0**-24}


def rounded(values: Any, dtype: str) -> Values:
    """Return float64 values rounded to ``dtype``, half to even; lower precisions are rounded through float32.

    Example:
        >>> rounded([0.1, 1.0], "bfloat16").tolist()
        [0.10009765625, 1.0]
    """
    if dtype == "float64":
        return np.asarray(values, np.float64)
    result = np.asarray(values).astype(np.float32)
    if dtype == "float16":
        result = result.astype(np.float16)
    if dtype == "bfloat16":  # NumPy lacks it: its bits are float32's upper half
        bits = np.ascontiguousarray(result).view(np.uint32)
        is_odd = (bits >> np.uint32(16)) & np.uint32(1)
        # Round half to even: add just below half, plus 1 if the last kept bit is odd.
        upper = (bits + np.uint32(0x7FFF) + is_odd) & np.uint32(0xFFFF0000)
        result = np.where(np.isfinite(result), upper.view(np.float32).reshape(result.shape), result)
    return result.astype(np.float64)


def masked_bias(c: Computation) -> Values:
    """Return the bias of a computation, ``[batch, heads, q_len, kv_len]``, -inf where masked."""
    compute_bias(c)
    bias = np.where(c.visible, c.bias, -np.inf)
    # Softmax ignores what a row's biases have in common: far from all keys, it would cost the digits of sums of gates.
    return bias if c.forgotten is None else bias - highest_of(bias) + c.forgotten


def largest_bias(c: Computation) -> Values:
    """Return the largest size of a bias counted from any token of the row, ``[batch, heads, 1, 1]``."""
    steepest = c.slopes if c.future_slopes is None else np.maximum(c.slopes, c.future_slopes)
    offsets = [0, *c.q_offset.ravel().tolist()]
    # From the first to the last position of any token.
    tokens = max(c.kv_len, max(offsets) + c.q_len) - min(offsets)
    return np.asarray(steepest[..., None, None] * (tokens if c.positions is None else c.penalty.max(initial=0)))


def distances(c: Computation) -> dict[str, Values]:
    """Return the distances that slopes multiply, by name, ``[batch, heads or 1, q_len, kv_len]``; 0 if masked."""
    sides = {"slopes": c.visible}
    if c.future_slopes is not None:
        sides = {"slopes": c.visible & (c.ahead <= 0), "future_slopes": c.visible & (c.ahead > 0)}
    return {name: side * c.penalty for name, side in sides.items()}


@dataclass(frozen=True)
class Answer:
    """An exact result and its error budget, element by element.

    Example:
        >>> Answer(np.ones(2), np.full(2, 1e-6)).budget.tolist()
        [1e-06, 1e-06]
    """

    value: Values
    budget: Values  # the largest error that rounding can cause


@dataclass(frozen=True)
class Terms:
    """Sums of products, with the quantities that bound their errors in any dtype."""

    value: Values
    by_score: Values  # sums of the terms' sizes, each times the error of its row's scores, in units of roundoff
    by_size: Values  # sums of the terms' sizes
    tiny: Values  # factor of the smallest number, for terms that underflow

    def map(self, function: Callable[[Values], Values]) -> Terms:
        """Return all four arrays after a linear operation with positive coefficients."""
        return Terms(*(function(x) for x in (self.value, self.by_score, self.by_size, self.tiny)))

    def scaled(self, factor: float) -> Terms:
        """Return the terms of ``factor * value``."""
        sizes = (self.by_score, self.by_size, self.tiny)
        return Terms(factor * self.value, *(abs(factor) * x for x in sizes))

    def times(self, tensor: Values) -> Terms:
        """Return the terms of ``value @ tensor``."""
        return Terms(self.value @ tensor, *(x @ abs(tensor) for x in (self.by_score, self.by_size, self.tiny)))


@dataclass(frozen=True)
class Attention:
    """Everything about one attention in float64: weights, output, gradients, and their error budgets.

    The budgets follow from the standard model of floating point arithmetic, ``fl(x op y) = (x op y)(1 + e)`` with
    ``|e| <= u``, for a computation with float32 scores and sums, and tensors (among them, possibly, the weights)
    rounded to ``dtype``: a sum of n terms is off by at most n u times the sum of the terms' sizes.

    Example:
        A slope of 1 between two keys that score alike:

        >>> tensors = {name: np.ones((1, 1, 2, 1)) for name in ("query", "key", "value")}
        >>> bias = np.asarray([[[[0.0, -np.inf], [-1.0, 0.0]]]])
        >>> problem = Attention(**tensors, bias=bias, scale=1.0, dtype="float32")
        >>> problem.weights.round(3).tolist()
        [[[[1.0, 0.0], [0.269, 0.731]]]]
        >>> bool((problem.output.budget < 2e-6).all())
        True
    """

    query: Values
    key: Values
    value: Values
    bias: Values
    scale: float
    dtype: str
    # The largest size of a bias, [batch, heads, 1, 1], if it may be counted from any token of the row.
    largest_bias: Values | None = field(default=None, kw_only=True)
    # The part of the bias that is sums of gates, [batch, heads, q_len, kv_len], each of them computed by itself.
    forgotten: Values | None = field(default=None, kw_only=True)
    share: float = field(default=0.0, kw_only=True)  # keys that together hold this share of a row may be left out

    @property
    def group(self) -> int:
        """The number of query heads that share a key/value head."""
        return int(self.query.shape[1] // self.key.shape[1])

    @property
    def keys(self) -> Values:
        """The keys of each query head, ``[batch, heads, kv_len, head_dim]``."""
        return self.key.repeat(self.group, axis=1)

    @property
    def values(self) -> Values:
        """The values of each query head, ``[batch, heads, kv_len, head_dim]``."""
        return self.value.repeat(self.group, axis=1)

    @property
    def _visible(self) -> Values:
        return np.asarray(self.bias > -np.inf)

    @cached_property
    def weights(self) -> Values:
        """The softmax weights, ``[batch, heads, q_len, kv_len]``; zeros in fully masked rows."""
        scores = self.scale * (self.query @ self.keys.swapaxes(-1, -2)) + (self.bias - highest_of(self.bias))
        weights = np.exp(scores - highest_of(scores))
        total = weights.sum(axis=-1, keepdims=True)
        return np.asarray(weights / np.where(total > 0, total, 1))

    @cached_property
    def _score_error(self) -> Values:
        """A bound of the error of a row's scores, ``[batch, heads, q_len, 1]``, in units of roundoff.

        Errors that are constant along the row do not count, because softmax ignores them: only the differences of
        biases along the row must be exact.
        """
        # How far each bias lies below the row's largest, without gates.
        bias = self.bias - self.sums
        falls = np.where(self._visible, highest_of(bias) - np.where(self._visible, bias, 0), 0)
        falls = falls if self.largest_bias is None else np.maximum(falls, self.largest_bias)
        products = abs(self.scale) * (abs(self.query) @ abs(self.keys).swapaxes(-1, -2))
        # Roundings of a scaled product of head_dim terms, and of the bias.
        sizes = (self.query.shape[-1] + 3) * products + 3 * falls
        return np.asarray(np.where(self._visible, sizes, 0).max(axis=-1, keepdims=True, initial=0))

    @property
    def sums(self) -> Any:
        """The sums of gates, 0 where masked."""
        return 0.0 if self.forgotten is None else np.where(self._visible, self.forgotten, 0)

    @cached_property
    def _gate_error(self) -> Any:
        """A bound of the error of each score by its sum of gates, and of the row's mean of it, in units of roundoff.

        A sum is off by two units in the last place, which are four of roundoff; two additions round it again. Sums of
        different sizes meet in a row, so the error of each counts with its own weight: large ones have none.
        """
        if self.forgotten is None:
            return 0.0
        own = -6 * self.sums
        return own + (self.weights * own).sum(axis=-1, keepdims=True)

    @property
    def _weight_terms(self) -> Terms:
        # The error of a tiny weight is half the spacing of denormals, not a share of the weight. Errors of scores count
        # twice, for the score and for the row's mean, which those of gates hold already.
        by_score = (self._score_error + self._gate_error / 2) * self.weights
        return Terms(self.weights, by_score, self.weights, self._visible * 1)

    @property
    def output(self) -> Answer:
        """The result, ``[batch, heads, q_len, head_dim]``."""
        # The factor 1.01 is a margin for rounding.
        largest = np.abs(self.values).max(axis=(2, 3), keepdims=True, initial=0) * 1.01
        return self._answer("output", self._weight_terms.times(self.values), 2 * self.share * largest)

    def _answer(self, name: str, terms: Terms, moved: Values) -> Answer:
        """Return the result ``name``, ``"output"`` or the name of a gradient.

        ``terms`` bound the effect of rounding, and ``moved`` that of keys that are left out.
        """
        (q_len, head_dim), kv_len = self.query.shape[2:], self.key.shape[2]
        if name == "output":
            # Scores (their error twice), exp (4 u), the sum of weights, the division; then the sum of values.
            scores, sums, stored = 2, 2 * kv_len + 8, 2
        else:
            # A weight enters twice; then its gradient, the mean, their difference and product, and the sum at the end.
            scores, sums, stored = 6, 3 * (kv_len + 8) + 2 * head_dim + 2 * kv_len + q_len * self.group + 16, 7
        unit, tiny = UNIT_ROUNDOFF[self.dtype], SMALLEST[self.dtype]
        u = min(U32, unit)  # unit roundoff of scores and sums
        # Sums round in float32 (or float64), stored tensors in their dtype.
        by_size = (sums * u + stored * unit) * terms.by_size
        value = -terms.value if name == "slopes" else terms.value
        return Answer(value, scores * u * terms.by_score + by_size + tiny * (terms.tiny + 1) + moved)

    def gradients(self, cotangent: Values, distances: Values) -> dict[str, Answer]:
        """Return the gradients of ``sum(output * cotangent)`` by tensors, slopes ``[batch, heads]`` and gates.

        The gradient of a causal call by its gates, ``[batch, heads, kv_len]``, is the sum of the score gradients of all
        earlier keys. Those of rows before the gate sum to 0, but for their rounding, which may thus be in it.

        If keys are left out, the weights w of a row change by 2 * share in total. The gradient of a score is
        w * (d - mean), where d is the gradient of the weight, and both d and the mean are at most D in size. Along a
        row the changes of w contribute at most 2 * share * 2 D, and the change of the mean another 2 * share * D.

        Args:
            cotangent: ``[batch, heads, q_len, head_dim]``.
            distances: Negated derivative of the bias by its slope, ``[q_len, kv_len]`` or with axes before.
        """
        w, values = self.weights, self.values.swapaxes(-1, -2)
        d_weights, d_sizes = cotangent @ values, abs(cotangent) @ abs(values)
        d_scores = w * (d_weights - (w * d_weights).sum(axis=-1, keepdims=True))
        sizes = w * (d_sizes + (w * d_sizes).sum(axis=-1, keepdims=True))
        # Errors of tiny weights propagate through the products below; two stored products may be tiny themselves.
        tiny = self._visible * (2 + d_sizes + d_sizes.sum(axis=-1, keepdims=True))
        errors = self._score_error * sizes
        if self.forgotten is not None:  # a weight's error in both of its places, which count six times below, not 3 / 2
            moved_mean = (w * self._gate_error * d_sizes).sum(axis=-1, keepdims=True)
            errors = errors + (self._gate_error * sizes + w * moved_mean) / 4
        by_score = Terms(d_scores, errors, sizes, tiny)
        terms = {
            "query": by_score.times(self.keys).scaled(self.scale),
            "key": by_score.map(_transposed).times(self.query).map(self._per_kv_head).scaled(self.scale),
            "value": self._weight_terms.map(_transposed).times(cotangent).map(self._per_kv_head),
            "slopes": by_score.map(lambda x: (x * distances).sum(axis=-1).sum(axis=-1)),
            "log_gates": by_score.map(lambda x: _sums_before(x.sum(axis=-2))),
        }
        by_row = 6.1 * self.share * np.where(self._visible, abs(d_weights), 0).max(axis=-1, initial=0)
        by_key = (by_row[..., None] * np.abs(self.query)).sum(axis=2, keepdims=True)
        # How far each gradient moves if keys are left out.
        moved = {
            "query": abs(self.scale) * by_row[..., None] * np.abs(self.keys).max(axis=2, keepdims=True, initial=0),
            "key": abs(self.scale) * self._per_kv_head(by_key),
            "value": self._per_kv_head(2.1 * self.share * np.abs(cotangent).sum(axis=2, keepdims=True)),
            "slopes": (by_row * np.abs(distances).max(axis=-1, initial=0)).sum(axis=-1),
            "log_gates": by_row.sum(axis=-1, keepdims=True),
        }
        return {name: self._answer(name, x, moved[name]) for name, x in terms.items()}

    def _per_kv_head(self, x: Values) -> Values:
        # [batch, kv_heads, group, ...]
        by_group = x.reshape(x.shape[0], x.shape[1] // self.group, self.group, *x.shape[2:])
        return np.asarray(by_group.sum(axis=2))


def _sums_before(x: Values) -> Values:
    """Return the sums of the elements before each, along the last axis."""
    return np.concatenate([np.zeros_like(x[..., :1]), np.cumsum(x, axis=-1)[..., :-1]], axis=-1)


def _transposed(x: Values) -> Values:
    return x.swapaxes(-1, -2)


def summed_over_batch(answer: Answer) -> Answer:
    """Return the gradient of shared slopes, ``[heads]``, from those of all batch entries, ``[batch, heads]``."""
    budget = answer.budget.sum(axis=0)
    return Answer(answer.value.sum(axis=0), budget + budget * len(answer.value) / 2**20)


def excess(actual: Values, answer: Answer) -> Values:
    """Return the error of each element as a share of its budget; inf where elements that are not finite differ."""
    is_finite = np.isfinite(answer.value) & np.isfinite(actual)
    distance = np.abs(np.where(is_finite, actual, 0) - np.where(is_finite, answer.value, 0))
    with np.errstate(over="ignore"):  # with a budget of 0, any error overflows to inf
        share = distance / np.maximum(answer.budget, np.finfo(np.float64).tiny)
    return np.where(is_finite | (actual == answer.value), share, np.inf)
