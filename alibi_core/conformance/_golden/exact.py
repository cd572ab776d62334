"""Exact attention, its gradients and their budgets: the oracle's formulas, with the same bits on every machine.

NumPy's exp, matmul and sum differ in the last bit between processors, so these are decimals of 50 digits: their
arithmetic is specified to its last digit. Sums are taken from the first term to the last, and what is kept is rounded
to float64 once.
"""

from __future__ import annotations

import decimal
import math
from dataclasses import dataclass
from decimal import Decimal

import numpy as np

from alibi_core.conformance._cases import (
    UNIT_ROUNDOFF,
    Answer,
    Attention,
    Rules,
    Values,
    penalties,
    summed_over_batch,
)

DTYPES = tuple(UNIT_ROUNDOFF)
CONTEXT = decimal.Context(
    prec=50,
    rounding=decimal.ROUND_HALF_EVEN,
    Emin=-999_999,
    Emax=999_999,
    traps=[decimal.InvalidOperation, decimal.DivisionByZero, decimal.Overflow],
)
BUDGET_BITS = 12


@dataclass(frozen=True)
class Expected:
    """What a result should be.

    Attributes:
        value: In float64.
        budgets: By dtype, how far a result may be off: element by element, or as a pair (share of the value, absolute).
        tensor: What it is called in files, if it is from one.
    """

    value: Values
    budgets: dict[str, Values | tuple[float, float]]
    tensor: str = ""


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
    shape = (*tensors["query"].shape[:3], tensors["key"].shape[2])
    with decimal.localcontext(CONTEXT):
        exact = {name: _decimals(x) for name, x in tensors.items()}
        cotangent = exact.pop("cotangent", None)
        bias, reach = _decimals(penalties(rules, *shape)), None if reach is None else _decimals(reach)
        problems = {x: Attention(**exact, bias=bias, scale=Decimal(scale), dtype=x, reach=reach) for x in DTYPES}
        one = problems[DTYPES[0]]
        terms = {"output": one.output_terms}
        found = {}
        for side, distances in rules.distances(*shape).items():
            terms |= {} if cotangent is None else one.gradient_terms(cotangent, _decimals(distances))
            for name, x in terms.items():
                answers = {dtype: problem.answer(name, x) for dtype, problem in problems.items()}
                if name == "slopes" and np.ndim(rules.slopes) == 1:  # all batch entries share them
                    answers = {dtype: summed_over_batch(answer) for dtype, answer in answers.items()}
                found[name if name == "output" else f"gradient/{side if name == 'slopes' else name}"] = answers
        return {name: _expected(answers) for name, answers in found.items()}


def default_scale(head_dim: int) -> float:
    """Return ``head_dim ** -0.5``, correctly rounded, with no help from the platform's ``pow``."""
    return float(CONTEXT.divide(Decimal(1), CONTEXT.sqrt(Decimal(head_dim))))


def _expected(answers: dict[str, Answer]) -> Expected:
    """Return answers in float64: values rounded to even between two, budgets up."""
    value = answers[DTYPES[0]].value
    budgets = {dtype: np.vectorize(_rounded_up, otypes=[float])(x.budget) for dtype, x in answers.items()}
    return Expected(value.astype(np.float64) + 0.0, budgets)  # zeros have no sign


def _decimals(values: Values) -> Values:
    """Return numbers as decimals, exactly."""
    return np.asarray(np.vectorize(lambda x: Decimal(float(x)), otypes=[object])(values))


def _rounded_up(number: Decimal) -> float:
    """Return a positive decimal rounded up to few bits, by more than the oracle's own rounding may add to it."""
    mantissa, exponent = math.frexp(float(number) * (1 + 2.0**-40))
    return math.ldexp(math.ceil(math.ldexp(mantissa, BUDGET_BITS)), exponent - BUDGET_BITS)
