"""The horizon and the tile plan: nothing that weighs more than the tolerance is left out, and little else is kept."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import alibi_core
from alibi_core import horizon
from alibi_core.backend import AttentionCall
from alibi_core.backend.horizon import Measured, Tiling, by_block, key_ranges, nearest_keys, needed_jobs
from alibi_core.conformance.testing import DATA, PER_BATCH, Attention, Case, Sizes, cases
from tests.support.frameworks import FRAMEWORKS, JAX, NUMPY, STRICT, TORCH, Framework
from tests.support.tiles import hostile, plain

ENDLESS = 2**30  # tokens: what the plan says for "as far as there are keys"
BLOCKS = (1, 3, 16, 64)
TOLERANCES = (0.4, 0.01, 2.0**-8, 2.0**-24, 5e-324, 0.0)
FIELDS = ("first", "stop", "past", "future")


# The horizon


def far_mass(slope: float, score_range: float, distance: float, sides: int) -> float:
    """Return the largest weight of all keys from ``distance`` on, beside 1 for the own key, which scores lowest."""
    # A sum of 60 e-folds; the rest is below 2**-80 of it.
    keys = np.arange(distance, distance + math.ceil(60 / slope), dtype=np.float64)
    return sides * float(np.exp(score_range - slope * keys).sum())


@given(
    slope=st.floats(2.0**-12, 16, width=32),
    score_range=st.floats(-30, 300, width=32),
    tolerance=st.sampled_from([0.5, 0.4, 0.01, 2.0**-24, 2.0**-53]) | st.floats(1e-30, 0.5),
    is_causal=st.booleans(),
)
@example(slope=2.0**-16, score_range=0.0, tolerance=2.0**-53, is_causal=False)
@example(slope=2.0**-16, score_range=100.0, tolerance=0.01, is_causal=True)
def test_horizon_is_the_nearest_distance_that_holds(
    slope: float, score_range: float, tolerance: float, is_causal: bool
) -> None:
    sides = 1 if is_causal else 2
    (tokens,) = horizon(np.float32([slope]), score_range, tolerance=tolerance, is_causal=is_causal)
    assert tokens.dtype == np.float32
    assert tokens >= 0
    distance = float(tokens)
    assert distance.is_integer()
    # Four float32 operations on terms of this size; the slope is exact.
    rounding = 2.0**-22 * (abs(score_range) + abs(math.log(tolerance)) + abs(math.log(-math.expm1(-slope))) + 1)
    assert far_mass(slope, score_range, distance, sides) <= tolerance * (1 + rounding)
    # The library adds 2**-20 of the distance, for rounding.
    if distance > 0:
        margin = rounding + slope * (distance - 1) * 2.0**-20
        assert far_mass(slope, score_range, distance - 1, sides) > tolerance * math.exp(-margin)


@given(
    law=st.sampled_from(["log", "sqrt"]),
    slope=st.floats(0.25, 8),
    score_range=st.floats(-5, 20),
    tolerance=st.sampled_from([0.4, 0.01, 2.0**-24]),
)
@example(law="sqrt", slope=0.5, score_range=14.0, tolerance=2.0**-24)
@example(law="log", slope=2.0, score_range=0.0, tolerance=0.01)
def test_horizon_of_other_laws_is_at_most_one_key_too_far(
    law: str, slope: float, score_range: float, tolerance: float
) -> None:
    (distance,) = horizon(np.float64([slope]), score_range, tolerance=tolerance, law=law)
    if law == "log" and (slope <= 1 or not math.isfinite(distance)):
        assert math.isinf(distance)  # the sum is infinite, or the distance beyond all texts
        return

    def mass(first: float) -> float:
        """Return the weight of keys from ``first`` on: a sum, and an integral for the rest."""
        keys = first + np.arange(2.0**18)
        x = keys[-1] + 0.5
        if law == "log":
            rest = (1 + x) ** (1 - slope) / (slope - 1)
        else:
            rest = np.exp(-slope * x**0.5) * 2 * (1 + slope * x**0.5) / slope**2
        penalty = np.log1p(keys) if law == "log" else np.sqrt(keys)
        return float(np.exp(score_range) * (np.exp(-slope * penalty).sum() + rest))

    assert mass(distance) <= tolerance
    if distance > 2:
        margin = distance * 2.0**-19 * (2 + math.log1p(distance))  # what the library adds for rounding's sake
        assert mass(distance - 2 - margin) > tolerance


def test_horizon_defaults_to_the_rounding_of_float32_and_to_causal() -> None:
    slopes = np.exp2(-np.arange(1.0, 9)).astype(np.float32)
    expected = horizon(slopes, 14.0, tolerance=2.0**-24, is_causal=True)
    assert np.array_equal(horizon(slopes, 14.0), expected)
    assert np.array_equal(horizon(8, 14.0), expected)
    assert np.all(horizon(slopes, 14.0, is_causal=False) > expected)


def test_horizon_is_infinite_where_the_bias_does_not_fall_or_nothing_may_be_lost() -> None:
    slopes = np.float32([0.0, -0.0, -0.5, 1.0])
    assert np.isposinf(horizon(slopes, 3.0)).tolist() == [True, True, True, False]
    assert np.isposinf(horizon(slopes, -1e9)).tolist() == [True, True, True, False]
    assert np.all(np.isposinf(horizon(slopes, 3.0, tolerance=0)))
    assert horizon(slopes[None], np.float32([[1.0], [2.0]]), tolerance=0.0).shape == (2, 4)
    smallest = 5e-324  # its half is 0
    assert np.isposinf(horizon(slopes, 3.0, tolerance=smallest, is_causal=False)).all()


def test_horizon_is_nowhere_where_all_may_be_lost() -> None:
    assert horizon(np.float32([1.0, 4.0]), 0.0, tolerance=10.0).tolist() == [0, 0]
    assert horizon(np.float32([1.0]), 0.0, tolerance=1.0).tolist() == [1.0]  # 1.58 of the own key's weight, from it on
    assert not np.signbit(horizon(np.float32([1.0]), -50.0)).any()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_horizon_takes_arrays_of_any_library(framework: Framework) -> None:
    rng = np.random.default_rng(3)
    slopes = rng.choice(np.float32([0.0, 2.0**-16, 0.0625, 0.3, 1.0, -1.0]), (2, 6))
    ranges = rng.uniform(0, 40, (3, 1, 6)).astype(np.float32)
    for arguments in ((slopes, ranges), (slopes, 7.5), (slopes[0], ranges), (6, ranges)):
        for options in ({}, {"tolerance": 0.01, "is_causal": False}):
            expected = horizon(*arguments, **options)
            actual = horizon(*framework.placed(arguments), **options)
            assert type(actual) is type(framework.array(slopes))
            assert "float32" in str(actual.dtype)
            actual = framework.numpy(actual)
            assert actual.shape == expected.shape
            finite = np.isfinite(expected)
            assert np.array_equal(np.isposinf(actual), ~finite)
            # Libraries round logarithms differently: of what is 2**-22 of a distance, ceil makes a token at most.
            assert np.all(np.abs(actual[finite] - expected[finite]) <= 1 + 2.0**-22 * expected[finite])


@pytest.mark.parametrize("framework", [NUMPY, STRICT, TORCH])
def test_horizon_of_float64_slopes_is_of_float64(framework: Framework) -> None:
    pytest.importorskip(framework.module)
    tokens = horizon(framework.array(np.float64([2.0**-16, 0.3]), "float64"), 14.0, tolerance=1e-3)
    assert "float64" in str(tokens.dtype)
    exact = [(14 + math.log(1e3) - math.log(-math.expm1(-s))) / s for s in (2.0**-16, 0.3)]
    assert all(e <= t <= e * (1 + 2.0**-19) + 1 for t, e in zip(framework.numpy(tokens), exact, strict=True))


# The plan, against weights in float64


@dataclass(frozen=True)
class Scene:
    """One attention problem, and what plans are made of and judged by."""

    case: Case

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments of ``AttentionCall.check`` but for query, key and value."""
        slopes = self.case.arrays["slopes"].astype(np.float32)
        return {"slopes": slopes, "is_causal": True, "scale": self.case.scale} | self.case.arguments

    @cached_property
    def exact(self) -> Attention:
        return self.case.exact("float32")

    @cached_property
    def positions(self) -> np.ndarray:
        """Positions of queries, ``[batch, q_len]``."""
        q_len, kv_len = self.case.sizes.lengths
        offset = self.arguments.get("q_offset", kv_len - q_len)
        return np.broadcast_to(offset, self.case.sizes.batch)[:, None] + np.arange(self.case.sizes.lengths[0])

    @cached_property
    def nearest(self) -> np.ndarray:
        """Distance of the nearest key that each query sees, ``[batch, heads, q_len]``, -1 where there is none."""
        seen, keys = np.isfinite(self.exact.bias), np.arange(self.case.sizes.lengths[1])
        found = np.where(seen, np.abs(keys - self.positions[:, None, :, None]), 2**62).min(axis=-1)
        return np.where(seen.any(axis=-1), found, -1)

    @cached_property
    def measured(self) -> dict[str, np.ndarray]:
        """The measurements of a backend in float32: norms of queries and keys, and own scores.

        A vector may be subtracted from all keys before.
        """
        query, key = (self.case.arrays[name].astype(np.float32) for name in ("query", "key"))
        anywhere = 3 * np.random.default_rng(self.case.seed).standard_normal(key[:, :, :1].shape)
        key = key - np.float32((0 * anywhere, key.mean(axis=2, keepdims=True), anywhere)[self.case.seed % 3])
        keys, scale = key.repeat(self.case.sizes.group, axis=1), np.float32(self.case.scale)
        own = np.full(query.shape[:3], 1e30, np.float32)  # what stands where there is no own key must not matter
        for b, i in np.ndindex(*self.positions.shape):
            if 0 <= (p := self.positions[b, i]) < key.shape[2]:
                own[b, :, i] = (query[b, :, i] * keys[b, :, p]).sum(axis=-1) * scale
        norms = [np.sqrt((x * x).sum(axis=-1)) for x in (query, key)]
        return {"q_norms": norms[0] * abs(scale), "own_scores": own, "key_norms": norms[1]}

    def plan(
        self,
        q_block: int,
        kv_block: int,
        tolerance: float,
        framework: Framework = NUMPY,
        *,
        measured: dict[str, np.ndarray] | None = None,
        compiled: bool = False,
    ) -> dict[str, np.ndarray]:
        """Return the fields of the plan, from what a backend would measure (or from what is given)."""
        arguments = {name: x for name, x in self.arguments.items() if isinstance(x, np.ndarray | tuple)}
        constants = {name: x for name, x in self.arguments.items() if name not in arguments}
        measured = measured or self.measured

        def fields(query: Any, key: Any, *arrays: Any) -> tuple[Any, ...]:
            named = dict(zip([*measured, *arguments], arrays, strict=True))
            norms = [named.pop(name) for name in measured]
            call = AttentionCall.check(query, key, key, tolerance=tolerance, **named, **constants)
            return fields_of(call, norms, q_block, kv_block)

        arrays = (self.case.arrays["query"], self.case.arrays["key"], *measured.values(), *arguments.values())
        function = framework.compiled(fields) if compiled else fields
        return values(function(*framework.placed(arrays)), framework)


