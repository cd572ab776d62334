"""The slopes: their three rules, their rounding, and the same bits in every library."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import alibi_core
from tests.support.frameworks import FRAMEWORKS, Framework


def slope_values(num_heads: int, **rule: Any) -> list[float]:
    return alibi_core.slopes(num_heads, **rule, dtype=np.float64).tolist()


def canonical_exponents(num_heads: int, bias_max: Fraction) -> list[Fraction]:
    """The recursion of the paper's code, with exponents in place of powers."""
    if num_heads & (num_heads - 1) == 0:
        return [-bias_max * (head + 1) / num_heads for head in range(num_heads)]
    below = 2 ** math.floor(math.log2(num_heads))
    return canonical_exponents(below, bias_max) + canonical_exponents(2 * below, bias_max)[0::2][: num_heads - below]


def is_nearest_float(x: float, exponent: Fraction) -> bool:
    """Whether no float64 is nearer to ``2**exponent`` than ``x``, decided in integers."""
    n, d = exponent.numerator, exponent.denominator
    below, above = (Fraction(x) + Fraction(math.nextafter(x, side)) for side in (0.0, math.inf))
    # below / 2 <= 2**(n / d) <= above / 2, raised to the power d
    return (below / 2) ** d <= Fraction(2) ** n <= (above / 2) ** d


@pytest.mark.parametrize("num_heads", [*range(1, 34), 40, 71, 112, 128])
@pytest.mark.parametrize("bias_max", [8, 16, 7.3])
def test_exponential_slopes_are_correctly_rounded(num_heads: int, bias_max: float) -> None:
    b = Fraction(bias_max)
    geometric = [-b * (head + 1) / num_heads for head in range(num_heads)]
    for scheme, exponents in (("canonical", canonical_exponents(num_heads, b)), ("geometric", geometric)):
        values = slope_values(num_heads, scheme=scheme, bias_max=bias_max)
        if b.denominator > 2:  # the powers grow too large to decide in integers; float64's pow is close enough to tell
            np.testing.assert_allclose(values, [2.0 ** float(e) for e in exponents], rtol=1e-14)
        else:
            assert all(map(is_nearest_float, values, exponents))


def test_linear_slopes_are_evenly_spaced() -> None:
    assert slope_values(4, scheme="linear") == [0.05, 0.2, 0.35, 0.5]
    assert slope_values(1, scheme="linear") == [0.05]


def test_mpts_rule_is_the_canonical_one() -> None:
    for num_heads in (*range(1, 34), 71, 112, 200, 256):
        # llm-foundry's: the list of the next power of two, every other one first, cut to length.
        above = 2 ** math.ceil(math.log2(num_heads))
        slopes = [Fraction(-8 * (head + 1), above) for head in range(above)]
        mpt = slopes if above == num_heads else (slopes[1::2] + slopes[0::2])[:num_heads]
        assert mpt == canonical_exponents(num_heads, Fraction(8))
        np.testing.assert_allclose(alibi_core.slopes(num_heads), [2.0 ** float(e) for e in mpt], rtol=2.0**-23)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@given(num_heads=st.integers(1, 150), scheme=st.sampled_from(["canonical", "geometric", "linear"]))
def test_slopes_have_the_same_bits_everywhere(framework: Framework, num_heads: int, scheme: str) -> None:
    expected = np.asarray(slope_values(num_heads, scheme=scheme)).astype(np.float32)
    actual = alibi_core.slopes(num_heads, scheme=scheme, xp=framework.xp)
    np.testing.assert_array_equal(framework.bits(actual), expected.view(np.int32))


def test_low_precision_slopes_are_rounded_by_way_of_float32() -> None:
    # The only head of all counts to 512 where float16 tells the two ways of rounding apart.
    value = np.asarray(slope_values(397, scheme="geometric"))[386]
    assert np.float16(value) != np.float16(np.float32(value))
    actual = alibi_core.slopes(397, scheme="geometric", dtype=np.float16)[386]
    assert actual == np.float16(np.float32(value))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_slopes_come_in_the_dtype_asked_for(framework: Framework) -> None:
    for dtype in framework.dtypes:
        actual = alibi_core.slopes(12, xp=framework.xp, dtype=getattr(framework.xp, dtype))
        expected = framework.array(slope_values(12), dtype)
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(framework.numpy(actual), framework.numpy(expected))


def test_jax_float64_is_refused_where_it_is_not_enabled() -> None:
    jnp = pytest.importorskip("jax.numpy")
    with pytest.raises(TypeError, match="set jax_enable_x64 first"):
        alibi_core.slopes(8, xp=jnp, dtype=jnp.float64)
