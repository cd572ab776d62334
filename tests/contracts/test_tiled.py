"""Attention tile by tile: tiny tiles, of which small cases have many, and rows longer than horizons."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alibi_core.conformance.testing import DATA, LONGER, PER_BATCH, SIZES, STEEP, U32, UNIT_ROUNDOFF, Case, Sizes, cases
from alibi_core.conformance.testing import assert_within_budget as assert_within
from tests.support.frameworks import JAX, MLX, TORCH, Backend, param
from tests.support.tiles import (
    SPANS,
    TILINGS,
    TOLERANCES,
    Tiling,
    assert_exact,
    assert_no_more_left_out,
    attend,
    hostile,
    plain,
)

BACKENDS = [param(Backend(f, f"alibi_{f.name}", "tiled"), f.name, f) for f in (TORCH, MLX)]
EACH = pytest.mark.parametrize("backend", BACKENDS)
# JAX, which compiles each call, is tested with its own tiles.
IN_JAX = param(Backend(JAX, "alibi_jax", "tiled"), "jax", JAX, pytest.mark.slow)
EACH_AND_JAX = pytest.mark.parametrize("backend", [*BACKENDS, IN_JAX])
DTYPES = [
    pytest.param(*x.values, dtype, id=f"{x.id}-{dtype}", marks=x.marks)
    for x in BACKENDS
    for dtype in x.values[0].framework.dtypes
]
DTYPES_AND_JAX = [*DTYPES, pytest.param(*IN_JAX.values, "bfloat16", id="jax-bfloat16", marks=IN_JAX.marks)]
FAST = settings(max_examples=max(10, settings.default.max_examples // 2))
ALL_SIZES = st.sampled_from(LONGER + SIZES).flatmap(lambda sizes: cases(sizes=sizes))


def dense(backend: Backend) -> Backend:
    return replace(backend, implementation="dense")


def inputs_of(case: Case) -> dict[str, np.ndarray]:
    return {name: case.arrays[name] for name in ("query", "key", "value", "slopes")}


# --- The same laws as for all implementations, in many tiles -------------------------------------------------------


PADDING = np.ones((2, 1, 1, 1100), dtype=bool)
PADDING[1, ..., :600] = PADDING[0, ..., 1000:] = PADDING[0, ..., 30:40] = False
STEEP_TO_FLAT = STEEP[[1, 2, 4, 6]].astype(np.float64)
LONG = {
    "asymmetric": plain(Sizes(1, 1, 4, (1090, 1090), 6), "asymmetric", seed=1).with_arrays(slopes=STEEP_TO_FLAT),
    "padded": plain(Sizes(2, 2, 1, (1100, 1100), 4), "symmetric", seed=2, mask=PADDING, window_size=70),
    "all rules": Case(Sizes(2, 1, 3, (300, 500), 3), "asymmetric", PER_BATCH, 130, "pair", "by key", True, 5),
    "more queries": plain(Sizes(1, 3, 1, (700, 420), 4), "asymmetric"),
}


@EACH_AND_JAX
@pytest.mark.parametrize("case", LONG.values(), ids=LONG)
def test_long_rows_are_exact_with_their_gradients(backend: Backend, case: Case) -> None:
    assert_exact(backend, case)


# Lengths around the limits at which the plan changes: 1,024 keys, 16 queries, 64 queries in a tile.
LENGTHS = [(1, 1), (1, 2), (2, 1), (16, 17), (17, 16), (64, 65), (193, 193), (257, 257)]
LENGTHS += [(1, 1025), (16, 1024), (16, 1025), (17, 1025), (200, 1025)]


@EACH
@pytest.mark.parametrize("implementation", ["tiled", pytest.param("dense", marks=pytest.mark.slow)])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_gradients_are_exact_whichever_are_asked_for(
    backend: Backend, lengths: tuple[int, int], implementation: str
) -> None:
    for form in ("causal", "asymmetric"):
        case = plain(Sizes(1, 2, 2, lengths, 5), form, seed=sum(lengths)).with_arrays(slopes=STEEP_TO_FLAT)
        asked = [("query",), ("key",), ("value", "slopes"), ("query", "key", "value")]
        asked += [("future_slopes",), ("query", "future_slopes")] if form == "asymmetric" else [("slopes",)]
        assert_exact(replace(backend, implementation=implementation), case, asked=asked)


def hiding() -> dict[str, dict[str, Any]]:
    """Return arguments that hide some of 64 keys from some queries, by name."""
    found: dict[str, dict[str, Any]] = {}
    for (name, spans), ids in itertools.product(SPANS.items(), ([0, 1, 2, 3], [0, 1, 0, 1])):
        of_tokens = (np.asarray(ids)[(np.arange(64)[:, None] >= np.asarray(x)).sum(axis=1)] for x in spans)
        found[f"segments {ids} {name}"] = {"segment_ids": tuple(of_tokens)}
    for holes in ([0, 1, 2], [19, 20], [33], [63], [10, 23, *range(47, 54)]):
        found[f"mask of {holes}"] = {"mask": ~np.isin(np.arange(64), holes)[None, None, None]}
    return found


@EACH
@pytest.mark.parametrize("call_scores", [0, pytest.param(10**9, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", ["causal", pytest.param("symmetric", marks=pytest.mark.slow)])
@pytest.mark.parametrize("hidden", hiding().values(), ids=hiding())
def test_runs_of_tiles_end_where_keys_are_hidden(
    backend: Backend, hidden: dict[str, Any], form: str, call_scores: int
) -> None:
    # With a window, tiles differ in their hidden keys alone; with short horizons, also in how many keys they need.
    packed = plain(Sizes(1, 2, 1, (64, 64), 4), form, seed=5, **hidden, window_size=5)
    steep = plain(Sizes(1, 2, 1, (64, 64), 4), form, seed=5, **hidden)
    steep = steep.with_arrays(slopes=np.asarray([4.0, 3.0]), query=steep.arrays["query"] * 2)
    for blocks in (3, 512):
        with Tiling(rows=(4, 4), blocks=blocks, call_scores=call_scores).applied():
            assert_exact(backend, packed.with_arrays(slopes=np.asarray([0.0, 0.25])), tolerance=0.0)
            assert_exact(backend, steep)


@EACH
@pytest.mark.parametrize("rule", ["mask", "segment_ids"])
def test_a_run_of_tiles_is_not_widened_to_what_is_hidden(backend: Backend, rule: str) -> None:
    # Queries from 56 on need key 37 alone, earlier queries no key. If one call computed all of them, the hidden key 33,
    # as far before query 52 as key 37 is before query 56, would hide key 37 from query 56.
    query, key, value = np.zeros((1, 1, 64, 1)), np.full((1, 1, 64, 1), -1.0), np.full((1, 1, 64, 1), -1.0)
    query[:, :, 56:] = 10
    key[:, :, 37] = value[:, :, 37] = 1
    places = np.arange(64)
    hidden = {"mask": (places != 33)[None, None, None], "segment_ids": (places >= 34).astype(np.int32)[None]}
    case = plain(Sizes(1, 1, 1, (64, 64), 1), **{rule: hidden[rule]})
    case = case.with_arrays(query=query, key=key, value=value, slopes=np.asarray([1.0]))
    for call_scores in (0, 10**9):
        with Tiling(rows=(4, 4), blocks=512, call_scores=call_scores).applied():
            assert_no_more_left_out(backend, case, 0.3)


@EACH
@pytest.mark.parametrize("q_offset", [2**29 - 50, 2**29 + 50, 2**30, 2**30 + 77, 2**31 - 10_000])
def test_masked_keys_far_from_all_queries_count(backend: Backend, q_offset: int) -> None:
    mask = np.ones((1, 1, 1, 7), dtype=bool)
    mask[..., [0, 2, 6]] = False
    for is_causal, sign in ((True, 1), (False, 1), (False, -1)):
        far = plain(Sizes(1, 2, 1, (7, 7), 4), seed=3, is_causal=is_causal, mask=mask, q_offset=sign * q_offset)
        far = far.with_arrays(slopes=np.asarray([0.0, 0.5]))
        with Tiling().applied():
            assert_within(attend(backend, far, "float32"), far.exact("float32").output)


# --- Gradients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "dtype"), DTYPES_AND_JAX)
def test_gradients_of_slopes_know_no_rounded_result(backend: Backend, dtype: str) -> None:
    # With values around 8, the gradients of a row's scores are differences of nearly equal numbers.
    query, key, value, cotangent = np.random.default_rng(0).standard_normal((4, 1, 2, 256, 16))
    tensors = {"query": query, "key": key, "value": value + 8, "slopes": np.asarray([0.5, 0.004])}
    tiled, other = (
        x.gradients(tensors, cotangent, dtype=dtype, wanted=["slopes"])["slopes"] for x in (backend, dense(backend))
    )
    # Both compute in float32, whatever the dtype. Errors are its roundoff times the terms that cancel: 256 rows of
    # values of 8, times a mean distance of 100, a thousand times the gradient.
    np.testing.assert_allclose(tiled, other, rtol=2e-3)


@pytest.mark.parametrize(("backend", "dtype"), DTYPES_AND_JAX)
@pytest.mark.parametrize(
    ("length", "of_keys", "of_values", "drift"),
    [
        *[(400, 30, 0, 0), (1100, 60, 60, 40)],
        *(pytest.param(*x, marks=pytest.mark.slow) for x in [(400, 0, 30, 0), (400, 100, 100, 0), (400, 30, 100, 60)]),
    ],
)
def test_means_that_keys_or_values_have_in_common_cost_no_digits(
    backend: Backend, dtype: str, length: int, of_keys: float, of_values: float, drift: float
) -> None:
    # Keys of trained models have such means: the gradients of a row's scores are then differences of nearly equal
    # numbers, and their sum, which should be 0, is multiplied by the mean of the keys.
    case = plain(Sizes(1, 2, 1, (length, length), 16), seed=3).with_arrays(slopes=np.asarray([0.5, 0.01]))
    drifting = np.linspace(-drift, drift, length)[:, None]
    arrays = {name: x / x.std() for name, x in case.arrays.items()}
    arrays |= {"key": arrays["key"] + of_keys + drifting, "value": arrays["value"] + of_values - drifting}
    case = case.with_arrays(**{name: arrays[name] for name in ("key", "value")}, query=arrays["query"] / 4)
    tiled, other = (
        x.gradients(inputs_of(case), case.arrays["cotangent"], dtype=dtype) for x in (backend, dense(backend))
    )
    answers = case.gradients(dtype)
    # Sums of ``length`` terms are rounded in both implementations, in another order.
    rounding = length / 2**0.5 * UNIT_ROUNDOFF["float64" if dtype == "float64" else "float32"]
    names = ("query", "key", "value", *(["slopes"] if backend.framework is MLX else []))  # PyTorch adds in other orders
    for name in names:
        ours, theirs = (np.linalg.norm(x[name] - answers[name].value) for x in (tiled, other))
        assert ours <= 2 * theirs + rounding * np.linalg.norm(answers[name].value), name


@EACH_AND_JAX
@pytest.mark.parametrize("sign", [1, -1])
def test_gradients_of_slopes_are_the_same_however_far_all_keys_are(backend: Backend, sign: int) -> None:
    case = plain(Sizes(1, 2, 1, (8, 8), 16)).with_arrays(slopes=np.asarray([0.5, 0.125]))
    gradient = functools.partial(
        backend.gradients,
        inputs_of(case),
        case.arrays["cotangent"],
        dtype="float32",
        wanted=["slopes"],
        is_causal=False,
    )
    near = gradient(q_offset=sign * 20)["slopes"]
    assert np.any(near)
    for q_offset in (10**4, 10**6, 10**8, 2**31 - 20):
        assert np.array_equal(gradient(q_offset=sign * q_offset)["slopes"], near)


# --- The guarantee -------------------------------------------------------------------------------------------------


# These keys are too large for float16.
@pytest.mark.parametrize(("backend", "dtype"), [x for x in DTYPES if x.values[1] != "float16"])
@FAST
@given(
    case=ALL_SIZES,
    data=st.sampled_from(sorted(DATA)),
    scaling=st.sampled_from([None, None, -2.0, 4.0]),
    tiling=TILINGS,
    tolerance=st.sampled_from(TOLERANCES),
    sign=st.sampled_from([1, 1, -1]),
)
def test_no_more_is_left_out_than_the_tolerance(
    backend: Backend, dtype: str, case: Case, data: str, scaling: Any, tiling: Tiling, tolerance: float, sign: int
) -> None:
    with tiling.applied():
        case = hostile(replace(case, scaling=scaling), data, sign)
        assert_no_more_left_out(backend, case, tolerance, dtype=dtype)


@EACH_AND_JAX
@pytest.mark.parametrize("data", sorted(DATA))
def test_no_more_is_left_out_of_long_rows(backend: Backend, data: str) -> None:
    index = sorted(DATA).index(data)
    lengths = ((1100, 1100), (257, 1400), (1300, 1100), (1024, 1025))[index % 4]
    form = ("causal", "causal", "symmetric", "asymmetric", "clamped")[index % 5]
    packing = "one row" if index == 6 else None
    case = Case(Sizes(1, 2, 2, lengths, 6), form, None, None, packing, None, index % 2 == 0, seed=index)
    case = hostile(case, data, -1 if index == 5 else 1)
    assert_no_more_left_out(backend, case, *TOLERANCES)


@EACH_AND_JAX
@pytest.mark.parametrize("q_len", [1, 2, 15, 16, 17])
@pytest.mark.parametrize("data", ["outlier", "sinks", "opposed", "fading"])
def test_a_few_queries_over_many_keys(backend: Backend, q_len: int, data: str) -> None:
    form = "causal" if q_len % 2 else "asymmetric"
    case = Case(Sizes(2, 2, 2, (q_len, 1500), 4), form, None if q_len > 2 else 1400, None, None, None, True, seed=q_len)
    case = hostile(case, data, 1)
    norms = np.linalg.norm(np.float32(case.arrays["key"]), axis=-1).max(axis=-1) * (1 + 2.0**-20)
    for known in (None, norms.astype(np.float32), float(norms.max())):
        if known is None or backend.framework is TORCH:
            given = {} if known is None else {"max_key_norm": known}
            assert_no_more_left_out(backend, case, 2.0**-24, 0.01, **given)


@EACH_AND_JAX
@pytest.mark.parametrize("number", [3e38, -1e30])
def test_huge_keys_are_seen_from_afar_without_a_warning(backend: Backend, number: float) -> None:
    query, key, value = np.ones((3, 1, 1, 1500, 4))
    key[0, 0, 3, 1], value[0, 0, 3] = number, 7.0
    tiled, other = (x.attention(query, key, value, [1.0], dtype="float32") for x in (backend, dense(backend)))
    np.testing.assert_allclose(tiled, other, atol=2e-6)


def through_caches(
    backend: Backend, arrays: Any, slopes: np.ndarray, dtype: str = "float32", **arguments: Any
) -> list[np.ndarray]:
    """Return attention through an MLX cache, which measures keys when they are appended."""
    if backend.framework is not MLX:
        return []
    query, key, value, slopes = backend.place(*(arrays[x] for x in ("query", "key", "value")), slopes, dtype=dtype)
    cache = importlib.import_module(backend.module).KVCache()
    cache.update_and_fetch(key, value)
    return [backend.framework.numpy(cache.attend(query, slopes, **arguments))]


@EACH_AND_JAX
@pytest.mark.parametrize("number", [np.nan, np.inf, pytest.param(-np.inf, marks=pytest.mark.slow)])
@pytest.mark.parametrize("lengths", [(300, 300), (1, 1100), (17, 1100), (1100, 1100), (40, 4500)], ids=str)
@pytest.mark.parametrize("place", ["query", "key", "value"])
def test_nan_and_inf_make_no_finite_result_wrong(
    backend: Backend, place: str, lengths: tuple[int, int], number: float
) -> None:
    (q_len, kv_len), slopes = lengths, np.asarray([0.5, 0.5])
    rng = np.random.default_rng(0)
    tensors = {n: np.float32(rng.standard_normal((1, 2, kv_len, 4))) for n in ("query", "key", "value")}
    tensors["query"] = tensors["query"][:, :, -q_len:]
    for at in (0, kv_len // 2, kv_len - 1):
        broken = {name: x.copy() for name, x in tensors.items()}
        broken[place][0, 0, min(at, q_len - 1) if place == "query" else at, 1] = number
        query, key, value = (x[0, 0].astype(np.float64) for x in broken.values())
        distance = np.arange(kv_len - q_len, kv_len)[:, None] - np.arange(kv_len)
        with np.errstate(invalid="ignore"):
            scores = np.where(distance < 0, -np.inf, query @ key.T / 2 - slopes[0] * distance)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        some = ~np.isneginf(scores).all(axis=-1)  # a row of -inf alone may give zeros, as if it saw no key
        depends = np.isnan(weights).any(axis=-1) | (weights[:, ~np.isfinite(value).all(axis=-1)] > U32).any(axis=-1)
        expected = weights @ np.where(np.isfinite(value), value, 0)
        attention = functools.partial(backend.attention, **broken, slopes=slopes, dtype="float32")
        results = [
            attention(),
            attention(tolerance=0.0),
            dense(backend).attention(**broken, slopes=slopes, dtype="float32"),
        ]
        for result in (*results, *through_caches(backend, broken, slopes)):
            finite = np.isfinite(result[0, 0]).all(axis=-1)
            assert not finite[depends & some].any()
            right = finite & some
            np.testing.assert_allclose(result[0, 0][right], expected[right], rtol=0, atol=1e-5)
            assert np.isfinite(result[0, 1]).all()  # the other head
            if place == "query":
                assert finite.sum() >= q_len - 1


FIRST = (np.arange(1100)[:, None] < 200) * np.eye(4)[0]  # of the first 200 keys, one feature
UNMEASURED = {  # a factor of queries, a function of keys, the dtype, and the scale, which makes scores of ordinary size
    "squares overflow": (1e-36, lambda key: key * 1e36, "float32", None),
    "means overflow": (1e-37, lambda key: (np.abs(key) + 1) * 1e37, "float32", None),
    "the largest": (1e-38, lambda key: np.clip(key, -1, 1) * 3e38, "bfloat16", None),
    "squares overflow float16": (1e-4, lambda key: np.clip(key * 3e4, -65000, 65000), "float16", None),
    "squares vanish": (1e6, lambda key: FIRST * 1e-23, "float32", 6e18),
    "queries' squares vanish": (1e-23, lambda key: FIRST * 1e6, "float32", 6e18),
}


@EACH  # not in JAX: XLA sets denormal numbers to 0 on CPUs, in dense attention too
@pytest.mark.parametrize("q_len", [1, 17, 1100])
@pytest.mark.parametrize("keys", UNMEASURED)
def test_keys_that_cannot_be_measured_are_attended_to_whole(backend: Backend, keys: str, q_len: int) -> None:
    factor, of_normal, dtype, scale = UNMEASURED[keys]
    sizes = Sizes(1, 2, 1, (q_len, 1100), 4)
    case = Case(sizes, "causal", None, None, None, None, False, seed=1, scaling=scale)
    query, key = (case.arrays[name] / case.arrays[name].std() for name in ("query", "key"))
    query = np.abs(query) * np.eye(4)[0] if scale else query
    key = np.broadcast_to(of_normal(key), key.shape)
    case = case.with_arrays(query=query * factor, key=key, slopes=np.asarray([0.5, 0.02]))
    answer = case.exact(dtype, UNIT_ROUNDOFF[dtype]).output
    assert_within(attend(backend, case, dtype), answer)
    for result in through_caches(backend, case.arrays, case.arrays["slopes"], dtype, scale=scale):
        assert_within(result, answer)
    if backend.framework is TORCH and "overflow" in keys:
        assert_within(attend(backend, case, dtype, max_key_norm=3e38), answer)


# --- The plan ------------------------------------------------------------------------------------------------------


@EACH
def test_horizons_save_work(backend: Backend) -> None:
    seconds: dict[float | None, float] = {}
    tensors = np.random.default_rng(0).standard_normal((3, 1, 1, 4096, 64))
    inputs = backend.place(*tensors, np.ones(1), dtype="float32")
    for tolerance in (None, 0.0) * 2:
        start = time.perf_counter()
        backend.framework.numpy(backend.function(tolerance=tolerance)(*inputs))
        seconds[tolerance] = min(seconds.get(tolerance, math.inf), time.perf_counter() - start)
    # A score exceeds another by at most 2 * scale * |query| * |key|, about 30: a query needs 50 keys, not 2,048.
    assert seconds[None] < 0.5 * seconds[0.0]


@EACH_AND_JAX
def test_a_tolerance_of_zero_leaves_nothing_out(backend: Backend) -> None:
    keys, slope = 2100, 1 / 60
    query, value = np.zeros((2, 1, 1, keys, 4))
    value[:, :, 0] = 2.0**100  # far away, it weighs exp(-35)
    none, some = (
        backend.attention(query, query, value, [slope], dtype="float32", tolerance=x)[0, 0, -1, 0] for x in (0.0, 2e-8)
    )
    assert some == 0
    weight = np.exp(-slope * np.arange(keys)[::-1])
    assert none == pytest.approx(weight[0] / weight.sum() * 2.0**100, rel=1e-4)
