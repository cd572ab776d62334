"""Positions of the caller's own: points, times, tokens without a place, and laws of distance, in every framework."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import alibi_core
from alibi_core.backend.models import AlibiConfig
from alibi_core.conformance.testing import FAR as FAR_TOKENS
from alibi_core.conformance.testing import SIZES, Case, Sizes
from benchmarks.harness import peak_growth
from tests.support.frameworks import (
    FRAMEWORK,
    FRAMEWORKS,
    JAX,
    LAYER_BACKENDS,
    LIBRARIES,
    NAMES_SLOW_IN_JAX,
    NUMPY,
    Backend,
    Framework,
    few_in_jax,
    slow_in_jax,
)
from tests.support.layers import apply, decode, make_layer
from tests.support.models import make_model
from tests.support.tiles import assert_exact

# How far queries are from keys, by kind: differences of positions, or their sums, do not fit float32.
FAR = {"far": [2**23 - 20, 10**8 + 3, 2**30 - 9], "far reals": [2.0**22]}


def between_points(case: Case, dims: int, kind: str, distance: str, law: str) -> Case:
    """Return the case with positions of the caller's own; NaN marks a token without a place."""
    rng, places = np.random.default_rng(case.seed), []
    for length in case.sizes.lengths:
        shape = (case.sizes.batch, length) if dims == 1 else (case.sizes.batch, length, dims)
        if kind in ("integers", *FAR):
            places.append(rng.integers(-9, 9, shape).astype(np.int32))  # with ties
            continue
        places.append(rng.normal(0, 9, shape).astype(np.float32))
        if kind == "without a place":
            places[-1][:, :: max(2, length // 2)] = np.nan
            places[-1].reshape(case.sizes.batch, length, -1)[:, -1, -1] = np.nan  # one coordinate is enough
    if kind in FAR:
        shift, (queries, keys) = rng.choice(FAR[kind], () if dims == 1 else dims), places
        places = [queries + shift, keys] if kind == "far" else [(queries + shift) / 1.0, keys / 8]
        if "mask" in case.arguments:  # a near key, which some queries do not see
            places[1][:, 0] = places[0][:, 0]
        places = [x.astype(np.int32 if kind == "far" else np.float32) for x in places]
    rules = {"positions": tuple(places), "distance": distance, "law": law}
    return case.with_arguments(case.form, case.arguments | rules)


@st.composite
def point_cases(
    draw: st.DrawFn,
    *,
    kinds: tuple[str, ...] = ("integers", "reals", "without a place", *FAR),
    distances: tuple[str, ...] = ("manhattan", "euclidean", "chebyshev"),
    laws: tuple[str, ...] = ("linear", "log", "sqrt"),
    sizes: tuple[Sizes, ...] = SIZES[1:5],
) -> Case:
    """Draw a problem between points."""
    dims = draw(st.sampled_from([1, 2, 3]))
    case = Case(
        draw(st.sampled_from(sizes)),
        draw(st.sampled_from(["causal", "symmetric"])) if dims == 1 else "symmetric",
        slopes_per_batch=True,
        seed=draw(st.integers(0, 2**16)),
    )
    kind, distance, law = (draw(st.sampled_from(x)) for x in (kinds, distances, laws))
    # In space, float32 libraries round Euclidean distances to float32.
    return between_points(case, 1 if kind in FAR and distance == "euclidean" else dims, kind, distance, law)


@pytest.mark.parametrize(
    ("backend", "is_masked"), few_in_jax([x for x in LIBRARIES if x.id != "mlx"], [False, True], False)
)
def test_blocks_of_queries_and_heads_fit_together(backend: Backend, is_masked: bool) -> None:
    hides = {"packing": "pair", "masking": "by head"} if is_masked else {}
    case = Case(Sizes(2, 2, 2, (601, 601), 5), "symmetric", slopes_per_batch=True, **hides)
    case = between_points(case, 2, "without a place", "euclidean", "linear")
    # PyTorch computes gradients of slopes on another path.
    assert_exact(backend, case, asked=[("query", "key", "value") if is_masked else None])


def tensors_of(case: Case) -> dict[str, np.ndarray]:
    return {name: case.arrays[name] for name in ("query", "key", "value", "slopes")}


@pytest.mark.parametrize(("backend", "rule"), few_in_jax(LIBRARIES, [("log", 0), ("sqrt", 300)], ("sqrt", 300)))
def test_a_law_needs_no_positions(backend: Backend, rule: tuple[str, int]) -> None:
    law, q_offset = rule
    tensors = tensors_of(Case(Sizes(2, 3, 2, (601, 601), 5), seed=1))  # several blocks of queries
    keys = np.arange(601, dtype=np.int32)
    for is_causal in (True, False):
        rules: dict[str, Any] = {"dtype": "float32", "law": law, "is_causal": is_causal}
        by_position = backend.attention(**tensors, positions=(keys + q_offset, keys), **rules)
        np.testing.assert_allclose(backend.attention(**tensors, q_offset=q_offset, **rules), by_position, atol=1e-5)


@pytest.mark.parametrize("side", [1, -1])
@pytest.mark.parametrize("backend", LIBRARIES)
def test_a_distance_that_all_keys_share_changes_nothing(backend: Backend, side: int) -> None:
    case, rng = Case(Sizes(2, 3, 2, (7, 11), 5), seed=1), np.random.default_rng(1)
    tensors = tensors_of(case) | {"future_slopes": case.arrays["slopes"][::-1].copy()}
    queries, keys = (rng.integers(-9, 9, n).astype(np.int32) for n in (7, 11))
    rules: dict[str, Any] = {"is_causal": False, "mask": (np.arange(11) > 0)[None, None, None], "dtype": "float32"}
    near, far = [], []
    for found, shift in ((near, 32), (far, 10**8 + 3)):
        keys[0] = side * shift  # hidden from the queries, which are near
        rules["positions"] = queries + np.int32(side * shift), keys.copy()
        found += [backend.attention(**tensors, **rules)]
        found += backend.gradients(tensors, case.arrays["cotangent"], **rules).values()
    for one, other in zip(near, far, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5 if one.ndim > 1 else 1e-4)


# PyTorch and MLX draw such problems above.
@pytest.mark.parametrize(
    "drawn",
    [(1, "far", "manhattan", "linear"), (2, "far", "manhattan", "sqrt"), (3, "far reals", "chebyshev", "log"), ()],
    ids=str,
)
def test_far_keys_keep_their_bias_in_jax(drawn: tuple[Any, ...]) -> None:
    case = Case(SIZES[3], "symmetric" if drawn[:1] > (1,) else "causal", q_offset=None if drawn else FAR_TOKENS, seed=3)
    case = case.with_arrays(slopes=case.arrays["slopes"] * 30)
    by_index = case.with_arguments(case.form, case.arguments | {"law": "log"})
    assert_exact(Backend(JAX, "alibi_jax", None), between_points(case, *drawn) if drawn else by_index)


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


def bias_of(case: Case, framework: Framework) -> Any:
    """Return the bias between a case's points, of the core."""
    rules = dict(case.arguments)
    places = rules.pop("positions")
    rules["distance"] = rules["distance"] if places[0].ndim == 3 else None
    slopes = case.arrays["slopes"].astype(np.float32)
    return alibi_core.bias_from_positions(*(framework.array(x) for x in (slopes, *places)), **rules)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@given(case=point_cases(kinds=("integers",), distances=("manhattan", "chebyshev"), laws=("linear",), sizes=SIZES[3:4]))
def test_the_bias_between_whole_points_has_the_same_bits_everywhere(framework: Framework, case: Case) -> None:
    np.testing.assert_array_equal(framework.bits(bias_of(case, framework)), NUMPY.bits(bias_of(case, NUMPY)))


@pytest.mark.parametrize("framework", slow_in_jax(FRAMEWORKS))
@given(case=point_cases())
def test_the_bias_is_right_to_two_units_in_the_last_place(framework: Framework, case: Case) -> None:
    found, expected = framework.numpy(bias_of(case, framework)), case.exact("float32").bias.astype(np.float32)
    shown = expected > -np.inf
    np.testing.assert_array_equal(found > -np.inf, shown)
    found, expected = found[shown], expected[shown]
    assert np.all(np.abs(found - expected) <= 2 * np.spacing(np.abs(expected)))


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
    case = between_points(Case(SIZES[1], "symmetric"), 2, "integers", "euclidean", "linear")
    said = backend.explain(**tensors_of(case), dtype="float32", **case.arguments)
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
