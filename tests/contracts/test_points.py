"""Positions of the caller's own: points, times, tokens without a place, and laws of distance, in every framework."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import alibi_core
from alibi_core.backend.models import AlibiConfig
from alibi_core.conformance.testing import Attention, assert_within_budget
from benchmarks.harness import peak_growth
from tests.support.frameworks import (
    BACKENDS,
    FRAMEWORK,
    FRAMEWORKS,
    JAX,
    LAYER_BACKENDS,
    LIBRARIES,
    NAMES_SLOW_IN_JAX,
    Backend,
    Framework,
)
from tests.support.layers import apply, decode, make_layer
from tests.support.models import make_model

BATCH, HEADS, KV_HEADS, HEAD_DIM = 2, 6, 3, 5
LAWS = {"linear": lambda d: d, "log": np.log1p, "sqrt": np.sqrt}
NORMS = {
    "manhattan": lambda steps: np.abs(steps).sum(axis=-1),
    "euclidean": lambda steps: np.sqrt((steps**2).sum(axis=-1)),
    "chebyshev": lambda steps: np.abs(steps).max(axis=-1),
}


@dataclass(frozen=True)
class Case:
    """An attention problem between points."""

    lengths: tuple[int, int]
    dims: int
    distance: str
    law: str
    kind: str  # of positions
    is_causal: bool
    has_segments: bool
    has_mask: bool
    seed: int

    @property
    def rng(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    def positions(self) -> Any:
        """Return one array for queries and keys alike where lengths are equal, else a pair."""
        rng = self.rng
        found = []
        for length in self.lengths:
            shape = (BATCH, length) if self.dims == 1 else (BATCH, length, self.dims)
            if self.kind == "integers":
                found.append(rng.integers(-9, 9, shape).astype(np.int32))  # with ties
                continue
            found.append(rng.normal(0, 9, shape).astype(np.float32))
            if self.kind == "without a place":
                found[-1][:, :: max(2, length // 2)] = np.nan
        return found[0] if self.lengths[0] == self.lengths[1] else tuple(found)

    def arguments(self) -> dict[str, Any]:
        rng, arguments = self.rng, {"positions": self.positions(), "is_causal": self.is_causal}
        if self.has_segments:
            arguments["segment_ids"] = tuple(rng.integers(0, 2, (BATCH, n)).astype(np.int32) for n in self.lengths)
        if self.has_mask:
            arguments["mask"] = rng.random((BATCH, HEADS, *self.lengths)) < 0.6
        return arguments | {"distance": self.distance, "law": self.law}

    def tensors(self) -> dict[str, np.ndarray]:
        rng = self.rng
        sizes = {"query": (HEADS, self.lengths[0]), "key": (KV_HEADS, self.lengths[1])}
        sizes["value"] = sizes["key"]
        tensors = {name: rng.normal(size=(BATCH, *size, HEAD_DIM)).astype(np.float32) for name, size in sizes.items()}
        return tensors | {"slopes": rng.uniform(0, 1, (BATCH, HEADS)).astype(np.float32)}

    def exact(self) -> tuple[Attention, np.ndarray]:
        """Return the problem in float64, and what each element of the bias is the negated multiple of."""
        arguments, tensors, pair = self.arguments(), self.tensors(), self.positions()
        pair = pair if isinstance(pair, tuple) else (pair, pair)
        queries, keys = (x[..., None] if self.dims == 1 else x for x in pair)
        steps = keys[:, None].astype(np.float64) - queries[:, :, None].astype(
            np.float64
        )  # [batch, q_len, kv_len, dims]
        penalty = LAWS[self.law](np.where(np.isnan(steps).any(axis=-1), 0, NORMS[self.distance](steps)))[:, None]
        visible = ~((steps[..., 0] > 0) & self.is_causal)[:, None]
        if self.has_segments:
            q_ids, kv_ids = arguments["segment_ids"]
            visible = visible & (q_ids[:, None, :, None] == kv_ids[:, None, None, :])
        visible = visible & arguments.get("mask", True)
        bias = np.where(visible, -tensors["slopes"][:, :, None, None].astype(np.float64) * penalty, -np.inf)
        three = {name: tensors[name].astype(np.float64) for name in ("query", "key", "value")}
        return Attention(**three, bias=bias, scale=HEAD_DIM**-0.5, dtype="float32"), penalty


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dims = draw(st.sampled_from([1, 2, 3]))
    return Case(
        lengths=draw(st.sampled_from([(1, 1), (7, 7), (5, 11), (13, 3)])),
        dims=dims,
        distance=draw(st.sampled_from(sorted(NORMS))),
        law=draw(st.sampled_from(sorted(LAWS))),
        kind=draw(st.sampled_from(["integers", "reals", "without a place"])),
        is_causal=dims == 1 and draw(st.booleans()),
        has_segments=draw(st.booleans()),
        has_mask=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


# JAX, which compiles each, has the kit's laws of points.
@pytest.mark.parametrize("backend", [x for x in BACKENDS if x.values[0].framework is not JAX])
@given(case=cases())
def test_attention_between_points_is_exact(backend: Backend, case: Case) -> None:
    problem, _ = case.exact()
    tensors = case.tensors()
    result = backend.attention(**tensors, dtype="float32", **case.arguments())
    assert_within_budget(result, problem.output)


@pytest.mark.parametrize("backend", [x for x in LAYER_BACKENDS if x.values[0].framework is not JAX])
@given(case=cases())
def test_gradients_between_points_are_exact(backend: Backend, case: Case) -> None:
    problem, penalty = case.exact()
    cotangent = case.rng.normal(size=problem.query.shape).astype(np.float32)
    found = backend.gradients(case.tensors(), cotangent, dtype="float32", **case.arguments())
    for name, answer in problem.gradients(cotangent.astype(np.float64), penalty).items():
        assert_within_budget(found[name], answer)


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("backend", [x for x in BACKENDS if x.values[0].implementation == "tiled"])
def test_blocks_of_queries_and_heads_fit_together(backend: Backend, is_masked: bool) -> None:
    case = Case((701, 701), 2, "euclidean", "linear", "without a place", False, is_masked, is_masked, seed=0)
    problem, penalty = case.exact()
    cotangent = case.rng.normal(size=problem.query.shape).astype(np.float32)
    answers = problem.gradients(cotangent.astype(np.float64), penalty)
    assert_within_budget(backend.attention(**case.tensors(), dtype="float32", **case.arguments()), problem.output)
    for wanted in (tuple(answers), ("query", "key", "value")):  # gradients of slopes may go another way
        rules = {"dtype": "float32", "wanted": wanted, **case.arguments()}
        for name, found in backend.gradients(case.tensors(), cotangent, **rules).items():
            assert_within_budget(found, answers[name])


@pytest.mark.parametrize("backend", LIBRARIES)
@pytest.mark.parametrize("law", ["log", "sqrt"])
@pytest.mark.parametrize("q_offset", [0, 40])
def test_a_law_needs_no_positions(backend: Backend, law: str, q_offset: int) -> None:
    case = Case((701, 701), 1, "manhattan", law, "integers", False, False, False, seed=1)  # several blocks of queries
    tensors, keys = case.tensors(), np.arange(701, dtype=np.int32)
    for arguments in ({"is_causal": True}, {"is_causal": False}):
        rules: dict[str, Any] = {"dtype": "float32", "law": law, **arguments}
        by_position = backend.attention(**tensors, positions=(keys + q_offset, keys), **rules)
        np.testing.assert_allclose(backend.attention(**tensors, q_offset=q_offset, **rules), by_position, atol=1e-5)


@pytest.mark.parametrize("side", [1, -1])
@pytest.mark.parametrize("backend", LIBRARIES)
def test_a_distance_that_all_keys_share_changes_nothing(backend: Backend, side: int) -> None:
    case = Case((7, 11), 1, "manhattan", "linear", "integers", False, False, False, seed=1)
    tensors, (queries, keys) = case.tensors(), case.positions()
    rules = {"is_causal": False, "dtype": "float32", "future_slopes": tensors["slopes"][:, ::-1].copy()}
    near, far = (
        backend.attention(**tensors, positions=(queries + side * shift, keys), **rules) for shift in (32, 2**23)
    )
    np.testing.assert_allclose(far, near, atol=1e-5)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@given(case=cases())
def test_the_bias_between_whole_points_has_the_same_bits_everywhere(framework: Framework, case: Case) -> None:
    case = dataclasses.replace(case, kind="integers", law="linear")
    distance = "manhattan" if case.distance == "euclidean" else case.distance
    pair = case.positions()
    pair = pair if isinstance(pair, tuple) else (pair, pair)
    slopes, rules = (
        case.tensors()["slopes"],
        {"distance": distance if case.dims > 1 else None, "is_causal": case.is_causal},
    )
    expected = alibi_core.bias_from_positions(slopes, *pair, **rules)
    found = alibi_core.bias_from_positions(*(framework.array(x) for x in (slopes, *pair)), **rules)
    np.testing.assert_array_equal(framework.bits(found), expected.view(np.int32))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@given(case=cases())
def test_the_bias_is_right_to_two_units_in_the_last_place(framework: Framework, case: Case) -> None:
    problem, _ = case.exact()
    pair = case.positions()
    pair = pair if isinstance(pair, tuple) else (pair, pair)
    rules = {"distance": case.distance if case.dims > 1 else None, "law": case.law, "is_causal": case.is_causal}
    arrays = (framework.array(x) for x in (case.tensors()["slopes"], *pair))
    found = framework.numpy(alibi_core.bias_from_positions(*arrays, **rules))
    if not (case.has_segments or case.has_mask):
        expected = problem.bias.astype(np.float32)
        shown = expected > -np.inf
        np.testing.assert_array_equal(found > -np.inf, shown)
        found, expected = found[shown], expected[shown]
        assert np.all(np.abs(found - expected) <= 2 * np.spacing(np.abs(expected)))


@pytest.mark.parametrize("name", NAMES_SLOW_IN_JAX)
def test_an_encoder_of_points_knows_nothing_of_their_order(name: str) -> None:
    config = AlibiConfig(
        num_layers=2, embed_dim=16, num_heads=4, is_causal=False, dropout=0.0, distance="euclidean", law="sqrt"
    )
    model, rng = make_model(name, "AlibiTransformer", config), np.random.default_rng(0)
    x, points = (rng.normal(0, 3, (2, 11, n)).astype(np.float32) for n in (16, 2))
    order = rng.permutation(11)
    result = model(x, positions=points)
    np.testing.assert_allclose(model(x[:, order], positions=points[:, order]), result[:, order], atol=1e-5)
    assert np.abs(model(x, positions=points[:, order]) - result).max() > 1e-2
    with pytest.raises(ValueError, match="is_causal must be False for positions with 2 dims"):
        make_model(name, "AlibiTransformer", AlibiConfig(num_layers=1, embed_dim=16, num_heads=4))(x, positions=points)


@pytest.mark.parametrize("name", NAMES_SLOW_IN_JAX)
def test_a_law_holds_in_caches(name: str) -> None:
    layer = make_layer(name, embed_dim=16, num_heads=4, num_kv_heads=2, law="log")
    x = np.random.default_rng(0).normal(size=(2, 9, 16)).astype(np.float32)
    in_steps, _ = decode(name, layer, x, layer.make_cache(2, 9), [4, 1, 3, 1])
    np.testing.assert_allclose(in_steps, apply(name, layer, x), atol=1e-5)
    placed, places, cache = FRAMEWORK[name].array(x), FRAMEWORK[name].array(np.arange(9)), layer.make_cache(2, 9)
    with pytest.raises(ValueError, match="cache must be None with positions"):
        layer(placed, cache=cache, positions=places)


@pytest.mark.parametrize("backend", LIBRARIES)
def test_explain_says_that_points_leave_out_no_key(backend: Backend) -> None:
    case = Case((7, 7), 2, "euclidean", "linear", "integers", False, False, False, seed=2)
    said = backend.explain(**case.tensors(), dtype="float32", positions=case.positions(), is_causal=False)
    assert (said.implementation, said.share, said.scores_visible) == ("tiled", 1, BATCH * HEADS * 49)
    assert np.all(np.isinf(said.horizons))


@pytest.mark.parametrize("backend", LIBRARIES)
def test_attention_between_points_compiles(backend: Backend) -> None:
    case = Case((37, 37), 2, "euclidean", "log", "without a place", False, False, False, seed=3)
    tensors, framework = case.tensors(), backend.framework
    placed = backend.place(*(tensors[name] for name in ("query", "key", "value", "slopes")), dtype="float32")
    positions = framework.array(case.positions())

    function = backend.function(distance="euclidean", law="log", is_causal=False)

    def attention(query: Any, key: Any, value: Any, slopes: Any, positions: Any) -> Any:
        return function(query, key, value, slopes, positions=positions)

    found = framework.numpy(framework.compiled(attention)(*placed, positions))
    np.testing.assert_allclose(backend.layout(found), case.exact()[0].output.value, atol=2e-5)


def long_attention(name: str, length: int) -> Any:
    """Return a call with its gradients, warmed up at a short length."""
    backend = Backend(FRAMEWORK[name], f"alibi_{name}", None)

    def call(length: int) -> Any:
        rng = np.random.default_rng(length)
        tensors = {x: rng.normal(size=(1, 2, length, 16)) for x in ("query", "key", "value")}
        rules = {"positions": rng.uniform(0, 90, (length, 2)), "distance": "euclidean", "is_causal": False}
        return backend.gradients(tensors, tensors["value"], dtype="float32", **rules)

    call(64)
    return partial(call, length)


@pytest.mark.parametrize("name", NAMES_SLOW_IN_JAX)
def test_memory_grows_with_the_number_of_points_alone(name: str) -> None:
    length = 8192
    peak = peak_growth("tests.contracts.test_points:long_attention", name, length)
    assert peak < 4 * 2 * length**2 / 2  # half of the bias, in bytes; XLA takes some 100 MB to compile
