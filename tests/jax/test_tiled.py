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
from alibi_core.conformance.testing import DATA, SIZES, Case, Sizes  # noqa: E402
from alibi_core.conformance.testing import assert_within_budget as assert_within  # noqa: E402
from alibi_jax import TPU  # noqa: E402
from tests.support.tiles import plain, within_tolerance  # noqa: E402
from tests.support.tpu_cases import BOTH, QUICKLY, TENSORS, assert_exact, computed  # noqa: E402


def in_long_rows(case: Case) -> Case:
    """Give a case slopes steep enough for horizons to end within its rows, and one of 0."""
    slopes = np.resize(np.float32([1.0, 0.3, 4.0, 0.0]), case.arrays["slopes"].shape).astype(np.float64)
    return case.with_arrays(slopes=slopes)


# --- Exact, in many tiles ------------------------------------------------------------------------------------------

SEES_NOTHING = ((np.arange(300) < 20) | (np.arange(300) > 290))[None, None, :, None]
EXAMPLES = {
    "beyond horizons": in_long_rows(plain(Sizes(1, 2, 2, (900, 900), 4))),
    "five jobs, four at a time": plain(Sizes(1, 1, 1, (1100, 1100), 2)),
    "queries that see nothing": plain(Sizes(2, 1, 2, (300, 400), 3), "symmetric", mask=SEES_NOTHING),
    "one query": plain(Sizes(2, 1, 3, (1, 1300), 4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", EXAMPLES.values(), ids=EXAMPLES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_many_tiles_are_exact_with_their_gradients(case: Case, dtype: str) -> None:
    assert_exact(case, dtype, implementation="tiled")


def test_a_program_for_any_batch_is_exact_in_many_tiles() -> None:
    # Its tiles have all heads, as where XLA divides a program among devices.
    rng = np.random.default_rng(0)
    query, key, value, weight = (jnp.asarray(rng.standard_normal((2, 700, n, 4)), jnp.float32) for n in (4, 2, 2, 4))
    slopes, (batch,) = jnp.asarray([1.0, 0.3, 4.0, 0.0]), export.symbolic_shape("batch")

    def gradients(implementation: str, query: Any, key: Any, value: Any, slopes: Any) -> Any:
        def loss(*x: jax.Array) -> jax.Array:
            return jnp.sum(alibi_jax.attention(*x, implementation=implementation) * weight[:1])

        return jax.grad(loss, argnums=(0, 1, 2, 3))(query, key, value, slopes)

    described = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in (query, key, value)]
    program = export.export(jax.jit(lambda *x: gradients("tiled", *x)))(*described, slopes)
    expected = jax.jit(lambda *x: gradients("dense", *x))(query, key, value, slopes)
    for found, exact in zip(program.call(query, key, value, slopes), expected, strict=True):
        # Gradients of slopes are sums over 2 * 700 queries, in another order.
        np.testing.assert_allclose(found, exact, rtol=0, atol=1400 * 2.0**-24 * max(4.0, float(np.abs(exact).max())))


def compiled(function: Any, implementation: Any) -> Any:
    """Return a function compiled as users do, but for kernels that are interpreted."""
    return jax.jit(function, compiler_options=None if isinstance(implementation, str) else QUICKLY)


def tensor_gradients(tensors: list[Any], weight: Any, implementation: Any) -> list[Any]:
    def loss(*tensors: jax.Array) -> jax.Array:
        return jnp.sum(alibi_jax.attention(*tensors, jnp.asarray([0.5, 0.02]), implementation=implementation) * weight)

    return compiled(jax.grad(loss, argnums=(0, 1, 2)), implementation)(*tensors)


@pytest.mark.slow
@BOTH
def test_gradients_of_scores_beyond_what_float32_counts(implementation: Any) -> None:
    # Scores of 1e9 or so: one key has all of the weight, and sums in another order are off by hundreds.
    query, key, value, weight = np.random.default_rng(0).standard_normal((4, 1, 400, 2, 32))
    tensors = [jnp.asarray(x, jnp.float32) for x in (1e4 * query, 1e4 * key, value)]
    by_query, by_key, by_value = tensor_gradients(tensors, jnp.asarray(weight, jnp.float32), implementation)
    # The exact 0 is a difference of sums of 32 products of up to 16, times a key, or times all queries.
    assert np.abs(by_query).max() <= 5e4 * 32**-0.5 * 32 * 16 * 2.0**-24
    assert np.abs(by_key).max() <= 400 * 5e4 * 32**-0.5 * 32 * 16 * 2.0**-24
    assert np.all(np.abs(np.asarray(by_value)) <= np.abs(weight).sum(axis=1, keepdims=True))


@pytest.mark.parametrize(
    ("q_offset", "is_masked"),
    [
        (1_000_000, True),
        pytest.param(1_000_000, False, marks=pytest.mark.slow),
        pytest.param(-1_000_000, False, marks=pytest.mark.slow),
    ],
)
def test_distances_are_counted_from_the_nearest_key(q_offset: int, is_masked: bool) -> None:
    mask = np.arange(11) % 4 != 3
    case = plain(SIZES[3], "symmetric", q_offset=q_offset, **({"mask": mask[None, None, None]} if is_masked else {}))
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


# --- The guarantee, and what it saves ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tolerance", [0.01, pytest.param(0.3, marks=pytest.mark.slow), pytest.param(2.0**-24, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "data",
    ["outlier", pytest.param("sinks", marks=pytest.mark.slow), pytest.param("equal_keys", marks=pytest.mark.slow)],
)
@BOTH
def test_no_more_is_left_out_than_the_tolerance(implementation: Any, data: str, tolerance: float) -> None:
    case = in_long_rows(plain(Sizes(1, 1, 3, (1000, 1000), 4), "symmetric" if data == "sinks" else "causal"))
    tensors = {name: case.arrays[name].copy() for name in TENSORS}
    DATA[data](**tensors)
    case = case.with_arrays(**tensors)
    result = computed(case, tolerance=tolerance, implementation=implementation)["result"]
    assert_within(result, within_tolerance(case.exact("float32").output, case, tolerance))


FORMS: dict[str, dict[str, Any]] = {
    "causal": {},
    "symmetric": {"is_causal": False},
    "window": {"is_causal": False, "window_size": 60},
}


@pytest.mark.parametrize(
    "form",
    ["causal", pytest.param("symmetric", marks=pytest.mark.slow), pytest.param("window", marks=pytest.mark.slow)],
)
@BOTH
def test_what_is_not_needed_is_not_read(implementation: Any, form: str) -> None:
    """Values and cotangents do not decide which keys are needed, so unneeded ones may be poison."""
    length, slopes = 1900, jnp.asarray([1.0, 0.7] if form != "window" else [0.0, 0.3])
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
        result, by_query, _ = function(value.at[:, spoilt].set(jnp.nan), weight)
        np.testing.assert_array_equal(result[:, untouched], clean[0][:, untouched])
        np.testing.assert_array_equal(by_query[:, untouched], clean[1][:, untouched])
    for spoilt, untouched in ((late, early), (early, late)):
        by_key = function(value, weight.at[:, spoilt].set(jnp.nan))[2]
        np.testing.assert_array_equal(by_key[:, untouched], clean[2][:, untouched])


@pytest.mark.slow
def test_memory_grows_with_the_length() -> None:
    def temporaries(length: int) -> int:
        tensors = [jax.ShapeDtypeStruct((1, length, heads, 16), jnp.float32) for heads in (4, 2, 2)]
        slopes = jax.ShapeDtypeStruct((4,), jnp.float32)

        def loss(*x: jax.Array) -> jax.Array:
            return jnp.sum(alibi_jax.attention(*x, implementation="tiled") ** 2)

        lowered = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(*tensors, slopes)
        return int(lowered.compile().memory_analysis().temp_size_in_bytes)

    assert temporaries(32768) <= 80 * 32768 * 4 * 16  # bytes: 20 tensors of the size of the query


# --- What is not finite, in rows so long that XLA's maximum on the CPU passes over a NaN: 4,096 in all heads ---------


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
    for one in (result, gradients[0]):
        assert np.isnan(one[:, seen, 2:]).all()
        assert np.isfinite(one[:, :, :2]).all()  # of the other key/value head
    for one in gradients[1:]:
        assert np.isnan(one[:, seen, 1]).all()
        assert np.isfinite(one[:, :, 0]).all()
