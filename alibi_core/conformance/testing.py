"""Attention problems with exact results, for your own tests: a strategy for Hypothesis, and a comparison.

>>> from hypothesis import given
>>> from alibi_core.conformance.testing import Case, assert_within_budget, cases
>>> @given(case=cases(forms=("causal",)))
... def test_mine(case: Case) -> None:
...     output = case.exact("float64").output
...     assert_within_budget(output.value, output)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from alibi_core.conformance.case import COTANGENTS, FAR, FORMS, PER_BATCH, Case, Sizes, draw_case  # noqa: F401
from alibi_core.conformance.data import DATA, STEEP  # noqa: F401, names beside __all__ are for this project's tests
from alibi_core.conformance.laws import LONGER  # noqa: F401
from alibi_core.conformance.oracle import (  # noqa: F401
    SMALLEST,
    U32,
    UNIT_ROUNDOFF,
    Answer,
    Attention,
    excess,
    masked_bias,
    rounded,
    summed_over_batch,
)
from alibi_core.conformance.reference import Computation, Values
from alibi_core.conformance.report import Counterexample

try:
    from hypothesis import settings
    from hypothesis import strategies as st
except ModuleNotFoundError as error:
    message = f"alibi_core.conformance.testing needs {error.name}; install with pip install hypothesis"
    raise ModuleNotFoundError(message, name=error.name) from error

__all__ = ["Answer", "Case", "Sizes", "assert_within_budget", "cases"]

# Quick profiles draw from these few sizes: compiling each new shape takes long.
SIZES = (
    Sizes(1, 1, 1, (1, 1), 1),
    Sizes(2, 3, 1, (7, 7), 5),
    Sizes(1, 3, 2, (7, 7), 8),
    Sizes(2, 1, 2, (5, 11), 3),
    Sizes(2, 3, 2, (11, 5), 3),
    Sizes(1, 5, 1, (1, 13), 2),
)
_ANY_SIZES = st.builds(
    Sizes,
    batch=st.integers(1, 3),
    num_kv_heads=st.integers(1, 4),
    group=st.integers(1, 3),
    lengths=st.tuples(st.integers(1, 17), st.integers(1, 17)),
    head_dim=st.integers(1, 11),
)
_FEATURES = {"offset", "far", "batch_offsets", "window", "segments", "mask", "pair_masks", "batch_slopes"}


@st.composite
def cases(draw: st.DrawFn, *, forms: tuple[str, ...] = FORMS, sizes: Sizes | None = None, plain: bool = False) -> Case:
    """Draw a case. ``sizes`` fixes its sizes; ``plain`` excludes offset, window, segments and mask.

    By default sizes are drawn from ``SIZES``, or from all small sizes if Hypothesis's profile has more than 100
    examples.

    Example:
        >>> cases(plain=True)
        cases(plain=True)
    """
    if sizes is None:
        sizes = draw(_ANY_SIZES if settings().max_examples > 100 else st.sampled_from(SIZES))

    def choose(values: Sequence[Any]) -> Any:
        return draw(st.sampled_from(values))

    case = draw_case(choose, (sizes,), forms, {"batch_slopes"} if plain else _FEATURES)
    return dataclasses.replace(case, seed=draw(st.integers(0, 2**16)))


def penalties(shape: tuple[int, ...], slopes: Values, **arguments: Any) -> Values:
    """Return the exact bias for arguments of ``attention``, ``[batch, heads, q_len, kv_len]``, -inf where masked."""
    query, key = (np.zeros((*shape[:2], n, 0)) for n in shape[2:])
    return masked_bias(Computation((), {}, query, key, key, slopes, **arguments))


def assert_within_budget(actual: Values, answer: Answer) -> None:
    """Assert that each element is within its budget of the exact value.

    Example:
        >>> answer = Case(SIZES[0]).exact("float32").output
        >>> assert_within_budget(answer.value + 0.5 * answer.budget, answer)
    """
    assert actual.shape == answer.value.shape, f"shape {actual.shape}, expected {answer.value.shape}"
    assert np.all(np.isfinite(actual)), "not finite"
    if excess(actual, answer).max(initial=0) > 1:
        raise AssertionError(str(Counterexample.worst("", "", actual, answer)))
