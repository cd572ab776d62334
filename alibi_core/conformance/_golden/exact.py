"""Exact attention, its gradients and their budgets: the oracle's formulas, with the same bits on every machine.

NumPy's exp, matmul and sum differ in the last bit between processors, so these are decimals of 50 digits: their
arithmetic is specified to its last digit. Sums are taken from the first term to the last, and what is kept is rounded
to float64 once.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from operator import mul

import numpy as np

from alibi_core.conformance._cases import SMALLEST, U32, UNIT_ROUNDOFF, Rules, Values, penalties

DTYPES = tuple(UNIT_ROUNDOFF)
CONTEXT = decimal.Context(
    prec=50,
    rounding=decimal.ROUND_HALF_EVEN,
    Emin=-999_999,
    Emax=999_999,
    traps=[decimal.InvalidOperation, decimal.DivisionByZero, decimal.Overflow],
)
ZERO, ONE = Decimal(0), Decimal(1)
BUDGET_BITS = 12


@dataclass(frozen=True)
class Expected:
    """What a result should be.

    Attributes:
        value: In float64.
        budgets: By dtype, how far a result may be off: element by element, or as a pair (share of the value, absolute).
    """

    value: Values
    budgets: dict[str, Values | tuple[float, float]]


@dataclass(frozen=True)
class _Sum:
    """Sums of products, and of the sizes of these, from which the errors of any dtype follow."""

    value: Values
    by_score: Values  # of sizes, each times how far its row's scores are off, in units of roundoff
    by_size: Values  # of sizes
    tiny: Values  # of what is multiplied with the smallest number, where that is lost

    def map(self, function: Callable[[Values], Values]) -> _Sum:
        """Return the same after an operation that is linear, and positive."""
        return _Sum(*(function(x) for x in (self.value, self.by_score, self.by_size, self.tiny)))


def attention_results(
    tensors: dict[str, Values], rules: Rules, scale: float, *, reach: Values | None = None
) -> dict[str, Expected]:
    """Return the output and, of ``sum(output * cotangent)``, the gradients, named as golden files name them.

    Args:
        tensors: ``query``, ``key``, ``value`` and, for gradients, ``cotangent``, in numbers that every dtype holds.
        rules: Slopes and the rest, in numbers that float32 holds.
        scale: Of the scores.
        reach: How large a bias may be, if it need not be counted from the nearest key, ``[batch, heads, 1, 1]``.
    """
    with decimal.localcontext(CONTEXT):
        return _attention_results(tensors, rules, Decimal(scale), reach)


def default_scale(head_dim: int) -> float:
    """Return ``head_dim ** -0.5``, correctly rounded, with no help from the platform's ``pow``."""
    return float(CONTEXT.divide(ONE, CONTEXT.sqrt(Decimal(head_dim))))


def _attention_results(
    tensors: dict[str, Values], rules: Rules, scale: Decimal, reach: Values | None
) -> dict[str, Expected]:
    (batch, heads, q_len, head_dim), (kv_heads, kv_len) = tensors["query"].shape, tensors["key"].shape[1:3]
    group = heads // kv_heads
    query = decimals(tensors["query"])
    key, value = (decimals(tensors[name].repeat(group, axis=1)) for name in ("key", "value"))
    bias = penalties(rules, batch, heads, q_len, kv_len)
    visible = np.isfinite(bias)
    highest = np.where(visible.any(axis=-1), bias.max(axis=-1, initial=-np.inf), 0.0)
    falls = decimals(highest)[..., None] - decimals(np.where(visible, bias, 0.0))
    seen = decimals(visible)

    weights = softmax(scale * products(query, key) - falls, visible)
    sizes = falls if reach is None else np.maximum(falls, decimals(reach))
    score_sizes = (head_dim + 3) * scale * products(abs(query), abs(key)) + 3 * sizes
    score_error = largest(seen * score_sizes)[..., None]
    by_weight = _Sum(weights, score_error * weights, weights, seen)
    results = {"output": _expected(_products(by_weight, value), _output_errors(kv_len))}
    if "cotangent" not in tensors:
        return results

    cotangent = decimals(tensors["cotangent"])
    d_weights, d_sizes = products(cotangent, value), products(abs(cotangent), abs(value))
    d_scores = weights * (d_weights - sums(weights * d_weights)[..., None])
    d_scores_size = weights * (d_sizes + sums(weights * d_sizes)[..., None])
    d_tiny = seen * (2 + d_sizes + sums(d_sizes)[..., None])
    by_score = _Sum(d_scores, score_error * d_scores_size, d_scores_size, d_tiny)
    gradients = {
        "query": _products(by_score, key).map(lambda x: scale * x),
        "key": _products(by_score.map(_transposed), query).map(lambda x: scale * _per_kv_head(x, group)),
        "value": _products(by_weight.map(_transposed), cotangent).map(lambda x: _per_kv_head(x, group)),
    }
    growth = ONE
    for name, distances in _distances(rules, batch, heads, q_len, kv_len).items():
        found = by_score.map(lambda x, distances=distances: sums(sums(x * distances)))  # type: ignore[misc]
        found = replace(found, value=-found.value)
        if np.ndim(rules.slopes) == 1:  # all batch entries share them
            found, growth = found.map(lambda x: sums(x.swapaxes(0, 1))), 1 + batch * Decimal(2) ** -20
            found = replace(found, tiny=found.tiny + (batch - 1))
        gradients[name] = found
    errors = _gradient_errors(kv_len, head_dim, q_len * group)
    for name, found in gradients.items():
        results[f"gradient/{name}"] = _expected(found, errors, growth if "slopes" in name else ONE)
    return results


