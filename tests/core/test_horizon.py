"""The horizon and the tile plan: nothing that weighs more than the tolerance is left out, and little else is kept."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from alibi_core import AttentionCall, KeyRanges, ScoreBounds, horizon, key_ranges
from alibi_core.conformance._cases.case import Case, Sizes, cases
from alibi_core.conformance._cases.oracle import Attention, Rules, penalties
from tests.contracts.test_bad_input import NAN, Bad, bools, floats, ints, refusals, refuse
from tests.support.frameworks import COMPILERS, DASK, FRAMEWORKS, JAX, MLX, NUMPY, STRICT, TORCH, Framework
from tests.support.full import once_in_jax, without_jax

HEAD_DIM = 5
SCALE = HEAD_DIM**-0.5
ENDLESS = 2**30  # tokens: what the plan says for "as far as there are keys"
BLOCKS = (1, 3, 16, 64)
TOLERANCES = (0.4, 0.01, 2.0**-8, 2.0**-24, 0.0)
FORMS = ("causal", "symmetric", "asymmetric", "clamped")
DATA = ("normal", "aligned", "outlier", "sinks", "equal keys", "no queries", "no keys", "shifted")
FIELDS = ("first", "stop", "past", "future")


# The horizon


def far_mass(slope: float, score_range: float, distance: float, sides: int) -> float:
    """What keys from ``distance`` on weigh at most, the own key being 1: every one of them scores higher by the range.

    A sum of 60 e-folds, one key at a time; the rest is below 2**-80 of it.
    """
    keys = np.arange(distance, distance + math.ceil(60 / slope), dtype=np.float64)
    return sides * float(np.exp(score_range - slope * keys).sum())


@given(
    slope=st.floats(2.0**-12, 16, width=32),
    score_range=st.floats(-30, 300, width=32),
    tolerance=st.sampled_from([0.5, 0.4, 0.01, 2.0**-24, 2.0**-53]) | st.floats(1e-30, 0.5),
    is_causal=st.booleans(),
)
@example(slope=2.0**-12, score_range=0.0, tolerance=2.0**-53, is_causal=False)
def test_horizon_is_the_nearest_distance_that_holds(
    slope: float, score_range: float, tolerance: float, is_causal: bool
) -> None:
    sides = 1 if is_causal else 2
    tokens = horizon(np.float32([slope]), score_range, tolerance=tolerance, is_causal=is_causal)
    assert tokens.dtype == np.float32
    distance = float(tokens[0])
    assert distance >= 0
    assert distance.is_integer()
    # Four float32 operations on terms of this size, of which the slope is exact.
    rounding = 2.0**-22 * (abs(score_range) + abs(math.log(tolerance)) + abs(math.log(-math.expm1(-slope))) + 1)
    assert far_mass(slope, score_range, distance, sides) <= tolerance * (1 + rounding)
    # What the library adds for rounding's sake: 2**-20 of the distance.
    if distance > 0:
        margin = rounding + slope * (distance - 1) * 2.0**-20
        assert far_mass(slope, score_range, distance - 1, sides) > tolerance * math.exp(-margin)


@pytest.mark.parametrize("score_range", [0.0, 14.0, 100.0])
@pytest.mark.parametrize("tolerance", [0.01, 2.0**-24, 2.0**-53])
def test_horizon_of_the_smallest_slope(score_range: float, tolerance: float) -> None:
    slope = 2.0**-16
    for sides in (1, 2):
        distance = float(horizon(np.float32([slope]), score_range, tolerance=tolerance, is_causal=sides == 1)[0])
        exact = (score_range + math.log(sides / tolerance) - math.log(-math.expm1(-slope))) / slope
        assert exact <= distance <= exact * (1 + 2.0**-19) + 1


def test_horizon_defaults_to_the_rounding_of_float32_and_to_causal() -> None:
    slopes = np.float32([0.5, 2.0**-8])
    expected = horizon(slopes, 14.0, tolerance=2.0**-24, is_causal=True)
    assert np.array_equal(horizon(slopes, 14.0), expected)
    assert np.array_equal(horizon(8, 14.0), horizon(np.exp2(-np.arange(1.0, 9)).astype(np.float32), 14.0))
    assert np.all(horizon(slopes, 14.0, is_causal=False) > expected)


def test_horizon_is_infinite_where_the_bias_does_not_fall_or_nothing_may_be_lost() -> None:
    slopes = np.float32([0.0, -0.0, -0.5, 1.0])
    assert np.isposinf(horizon(slopes, 3.0)).tolist() == [True, True, True, False]
    assert np.isposinf(horizon(slopes, -1e9)).tolist() == [True, True, True, False]
    assert np.all(np.isposinf(horizon(slopes, 3.0, tolerance=0)))
    assert horizon(slopes[None], np.float32([[1.0], [2.0]]), tolerance=0.0).shape == (2, 4)
    smallest = 5e-324  # of which a half is 0
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
    for given_slopes, given_range in ((slopes, ranges), (slopes, 7.5), (slopes[0], ranges), (6, ranges), (6, 7.5)):
        for tolerance, is_causal in ((None, True), (0.01, False)):
            options = {"tolerance": tolerance, "is_causal": is_causal}
            expected = horizon(given_slopes, given_range, **options)
            placed = framework.placed((given_slopes, given_range))
            actual = horizon(*placed, **options)
            if not any(isinstance(x, np.ndarray) for x in (given_slopes, given_range)):
                assert np.array_equal(actual, expected)  # without an array it is NumPy's
                continue
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


@pytest.mark.parametrize("framework", [p for p in COMPILERS if p.values[0] is not TORCH])
def test_horizon_compiles(framework: Framework) -> None:
    slopes, ranges = framework.array(np.float32([0.5, 0.25])), framework.array(np.float32([3.0, 9.0]))
    actual = framework.compiled(lambda s, r: horizon(s, r))(slopes, ranges)
    assert np.array_equal(framework.numpy(actual), framework.numpy(horizon(slopes, ranges)))


HORIZON = [
    Bad({"slopes": 0}, ValueError, "slopes must be at least 1, got 0|num_heads must be at least 1, got 0"),
    Bad({"slopes": True}, TypeError, "slopes must be an array, got True"),
    Bad({"slopes": [0.5]}, TypeError, r"slopes must be an array, got \[0.5\]"),
    Bad({"slopes": ints(3)}, TypeError, "slopes must have a real floating dtype, got .*int32"),
    Bad({"slopes": np.asarray(0.5, np.float32)}, ValueError, r"slopes must have shape \(..., num_heads\).*, got \(\)"),
    Bad({"slopes": floats(3) * NAN}, ValueError, "slopes must be finite", is_about_values=True),
    Bad({"slopes": floats(3) * np.inf}, ValueError, "slopes must be finite", is_about_values=True),
    Bad({"score_range": "14"}, TypeError, "score_range must be a real number, got '14'"),
    Bad({"score_range": None}, TypeError, "score_range must be a real number, got None"),
    Bad({"score_range": True}, TypeError, "score_range must be a real number, got True"),
    Bad({"score_range": [14.0]}, TypeError, "score_range must be a real number, got"),
    Bad({"score_range": ints(3)}, TypeError, "score_range must have a real floating dtype, got .*int32"),
    Bad({"score_range": bools(3)}, TypeError, "score_range must have a real floating dtype, got .*bool"),
    Bad({"score_range": NAN}, ValueError, "score_range must be finite, got nan"),
    Bad({"score_range": np.inf}, ValueError, "score_range must be finite, got inf"),
    Bad({"tolerance": -1e-3}, ValueError, "tolerance must not be negative, got -0.001"),
    Bad({"tolerance": NAN}, ValueError, "tolerance must be finite, got nan"),
    Bad({"tolerance": np.inf}, ValueError, "tolerance must be finite, got inf"),
    Bad({"tolerance": "tight"}, TypeError, "tolerance must be a real number, got 'tight'"),
    Bad({"is_causal": 1}, TypeError, "is_causal must be True or False, got 1"),
]


@pytest.mark.parametrize(("framework", "bad"), refusals(FRAMEWORKS, HORIZON))
def test_horizon_refuses(framework: Framework, bad: Bad) -> None:
    arguments = {"slopes": floats(3), "score_range": 14.0} | bad.arguments
    placed = framework.placed(arguments)
    refuse(bad, lambda: horizon(placed.pop("slopes"), placed.pop("score_range"), **placed))


def test_horizon_refuses_arrays_of_two_libraries() -> None:
    strict = pytest.importorskip("array_api_strict")
    with pytest.raises(TypeError, match="arrays must belong to one array namespace"):
        horizon(strict.asarray(floats(3)), floats(3))


# The plan, against weights in float64


@dataclass(frozen=True)
class Scene:
    """One attention problem whose keys and queries are of some kind that a bound may stumble over."""

    sizes: tuple[int, int, int]  # batch, num_kv_heads, query heads a key/value head
    lengths: tuple[int, int]
    form: str = "causal"
    data: str = "normal"
    q_offset: int | str | None = None
    window_size: int | None = None
    packing: str | None = None
    masking: str | None = None
    slopes: str = "positive"
    scale: float = SCALE
    seed: int = 0

    @property
    def heads(self) -> int:
        return self.sizes[1] * self.sizes[2]

    @property
    def score_shape(self) -> tuple[int, int, int, int]:
        return (self.sizes[0], self.heads, *self.lengths)

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """Query, key and what is subtracted from keys before they are measured, in float32."""
        rng = np.random.default_rng(self.seed)
        (batch, kv_heads, _), (q_len, kv_len) = self.sizes, self.lengths
        query = rng.standard_normal((batch, self.heads, q_len, HEAD_DIM))
        key = rng.standard_normal((batch, kv_heads, kv_len, HEAD_DIM))
        if self.data == "aligned":  # so that scores are what their bounds say
            one = np.eye(HEAD_DIM)[0]
            query = one * rng.choice([0.5, 2.0, 3.0], (*query.shape[:-1], 1))
            key = one * rng.choice([-4.0, -0.5, 0.0, 0.5, 4.0], (*key.shape[:-1], 1))
        elif self.data == "outlier":
            at = rng.integers(0, kv_len, key.shape[:2])[..., None, None]
            key = np.where(np.arange(kv_len)[:, None] == at, key * 10.0 ** rng.uniform(1, 4), key)
        elif self.data == "sinks":
            one = np.eye(HEAD_DIM)[1] * 4
            query = query + one
            key[:, :, : rng.integers(1, 5)] = one
        elif self.data == "equal keys":
            key = key[:, :, :1] + 0 * key
        elif self.data == "no queries":
            query = query * (rng.random((*query.shape[:-1], 1)) < 0.3)
        elif self.data == "no keys":
            key = key * (rng.random((*key.shape[:-1], 1)) < rng.choice([0.0, 0.5]))
        elif self.data == "shifted":
            key = key + rng.standard_normal(HEAD_DIM) * 100
        centre = {0: np.zeros_like(key[:, :, :1]), 1: key.mean(axis=2, keepdims=True)}
        centre |= {2: rng.standard_normal(key[:, :, :1].shape) * 3}
        arrays = {"query": query, "key": key, "centre": centre[int(rng.integers(3))]}
        return {name: x.astype(np.float32) for name, x in arrays.items()}

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments of ``AttentionCall.check`` but for the tensors."""
        rng = np.random.default_rng(self.seed + 1)
        batch, heads, q_len, kv_len = self.score_shape
        arguments: dict[str, Any] = {"is_causal": self.form == "causal", "scale": self.scale}
        some = np.float32({"mixed": [0.0, 2.0**-16, -0.05, 0.3]}.get(self.slopes, [0.02, 0.0625, 0.3, 0.5, 1.0, 3.0]))
        shape = (batch, heads) if rng.random() < 0.5 else (heads,)
        arguments["slopes"] = rng.choice(some, shape)
        if self.form in ("asymmetric", "clamped"):
            arguments["future_slopes"] = rng.choice(some, shape) * np.float32(self.form == "asymmetric")
        arguments["allow_negative_slopes"] = self.slopes == "mixed"
        offset = kv_len - q_len if self.q_offset is None else self.q_offset
        if self.q_offset == "per batch":
            offset = rng.integers(-q_len - 5, kv_len + 5, batch, np.int32)
        elif self.q_offset == "array":
            offset = np.asarray(rng.integers(-5, kv_len), np.int32)
        arguments["q_offset"] = offset
        arguments["window_size"] = self.window_size
        if self.packing is not None:
            ids = rng.integers(0, 5, (batch, q_len + kv_len), np.int32)
            ids = ids if self.packing == "unsorted" else np.sort(ids, axis=-1)
            ids = ids[0] if self.packing == "one row" else ids
            q_ids, kv_ids = np.sort(ids[..., ::2], axis=-1), ids
            q_ids = (
                ids[..., :q_len] if self.packing == "unsorted" else ids[..., :: max(1, kv_len // q_len)][..., :q_len]
            )
            arguments["segment_ids"] = q_ids, kv_ids[..., :kv_len]
        if self.masking is not None:
            shapes = {"by head": (1, heads, q_len, kv_len), "by key": (batch, 1, 1, kv_len), "full": self.score_shape}
            shape = shapes.get(self.masking, (batch, 1, q_len, kv_len))
            arguments["mask"] = rng.random(shape) < rng.choice([0.03, 0.5, 0.95])
            if self.masking == "near":  # what is near is hidden, so that what is far weighs all that it can
                relative = np.arange(kv_len) - np.arange(q_len)[:, None] - np.reshape(offset, (-1, 1, 1, 1))
                arguments["mask"] = (relative == 0) | (np.abs(relative) >= rng.integers(2, 100))
        return {name: x for name, x in arguments.items() if x is not None}

    @cached_property
    def bias(self) -> np.ndarray:
        arguments = dict(self.arguments)
        del arguments["allow_negative_slopes"], arguments["scale"]
        q_ids, kv_ids = arguments.pop("segment_ids", (None, None))
        return penalties(Rules(q_segment_ids=q_ids, kv_segment_ids=kv_ids, **arguments), *self.score_shape)

    @cached_property
    def weights(self) -> np.ndarray:
        """Softmax weights ``[batch, heads, q_len, kv_len]`` in float64, over all keys a query may see."""
        query, key = (self.arrays[name].astype(np.float64) for name in ("query", "key"))
        return Attention(query, key, key, self.bias, self.scale, "float64").weights

    @property
    def positions(self) -> np.ndarray:
        """Positions of queries, ``[batch, q_len]``."""
        offsets = np.broadcast_to(self.arguments["q_offset"], self.sizes[:1]).astype(np.int64)
        return offsets[:, None] + np.arange(self.lengths[0])

    @cached_property
    def nearest(self) -> np.ndarray:
        """Distance of the nearest key that each query sees, ``[batch, heads, q_len]``, -1 where there is none."""
        result = np.full(self.score_shape[:3], -1, np.int64)
        for b, h, i in np.ndindex(*result.shape):
            seen = np.flatnonzero(np.isfinite(self.bias[b, h, i]))
            if seen.size:
                result[b, h, i] = np.abs(seen - self.positions[b, i]).min()
        return result

    @cached_property
    def measured(self) -> dict[str, np.ndarray]:
        """What a backend would measure of tokens, in float32: norms of queries and keys, and own scores."""
        query, key = self.arrays["query"], self.arrays["key"] - self.arrays["centre"]
        keys = np.stack([key[:, h // self.sizes[2]] for h in range(self.heads)], axis=1)
        scale = np.float32(self.scale)
        own = np.full(query.shape[:3], 1e30, np.float32)  # what stands where there is no own key must not matter
        for b, i in np.ndindex(*self.positions.shape):
            if 0 <= (p := self.positions[b, i]) < self.lengths[1]:
                own[b, :, i] = (query[b, :, i] * keys[b, :, p]).sum(axis=-1) * scale
        norms = [np.sqrt((x * x).sum(axis=-1)) for x in (query, keys)]
        return {"q_norms": norms[0] * abs(scale), "own_scores": own, "key_norms": norms[1]}

    def call(self, framework: Framework = NUMPY) -> AttentionCall:
        tensors = [framework.array(self.arrays[name]) for name in ("query", "key", "key")]
        return AttentionCall.check(*tensors, **framework.placed(self.arguments))

    def plan(
        self,
        q_block: int,
        kv_block: int,
        tolerance: float,
        framework: Framework = NUMPY,
        *,
        measured: dict[str, np.ndarray] | None = None,
        compiled: bool = False,
    ) -> KeyRanges:
        """Return the plan, from what a backend would measure (or from what is given)."""
        arguments = {name: x for name, x in self.arguments.items() if isinstance(x, np.ndarray | tuple)}
        constants = {name: x for name, x in self.arguments.items() if name not in arguments}
        measured = measured or self.measured

        def fields(query: Any, key: Any, *arrays: Any) -> tuple[Any, ...]:
            named = dict(zip([*measured, *arguments], arrays, strict=True))
            norms = [named.pop(name) for name in measured]
            call = AttentionCall.check(query, key, key, **named, **constants)
            bounds = ScoreBounds.of_tokens(call, *norms, call.nearest_keys(), q_block=q_block, kv_block=kv_block)
            ranges = key_ranges(call, bounds, tolerance)
            assert ranges.q_block == q_block
            return tuple(getattr(ranges, name) for name in FIELDS)

        arrays = (self.arrays["query"], self.arrays["key"], *measured.values(), *arguments.values())
        function = framework.compiled(fields) if compiled else fields
        return KeyRanges(q_block, *function(*framework.placed(arrays)))


def with_slope(scene: Scene, slope: float) -> Scene:
    scene.arguments["slopes"] = np.full(scene.heads, slope, np.float32)
    return scene


def values(plan: KeyRanges, framework: Framework = NUMPY) -> dict[str, np.ndarray]:
    """Return the fields of a plan, having checked that they are int32."""
    fields = {name: getattr(plan, name) for name in FIELDS}
    assert all("int32" in str(x.dtype) for x in fields.values())
    return {name: framework.numpy(x).astype(np.int64) for name, x in fields.items()}


def kept(scene: Scene, plan: KeyRanges) -> np.ndarray:
    """Return which keys a plan leaves each query, ``[batch, heads, q_len, kv_len]``."""
    fields = values(plan)
    assert np.all(fields["first"] >= 0)
    assert np.all(fields["first"] <= fields["stop"])
    assert np.all(fields["stop"] <= scene.lengths[1])
    assert np.all(fields["past"] >= 0)
    blocks = np.arange(scene.lengths[0]) // plan.q_block
    first, stop, past, future = (fields[name][..., blocks, None] for name in FIELDS)  # [batch, heads, q_len, 1]
    p, j = scene.positions[:, None, :, None], np.arange(scene.lengths[1])
    return (first <= j) & (j < stop) & (p - past < j) & (j < p + future)


def assert_nothing_heavy_is_lost(scene: Scene, q_block: int, kv_block: int, tolerance: float) -> None:
    keeps = kept(scene, scene.plan(q_block, kv_block, tolerance))
    lost = np.where(keeps, 0, scene.weights).sum(axis=-1)
    # The plan allows for the rounding of scores. Left are a running sum over blocks, and logarithms that matter only
    # where they cancel to less than -100 or so.
    slack = 2.0**-22 * (scene.lengths[1] / kv_block + 128)
    allowed = min(tolerance, 0.5) * (1 + slack)
    assert lost.max() <= allowed, f"lost {lost.max():.4g} of {allowed:.4g}, q_block {q_block}, kv_block {kv_block}"


def scenes(**fixed: Any) -> st.SearchStrategy[Scene]:
    drawn = {
        "sizes": st.sampled_from([(1, 1, 2), (2, 1, 1), (1, 2, 2)]),
        "lengths": st.sampled_from([(70, 70), (40, 300), (130, 130), (101, 37), (1, 290), (1, 1)]),
        "form": st.sampled_from(FORMS),
        "data": st.sampled_from(DATA),
        "q_offset": st.none() | st.integers(-30, 320) | st.sampled_from(["per batch", "array", 1_000_000, 10**9]),
        "window_size": st.none() | st.sampled_from([0, 5, 40, 2**40]),
        "packing": st.none() | st.sampled_from(["sorted", "unsorted", "one row"]),
        "masking": st.none() | st.sampled_from(["by query", "by head", "by key", "full", "near", "near"]),
        "slopes": st.sampled_from(["positive", "positive", "mixed"]),
        "scale": st.sampled_from([SCALE, SCALE, -0.7, 0.0]),
        "seed": st.integers(0, 2**16),
    }
    return st.builds(Scene, **(drawn | {name: st.just(x) for name, x in fixed.items()}))


@settings(max_examples=15 * settings.default.max_examples)
@given(scene=scenes(), tolerances=st.permutations(TOLERANCES))
@example(scene=Scene((1, 1, 2), (70, 70), q_offset=10**9), tolerances=list(TOLERANCES))
def test_plan_loses_no_more_than_the_tolerance(scene: Scene, tolerances: list[float]) -> None:
    for index, (q_block, kv_block) in enumerate((q, kv) for q in BLOCKS for kv in BLOCKS):
        assert_nothing_heavy_is_lost(scene, q_block, kv_block, tolerances[index % len(tolerances)])


@pytest.mark.parametrize("q_offset", [300, 10**6, 10**8, 2**30, 2**31 - 400])
@pytest.mark.parametrize("form", ["causal", "symmetric"])
@pytest.mark.parametrize("sign", [1, -1])
def test_plan_of_queries_far_from_all_keys(q_offset: int, form: str, sign: int) -> None:
    # There distances round to many tokens in float32, and only their differences count.
    for seed in range(4):
        scene = Scene((1, 1, 3), (1, 300), form, "no keys", q_offset=sign * q_offset, seed=seed)
        for tolerance in (0.4, 2.0**-8):
            for kv_block in (1, 16):
                assert_nothing_heavy_is_lost(scene, 1, kv_block, tolerance)


@given(scene=scenes(data="shifted", packing=None, masking=None, form="causal"), tolerance=st.sampled_from(TOLERANCES))
def test_plan_of_norms_by_block_is_that_of_norms_by_token(scene: Scene, tolerance: float) -> None:
    for kv_block in (3, 16, 64):
        norms = scene.measured["key_norms"]
        blocks = [norms[..., j : j + kv_block].max(axis=-1) for j in range(0, norms.shape[-1], kv_block)]
        other = scene.plan(16, kv_block, tolerance, measured=scene.measured | {"key_norms": np.stack(blocks, axis=-1)})
        expected = values(scene.plan(16, kv_block, tolerance))
        assert all(np.array_equal(x, expected[name]) for name, x in values(other).items())


@pytest.mark.parametrize("form", ["causal", "symmetric"])
@pytest.mark.parametrize("kv_block", [1, 16, 100])
def test_plan_allows_for_the_rounding_of_what_is_measured(form: str, kv_block: int) -> None:
    # All scores are 1e7, and each number measured is off by what a float32 sum may be, to the worse side.
    scene = with_slope(Scene((1, 1, 1), (100, 100), form, scale=1.0), 1.0)
    one = np.eye(HEAD_DIM, dtype=np.float32)[0]
    scene.arrays["query"][:], scene.arrays["key"][:], scene.arrays["centre"][:] = one, 1e7 * one, 0
    norm, product = 1 - (HEAD_DIM / 2 + 2) * 2.0**-24, 1 + HEAD_DIM * 2.0**-24
    factors = {"q_norms": norm, "key_norms": norm, "own_scores": product}
    measured = {name: (x * np.float64(factors[name])).astype(np.float32) for name, x in scene.measured.items()}
    lost = np.where(kept(scene, scene.plan(4, kv_block, 0.01, measured=measured)), 0, scene.weights).sum(axis=-1)
    assert lost.max() <= 0.01


@pytest.mark.parametrize("tolerance", [0.5, 1.0, 7.0])
def test_tolerance_of_the_plan_is_at_most_a_half(tolerance: float) -> None:
    scene = Scene((1, 2, 2), (70, 70))
    expected = values(scene.plan(16, 16, 0.5))
    assert all(np.array_equal(x, expected[name]) for name, x in values(scene.plan(16, 16, tolerance)).items())
    assert kept(scene, scene.plan(16, 16, tolerance)).diagonal(axis1=2, axis2=3).all()


def test_plan_of_the_smallest_tolerance() -> None:
    assert_nothing_heavy_is_lost(Scene((1, 1, 2), (70, 70), "symmetric"), 16, 16, 5e-324)


# The plan is tight


WORST = {"tolerance": (0.4, 0.01, 2.0**-24), "slope": (0.1, 0.5, 1.0, 2.5), "range": (0.0, 1.0, 6.0, 7.3)}


@pytest.mark.parametrize("tolerance", WORST["tolerance"])
@pytest.mark.parametrize("slope", WORST["slope"])
@pytest.mark.parametrize("size", WORST["range"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_no_token_can_be_spared_in_the_worst_case(tolerance: float, slope: float, size: float, is_causal: bool) -> None:
    # One query, which scores -size with its own key and +size with all the others.
    kv_len, p = 1201, 1200 if is_causal else 600
    key = np.full((1, 1, kv_len, 1), size, np.float32)
    key[:, :, p] = -size
    query, slopes = np.ones((1, 1, 1, 1), np.float32), np.float32([slope])
    sides = 1 if is_causal else 2
    arguments = {"is_causal": is_causal, "q_offset": p, "scale": 1.0}
    call = AttentionCall.check(query, key, key, slopes, **arguments)
    measured = np.ones((1, 1, 1), np.float32), np.float32([[[-size]]]), np.full((1, 1, kv_len), size, np.float32)
    bounds = ScoreBounds.of_tokens(call, *measured, call.nearest_keys(), q_block=1, kv_block=kv_len)
    plan = {name: int(x[0, 0, 0]) for name, x in values(key_ranges(call, bounds, tolerance)).items()}

    def mass(distance: int) -> float:
        """What keys from a distance on weigh, as a multiple of the own key."""
        return sum(math.exp(2 * size - float(slopes[0]) * abs(j - p)) for j in range(kv_len) if abs(j - p) >= distance)

    assert plan["first"] == max(0, p - plan["past"] + 1)
    assert plan["future"] == (1 if is_causal else plan["past"])
    assert plan["stop"] == min(kv_len, p + plan["future"])
    margin = 2.0**-18 * (2 * size + 60) + sides * math.exp(2 * size - slope * (kv_len // 2)) / tolerance
    assert mass(plan["past"]) <= tolerance * (1 + margin)
    assert mass(plan["past"] - 1) > tolerance * (1 - margin)


def test_an_outlier_widens_no_more_than_it_must() -> None:
    scene = with_slope(Scene((1, 1, 1), (300, 300), seed=7), 0.5)
    scene.arrays["key"][:, :, 40] *= 1000 / np.linalg.norm(scene.arrays["key"][:, :, 40])
    scene.arrays["centre"][:] = 0
    visible = np.isfinite(scene.bias)
    pairs = kept(scene, scene.plan(4, 4, 0.01)) & visible
    assert pairs[:, :, 44:, 40:44].all()
    assert not pairs[:, :, 250:, :40].all(axis=-1).any()
    assert_nothing_heavy_is_lost(scene, 4, 4, 0.01)


def model(scene: Scene, q_block: int, kv_block: int, tolerance: float) -> dict[str, np.ndarray]:
    """Return the plan, from the two bounds of scores and the rules by position, one block at a time in float64."""
    (batch, heads, q_len, kv_len), is_causal = scene.score_shape, scene.form == "causal"
    q_norms, own, k_norms = (scene.measured[name].astype(np.float64) for name in ("q_norms", "own_scores", "key_norms"))
    slopes = np.broadcast_to(scene.arguments["slopes"], (batch, heads)).astype(np.float64)
    future_slopes = np.broadcast_to(scene.arguments.get("future_slopes", slopes), (batch, heads)).astype(np.float64)
    window = scene.arguments.get("window_size")
    ids = scene.arguments.get("segment_ids")
    side = min(tolerance, 0.5) / (1 if is_causal else 2)
    q_blocks, kv_blocks = (
        [range(start, min(start + size, n)) for start in range(0, n, size)]
        for n, size in ((q_len, q_block), (kv_len, kv_block))
    )
    result = {name: np.zeros((batch, heads, len(q_blocks)), np.int64) for name in FIELDS}
    for b, h, t in np.ndindex(batch, heads, len(q_blocks)):
        block, slope, future_slope = q_blocks[t], slopes[b, h], future_slopes[b, h]
        lowest, highest = int(scene.positions[b, block[0]]), int(scene.positions[b, block[-1]])
        largest = k_norms[b, h].max()
        anchor, excess = math.inf, -math.inf
        for i in block:
            near = scene.nearest[b, h, i]
            if near >= 0:
                least = -q_norms[b, h, i] * largest - max(slope, future_slope) * near
                own_anchor = own[b, h, i] if near == 0 else least
                anchor, excess = min(anchor, own_anchor), max(excess, q_norms[b, h, i] * largest - own_anchor)
        shortest, longest = (f(q_norms[b, h, i] for i in block) for f in (min, max))
        norms = [max(k_norms[b, h, j] for j in keys) for keys in kv_blocks]
        heaviest = [min(excess - shortest * (largest - norm), longest * norm - anchor) for norm in norms]
        past, future = model_reach(slope, excess, side), model_reach(future_slope, excess, side)
        behind = [max(0, lowest - keys[-1]) for keys in kv_blocks]
        ahead = [max(0, keys[0] - highest) for keys in kv_blocks]
        first = model_drop(heaviest, behind, slope, side, kv_block) * kv_block
        dropped = model_drop(heaviest[::-1], ahead[::-1], future_slope, side, kv_block)
        stop = min(kv_len, (len(kv_blocks) - dropped) * kv_block)
        if is_causal:
            stop, future = kv_len, 1
        if window is not None:
            past, future = min(past, window + 1), min(future, window + 1)
        if ids is not None:
            q_ids, kv_ids = (np.broadcast_to(x, (batch, x.shape[-1]))[b] for x in ids)
            low, high = min(q_ids[i] for i in block), max(q_ids[i] for i in block)
            ranges = [(min(kv_ids[j] for j in keys), max(kv_ids[j] for j in keys)) for keys in kv_blocks]
            meets = [n for n, (least, most) in enumerate(ranges) if least <= high and most >= low]
            first = max(first, meets[0] * kv_block if meets else kv_len)
            stop = min(stop, (meets[-1] + 1) * kv_block if meets else 0)
        first, stop = max(first, lowest - past + 1), max(0, min(stop, highest + future))
        for name, x in zip(FIELDS, (min(first, stop), stop, past, future), strict=True):
            result[name][b, h, t] = x
    return result


def model_reach(slope: float, excess: float, side: float) -> int:
    if side == 0 or slope <= 0:
        return ENDLESS
    tokens = (excess - math.log(side) - math.log(-math.expm1(-slope))) / slope
    return 0 if tokens <= 0 else min(math.ceil(tokens), ENDLESS)


def model_drop(heaviest: list[float], distances: list[int], slope: float, side: float, kv_block: int) -> int:
    """Return how many blocks, from the farthest on, weigh no more than ``side`` together."""
    if side == 0 or slope < 0:
        return 0
    keys = kv_block if slope == 0 else min(kv_block, -1 / math.expm1(-slope))
    total = 0.0
    for count, (logarithm, distance) in enumerate(zip(heaviest, distances, strict=True)):
        total += math.exp(min(logarithm - slope * distance, 50)) * keys
        if total > side:
            return count
    return len(heaviest)


@settings(max_examples=8 * settings.default.max_examples)
@given(
    scene=scenes(),
    blocks=st.tuples(st.sampled_from(BLOCKS), st.sampled_from(BLOCKS)),
    tolerance=st.sampled_from(TOLERANCES),
)
def test_plan_is_that_of_the_formulas(scene: Scene, blocks: tuple[int, int], tolerance: float) -> None:
    far = isinstance(scene.q_offset, int) and scene.q_offset > 10**5
    scene = dataclasses.replace(
        scene,
        sizes=(scene.sizes[0], 1, 2),
        data="normal" if scene.data in ("outlier", "shifted") else scene.data,  # for which rounding is worth tokens
        q_offset=400 if far else scene.q_offset,
    )
    actual, expected = values(scene.plan(*blocks, tolerance)), model(scene, *blocks, tolerance)
    for name in ("past", "future"):
        # The library adds 2**-20 of a distance, and 2**-13 to scores of this size, for rounding's sake. That is worth
        # a part of a token, which ceil makes a whole one now and then, except at the slope of 2**-16.
        steep = expected[name] < 10_000
        assert np.all(np.abs(actual[name] - expected[name])[steep] <= 1), name
        assert np.all(np.abs(actual[name] - expected[name]) <= 9 + 2.0**-19 * expected[name]), name
        assert (actual[name] != expected[name])[steep].sum() <= 1 + 0.05 * steep.sum(), name
    if tolerance == 0:
        assert all(np.array_equal(actual[name], expected[name]) for name in FIELDS)
        return
    for name in ("first", "stop"):
        assert np.all(np.abs(actual[name] - expected[name]) <= blocks[1]), name


# Data that is not finite


BAD = itertools.product([NAN, np.inf, -np.inf], ["causal", "symmetric"])


@pytest.mark.parametrize(
    ("framework", "bad", "form"), once_in_jax([p for p in FRAMEWORKS if p.values[0] is not DASK], BAD)
)
def test_what_is_not_finite_drops_nothing(framework: Framework, bad: float, form: str) -> None:
    scene = Scene((1, 2, 2), (96, 96), form, seed=3)
    scene.arguments["slopes"] = np.float32([1.0, 3.0, 1.0, 3.0])
    compiled = framework is JAX
    clean = values(scene.plan(16, 16, 0.01, framework, compiled=compiled), framework)
    lowest, highest = np.arange(6) * 16, np.arange(6) * 16 + 15
    everything = {"first": 0 * lowest, "stop": highest + 1 if form == "causal" else 0 * highest + 96}
    everything["past"] = 0 * lowest + ENDLESS
    for name in ("query", "key", "score"):
        measured = {field: x.copy() for field, x in scene.measured.items()}
        if name == "key":  # of the second group; in the causal form, ahead of all queries but the last
            measured["key_norms"][:, 2:, 95] = abs(bad)
            measured["own_scores"][:, 2:, 95] = bad
            rows = [(h, slice(None)) for h in (2, 3)]
        elif name == "query":
            measured["q_norms"][:, 1, 40] = abs(bad)
            measured["own_scores"][:, 1, 40] = bad
            rows = [(1, slice(2, 3))]
        else:
            measured["own_scores"][:, 1, 40] = bad
            rows = [(1, slice(2, 3))]
        with np.errstate(invalid="ignore"):
            plan = values(scene.plan(16, 16, 0.01, framework, measured=measured, compiled=compiled), framework)
        for field, expected in everything.items():
            want = clean[field].copy()
            for h, t in rows:
                want[:, h, t] = expected[t]
            assert np.array_equal(plan[field], want), (name, field)


# The nearest keys, and tiles


@given(case=cases())
@example(case=Case(Sizes(2, 1, 2, (5, 11), 3), "causal", -3, 2, None, None, False, 0))
def test_nearest_keys_are_the_nearest(case: Case) -> None:
    arrays, arguments = case.arrays, case.arguments
    slopes = arrays["slopes"].astype(np.float32)
    call = AttentionCall.check(arrays["query"], arrays["key"], arrays["value"], arrays["slopes"], **arguments)
    bias = penalties(case.rules(slopes), case.sizes.batch, case.num_heads, *case.sizes.lengths)
    offsets = np.broadcast_to(arguments.get("q_offset", case.sizes.lengths[1] - case.sizes.lengths[0]), len(bias))
    expected = np.full(bias.shape[:3], -1)
    for b, h, i in np.ndindex(*expected.shape):
        distances = [abs(j - offsets[b] - i) for j in range(bias.shape[3]) if bias[b, h, i, j] > -np.inf]
        expected[b, h, i] = min(distances, default=-1)
    nearest = call.nearest_keys()
    assert nearest.dtype == np.int32
    assert nearest.shape[-1] == case.sizes.lengths[0]
    assert np.array_equal(np.broadcast_to(nearest, expected.shape), expected)


@pytest.mark.parametrize("arguments", [{}, {"mask": bools(5, 0)}, {"segment_ids": (ints(5), ints(0))}])
@pytest.mark.parametrize("is_causal", [True, False])
def test_nearest_keys_of_no_keys_are_none(arguments: dict[str, Any], is_causal: bool) -> None:
    key = floats(2, 3, 0, 4)
    call = AttentionCall.check(floats(2, 3, 5, 4), key, key, is_causal=is_causal, q_offset=-2, **arguments)
    assert np.all(call.nearest_keys() == -1)
    assert call.nearest_keys().shape[-1] == 5


@st.composite
def parts(draw: st.DrawFn, case: Case) -> dict[str, slice]:
    def part(n: int) -> slice:
        start = draw(st.integers(0, n - 1))
        return slice(start, draw(st.integers(start + 1, n)))

    group = case.sizes.group
    groups = part(case.sizes.num_kv_heads)
    heads = slice(groups.start * group, groups.stop * group)
    if draw(st.booleans()):
        within = part(group)
        heads = slice(groups.start * group + within.start, groups.start * group + within.stop)
    q_len, kv_len = case.sizes.lengths
    return {"batch": part(case.sizes.batch), "heads": heads, "queries": part(q_len), "keys": part(kv_len)}


def full_bias(call: AttentionCall) -> tuple[np.ndarray, np.ndarray]:
    """Return the bias, and where a query looks, as float64 and booleans of the full shape."""
    shape = (*call.batch, call.num_heads, call.q_len, call.kv_len)
    bias, attends = call.bias()
    seen = np.isfinite(bias) if attends is None else np.isfinite(bias) & attends
    return np.broadcast_to(bias, shape).astype(np.float64), np.broadcast_to(seen, shape)


@settings(max_examples=3 * settings.default.max_examples)
@given(data=st.data(), case=cases(), array_offset=st.booleans())
def test_bias_of_a_tile_is_a_tile_of_the_bias(data: st.DataObject, case: Case, array_offset: bool) -> None:
    arguments, slices = dict(case.arguments), data.draw(parts(case))
    if array_offset and isinstance(offset := arguments.get("q_offset"), int):
        arguments["q_offset"] = np.asarray(offset, np.int32)
    tensors = [case.arrays[name].astype(np.float32) for name in ("query", "key", "value")]
    slopes = case.arrays["slopes"].astype(np.float32)
    whole = AttentionCall.check(*tensors, slopes, window_size=arguments.pop("window_size", None), **arguments)
    tile = whole.tile(**slices)
    sizes = [s.stop - s.start for s in slices.values()]
    assert [*tile.batch, tile.num_heads, tile.q_len, tile.kv_len] == sizes
    # What attention makes of the sizes: so many query heads a key/value head as are there.
    heads = slices["heads"]
    groups = {h // case.sizes.group for h in range(heads.start, heads.stop)}
    assert tile.num_kv_heads == len(groups)
    unchanged = ("head_dim", "dtype", "working_dtype", "is_causal", "window_size", "scale", "tolerance", "xp", "device")
    assert all(getattr(tile, name) is getattr(whole, name) for name in unchanged)

    (bias, seen), (part, part_seen) = full_bias(whole), full_bias(tile)
    index = tuple(slices.values())
    assert np.array_equal(part_seen, seen[index])
    difference = part - np.where(seen[index], bias[index], 0)
    largest = np.abs(np.where(part_seen, part, 0)) + np.abs(np.where(seen[index], bias[index], 0))
    for row in np.ndindex(*part.shape[:3]):
        here = difference[row][part_seen[row]]
        if here.size:  # each is a product, rounded once, and their difference is constant
            assert np.ptp(here) <= 2 * 2.0**-24 * largest[row].max()
    if whole.every_query_attends:
        assert seen.any(axis=-1).all()
    if tile.every_query_attends:
        assert part_seen.any(axis=-1).all()


@given(data=st.data(), case=cases())
def test_tiles_know_their_nearest_keys(data: st.DataObject, case: Case) -> None:
    slices = data.draw(parts(case))
    slices["keys"] = slice(0, case.sizes.lengths[1])
    tensors = [case.arrays[name].astype(np.float32) for name in ("query", "key", "value", "slopes")]
    whole = AttentionCall.check(*tensors, **case.arguments)
    shape = (*whole.batch, whole.num_heads, whole.q_len)
    expected = np.broadcast_to(whole.nearest_keys(), shape)[tuple(slices.values())[:3]]
    assert np.array_equal(np.broadcast_to(whole.tile(**slices).nearest_keys(), expected.shape), expected)


# Every library


LIBRARY_SCENES = [
    Scene((2, 1, 2), (70, 70), "causal", "outlier", seed=1),
    Scene((2, 1, 2), (40, 101), "symmetric", "sinks", q_offset="per batch", window_size=40, seed=2),
    Scene((1, 2, 2), (70, 70), "asymmetric", "aligned", packing="sorted", masking="by head", slopes="mixed", seed=3),
    Scene((2, 1, 2), (33, 70), "clamped", "shifted", q_offset="array", window_size=2**40, masking="by key", seed=4),
    Scene((2, 1, 1), (64, 64), "causal", "no queries", q_offset=70, packing="one row", window_size=5, seed=5),
    Scene((2, 1, 2), (70, 70), "symmetric", "outlier", seed=6),  # where blocks know more than tokens, on both sides
]


def assert_same_plan(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], kv_block: int) -> None:
    """Assert that plans are one, but for what a last bit may do: a token, and where a block begins."""
    for name in FIELDS:
        assert actual[name].shape == expected[name].shape
        unit = kv_block if name in ("first", "stop") else 1
        assert np.all(np.abs(actual[name] - expected[name]) <= unit * (expected[name] < ENDLESS)), name
    differing = sum(int((actual[name] != expected[name]).sum()) for name in FIELDS)
    assert differing <= 0.02 * sum(x.size for x in expected.values())


def in_libraries(items: list[Any], scenes: dict[Framework, list[Scene]]) -> list[Any]:
    """Return frameworks and scenes: those named for a framework, or else all."""
    return [
        pytest.param(p.values[0], scene, id=f"{p.id}-{scene.form}-{scene.data}", marks=p.marks)
        for p in items
        for scene in scenes.get(p.values[0], LIBRARY_SCENES)
    ]


# Operation by operation, JAX takes seconds over each new shape; it has a plan compiled.
@pytest.mark.parametrize(("framework", "scene"), without_jax(in_libraries(FRAMEWORKS, {JAX: LIBRARY_SCENES[2:3]})))
def test_plan_is_the_same_in_every_library(framework: Framework, scene: Scene) -> None:
    assert_same_plan(values(scene.plan(16, 16, 0.01, framework), framework), values(scene.plan(16, 16, 0.01)), 16)
    nearest = framework.numpy(scene.call(framework).nearest_keys())
    assert np.array_equal(np.broadcast_to(nearest, scene.nearest.shape), scene.nearest)


@pytest.mark.parametrize(("framework", "scene"), in_libraries(COMPILERS, {TORCH: [], MLX: LIBRARY_SCENES[1:2]}))
def test_plan_compiles(framework: Framework, scene: Scene) -> None:
    actual = scene.plan(16, 16, 0.01, framework, compiled=True)
    assert_same_plan(values(actual, framework), values(scene.plan(16, 16, 0.01)), 16)


def run_without_values(torch: Any, device: str) -> None:
    for scene in LIBRARY_SCENES:

        def empty(x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple(map(empty, x))
            return torch.empty(x.shape, dtype=getattr(torch, str(x.dtype)), device=device)

        arrays = {name: empty(x) if isinstance(x, np.ndarray | tuple) else x for name, x in scene.arguments.items()}
        query, key = (empty(scene.arrays[name]) for name in ("query", "key"))
        call = AttentionCall.check(query, key, key, **arrays)
        measured = {name: empty(x) for name, x in scene.measured.items()}
        bounds = ScoreBounds.of_tokens(call, **measured, nearest=call.nearest_keys(), q_block=16, kv_block=16)
        plan = key_ranges(call, bounds, 0.01)
        for name in FIELDS:
            field = getattr(plan, name)
            assert field.shape == (*scene.score_shape[:2], -(-scene.lengths[0] // 16))
            assert field.dtype == torch.int32
            assert field.device.type == device
        tile = call.tile(batch=slice(0, 1), heads=slice(0, 1), queries=slice(3, 9), keys=slice(2, 30))
        assert tile.bias()[0].shape[-2:] == (6, 28)
        slopes = arrays["slopes"]
        assert horizon(slopes, torch.ones_like(slopes)).shape == slopes.shape


def test_plan_reads_no_value_on_meta() -> None:
    run_without_values(pytest.importorskip("torch"), "meta")


def test_plan_reads_no_value_of_fake_tensors() -> None:
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        run_without_values(torch, "cpu")


@pytest.mark.parametrize("framework", [p for p in FRAMEWORKS if p.values[0] not in (JAX, MLX, DASK)])
def test_offsets_of_64_bits_give_the_same_plan(framework: Framework) -> None:
    scene = Scene((2, 1, 2), (40, 101), "symmetric", q_offset="per batch", seed=6)
    expected = values(scene.plan(16, 16, 0.01))
    scene.arguments["q_offset"] = scene.arguments["q_offset"].astype(np.int64)
    assert_same_plan(values(scene.plan(16, 16, 0.01, framework), framework), expected, 16)