def fields_of(call: AttentionCall, measured: Any, q_block: int, kv_block: int) -> tuple[Any, ...]:
    q_norms, own_scores, key_norms = measured
    key_norms = call.xp.max(by_block(call.xp, key_norms, kv_block), axis=-1)
    tokens = Measured(q_block, kv_block, q_norms, own_scores, key_norms, centre=None, lower=None)
    ranges = key_ranges(call, tokens.bounds(call, nearest_keys(call)))
    assert ranges.q_block == q_block
    return ranges[1:]


def values(fields: tuple[Any, ...], framework: Framework = NUMPY) -> dict[str, np.ndarray]:
    """Return the fields of a plan by name, having checked that they are int32."""
    assert all("int32" in str(x.dtype) for x in fields)
    return {name: framework.numpy(x).astype(np.int64) for name, x in zip(FIELDS, fields, strict=True)}


def kept(scene: Scene, q_block: int, plan: dict[str, np.ndarray]) -> np.ndarray:
    """Return which keys a plan leaves each query, ``[batch, heads, q_len, kv_len]``."""
    q_len, kv_len = scene.case.sizes.lengths
    assert np.all((plan["first"] >= 0) & (plan["first"] <= plan["stop"]) & (plan["stop"] <= kv_len))
    assert np.all(plan["past"] >= 0)
    blocks = np.arange(q_len) // q_block
    first, stop, past, future = (plan[name][..., blocks, None] for name in FIELDS)  # [batch, heads, q_len, 1]
    p, j = scene.positions[:, None, :, None], np.arange(kv_len)
    return (first <= j) & (j < stop) & (p - past < j) & (j < p + future)


