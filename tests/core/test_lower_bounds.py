"""Lower bounds of softmax denominators, from means of keys: never too high, and worth having."""

from __future__ import annotations

import array_api_compat.numpy as xp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from alibi_core.backend import AttentionCall
from alibi_core.backend.horizon import Tiling as HorizonTiling
from alibi_core.backend.horizon import entry_of, lower_bounds
from alibi_core.conformance.testing import DATA, LONGER, Case
from tests.support.tiles import LONGER_CASES, TILINGS, Tiling, hostile, plain


@given(case=LONGER_CASES, data=st.sampled_from(sorted(DATA)), tiling=TILINGS, sign=st.sampled_from([1, 1, -1]))
@example(plain(LONGER[0], seed=4), "stripes", Tiling(), 1)
@example(plain(LONGER[0], seed=4, window_size=6), "stripes", Tiling(), 1)
@example(Case(LONGER[1], "clamped", 13, None, None, "by query", False, seed=3), "stripes", Tiling(), 1)
@example(Case(LONGER[0], "causal", None, None, "same", None, False, seed=4), "stripes", Tiling(), 1)
def test_lower_bounds_of_denominators_are_lower(case: Case, data: str, tiling: Tiling, sign: int) -> None:
    if isinstance(case.arguments.get("q_offset"), np.ndarray):  # bounds are for calls whose offset is an int
        case = case.with_arguments(case.form, case.arguments | {"q_offset": 1})
    assert_lower_bounds(hostile(case, data, sign), tiling)


@pytest.mark.parametrize("shown", [0, 1])
def test_lower_bounds_count_no_hidden_keys(shown: int) -> None:
    case = hostile(plain(LONGER[0], seed=4), "stripes", 1)
    visible = np.arange(150) // 32 % 2 == shown
    for rule, hidden in (("mask", visible[None, None, None]), ("segment_ids", visible[None].astype(np.int32))):
        assert_lower_bounds(case.with_arguments("causal", {rule: hidden}), Tiling())


def assert_lower_bounds(case: Case, tiling: Tiling) -> None:
    problem, slopes = case.exact("float32"), case.arrays["slopes"].astype(np.float32)
    query, key = (case.arrays[name].astype(np.float32) for name in ("query", "key"))
    call = AttentionCall.check(query, key, key, slopes, **case.arguments, xp=xp)
    middle = key.mean(axis=2, keepdims=True)
    scores = np.einsum("bhid,bhjd->bhij", problem.query, problem.keys - middle.repeat(problem.group, 1))
    scores = scores * problem.scale + problem.bias
    actual = np.logaddexp.reduce(scores, axis=-1)  # -inf for queries that see nothing
    for index in range(case.sizes.batch):
        one = slice(index, index + 1)
        bounds = lower_bounds(entry_of(call, index), query[one], key[one], middle[one], tiling.sizes)
        if bounds is not None:
            rounding = 2.0**-20 * (1 + np.abs(np.where(np.isfinite(scores), scores, 0)).max())
            assert np.all(bounds[0] <= actual[index] + rounding)


def test_lower_bounds_shorten_horizons() -> None:
    # The query's own key says little of a row of 150 that score the same.
    query, key = np.ones((2, 1, 1, 150, 4), np.float32)
    call = AttentionCall.check(query, key, key, np.float32([0.03]), xp=xp)
    bounds = lower_bounds(call, query, key, key.mean(axis=2, keepdims=True), Tiling().sizes)
    assert (bounds[..., 32:] > np.log(32) - 0.03 * 64).all()
    assert (bounds[..., :16] == -np.inf).all()


@pytest.mark.parametrize("part_elements", [None, 64])
def test_lower_bounds_say_nothing_before_the_first_block_of_keys(part_elements: int | None) -> None:
    query, key = np.ones((1, 1, 10, 4)), np.ones((1, 1, 150, 4))
    call = AttentionCall.check(query, key, key, np.asarray([0.03]), q_offset=0, xp=xp)
    tiling = HorizonTiling(16, 16, least_decay=0.0, part_elements=part_elements)
    assert lower_bounds(call, query, key, None, tiling) is None