def _output_errors(kv_len: int) -> dict[str, tuple[Decimal, Decimal]]:
    """Return by dtype how far the output is off, as a share of ``by_score`` and one of ``by_size``."""
    return {
        dtype: (Decimal(2 * u), Decimal((2 * kv_len + 8) * u) + Decimal(2 * UNIT_ROUNDOFF[dtype]))
        for dtype, u in _roundoff_of_sums().items()
    }


def _gradient_errors(kv_len: int, head_dim: int, rows: int) -> dict[str, tuple[Decimal, Decimal]]:
    """Return the same for gradients."""
    terms = 3 * (kv_len + 8) + 2 * head_dim + 2 * kv_len + rows + 16
    return {
        dtype: (Decimal(6 * u), Decimal(terms * u) + Decimal(7 * UNIT_ROUNDOFF[dtype]))
        for dtype, u in _roundoff_of_sums().items()
    }


def _roundoff_of_sums() -> dict[str, float]:
    return {dtype: min(U32, UNIT_ROUNDOFF[dtype]) for dtype in DTYPES}


def _distances(rules: Rules, batch: int, heads: int, q_len: int, kv_len: int) -> dict[str, Values]:
    """Return what each kind of slope is multiplied by, ``[batch, heads, q_len, kv_len]``, 0 where masked."""
    ones, zeros = np.ones(heads), np.zeros(heads)
    sides = {"slopes": replace(rules, slopes=ones, future_slopes=None if rules.future_slopes is None else zeros)}
    if rules.future_slopes is not None:
        sides["future_slopes"] = replace(rules, slopes=zeros, future_slopes=ones)
    found = {name: -penalties(side, batch, heads, q_len, kv_len) for name, side in sides.items()}
    return {name: decimals(np.where(np.isfinite(x), x, 0.0)) for name, x in found.items()}


def _expected(result: _Sum, errors: dict[str, tuple[Decimal, Decimal]], growth: Decimal = ONE) -> Expected:
    budgets: dict[str, Values | tuple[float, float]] = {
        dtype: floats_above(
            growth
            * (by_score * result.by_score + by_size * result.by_size + Decimal(SMALLEST[dtype]) * (result.tiny + 1))
        )
        for dtype, (by_score, by_size) in errors.items()
    }
    return Expected(floats(result.value), budgets)


def _products(rows: _Sum, tensor: Values) -> _Sum:
    columns = _transposed(tensor)
    sizes: Sequence[Values] = [products(x, abs(columns)) for x in (rows.by_score, rows.by_size, rows.tiny)]
    return _Sum(products(rows.value, columns), *sizes)


def _transposed(x: Values) -> Values:
    return x.swapaxes(-1, -2)


def _per_kv_head(x: Values, group: int) -> Values:
    return sums(np.moveaxis(x.reshape(x.shape[0], x.shape[1] // group, group, *x.shape[2:]), 2, -1))


# --- Arrays of decimals ---


def decimals(values: Values) -> Values:
    """Return finite numbers as decimals, exactly."""
    return _array([Decimal(float(x)) for x in values.flat], values.shape)


def floats(values: Values) -> Values:
    """Return decimals rounded to float64, to even between two; zeros have no sign."""
    return np.asarray([float(x) + 0.0 for x in values.flat], np.float64).reshape(values.shape)


def floats_above(values: Values) -> Values:
    """Return positive decimals rounded up to few bits, and by more than the oracle's own rounding may add to them."""
    return np.asarray([_rounded_up(x) for x in values.flat], np.float64).reshape(values.shape)


def products(rows: Values, columns: Values) -> Values:
    """Return the products of all rows with all columns: ``[..., n, k]`` and ``[..., m, k]`` give ``[..., n, m]``."""
    elements: list[Decimal] = []
    for index in np.ndindex(rows.shape[:-2]):
        others = columns[index].tolist()
        elements += [sum(map(mul, row, column), ZERO) for row in rows[index].tolist() for column in others]
    return _array(elements, (*rows.shape[:-1], columns.shape[-2]))


def sums(values: Values) -> Values:
    """Return the sums along the last axis."""
    return _array([sum(row, ZERO) for row in _rows(values)], values.shape[:-1])


def largest(values: Values) -> Values:
    """Return the largest number along the last axis, 0 if there is none above."""
    return _array([max(row, default=ZERO) for row in _rows(values)], values.shape[:-1])


def softmax(scores: Values, visible: Values) -> Values:
    """Return what each visible key weighs; nothing, in a row that may look nowhere."""
    result = np.full(scores.shape, ZERO, object)
    for index in np.ndindex(scores.shape[:-1]):
        seen = np.flatnonzero(visible[index])
        if seen.size:
            row = scores[index][seen].tolist()
            highest = max(row)
            powers = [(score - highest).exp() for score in row]
            total = sum(powers, ZERO)
            result[(*index, seen)] = [power / total for power in powers]
    return result


def _rounded_up(number: Decimal) -> float:
    mantissa, exponent = math.frexp(float(number) * (1 + 2.0**-40))
    return math.ldexp(math.ceil(math.ldexp(mantissa, BUDGET_BITS)), exponent - BUDGET_BITS)


def _rows(values: Values) -> list[list[Decimal]]:
    rows: list[list[Decimal]] = values.reshape(math.prod(values.shape[:-1]), values.shape[-1]).tolist()
    return rows


def _array(elements: Iterable[Decimal], shape: tuple[int, ...]) -> Values:
    result = np.empty(math.prod(shape), object)
    result[:] = list(elements)
    return result.reshape(shape)
