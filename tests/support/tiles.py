"""What tests of attention in tiles share: hostile data, long rows, and what may be off by how much."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from alibi_core.conformance._cases.case import LONGER, Case, cases
from alibi_core.conformance._cases.data import DATA, STEEP
from alibi_core.conformance._cases.oracle import UNIT_ROUNDOFF, Answer, assert_within
from tests.support.frameworks import Backend

TOLERANCES = (0.3, 0.01, 1e-4, 2.0**-24)
LONGER_CASES = st.sampled_from(LONGER).flatmap(lambda sizes: cases(sizes=sizes))

# Where segments of queries and of keys begin, in 64 tokens.
SPANS = {
    "within tiles": ([10, 33], [10, 33]),
    "at tiles": ([16, 40], [16, 40]),
    "of one token": ([20, 21, 22], [20, 21, 22]),
    "of queries": ([16, 33], []),
    "of keys": ([], [17, 31]),
    "apart": ([10, 30], [18, 38]),
}


def attend(backend: Backend, case: Case, dtype: str, **changes: Any) -> np.ndarray:
    arrays = {name: case.arrays[name] for name in ("query", "key", "value", "slopes")}
    return backend.attention(**arrays, dtype=dtype, **(case.arguments | changes))


def hostile(case: Case, data: str, sign: int) -> Case:
    """Return the case with such data, with steep slopes among its own, and maybe with a negative one."""
    tensors = {name: case.arrays[name].copy() for name in ("query", "key", "value")}
    DATA[data](**tensors)
    slopes = np.resize(np.roll(STEEP, case.seed), case.arrays["slopes"].shape).astype(np.float64)
    if sign < 0:
        slopes[..., -1] = -0.125
        case = case.with_arguments(case.form, case.arguments | {"allow_negative_slopes": True})
    return case.with_arrays(**tensors, slopes=slopes)


def within_tolerance(answer: Answer, case: Case, tolerance: float) -> Answer:
    """Return an answer that may be off by what a share of the weight can move, besides rounding."""
    largest = np.abs(case.arrays["value"]).max(axis=(2, 3), keepdims=True) * 1.01  # as they are once rounded
    return Answer(answer.value, answer.budget + 2 * tolerance * largest.repeat(case.sizes.group, axis=1))


def assert_exact(backend: Backend, case: Case, dtype: str = "float32", tolerance: float | None = None) -> None:
    """Assert that result and gradients of a case are exact to rounding, and to the tolerance."""
    share = UNIT_ROUNDOFF[dtype] if tolerance is None else tolerance
    assert_within(attend(backend, case, dtype, tolerance=tolerance), case.exact(dtype).output_without(share))
    inputs = {name: case.arrays[name] for name in ("query", "key", "value", "slopes")}
    arguments = case.arguments | {"tolerance": tolerance}
    if "future_slopes" in arguments:
        inputs["future_slopes"] = arguments.pop("future_slopes")
    actual = backend.gradients(inputs, case.arrays["cotangent"], dtype=dtype, **arguments)
    for name, answer in case.gradients(dtype, share).items():
        assert_within(actual[name], answer)