def assert_nothing_heavy_is_lost(scene: Scene, q_block: int, kv_block: int, tolerance: float) -> None:
    keeps = kept(scene, q_block, scene.plan(q_block, kv_block, tolerance))
    lost = np.where(keeps, 0, scene.exact.weights).sum(axis=-1)
    # The plan allows for the rounding of scores. Left are a running sum over blocks, and logarithms that matter only
    # where they cancel to less than -100 or so.
    slack = 2.0**-22 * (scene.case.sizes.lengths[1] / kv_block + 128)
    allowed = min(tolerance, 0.5) * (1 + slack)
    assert lost.max() <= allowed, f"lost {lost.max():.4g} of {allowed:.4g}, q_block {q_block}, kv_block {kv_block}"


@st.composite
def scenes(draw: st.DrawFn, heads: tuple[tuple[int, int, int], ...] = ((1, 1, 2), (2, 1, 1), (1, 2, 2))) -> Scene:
    """Draw a problem of several blocks, of some batch, key/value heads and query heads a key/value head."""
    lengths = draw(st.sampled_from([(70, 70), (40, 300), (130, 130), (101, 37), (1, 290), (1, 1)]))
    case = dataclasses.replace(
        draw(cases(sizes=Sizes(*draw(st.sampled_from(heads)), lengths, 5))),
        q_offset=draw(st.none() | st.integers(-30, 320) | st.sampled_from([PER_BATCH, 1_000_000, 10**9])),
        window_size=draw(st.none() | st.sampled_from([0, 5, 40, 2**40])),
        scaling=draw(st.sampled_from([None, None, -0.7, 0.0])),
    )
    data = draw(st.sampled_from(["normal", *DATA]))
    case = case if data == "normal" else hostile(case, data, draw(st.sampled_from([1, 1, -1])))
    if draw(st.integers(0, 3)) == 0:  # what is near is hidden, so that what is far weighs all that it can
        relative = np.arange(lengths[1]) - Scene(case).positions[:, None, :, None]
        mask = (relative == 0) | (np.abs(relative) >= draw(st.integers(2, 100)))
        case = case.with_arguments(case.form, case.arguments | {"mask": mask})
    return Scene(case)


