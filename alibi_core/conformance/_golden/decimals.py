"""Arrays of decimals: arithmetic of 50 digits with the same bits on every machine.

NumPy's exp, matmul and sum differ in the last bit between processors. Decimal arithmetic is specified to its last
digit; sums are taken from the first term to the last, and what is kept is rounded to float64 once.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Iterable
from decimal import Decimal
from operator import mul

import numpy as np

from alibi_core.conformance._cases import Values

CONTEXT = decimal.Context(
    prec=50,
    rounding=decimal.ROUND_HALF_EVEN,
    Emin=-999_999,
    Emax=999_999,
    traps=[decimal.InvalidOperation, decimal.DivisionByZero, decimal.Overflow],
)
ZERO, ONE = Decimal(0), Decimal(1)
BUDGET_BITS = 12


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
