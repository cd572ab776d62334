"""Tiled attention in MLX: tiles so small that little cases have many, rows longer than horizons, and what they cost."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

mx = pytest.importorskip("mlx.core", reason="mlx is not installed")

import alibi_core  # noqa: E402
from alibi_core import AttentionCall  # noqa: E402
from alibi_core._horizon.jobs import TileSizes  # noqa: E402
from alibi_core.conformance._cases.case import (  # noqa: E402
    LONGER,
    SIZES,
    Case,
    Sizes,
    cases,
)
from alibi_core.conformance._cases.data import DATA, STEEP  # noqa: E402
from alibi_core.conformance._cases.oracle import U32, UNIT_ROUNDOFF, assert_within  # noqa: E402
from alibi_mlx import KVCache, attention  # noqa: E402
from alibi_mlx._tiled import kernels as _tile_kernels  # noqa: E402
from alibi_mlx._tiled import plan as _plan  # noqa: E402
from alibi_mlx._tiled.norms import KeyNorms, norm_bounds  # noqa: E402
from tests.support import tiles  # noqa: E402
from tests.support.frameworks import MLX, Backend  # noqa: E402
from tests.support.tiles import (  # noqa: E402
    LONGER_CASES,
    SPANS,
    TOLERANCES,
    hostile,
    within_tolerance,
)

TILED = Backend(MLX, "alibi_mlx", "tiled")
DTYPES = ("float32", "float16", "bfloat16")
FAST = settings(max_examples=max(10, settings.default.max_examples // 2))

attend = functools.partial(tiles.attend, TILED)
assert_exact = functools.partial(tiles.assert_exact, TILED)


@dataclass(frozen=True)
class Tiling:
    """The sizes that decide how a call is cut up, in place of those of the modules."""

    rows: tuple[int, int] = (2, 4)
    few: int = 1
    blocks: int = 3
    bias_elements: int = 2**20
    plan_elements: int = 2**20
    kernel_elements: int = 2**21
    call_scores: int = 0
    short: int = 0

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        sizes = TileSizes(self.rows, self.bias_elements, self.call_scores, self.few)
        constants = {"SIZES": {mx.cpu: sizes, mx.gpu: sizes}, "SHORT": self.short, "KV_BLOCK": 1, "WORTHWHILE": 0}
        constants |= {"BLOCKS": self.blocks, "PART_ELEMENTS": self.plan_elements}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in constants.items():
                patch.setattr(_plan, name, value)
            patch.setattr(_tile_kernels, "PART_ELEMENTS", self.kernel_elements)
            yield


TILINGS = st.builds(
    Tiling,
    rows=st.sampled_from([(1, 1), (1, 4), (2, 4), (4, 4), (2, 16)]),
    few=st.sampled_from([1, 1, 3]),
    blocks=st.sampled_from([1, 3, 512]),
    bias_elements=st.sampled_from([1, 24, 100, 2**20]),
    plan_elements=st.sampled_from([1, 40, 2**20]),
    kernel_elements=st.sampled_from([1, 300, 2**21]),
    call_scores=st.sampled_from([0, 20, 10**9]),
    short=st.sampled_from([0, 0, 0, 1024]),
)


# --- The same laws as for all implementations, in many tiles -------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@given(case=cases(), tiling=TILINGS, tolerance=st.sampled_from([None, 0.0]))
def test_many_tiles_are_exact_with_their_gradients(
    dtype: str, case: Case, tiling: Tiling, tolerance: float | None
) -> None:
    with tiling.applied():
        assert_exact(case, dtype, tolerance)


@FAST
@given(case=LONGER_CASES, tiling=TILINGS, tolerance=st.sampled_from([None, 0.0]))
def test_several_blocks_of_keys_are_exact_with_their_gradients(
    case: Case, tiling: Tiling, tolerance: float | None
) -> None:
    with tiling.applied():
        assert_exact(case, tolerance=tolerance)


@pytest.mark.parametrize("form", ["causal", "asymmetric"])
def test_long_rows_are_exact_with_their_gradients(form: str) -> None:
    case = Case(Sizes(1, 1, 4, (1090, 1090), 6), form, None, None, None, None, False, seed=1)
    steep = STEEP[[1, 2, 4, 6]].astype(np.float64)
    assert_exact(case.with_arrays(slopes=steep))


def test_a_window_and_padding_in_long_rows() -> None:
    case = Case(Sizes(2, 2, 1, (1100, 1100), 4), "symmetric", None, None, None, None, False, seed=2)
    mask = np.ones((2, 1, 1, 1100), dtype=bool)
    mask[1, ..., :600] = mask[0, ..., 1000:] = mask[0, ..., 30:40] = False
    assert_exact(case.with_arguments("symmetric", {"is_causal": False, "mask": mask, "window_size": 70}))


@pytest.mark.parametrize("call_scores", [0, 10**9])
@pytest.mark.parametrize("ids", [(0, 1, 2, 3), (0, 1, 0, 1)], ids=str)
@pytest.mark.parametrize("spans", SPANS)
def test_runs_of_tiles_end_at_segments(spans: str, ids: tuple[int, ...], call_scores: int) -> None:
    case = Case(Sizes(1, 2, 1, (64, 64), 4), "causal", None, None, None, None, False, seed=5)
    segment_ids = tuple(np.asarray(ids)[(np.arange(64)[:, None] >= np.asarray(x)).sum(axis=1)] for x in SPANS[spans])
    case = case.with_arguments("causal", {"segment_ids": segment_ids})
    steep = case.with_arrays(slopes=np.asarray([4.0, 4.0]), query=case.arrays["query"] * 2)
    with Tiling(rows=(4, 4), blocks=512, call_scores=call_scores).applied():
        assert_exact(steep)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
def test_gradients_of_slopes_know_no_rounded_result(dtype: mx.Dtype) -> None:
    # Values around 8: the gradients of a row's scores are differences of what is nearly the same.
    rng = np.random.default_rng(0)
    query, key, value, cotangent = (mx.array(rng.standard_normal((1, 2, 256, 16)), mx.float32) for _ in range(4))
    tensors = [x.astype(dtype) for x in (query, key, value + 8)]
    weight, slopes = cotangent.astype(dtype).astype(mx.float32), mx.array([0.5, 0.004])

    def gradient(implementation: str) -> np.ndarray:
        def loss(slopes: mx.array) -> mx.array:
            return (attention(*tensors, slopes, implementation=implementation).astype(mx.float32) * weight).sum()

        return np.asarray(mx.grad(loss)(slopes))

    # Both in float32 until the end, whatever the dtype: off by its roundoff times the sum of what cancels, 256 rows of
    # values of 8 by a mean distance of 100, which is some thousand times the gradient.
    np.testing.assert_allclose(gradient("tiled"), gradient("dense"), rtol=2e-3)


@pytest.mark.parametrize(("of_keys", "of_values", "drift"), [(30, 0, 0), (30, 30, 0), (100, 100, 0), (30, 100, 60)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_forgive_what_keys_and_values_have_in_common(
    dtype: str, of_keys: float, of_values: float, drift: float
) -> None:
    sizes = Sizes(1, 2, 1, (400, 400), 16)
    case = Case(sizes, "causal", None, None, None, None, False, seed=3).with_arrays(slopes=np.asarray([0.5, 0.01]))
    drifting = np.linspace(-drift, drift, 400)[:, None]
    tensors = {
        name: case.arrays[name] / case.arrays[name].std() + common
        for name, common in (("query", 0), ("key", of_keys + drifting), ("value", of_values + drifting))
    }
    case = case.with_arrays(**tensors | {"query": tensors["query"] / 4})
    inputs = {name: case.arrays[name] for name in ("query", "key", "value", "slopes")}
    tiled, dense = (
        Backend(MLX, "alibi_mlx", name).gradients(inputs, case.arrays["cotangent"], dtype=dtype)
        for name in ("tiled", "dense")
    )
    for name, answer in case.gradients(dtype).items():
        ours, theirs = (np.linalg.norm(x[name] - answer.value) for x in (tiled, dense))
        rounding = (400 * 400 / 2) ** 0.5 * U32  # of so many terms, in float32, each on its own side
        assert ours <= 2 * theirs + rounding * np.linalg.norm(answer.value), name


@pytest.mark.parametrize("sign", [1, -1])
def test_gradients_of_slopes_are_the_same_however_far_all_keys_are(sign: int) -> None:
    query, key, value = (mx.array(x, mx.float32) for x in np.random.default_rng(0).standard_normal((3, 1, 2, 8, 16)))

    def gradient(q_offset: int) -> np.ndarray:
        def loss(slopes: mx.array) -> mx.array:
            attended = attention(query, key, value, slopes, is_causal=False, q_offset=q_offset)
            return (attended * query).sum()

        return np.asarray(mx.grad(loss)(mx.array([0.5, 0.125])))

    assert np.any(gradient(sign * 20))
    for q_offset in (10**4, 10**6, 10**8, 2**31 - 20):
        assert np.array_equal(gradient(sign * q_offset), gradient(sign * 20))


# --- The guarantee -------------------------------------------------------------------------------------------------


@given(
    case=st.sampled_from(LONGER + SIZES).flatmap(lambda sizes: cases(sizes=sizes)),
    data=st.sampled_from(sorted(DATA)),
    tiling=TILINGS,
    tolerance=st.sampled_from(TOLERANCES),
    sign=st.sampled_from([1, 1, -1]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_no_more_is_left_out_than_the_tolerance(
    case: Case, data: str, tiling: Tiling, tolerance: float, sign: int, dtype: str
) -> None:
    case = hostile(case, data, sign)
    with tiling.applied():
        result = attend(case, dtype, tolerance=tolerance)
    assert_within(result, within_tolerance(case.exact(dtype).output, case, tolerance))


@pytest.mark.parametrize("data", sorted(DATA))
def test_no_more_is_left_out_of_long_rows(data: str) -> None:
    index = sorted(DATA).index(data)
    lengths = ((1100, 1100), (257, 1400), (1300, 1100), (1024, 1025))[index % 4]
    form = ("causal", "causal", "symmetric", "asymmetric", "clamped")[index % 5]
    packing = "one row" if index == 6 else None
    sizes = Sizes(1, 2, 2, lengths, 6)
    case = hostile(
        Case(sizes, form, None, None, packing, None, index % 2 == 0, seed=index), data, -1 if index == 5 else 1
    )
    answer = case.exact("float32").output
    for tolerance in TOLERANCES:
        assert_within(attend(case, "float32", tolerance=tolerance), within_tolerance(answer, case, tolerance))


@pytest.mark.parametrize("q_len", [1, 2, 15, 16, 17])
@pytest.mark.parametrize("data", ["outlier", "sinks", "opposed", "fading"])
def test_a_few_queries_over_many_keys(q_len: int, data: str) -> None:
    case = hostile(Case(Sizes(2, 2, 3, (q_len, 1500), 6), "causal", None, None, None, None, False, 11), data, 1)
    answer = case.exact("float32").output
    for tolerance in TOLERANCES:
        assert_within(attend(case, "float32", tolerance=tolerance), within_tolerance(answer, case, tolerance))


@given(
    case=st.sampled_from(LONGER + SIZES).flatmap(lambda sizes: cases(sizes=sizes)),
    data=st.sampled_from(sorted(DATA)),
    tiling=TILINGS,
    block=st.sampled_from([1, 2, 7, 64, 1000]),
    tolerance=st.sampled_from(TOLERANCES),
)
def test_norms_by_block_leave_out_no_more(case: Case, data: str, tiling: Tiling, block: int, tolerance: float) -> None:
    case = hostile(case, data, 1)
    call, query, key, value = planning(case)
    norms = norm_bounds(key)
    norms = mx.pad(norms, [(0, 0), (0, 0), (0, -norms.shape[-1] % block)])
    norms = KeyNorms(mx.max(mx.unflatten(norms, -1, (-1, block)), axis=-1), block)
    call = replace(call, tolerance=tolerance)
    with tiling.applied():
        from alibi_mlx._attention import run

        result = MLX.numpy(run(call, query, key, value, "tiled", norms))
    assert_within(result, within_tolerance(case.exact("float32").output, case, tolerance))


@pytest.mark.parametrize("number", [3e38, -1e30])
def test_huge_keys_are_seen_from_afar_without_a_warning(number: float) -> None:
    query, key, value = (mx.ones((1, 1, 1500, 4)) for _ in range(3))
    key[0, 0, 3, 1], value[0, 0, 3] = number, 7.0
    dense, tiled = (attention(query, key, value, mx.array([1.0]), implementation=x) for x in ("dense", "tiled"))
    np.testing.assert_allclose(np.asarray(tiled), np.asarray(dense), atol=2e-6)


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("lengths", [(300, 300), (1, 1100), (17, 1100), (1100, 1100), (40, 4500)], ids=str)
@pytest.mark.parametrize("place", ["query", "key", "value"])
def test_what_is_not_finite_makes_no_finite_result_wrong(place: str, lengths: tuple[int, int], number: float) -> None:
    (q_len, kv_len), slope = lengths, 0.5
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.standard_normal((1, 2, n, 4)).astype(np.float32)
        for name, n in (("query", q_len), ("key", kv_len), ("value", kv_len))
    }
    for at in (0, kv_len // 2, kv_len - 1):
        broken = {name: x.copy() for name, x in tensors.items()}
        broken[place][0, 0, min(at, q_len - 1) if place == "query" else at, 1] = number
        call = functools.partial(attention, *(mx.array(x) for x in broken.values()), mx.array([slope, slope]))
        cache = KVCache()
        cache.update_and_fetch(mx.array(broken["key"]), mx.array(broken["value"]))
        cached = cache.attend(mx.array(broken["query"]), mx.array([slope, slope]))
        query, key, value = (x[0, 0].astype(np.float64) for x in broken.values())
        distance = np.arange(kv_len - q_len, kv_len)[:, None] - np.arange(kv_len)
        with np.errstate(invalid="ignore"):
            scores = np.where(distance < 0, -np.inf, query @ key.T / 2 - slope * distance)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        depends = np.isnan(weights).any(axis=-1) | (weights[:, ~np.isfinite(value).all(axis=-1)] > U32).any(axis=-1)
        expected = weights @ np.where(np.isfinite(value), value, 0)
        for result in (np.asarray(x) for x in (call(), call(tolerance=0.0), call(implementation="dense"), cached)):
            finite = np.isfinite(result[0, 0]).all(axis=-1)
            assert not finite[depends].any()
            np.testing.assert_allclose(result[0, 0][finite], expected[finite], rtol=0, atol=1e-5)
            assert np.isfinite(result[0, 1]).all()  # the other head
            if place == "query":
                assert finite.sum() == q_len - 1


UNMEASURED = {  # queries and keys made of normal ones: their factors, dtype and scale; scores are of ordinary size
    "squares overflow": (1e-36, lambda key: key * 1e36, "float32", None),
    "means overflow": (1e-37, lambda key: (np.abs(key) + 1) * 1e37, "float32", None),
    "the largest": (1e-38, lambda key: np.clip(key, -1, 1) * 3e38, "bfloat16", None),
    "squares overflow float16": (1e-4, lambda key: np.clip(key * 3e4, -65000, 65000), "float16", None),
    "squares vanish": (
        1e6,
        lambda key: (np.arange(1100)[:, None] < 200) * np.eye(4)[0] * 1e-23 + key * 0,
        "float32",
        6e18,
    ),
}


@pytest.mark.parametrize("q_len", [1, 16, 17, 1100])
@pytest.mark.parametrize("keys", UNMEASURED)
def test_keys_that_cannot_be_measured_are_attended_to_whole(keys: str, q_len: int) -> None:
    factor, of_normal, dtype, scale = UNMEASURED[keys]
    sizes = Sizes(1, 2, 1, (q_len, 1100), 4)
    case = Case(sizes, "causal", None, None, None, None, False, seed=1, scaling=scale)
    query, key = (case.arrays[name] / case.arrays[name].std() for name in ("query", "key"))
    query = np.abs(query) * np.eye(4)[0] if scale else query
    case = case.with_arrays(query=query * factor, key=of_normal(key), slopes=np.asarray([0.5, 0.02]))
    answer = case.exact(dtype).output_without(UNIT_ROUNDOFF[dtype])
    assert_within(attend(case, dtype), answer)
    query, key, value = (MLX.array(case.arrays[name], dtype) for name in ("query", "key", "value"))
    cache = KVCache()
    cache.update_and_fetch(key, value)
    assert_within(MLX.numpy(cache.attend(query, MLX.array(case.arrays["slopes"]), scale=scale)), answer)


# --- The plan ------------------------------------------------------------------------------------------------------


@given(case=cases(), tiling=TILINGS, tolerance=st.sampled_from([0.0, 2.0**-24]))
def test_each_query_is_in_one_job(case: Case, tiling: Tiling, tolerance: float) -> None:
    call, *tensors = planning(case)
    with tiling.applied():
        planned = _plan.jobs(call, *tensors, tolerance, None)
    times = np.zeros((case.sizes.batch, case.num_heads, case.sizes.lengths[0]), dtype=int)
    for job in planned:
        times[job.batch, job.heads, job.q_start : job.q_start + job.tiles * job.rows] += 1
        assert job.kv_start >= 0
        assert job.kv_start + (job.tiles - 1) * job.rows + job.kv_len <= case.sizes.lengths[1]
    assert np.all(times == 1)


def test_horizons_save_work() -> None:
    slopes = alibi_core.slopes(8)
    query, key = (mx.array(np.random.default_rng(n).standard_normal((1, 8, 4096, 8)), mx.float32) for n in (1, 2))
    call = AttentionCall.check(query, key, key, mx.array(slopes), xp=mx)
    by_head = np.zeros(8)
    for job in _plan.jobs(call, query, key, key, 2.0**-24, None):
        by_head[job.heads] += job.tiles * job.rows * job.kv_len
    # Twice the norms' product, and the logarithm of what is left out: 36 / slope tokens or so for such data.
    for head in range(5):
        assert by_head[head] <= 4096 * (45 / slopes[head] + 64)
    assert by_head[0] < by_head[4] < by_head[7] <= 4096 * 4096 / 2 * 1.1


def test_a_tolerance_of_zero_evaluates_nothing() -> None:
    query, key, value = (mx.random.normal((1, 2, 1100, 4)) for _ in range(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, "eval", lambda *arrays: pytest.fail("evaluated"))
        result = attention(query, key, value, tolerance=0.0)
    np.testing.assert_allclose(
        np.asarray(result), np.asarray(attention(query, key, value, implementation="dense")), atol=2e-6
    )


# --- Memory --------------------------------------------------------------------------------------------------------


def peak(compute: Callable[[], Any]) -> int:
    """Return the most memory that a call takes beyond what there is, in bytes."""
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(compute())
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("form", [{}, {"is_causal": False}])
def test_memory_grows_with_the_length_alone(form: dict[str, Any], compiled: bool) -> None:
    wrap = mx.compile if compiled else lambda function: function
    rows = {}
    for length in (1024, 2048):
        tensors = [mx.random.normal((1, 2, length, 4)) for _ in range(3)]
        mx.eval(tensors)
        both = wrap(mx.value_and_grad(lambda *x: attention(*x, **form).sum(), argnums=(0, 1, 2)))
        mx.eval(both(*tensors))  # what is made only once
        rows[length] = peak(lambda: both(*tensors))  # noqa: B023
    scores = 4 * 2 * 2048**2
    assert rows[2048] < scores  # of which attention that held them would hold several times as many
    assert rows[2048] < 2.5 * rows[1024]


def planning(case: Case) -> tuple[AttentionCall, Any, Any, Any]:
    """Return what jobs are made of."""
    query, key, value = (MLX.array(case.arrays[name], "float32") for name in ("query", "key", "value"))
    arguments = {name: TILED._place(value) for name, value in case.arguments.items()}
    call = AttentionCall.check(query, key, value, MLX.array(case.arrays["slopes"], "float32"), **arguments, xp=mx)
    return call, query, key, value