def plain_scene(sizes: Sizes, form: str = "causal", slope: float | None = None, **arguments: Any) -> Scene:
    """Return a problem of full rows, whose keys are measured as they are."""
    case = plain(sizes, form, **arguments)
    slopes = case.arrays["slopes"] if slope is None else np.full(case.num_heads, slope)
    return Scene(case.with_arrays(slopes=slopes))


ONE_QUERY = Sizes(1, 1, 3, (1, 300), 5)


@settings(max_examples=5 * settings.default.max_examples)
@given(scene=scenes(), tolerances=st.permutations(TOLERANCES))
# Far from all keys distances round to many tokens in float32, and only their differences count.
@example(plain_scene(Sizes(1, 1, 2, (70, 70), 5), q_offset=10**9), TOLERANCES)
@example(plain_scene(ONE_QUERY, slope=0.02, q_offset=300), TOLERANCES)
@example(plain_scene(ONE_QUERY, slope=0.3, q_offset=10**8), TOLERANCES)
@example(plain_scene(ONE_QUERY, "symmetric", slope=3.0, q_offset=-(2**31) + 400), TOLERANCES)
def test_plan_loses_no_more_than_the_tolerance(scene: Scene, tolerances: list[float]) -> None:
    for index, (q_block, kv_block) in enumerate((q, kv) for q in BLOCKS for kv in BLOCKS):
        assert_nothing_heavy_is_lost(scene, q_block, kv_block, tolerances[index % len(tolerances)])


