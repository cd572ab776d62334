"""The slopes: one positive number a head, which says how fast that head forgets."""

from __future__ import annotations

import decimal
import operator
from fractions import Fraction
from functools import lru_cache
from typing import Any

from alibi_core import _checks
from alibi_core._namespace import asarray, astype, namespace_of
from alibi_core._typing import Device, DType, Namespace

SCHEMES = ("canonical", "geometric", "linear")

_DECIMAL = decimal.Context(prec=60, Emin=-999_999, Emax=999_999, traps=[])  # 60 digits: far beyond float64's 17


def slopes(
    num_heads: int,
    *,
    scheme: str = "canonical",
    bias_max: float = 8.0,
    xp: Namespace | None = None,
    dtype: DType | None = None,
    device: Device | None = None,
) -> Any:
    """Return the ALiBi slope of every head.

    With ``n`` heads, ``b = bias_max`` and ``p`` the largest power of two not above ``n``:

    - ``"canonical"``, the rule of the paper's code: ``2**(-b (h+1) / p)`` for the first ``p`` heads, then
      ``2**(-b (2h+1) / (2p))`` for ``h = 0, 1, ...`` until there are ``n``;
    - ``"geometric"``, the rule of the paper's text: ``2**(-b (h+1) / n)``;
    - ``"linear"``: ``n`` evenly spaced numbers from 0.05 to 0.5.

    The first two agree when ``n`` is a power of two. The numbers are computed in decimal arithmetic, correctly
    rounded to float64, then rounded to float32 (or kept, for float64): the same bits on every platform.

    Under tensor parallelism a shard of heads takes its slopes from the *global* count: ``slopes(n)[first:last]``.

    Args:
        num_heads: How many heads, at least 1.
        scheme: One of ``"canonical"``, ``"geometric"``, ``"linear"``.
        bias_max: ``b`` above, the negated log2 of the smallest of the first ``p`` slopes. Must be left alone when
            ``scheme="linear"``, where it has no meaning.
        xp: Array namespace of the result. Default NumPy.
        dtype: Floating dtype of the result. Default float32.
        device: Device of the result, as ``xp.asarray`` takes it.

    Returns:
        ``[num_heads]`` array of ``dtype`` on ``device``, all positive but for what a large ``bias_max`` makes smaller
        than the dtype can hold.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a number is out of range or the scheme is unknown.

    Example:
        >>> slopes(8).tolist()
        [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625]
        >>> slopes(3).tolist()
        [0.0625, 0.00390625, 0.25]

    References:
        Press, Smith, Lewis, "Train Short, Test Long", section 3 and its public code, arXiv 2108.12409.
    """
    values = slope_values(num_heads, scheme=scheme, bias_max=bias_max)
    xp = namespace_of(xp=xp)
    dtype = xp.float32 if dtype is None else _checks.floating_dtype(xp, "dtype", dtype)
    if dtype == xp.float64:
        return asarray(xp, values, xp.float64, device)
    # Lower precisions are reached through float32 in some libraries and directly in others: fix one way.
    return astype(xp, asarray(xp, values, xp.float32, device), dtype)


def slope_values(num_heads: int, *, scheme: str = "canonical", bias_max: float = 8.0) -> list[float]:
    """Return the slopes as Python floats; arguments and errors as for :func:`slopes`."""
    num_heads = _checks.positive_int("num_heads", num_heads)
    _checks.one_of("scheme", scheme, SCHEMES)
    bias_max = _checks.positive_number("bias_max", bias_max)
    if scheme == "linear" and bias_max != 8:
        raise ValueError(f"bias_max must be left at 8 with scheme 'linear', which does not use it, got {bias_max}")
    # Of numbers that torch.compile holds as symbols, these two functions make constants; int and float do not.
    return list(_constant_slope_values(operator.index(num_heads), scheme, bias_max.as_integer_ratio()))


def _constant_slope_values(num_heads: int, scheme: str, bias_max: tuple[int, int]) -> tuple[float, ...]:
    return _slope_values(num_heads, scheme, bias_max)


# torch.compile calls a function with this mark while it traces and takes the result as a constant: it can trace
# neither decimal arithmetic nor a cache. The mark is all that torch.compiler.assume_constant_result sets.
_constant_slope_values._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=256)
def _slope_values(num_heads: int, scheme: str, bias_max: tuple[int, int]) -> tuple[float, ...]:
    if scheme == "linear":
        step = Fraction(45, 100) / max(num_heads - 1, 1)
        return tuple(float(Fraction(5, 100) + step * head) for head in range(num_heads))
    b = Fraction(*bias_max)
    if scheme == "geometric":
        return tuple(_exp2(-b * (head + 1) / num_heads) for head in range(num_heads))
    p = 1 << (num_heads.bit_length() - 1)
    first = [-b * (head + 1) / p for head in range(p)]
    between = [-b * (2 * head + 1) / (2 * p) for head in range(num_heads - p)]
    return tuple(_exp2(exponent) for exponent in first + between)


def _exp2(exponent: Fraction) -> float:
    """Return ``2**exponent`` correctly rounded to float64, with no help from the platform's ``pow``."""
    power = _DECIMAL.divide(decimal.Decimal(exponent.numerator), decimal.Decimal(exponent.denominator))
    return float(_DECIMAL.power(decimal.Decimal(2), power))
