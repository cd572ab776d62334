"""Attention tile by tile, in plain XLA and in the TPU's kernel: rows of several tiles, and longer than horizons."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # or JAX waits for the TPU of an installed libtpu
jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax import export  # noqa: E402

import alibi_jax  # noqa: E402
from alibi_core.conformance.testing import DATA, SIZES, U32, Case, Sizes  # noqa: E402
from alibi_core.conformance.testing import assert_within_budget as assert_within  # noqa: E402
from alibi_jax import TPU  # noqa: E402
from tests.support.tiles import plain  # noqa: E402
from tests.support.tpu_cases import BOTH, QUICKLY, TENSORS, answers, assert_exact, computed, tensors_of  # noqa: E402

SLOPES = np.float32([1.0, 0.3, 4.0, 0.0]).astype(
    np.float64
)  # horizons that end within long rows, and one that does not


def compiled(function: Any, implementation: Any) -> Any:
    """Return a function compiled as users do, but for kernels that are interpreted."""
    return jax.jit(function, compiler_options=None if isinstance(implementation, str) else QUICKLY)


# --- Exact, in many tiles -------------------------------------------------------------------------------------------

SEES_NOTHING = ((np.arange(300) < 20) | (np.arange(300) > 290))[None, None, :, None]
EXAMPLES = {
    "five jobs, four at a time": plain(Sizes(1, 1, 1, (1100, 1100), 2)),
    "queries that see nothing": plain(Sizes(2, 1, 2, (300, 400), 3), "symmetric", mask=SEES_NOTHING),
    "one query": plain(Sizes(2, 1, 3, (1, 1300), 4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", EXAMPLES.values(), ids=EXAMPLES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_many_tiles_are_exact_with_their_gradients(case: Case, dtype: str) -> None:
    assert_exact(case, dtype, implementation="tiled")


@pytest.mark.parametrize("law", ["linear", "log"])
def test_a_program_for_any_batch_is_exact_in_many_tiles(law: str) -> None:
    # Its tiles have all heads, as where XLA divides a program among devices.
    case = plain(Sizes(2, 2, 2, (400, 400), 4)).with_arguments("", {"law": law}).with_arrays(slopes=SLOPES)
    tensors, cotangent = tensors_of(case, "float32"), jnp.asarray(case.arrays["cotangent"].swapaxes(1, 2), jnp.float32)

    @jax.jit
    def result_and_gradients(tensors: dict[str, jax.Array], cotangent: jax.Array) -> dict[str, jax.Array]:
        result, pull = jax.vjp(lambda x: alibi_jax.attention(**x, law=law, implementation="tiled"), tensors)
        return {"result": result} | pull(cotangent)[0]

    (batch,) = export.symbolic_shape("batch")
    shapes = {name: (batch, *x.shape[1:]) if x.ndim == 4 else x.shape for name, x in tensors.items()}
    described = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    program = export.export(result_and_gradients)(described, described["query"])
    found = program.call(tensors, cotangent)
    for name, answer in answers(case, "float32", U32).items():
        array = np.asarray(found[name], np.float64)
        assert_within(array.swapaxes(1, 2) if array.ndim == 4 else array, answer)


@pytest.mark.slow
@BOTH
def test_gradients_of_scores_beyond_what_float32_counts(implementation: Any) -> None:
    # Scores of 1e9 or so: one key has all of the weight, and sums in another order are off by hundreds.
    arrays = np.random.default_rng(0).standard_normal((4, 1, 400, 2, 32)) * [[[[[x]]]] for x in (1e4, 1e4, 1, 1)]
    *tensors, weight = jnp.asarray(arrays, jnp.float32)

    def loss(*tensors: jax.Array) -> jax.Array:
        return jnp.sum(alibi_jax.attention(*tensors, jnp.asarray([0.5, 0.02]), implementation=implementation) * weight)

    by_query, by_key, by_value = compiled(jax.grad(loss, argnums=(0, 1, 2)), implementation)(*tensors)
    # The exact 0 is a difference of sums of 32 products of up to 16, times a key, or times all queries.
    assert np.abs(by_query).max() <= 5e4 * 32**-0.5 * 32 * 16 * 2.0**-24
    assert np.abs(by_key).max() <= 400 * 5e4 * 32**-0.5 * 32 * 16 * 2.0**-24
    assert np.all(np.abs(np.asarray(by_value)) <= np.abs(weight).sum(axis=1, keepdims=True))


@pytest.mark.parametrize(
    ("q_offset", "is_masked"), [(1_000_000, True), pytest.param(-1_000_000, False, marks=pytest.mark.slow)]
)
def test_distances_are_counted_from_the_nearest_key(q_offset: int, is_masked: bool) -> None:
    hidden = {"mask": (np.arange(11) % 4 != 3)[None, None, None]} if is_masked else {}
    case = plain(SIZES[3], "symmetric", q_offset=q_offset, **hidden)
    # So steep that a rounded product of slope and distance would be off by much.
    steep = case.with_arrays(slopes=np.asarray([1.7, 0.3], np.float32).astype(np.float64))
    assert_exact(steep, implementation="tiled")


def test_distances_are_counted_from_the_nearest_key_that_is_not_hidden() -> None:
    # Two neighbours far from the query, which weigh the same: the farther one has the higher score.
    slopes = np.linspace(90.1, 120.7, 8).astype(np.float32).astype(np.float64)
    key, value = np.zeros((2, 1, 8, 400, 1))
    key[0, :, 0, 0], value[..., 0, :], value[..., 1, :] = slopes, 1, -1
    case = plain(Sizes(1, 8, 1, (1, 400), 1), mask=(np.arange(400) < 2)[None, None, None])
    case = case.with_arrays(query=np.ones((1, 8, 1, 1)), key=key, value=value, slopes=slopes)
    assert_within(computed(case, implementation="tiled")["result"], case.exact("float32").output)


def test_gates_are_counted_from_the_nearest_key_that_is_not_hidden() -> None:
    # Two queries that see the first three keys alone, with a gate between that all of these share.
    query, key = (jnp.asarray(np.random.default_rng(0).standard_normal((1, n, 1, 4)), jnp.float32) for n in (2, 400))
    rules = {"mask": jnp.broadcast_to(jnp.arange(400) < 3, (2, 400)), "implementation": "tiled"}
    small, large = (jnp.full((1, 400, 1), -0.3).at[:, 200].set(x) for x in (-1.0, -1e7))
    found, expected = (alibi_jax.attention(query, key, key, log_gates=x, **rules) for x in (large, small))
    np.testing.assert_allclose(found, expected, atol=1e-6)


# --- The guarantee, and what it saves -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "tolerance"),
    [("outlier", 0.01), *(pytest.param(*x, marks=pytest.mark.slow) for x in (("sinks", 0.3), ("equal_keys", U32)))],
)
@BOTH
def test_no_more_is_left_out_than_the_tolerance(implementation: Any, data: str, tolerance: float) -> None:
    case = plain(Sizes(1, 1, 3, (1000, 1000), 4), "symmetric" if data == "sinks" else "causal")
    tensors = {name: case.arrays[name].copy() for name in TENSORS}
    DATA[data](**tensors)
    case = case.with_arrays(**tensors, slopes=SLOPES[:3])
    result = computed(case, tolerance=tolerance, implementation=implementation)["result"]
    assert_within(result, case.exact("float32", tolerance).output)


FORMS: dict[str, dict[str, Any]] = {
    "causal": {},
    "symmetric": {"is_causal": False},
    "window": {"is_causal": False, "window_size": 60},
}


@pytest.mark.parametrize(
    "form", ["causal", *(pytest.param(x, marks=pytest.mark.slow) for x in ("symmetric", "window"))]
)
@BOTH
def test_what_is_not_needed_is_not_read(implementation: Any, form: str) -> None:
    """Values and cotangents do not decide which keys are needed, so unneeded ones may be poison."""
    length, slopes = 1900, jnp.asarray([0.0, 0.3] if form == "window" else [1.0, 0.7])
    query, key, value, weight = jnp.asarray(np.random.default_rng(0).standard_normal((4, 1, length, 2, 8)), jnp.float32)

    def result_and_gradients(value: jax.Array, weight: jax.Array) -> Any:
        def attend(query: jax.Array, key: jax.Array) -> jax.Array:
            return alibi_jax.attention(query, key, value, slopes, implementation=implementation, **FORMS[form])

        result, pull = jax.vjp(attend, query, key)
        return result, *pull(weight)

    function = compiled(result_and_gradients, implementation)
    clean = function(value, weight)
    early, late = slice(0, 100), slice(1400, length)
    for spoilt, untouched in ((late, early), (early, late)):
        of_values = function(value.at[:, spoilt].set(jnp.nan), weight)
        of_weights = function(value, weight.at[:, spoilt].set(jnp.nan))
        for found, expected in zip((*of_values[:2], of_weights[2]), clean, strict=True):
            np.testing.assert_array_equal(found[:, untouched], expected[:, untouched])


@pytest.mark.slow
def test_memory_grows_with_the_length() -> None:
    def loss(*x: jax.Array) -> jax.Array:
        return jnp.sum(alibi_jax.attention(*x, implementation="tiled") ** 2)

    tensors = [jax.ShapeDtypeStruct((1, 32768, heads, 16), jnp.float32) for heads in (4, 2, 2)]
    lowered = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(*tensors, jax.ShapeDtypeStruct((4,), jnp.float32))
    temporaries = lowered.compile().memory_analysis().temp_size_in_bytes
    assert temporaries <= 80 * 32768 * 4 * 16  # bytes: 20 tensors of the size of the query


# --- NaN, in rows so long that XLA's maximum on the CPU passes over a NaN: 4,096 in all heads -----------------------


@pytest.mark.parametrize(("token", "is_causal"), [(0, True), pytest.param(300, False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "implementation",
    ["tiled", pytest.param(TPU(256, 256, interpret=True), marks=pytest.mark.slow)],
    ids=["tiled", "tpu"],
)
def test_nan_in_a_key_reaches_every_query_that_may_look_at_it(token: int, implementation: Any, is_causal: bool) -> None:
    random, slopes = np.random.default_rng(0), jnp.asarray([0.5, 0.25, 0.5, 0.02])
    query, key, value = (jnp.asarray(random.normal(size=(1, 1024, n, 4)), jnp.float32) for n in (4, 2, 2))

    def loss(*tensors: jax.Array) -> Any:
        result = alibi_jax.attention(*tensors, slopes, implementation=implementation, is_causal=is_causal)
        return jnp.sum(result * jnp.cos(jnp.arange(1024))[:, None, None]), result

    key = key.at[0, token, 1, 2].set(jnp.nan)
    gradients, result = compiled(jax.grad(loss, argnums=(0, 1, 2), has_aux=True), implementation)(query, key, value)
    seen = slice(token if is_causal else 0, None)
    for one, heads in ((result, 2), (gradients[0], 2), (gradients[1], 1), (gradients[2], 1)):
        assert np.isnan(one[:, seen, heads:]).all()
        assert np.isfinite(one[:, :, :heads]).all()  # of the other key/value head