@pytest.mark.parametrize("form", ["causal", "symmetric"])
@pytest.mark.parametrize("kv_block", [1, 16, 100])
def test_plan_allows_for_the_rounding_of_what_is_measured(form: str, kv_block: int) -> None:
    # All scores are 1e7, and each number measured is off by what a float32 sum may be, to the worse side.
    one = np.broadcast_to(np.eye(5)[0], (1, 1, 100, 5))
    case = Case(Sizes(1, 1, 1, (100, 100), 5), form, scaling=1.0)
    scene = Scene(case.with_arrays(query=one, key=1e7 * one, slopes=np.ones(1)))
    norm, product = 1 - (5 / 2 + 2) * 2.0**-24, 1 + 5 * 2.0**-24
    factors = {"q_norms": norm, "key_norms": norm, "own_scores": product}
    measured = {name: (x * np.float64(factors[name])).astype(np.float32) for name, x in scene.measured.items()}
    lost = np.where(kept(scene, 4, scene.plan(4, kv_block, 0.01, measured=measured)), 0, scene.exact.weights)
    assert lost.sum(axis=-1).max() <= 0.01


@pytest.mark.parametrize("tolerance", [0.5, 1.0, 7.0])
def test_tolerance_of_the_plan_is_at_most_a_half(tolerance: float) -> None:
    scene = plain_scene(Sizes(1, 2, 2, (70, 70), 5))
    plan = scene.plan(16, 16, tolerance)
    np.testing.assert_equal(plan, scene.plan(16, 16, 0.5))
    assert kept(scene, 16, plan).diagonal(axis1=2, axis2=3).all()


# The plan is tight


