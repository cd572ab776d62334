"""Attention tile by tile, beside the drawn property: crafted keys, NaN, numbers that cannot be measured, and time."""

from __future__ import annotations

import functools
import importlib
import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from alibi_core.conformance.testing import U32, UNIT_ROUNDOFF, Case, Sizes
from alibi_core.conformance.testing import assert_within_budget as assert_within
from tests.support.frameworks import JAX, MLX, TORCH, Backend, param
from tests.support.tiles import Tiling, assert_no_more_left_out, attend, plain

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


def dense(backend: Backend) -> Backend:
    return replace(backend, implementation="dense")


def inputs_of(case: Case) -> dict[str, np.ndarray]:
    return {name: case.arrays[name] for name in ("query", "key", "value", "slopes")}


# --- Runs of tiles -------------------------------------------------------------------------------------------------


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


# --- The guarantee -------------------------------------------------------------------------------------------------


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
