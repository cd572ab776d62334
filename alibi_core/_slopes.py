"""The slopes: one positive number a head, the penalty per token of distance."""

from __future__ import annotations

import decimal
import operator
from fractions import Fraction
from functools import lru_cache
from typing import Any

from alibi_core._arrays import (
    FLOATING,
    Device,
    DType,
    Namespace,
    asarray,
    astype,
    brief,
    checks,
    constant_when_traced,
    explains_keywords,
    known_device,
    namespace_of,
)
from alibi_core._contracts import named

MOST_HEADS = 2**20  # more heads are refused: each slope takes microseconds of decimal arithmetic
SCHEMES = ("canonical", "geometric", "linear")

_DECIMAL = decimal.Context(prec=60, Emin=-999_999, Emax=999_999, traps=[])  # 60 digits: far beyond float64's 17


@explains_keywords
def slopes(
    num_heads: int,
    *,
    scheme: str = "canonical",
    bias_max: float = 8.0,
    contract: str = "exact",
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
    rounded to float64, then rounded to float32 (float64 stays as it is): the same bits on every platform.

    Under tensor parallelism a shard of heads takes its slopes from the *global* count: ``slopes(n)[first:last]``.

    ``contract`` selects the slopes that a family of models was trained with, each step rounded to nearest in float32:

    - ``"bloom"``: the powers ``1, 2, ...`` of ``2**(-8 / p)``, then the powers ``1, 3, ...`` of ``2**(-8 / (2p))``.
      The base is rounded first, so slopes are off by up to 11 units in the last place (for 128 heads);
    - ``"falcon"``: BLOOM's, rounded to bfloat16. Its models divide them, like the scores, by ``sqrt(head_dim)``;
    - ``"mpt"``: ``1 / 2**(b (h+1) / n')`` for ``n'`` the next power of two, odd ``h`` first, cut to ``n``;
    - ``"geometric"``: the same as ``scheme="geometric"``; :func:`bias` accepts this name too.

    Up to 128 heads, BLOOM's and MPT's slopes are bit for bit those of ``transformers`` if ``powf`` rounds correctly;
    PyTorch's vectorised ``pow`` may be a unit in the last place off.

    Args:
        num_heads: Number of heads, at least 1.
        scheme: One of ``"canonical"``, ``"geometric"``, ``"linear"``.
        bias_max: ``b`` above, the negated log2 of the smallest of the first ``p`` slopes. It must be 8 with
            ``scheme="linear"`` and the contracts ``"bloom"`` and ``"falcon"``, which do not use it.
        contract: Rounding of the slopes: ``"exact"`` (the scheme's), ``"bloom"``, ``"falcon"``, ``"mpt"`` or
            ``"geometric"``. With all but ``"exact"``, ``scheme`` must be left at its default.
        xp: Array namespace of the result, or its name. Default NumPy.
        dtype: Floating dtype of the result, or its name. Default float32.
        device: Device of the result, as ``xp.asarray`` takes it.

    Returns:
        ``[num_heads]`` array of ``dtype`` on ``device``. All slopes are positive unless a large ``bias_max`` makes them
        too small for the dtype.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a number is out of range, or scheme or contract are unknown or exclude each other.

    Example:
        >>> slopes(8).tolist()
        [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625]
        >>> slopes(3).tolist()
        [0.0625, 0.00390625, 0.25]
        >>> slopes(16)[-1].item() * 2**8, slopes(16, contract="bloom")[-1].item() * 2**8
        (1.0, 0.9999997019767761)

    References:
        Press, Smith, Lewis, "Train Short, Test Long", section 3 and its public code, arXiv 2108.12409. Contracts:
        ``transformers`` 5.23, ``build_alibi_tensor`` of BLOOM and Falcon and ``build_mpt_alibi_tensor``.
    """
    values = slope_values(num_heads, scheme=scheme, bias_max=bias_max, contract=contract)
    xp = namespace_of(xp=xp)
    known_device(xp, device)
    dtype = xp.float32 if dtype is None else checks.floating_dtype(xp, "dtype", dtype)
    if dtype == xp.float64:
        return asarray(xp, values, xp.float64, device)
    # Libraries round to lower precisions either through float32 or directly: always go through float32.
    return astype(xp, asarray(xp, values, xp.float32, device), dtype)


def slope_values(
    num_heads: int, *, scheme: str = "canonical", bias_max: float = 8.0, contract: str = "exact"
) -> list[float]:
    """Return the slopes as Python floats; arguments and errors as in :func:`slopes`."""
    num_heads = checks.positive_int("num_heads", num_heads)
    if num_heads > MOST_HEADS:
        raise ValueError(f"num_heads must be at most {MOST_HEADS}, got {brief(num_heads)}")
    checks.one_of("scheme", scheme, SCHEMES)
    bias_max = checks.positive_number("bias_max", bias_max)
    rule = named(contract)
    if rule.scheme is not None and scheme != "canonical":
        raise ValueError(f"scheme must be left at 'canonical' with contract {contract!r}, got {scheme!r}")
    if bias_max != 8 and not rule.takes_bias_max:
        raise ValueError(f"bias_max must be left at 8 with contract {contract!r}, which has none, got {bias_max}")
    if scheme == "linear" and bias_max != 8:
        raise ValueError(f"bias_max must be left at 8 with scheme 'linear', which does not use it, got {bias_max}")
    # `operator.index` and `as_integer_ratio` turn torch.compile's symbolic numbers into constants; `int()` does not.
    return list(_constant_slope_values(operator.index(num_heads), rule.scheme or scheme, bias_max.as_integer_ratio()))


@constant_when_traced  # torch.compile can trace neither decimal arithmetic nor a cache
def _constant_slope_values(num_heads: int, scheme: str, bias_max: tuple[int, int]) -> tuple[float, ...]:
    return _slope_values(num_heads, scheme, bias_max)


@lru_cache(maxsize=256)
def _slope_values(num_heads: int, scheme: str, bias_max: tuple[int, int]) -> tuple[float, ...]:
    if scheme == "linear":
        # From 0.05 to 0.5; a single head gets 0.05.
        step = Fraction(45, 100) / max(num_heads - 1, 1)
        return tuple(float(Fraction(5, 100) + step * head) for head in range(num_heads))
    b = Fraction(*bias_max)
    if scheme == "geometric":
        return tuple(float(_power_of_two(-b * (head + 1) / num_heads)) for head in range(num_heads))
    if scheme == "mpt":
        return _mpt_slopes(num_heads, b)
    # Falcon rounds BLOOM's float32 slopes once more, to bfloat16.
    if scheme in ("bloom", "falcon"):
        dtype = "float32" if scheme == "bloom" else "bfloat16"
        return tuple(_rounded(Fraction(slope), dtype) for slope in _bloom_slopes(num_heads))
    assert scheme == "canonical", scheme
    # p slopes in geometric progression, then the first, third, fifth ... slope of 2 * p heads.
    p = 1 << (num_heads.bit_length() - 1)
    first = [-b * (head + 1) / p for head in range(p)]
    between = [-b * (2 * head + 1) / (2 * p) for head in range(num_heads - p)]
    return tuple(float(_power_of_two(exponent)) for exponent in first + between)


def _bloom_slopes(num_heads: int) -> list[float]:
    p = 1 << (num_heads.bit_length() - 1)
    base, between = (Fraction(_rounded(_power_of_two(Fraction(-8, n)), "float32")) for n in (p, 2 * p))
    powers = [base ** (head + 1) for head in range(p)] + [between ** (2 * head + 1) for head in range(num_heads - p)]
    return [_rounded(power, "float32") for power in powers]


def _mpt_slopes(num_heads: int, bias_max: Fraction) -> tuple[float, ...]:
    above = 1 << (num_heads - 1).bit_length()
    # transformers computes arange(1, n' + 1) * (bias_max / n') in float32.
    step = Fraction(_rounded(bias_max / above, "float32"))
    exponents = [Fraction(_rounded(step * (head + 1), "float32")) for head in range(above)]
    powers = [Fraction(_rounded(_power_of_two(x), "float32")) if x < 128 else None for x in exponents]
    # 2**128 is infinite in float32, and its reciprocal 0.
    slopes = [0.0 if power is None else _rounded(1 / power, "float32") for power in powers]
    return tuple(slopes if above == num_heads else (slopes[1::2] + slopes[0::2])[:num_heads])


def _rounded(value: Fraction | decimal.Decimal, dtype: str) -> float:
    """Return a positive number rounded to the digits of ``dtype``, half to even, whatever its size."""
    number = Fraction(value)
    exponent = number.numerator.bit_length() - number.denominator.bit_length()
    exponent -= number < Fraction(2) ** exponent  # 2**exponent <= number < 2**(exponent + 1)
    unit = Fraction(2) ** (exponent + 1 - FLOATING[dtype].bits)
    return float(round(number / unit) * unit)


def _power_of_two(exponent: Fraction) -> decimal.Decimal:
    """Return ``2**exponent`` to 60 digits; ``float`` of it is correctly rounded on every platform."""
    power = _DECIMAL.divide(decimal.Decimal(exponent.numerator), decimal.Decimal(exponent.denominator))
    return _DECIMAL.power(decimal.Decimal(2), power)
