"""Positions of the caller's own: points, times, tokens without a place, and laws of distance, in every framework."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import alibi_core
from alibi_core.backend.models import AlibiConfig
from alibi_core.conformance.testing import Case, Sizes, penalties
from benchmarks.harness import peak_growth
from tests.support.frameworks import (
    FRAMEWORK,
    FRAMEWORKS,
    LAYER_BACKENDS,
    LIBRARIES,
    NAMES_SLOW_IN_JAX,
    NUMPY,
    Backend,
    Framework,
    slow_in_jax,
)
from tests.support.layers import apply, decode, make_layer
from tests.support.models import make_model
from tests.support.problems import ON_LINE, POINTS, Problem

PROBLEMS = st.builds(
    Problem,
    lengths=st.sampled_from([(7, 7), (5, 11), (11, 5)]),
    points=st.sampled_from([x for x in POINTS if not x.startswith("one") and not x.endswith("of all")]),
    is_causal=st.booleans(),
    distance=st.sampled_from(["manhattan", "euclidean", "chebyshev"]),
    law=st.sampled_from(["linear", "log", "sqrt"]),
    seed=st.integers(0, 2**16),
)


def tensors_of(case: Case) -> dict[str, np.ndarray]:
    return {name: case.arrays[name] for name in ("query", "key", "value", "slopes")}


@pytest.mark.parametrize("backend", [x for x in LAYER_BACKENDS if x.values[0].implementation != "sdpa"])
def test_positions_have_no_derivatives_and_say_so(backend: Backend) -> None:
    framework, case = backend.framework, Case(Sizes(2, 3, 2, (7, 7), 5), seed=1)
    *tensors, slopes = backend.place(**tensors_of(case), dtype="float32")
    points = framework.array(np.random.default_rng(1).normal(size=(7, 2)))
    transforms = importlib.import_module({"torch": "torch.func", "jax": "jax", "mlx": "mlx.core"}[framework.name])
    attention, grad = backend.function(is_causal=False, distance="euclidean"), transforms.grad

    def loss(points: Any, slopes: Any = slopes) -> Any:
        return attention(*tensors, slopes, positions=points).sum()

    def of_pair(points: Any) -> Any:
        return loss((framework.array(np.zeros((7, 2))), points))

    def asked(points: Any) -> None:  # as PyTorch asks
        grad(loss)(points) if framework.name != "torch" else loss(points.clone().requires_grad_())

    wanted = [asked, grad(loss), grad(of_pair), lambda x: grad(lambda x: framework.mapped(loss)(x[None]).sum())(x)]
    wanted += [lambda x: framework.mapped(grad(loss))(x[None])]
    wanted += [framework.compiled(asked)] if framework.name != "torch" else []
    places = (lambda x: [x]) if framework.name == "mlx" else (lambda x: (x,))
    for derive in (*wanted, lambda x: transforms.jvp(loss, places(x), places(x))):
        with pytest.raises(NotImplementedError, match=r"positions must be constants, .*; use .*positions"):
            derive(points)
    # Whole positions, and other derivatives in any transform.
    grad(lambda slopes: loss(points, slopes) + framework.mapped(loss)(points[None]).sum())(slopes)
    grad(lambda slopes: loss(framework.array(np.ones((7, 2), np.int32)), slopes))(slopes)


@pytest.mark.parametrize("framework", slow_in_jax(FRAMEWORKS))
@given(problem=PROBLEMS)
def test_the_bias_between_points_is_right_to_two_units_in_the_last_place(
    framework: Framework, problem: Problem
) -> None:
    p, is_on_line = problem, problem.points in ON_LINE
    assume((p.points, p.distance) != ("far grid", "euclidean"))  # float32 libraries round such distances to float32
    slopes, positions = np.float32(p.arrays["slopes"]), p.arguments["positions"]
    rules = {"law": p.law, "is_causal": p.is_causal and is_on_line}

    def bias(framework: Framework) -> Any:
        metric = None if is_on_line else p.distance
        return alibi_core.bias_from_positions(*framework.placed((slopes, *positions)), distance=metric, **rules)

    shape = (*p.batch, p.num_heads, *p.lengths)
    expected = penalties(shape, slopes, positions=positions, distance=p.distance, **rules).astype(np.float32)
    found, shown = framework.numpy(bias(framework)), expected > -np.inf
    np.testing.assert_array_equal(found > -np.inf, shown)
    found, expected = found[shown], expected[shown]
    assert np.all(np.abs(found - expected) <= 2 * np.spacing(np.abs(expected)))
    if p.law == "linear" and p.points in ("integers", "far", "grid") and p.distance != "euclidean":
        np.testing.assert_array_equal(framework.bits(bias(framework)), NUMPY.bits(bias(NUMPY)))


@pytest.mark.parametrize("law", ["linear", "log", "sqrt"])
@pytest.mark.parametrize("distance", ["manhattan", "euclidean", "chebyshev"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_bias_in_many_dimensions_is_right_to_units_in_the_last_place(
    framework: Framework, distance: str, law: str
) -> None:
    slopes = np.asarray([1.0, 0.3], np.float32)  # 0.3 rounds the product, 1.0 does not
    for dims in (1, 3, 64):
        points = np.random.default_rng(dims).normal(size=(60, dims)).astype(np.float32)
        steps = np.abs(points[:, None].astype(np.float64) - points)
        norm = {"manhattan": 1, "euclidean": 2, "chebyshev": np.inf}[distance]
        penalties = {"linear": np.positive, "log": np.log1p, "sqrt": np.sqrt}[law](np.linalg.norm(steps, norm, axis=-1))
        exact = -slopes[:, None, None].astype(np.float64) * penalties
        arrays = map(framework.array, (slopes, points, points))
        found = alibi_core.bias_from_positions(*arrays, distance=distance, law=law, is_causal=False)
        units = dims + 4 if framework.name in ("jax", "mlx") else 2
        assert np.all(np.abs(framework.numpy(found) - exact) <= units * np.spacing(np.abs(exact).astype(np.float32)))


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
    tensors = tensors_of(Case(Sizes(2, 3, 1, (7, 7), 5)))
    rules = {"positions": np.ones((2, 7, 2), np.int32), "distance": "euclidean", "is_causal": False}
    said = backend.explain(**tensors, dtype="float32", **rules)
    assert (said.implementation, said.share, said.scores_visible) == ("tiled", 1, 2 * 3 * 49)
    assert np.all(np.isinf(said.horizons))


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
    length = 8192 if name == "jax" else 4096
    peak = peak_growth("tests.contracts.test_points:long_attention", name, length)
    assert peak < 4 * 2 * length**2 / 2  # half of the bias, in bytes; XLA takes about 100 MB to compile