@pytest.mark.parametrize("tolerance", [0.4, 0.01, 2.0**-24])
@pytest.mark.parametrize("slope", [0.1, 0.5, 1.0, 2.5])
@pytest.mark.parametrize("size", [0.0, 1.0, 6.0, 7.3])
@pytest.mark.parametrize("is_causal", [True, False])
def test_no_token_can_be_spared_in_the_worst_case(tolerance: float, slope: float, size: float, is_causal: bool) -> None:
    # One query, which scores -size with its own key and +size with all the others.
    kv_len, p = 1201, 1200 if is_causal else 600
    key = np.full((1, 1, kv_len, 1), size, np.float32)
    key[:, :, p] = -size
    query, slopes = np.ones((1, 1, 1, 1), np.float32), np.float32([slope])
    sides = 1 if is_causal else 2
    arguments = {"is_causal": is_causal, "q_offset": p, "scale": 1.0}
    call = AttentionCall.check(query, key, key, slopes, tolerance=tolerance, **arguments)
    measured = np.ones((1, 1, 1), np.float32), np.float32([[[-size]]]), np.full((1, 1, kv_len), size, np.float32)
    plan = {name: int(x[0, 0, 0]) for name, x in values(fields_of(call, measured, 1, kv_len)).items()}

    def mass(distance: int) -> float:
        """The weight of all keys from a distance on, as a multiple of the own key's."""
        return sum(math.exp(2 * size - float(slopes[0]) * abs(j - p)) for j in range(kv_len) if abs(j - p) >= distance)

    assert plan["first"] == max(0, p - plan["past"] + 1)
    assert plan["future"] == (1 if is_causal else plan["past"])
    assert plan["stop"] == min(kv_len, p + plan["future"])
    margin = 2.0**-18 * (2 * size + 60) + sides * math.exp(2 * size - slope * (kv_len // 2)) / tolerance
    assert mass(plan["past"]) <= tolerance * (1 + margin)
    assert mass(plan["past"] - 1) > tolerance * (1 - margin)


def test_an_outlier_widens_no_more_than_it_must() -> None:
    case = plain_scene(Sizes(1, 1, 1, (300, 300), 5), slope=0.5).case
    query, key = (case.arrays[name] / case.arrays[name].std() for name in ("query", "key"))
    key[:, :, 40] *= 1000 / np.linalg.norm(key[:, :, 40])
    scene = Scene(case.with_arrays(query=query, key=key))
    pairs = kept(scene, 4, scene.plan(4, 4, 0.01)) & np.isfinite(scene.exact.bias)
    assert pairs[:, :, 44:, 40:44].all()
    assert not pairs[:, :, 250:, :40].all(axis=-1).any()
    assert_nothing_heavy_is_lost(scene, 4, 4, 0.01)


@pytest.mark.parametrize("tolerance", [0.3, 0.01, 2.0**-24])
@pytest.mark.parametrize("q_len", [300, 40])
def test_plan_leaves_out_what_gates_make_negligible(tolerance: float, q_len: int) -> None:
    case = plain_scene(Sizes(1, 1, 2, (q_len, 300), 5)).case
    gates = np.random.default_rng(0).choice(
        np.float32([0, -0.01, -0.1, -3, -np.inf]), (1, 2, 300), p=[0.3, 0.4, 0.24, 0.05, 0.01]
    )
    case = case.with_arrays(slopes=np.zeros(2)).with_arguments("causal", {"log_gates": gates})
    tensors = (case.arrays[name] for name in ("query", "key", "value"))
    weights = alibi_core.attention(*tensors, log_gates=gates.astype(np.float64), return_weights=True, scale=case.scale)[
        1
    ]
    for q_block, kv_block in ((1, 1), (4, 16), (16, 3), (64, 64)):
        keeps = kept(Scene(case), q_block, Scene(case).plan(q_block, kv_block, tolerance))
        assert np.where(keeps, 0, weights).sum(axis=-1).max() <= tolerance * (1 + 2.0**-16)
        assert q_block > 16 or keeps.mean() < 0.2


# The nearest keys, and tiles


@given(case=cases())
@example(case=Case(Sizes(2, 1, 2, (5, 11), 3), "causal", -3, 2, None, None, False, 0))
def test_nearest_keys_are_the_nearest(case: Case) -> None:
    tensors = (case.arrays[name] for name in ("query", "key", "value", "slopes"))
    call, expected = AttentionCall.check(*tensors, **case.arguments), Scene(case).nearest
    for part_elements in (None, 40):
        nearest = nearest_keys(call, part_elements)
        assert nearest.dtype == np.int32
        assert nearest.shape[-1] == case.sizes.lengths[0]
        assert np.array_equal(np.broadcast_to(nearest, expected.shape), expected)


# Every library


def varied(seed: int, form: str = "causal", lengths: tuple[int, int] = (70, 70), **options: Any) -> Scene:
    return Scene(Case(Sizes(2, 1, 2, lengths, 5), form, slopes_per_batch=True, seed=seed, **options))


LIBRARY_SCENES = [
    varied(1, data="outlier"),
    varied(2, "symmetric", (40, 101), data="sinks", q_offset=PER_BATCH, window_size=40),
    Scene(hostile(varied(3, "asymmetric", packing="pair", masking="by head").case, "stripes", -1)),
    varied(4, "clamped", (33, 70), data="shifted", q_offset=5, window_size=2**40, masking="by key"),
    varied(5, data="no_queries", q_offset=70, packing="one row", window_size=5),
    varied(6, "symmetric", data="outlier"),  # where blocks know more than tokens, on both sides
]


def assert_same_plan(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], kv_block: int) -> None:
    """Assert that plans are one, but for what a last bit may do: a token, and where a block begins."""
    for name in FIELDS:
        assert actual[name].shape == expected[name].shape
        unit = kv_block if name in ("first", "stop") else 1
        assert np.all(np.abs(actual[name] - expected[name]) <= unit * (expected[name] < ENDLESS)), name
    differing = sum(int((actual[name] != expected[name]).sum()) for name in FIELDS)
    assert differing <= 0.02 * sum(x.size for x in expected.values())


# Operation by operation, JAX takes seconds over each new shape; it has a plan compiled.
@pytest.mark.parametrize("framework", [x for x in FRAMEWORKS if x.id != "jax"])
@pytest.mark.parametrize("scene", LIBRARY_SCENES, ids=range(len(LIBRARY_SCENES)))
def test_plan_is_the_same_in_every_library(framework: Framework, scene: Scene) -> None:
    assert_same_plan(scene.plan(16, 16, 0.01, framework), scene.plan(16, 16, 0.01), 16)
    tensors = [framework.array(scene.case.arrays[name]) for name in ("query", "key", "key")]
    nearest = framework.numpy(nearest_keys(AttentionCall.check(*tensors, **framework.placed(scene.arguments))))
    assert np.array_equal(np.broadcast_to(nearest, scene.nearest.shape), scene.nearest)


# MLX's backend makes no plan in a compiled function.
@pytest.mark.parametrize("index", [1, 2])
def test_plan_compiles(index: int) -> None:
    pytest.importorskip("jax")
    scene = LIBRARY_SCENES[index]
    assert_same_plan(scene.plan(16, 16, 0.01, JAX, compiled=True), scene.plan(16, 16, 0.01), 16)


def test_plan_reads_no_value() -> None:
    torch = pytest.importorskip("torch")
    for scene in LIBRARY_SCENES:

        def empty(x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple(map(empty, x))
            return torch.empty(x.shape, dtype=getattr(torch, str(x.dtype)), device="meta")

        arrays = {name: empty(x) if isinstance(x, np.ndarray | tuple) else x for name, x in scene.arguments.items()}
        query, key = (empty(scene.case.arrays[name].astype(np.float32)) for name in ("query", "key"))
        call = AttentionCall.check(query, key, key, tolerance=0.01, **arrays)
        for field in fields_of(call, [empty(x) for x in scene.measured.values()], 16, 16):
            assert field.shape == (*query.shape[:2], -(-query.shape[2] // 16))
            assert field.dtype == torch.int32
            assert field.device.type == "meta"
        tile = call.tile(batch=slice(0, 1), heads=slice(0, 1), queries=slice(3, 9), keys=slice(2, 30))
        assert tile.bias()[0].shape[-2:] == (6, 28)
        slopes = arrays["slopes"]
        assert horizon(slopes, torch.ones_like(slopes)).shape == slopes.shape


@pytest.mark.parametrize(
    "arguments",
    [
        {"is_causal": False},
        {"q_offset": np.asarray([3, -5])},
        {"mask": np.arange(70)[None, None, None] % 9 > np.arange(2)[:, None, None, None]},
        {"segment_ids": tuple(np.arange(140).reshape(2, 70) // 50 for _ in range(2))},
    ],
    ids=lambda x: next(iter(x)),
)
def test_whole_plans_need_no_more_than_the_array_standard(arguments: dict[str, Any]) -> None:
    query, key = (np.random.default_rng(n).standard_normal((2, n, 70, 8)).astype(np.float32) for n in (4, 2))
    tensors, tiling = (query, key, np.float32([0.01, 0.3, 3, 1])), Tiling(16, 16, rows=(4, 16), least_decay=0.0)
    plans = []
    for framework in (NUMPY, STRICT):
        query, key, slopes = framework.placed(tensors)
        call = AttentionCall.check(query, key, key, slopes, **framework.placed(arguments))
        plans.append(list(needed_jobs(call, query, key, tiling)))
    assert plans[0] == plans[1]
