"""Tiled attention in plain XLA: tiles so small that little cases have many, and rows longer than horizons."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import alibi_jax  # noqa: E402
from alibi_core.backend import LENGTH_FIRST, AttentionCall  # noqa: E402
from alibi_core.conformance.testing import DATA, LONGER, PER_BATCH, SIZES, Case, Sizes, cases  # noqa: E402
from alibi_core.conformance.testing import assert_within_budget as assert_within  # noqa: E402
from alibi_jax import _tiled  # noqa: E402
from alibi_jax._call.operands import Operands, Rules, take_apart  # noqa: E402
from alibi_jax._call.plan import NORM_BLOCK, needed_keys  # noqa: E402
from alibi_jax._tiled import Tiling, jobs_of, sizes_of  # noqa: E402
from tests.support.frameworks import JAX, Backend  # noqa: E402
from tests.support.full import first_of  # noqa: E402
from tests.support.tiles import plain, within_tolerance  # noqa: E402
from tests.support.tpu_cases import QUICKLY, TENSORS, answers, replaced  # noqa: E402

BACKEND = Backend(JAX, "alibi_jax", None)
DEFAULT = Tiling()
# A compiler is at work in each example.
FEW_EXAMPLES = settings(max_examples=max(8, settings.default.max_examples // 4))


def small(rows: int = 4, keys: int = 3, lanes: int = 4, scores: int = 1, *, together: bool = False) -> Tiling:
    """Return tiles so small that little cases have many."""
    return Tiling(together, rows, keys, keys, lanes, scores, piece=1, plan_keys=4)


TILINGS = st.builds(
    small,
    rows=st.sampled_from([1, 2, 4, 16]),
    keys=st.sampled_from([2, 3, 16]),
    lanes=st.sampled_from([1, 2, 5]),
    scores=st.sampled_from([1, 2**20]),
)


def operands_of(case: Case, dtype: str = "float32", tolerance: float | None = None) -> tuple[Rules, Operands]:
    tensors = [JAX.array(BACKEND.layout(case.arrays[name]), dtype) for name in ("query", "key", "value")]
    slopes = JAX.array(case.arrays["slopes"], "float64" if dtype == "float64" else "float32")
    arguments = JAX.placed(case.arguments)
    call = AttentionCall.check(
        *tensors, slopes, **arguments, tolerance=tolerance, allow_negative_slopes=True, layout=LENGTH_FIRST, xp=jnp
    )
    return take_apart(call, *tensors)


def forward(rules: Rules, operands: Operands, tiling: Tiling = DEFAULT) -> tuple[Any, Any]:
    dtype = operands.query.dtype
    return jax.jit(lambda x: _tiled.forward(rules, x, dtype, tiling))(operands)


def forward_and_backward(rules: Rules, operands: Operands, cotangent: Any, tiling: Tiling = DEFAULT) -> tuple[Any, ...]:
    """Return the result, the log-sum-exps and the five gradients."""

    def both(operands: Operands, cotangent: Any) -> tuple[Any, ...]:
        result, sums = _tiled.forward(rules, operands, operands.slopes.dtype, tiling)
        gradients = _tiled.backward(rules, operands, result, sums, cotangent, tiling, slopes_too=True)
        return result.astype(operands.query.dtype), sums, *gradients

    return jax.jit(both)(operands, cotangent)


def assert_exact(case: Case, tiling: Tiling, dtype: str = "float32", tolerance: float | None = None) -> None:
    """Assert that the result and all gradients, those of slopes for each entry, are within their budgets."""
    by_entry = (case.sizes.batch, case.num_heads)
    arguments = {name: np.broadcast_to(x, by_entry) if name == "future_slopes" else x
                 for name, x in case.arguments.items()}  # fmt: skip
    case = replaced(case, arguments=arguments, slopes=np.broadcast_to(case.arrays["slopes"], by_entry))
    rules, operands = operands_of(case, dtype, tolerance)
    cotangent = JAX.array(BACKEND.layout(case.arrays["cotangent"]), dtype)
    result, sums, *gradients = forward_and_backward(rules, operands, cotangent, tiling)
    assert (result.shape, result.dtype) == (operands.query.shape, operands.query.dtype)
    assert (sums.shape, sums.dtype) == ((*by_entry, case.sizes.lengths[0]), operands.slopes.dtype)
    assert [x.shape for x in gradients[:3]] == [x.shape for x in operands[:3]]
    sees = np.isfinite(case.exact(dtype).bias).any(axis=-1)
    np.testing.assert_array_equal(JAX.numpy(sums) == np.inf, ~sees)
    found = {"result": result} | dict(zip((*TENSORS, "slopes", "future_slopes"), gradients, strict=True))
    assert (found["future_slopes"] is None) == ("future_slopes" not in case.arguments)
    for name, answer in answers(case, dtype, rules.tolerance).items():
        array = JAX.numpy(found[name])
        assert_within(array if "slopes" in name else BACKEND.layout(array), answer)


def in_long_rows(case: Case) -> Case:
    """Give a case slopes steep enough for horizons to end within its rows, and one of 0."""
    slopes = np.resize(np.float32([1.0, 0.3, 4.0, 0.0]), case.arrays["slopes"].shape).astype(np.float64)
    return case.with_arrays(slopes=slopes)


# --- Exact, in many tiles ------------------------------------------------------------------------------------------

EXAMPLES = {
    "all rules": (Case(SIZES[3], "asymmetric", PER_BATCH, 3, "pair", "by key", True, 5), small(together=True)),
    "beyond horizons": (in_long_rows(plain(LONGER[0])), small(16, 24)),
    "lanes without a job": (plain(SIZES[1]), small(lanes=5)),
    "queries that see nothing": (
        plain(SIZES[2], "symmetric", mask=((np.arange(7) < 2) | (np.arange(7) > 5))[None, None, :, None]),
        small(2, 3),
    ),
    "beyond horizons, more queries": (in_long_rows(plain(LONGER[2], "asymmetric")), small(16, 24, together=True)),
}


@pytest.mark.parametrize(("case", "tiling"), first_of(EXAMPLES.values()), ids=EXAMPLES)
def test_an_example_is_exact_with_its_gradients(case: Case, tiling: Tiling) -> None:
    assert_exact(case, tiling)


@pytest.mark.full
@FEW_EXAMPLES
@given(
    case=cases(),
    tiling=TILINGS,
    precision=st.sampled_from([("float32", None), ("float32", 0.0), ("bfloat16", 0.0), ("float16", 0.0)]),
)
def test_many_tiles_are_exact_with_their_gradients(
    case: Case, tiling: Tiling, precision: tuple[str, float | None]
) -> None:
    for together in (False, True):
        assert_exact(case, replace(tiling, together=together), *precision)


@pytest.mark.full
@FEW_EXAMPLES
@given(
    case=st.sampled_from(LONGER).flatmap(lambda sizes: cases(sizes=sizes)),
    rows=st.sampled_from([16, 40]),
    together=st.booleans(),
)
def test_rows_longer_than_horizons_are_exact_with_their_gradients(case: Case, rows: int, together: bool) -> None:
    assert_exact(in_long_rows(case), small(rows, 24, together=together))


KERNEL = alibi_jax.TPU(interpret=True, q_block=128, kv_block=128)


def compiled(function: Any, implementation: Any) -> Any:
    """Return a function compiled as users do, but for kernels that are interpreted."""
    return jax.jit(function, compiler_options=None if isinstance(implementation, str) else QUICKLY)


@pytest.mark.parametrize("dtype", first_of([jnp.bfloat16, jnp.float32]), ids=lambda x: x.__name__)
@pytest.mark.parametrize("form", first_of([{}, {"is_causal": False}]), ids=str)
@pytest.mark.parametrize("implementation", first_of(["tiled", KERNEL]), ids=["tiled", "tpu"])
def test_gradients_of_slopes_know_no_rounded_result(implementation: Any, dtype: Any, form: dict[str, Any]) -> None:
    # Values around 8: the gradients of a row's scores are differences of what is nearly the same.
    rng = np.random.default_rng(0)
    query, key, value, weight = (jnp.asarray(x, jnp.float32) for x in rng.standard_normal((4, 1, 256, 2, 16)))
    tensors, weight = [x.astype(dtype) for x in (query, key, value + 8)], weight.astype(dtype).astype(jnp.float32)

    def gradient(implementation: Any) -> jax.Array:
        def loss(slopes: jax.Array) -> jax.Array:
            result = alibi_jax.attention(*tensors, slopes, implementation=implementation, **form)
            return (result.astype(jnp.float32) * weight).sum()

        return compiled(jax.grad(loss), implementation)(jnp.asarray([0.5, 0.004]))

    # Both in float32 until the end, whatever the dtype: off by its roundoff times the sum of what cancels, 256 rows of
    # values of 8 by a mean distance of 100, which is some thousand times the gradient.
    np.testing.assert_allclose(gradient(implementation), gradient("dense"), rtol=2e-3)


def query_key_and_value_gradients(tensors: list[Any], weight: Any, implementation: Any) -> list[Any]:
    def loss(*tensors: jax.Array) -> jax.Array:
        return jnp.sum(alibi_jax.attention(*tensors, jnp.asarray([0.5, 0.02]), implementation=implementation) * weight)

    return compiled(jax.grad(loss, argnums=(0, 1, 2)), implementation)(*tensors)


def relative_errors(found: list[Any], exact: list[Any]) -> np.ndarray:
    """Return norms of differences, as parts of those of the exact arrays."""
    found = [np.asarray(x, np.float64) for x in found]
    return np.asarray([np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in zip(found, exact, strict=True)])


@pytest.mark.full
@pytest.mark.parametrize("means", [(0, 30), (100, 100)], ids=str)
@pytest.mark.parametrize(
    ("implementation", "dtype"),
    first_of([("tiled", jnp.bfloat16), ("tiled", jnp.float16), (KERNEL, jnp.bfloat16)]),
    ids=["tiled, bfloat16", "tiled, float16", "tpu, bfloat16"],
)
def test_gradients_where_keys_and_values_have_a_mean(implementation: Any, means: Any, dtype: Any) -> None:
    tensors = np.random.default_rng(0).standard_normal((4, 1, 512, 2, 32))
    tensors = [jnp.asarray(x + mean, dtype) for x, mean in zip(tensors, (0, *means, 0), strict=True)]
    with jax.enable_x64(True):
        *wide, weight = (jnp.asarray(x, jnp.float64) for x in tensors)
        exact = [np.asarray(x) for x in query_key_and_value_gradients(wide, weight, "dense")]
    # Results are rounded, and nothing else is, beside what float32 is off by. The kernels round weights and gradients
    # of scores as well, for the sake of the units that multiply them: three roundings for one.
    slack = 1.1 if implementation == "tiled" else 3**0.5
    of_rounding = relative_errors([x.astype(dtype) for x in exact], exact)
    for kind, roundings in ((jnp.float32, 0.0), (dtype, slack)):
        *narrow, weight = (x.astype(kind) for x in tensors)
        found = query_key_and_value_gradients(narrow, weight, implementation)
        # Scores of up to 100 * 32**0.5 and more are off by 2**-24 of that, and so are weights.
        assert np.all(relative_errors(found, exact) <= roundings * of_rounding + 32 * max(1, *means) * 2.0**-24)


@pytest.mark.full
@pytest.mark.parametrize("implementation", ["tiled", KERNEL], ids=["tiled", "tpu"])
def test_gradients_of_scores_beyond_what_float32_counts(implementation: Any) -> None:
    # Scores of 1e9 or so: one key has all of the weight, and sums in another order are off by hundreds.
    query, key, value, weight = np.random.default_rng(0).standard_normal((4, 1, 400, 2, 32))
    tensors = [jnp.asarray(x, jnp.float32) for x in (1e4 * query, 1e4 * key, value)]

    def loss(*tensors: jax.Array) -> jax.Array:
        result = alibi_jax.attention(*tensors, jnp.asarray([0.5, 0.02]), implementation=implementation)
        return jnp.sum(result * jnp.asarray(weight, jnp.float32))

    by_query, by_key, by_value = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*tensors)
    # What is exactly 0 is a difference of sums of 32 products of up to 16, times a key, or as many queries.
    assert np.abs(by_query).max() <= 5e4 * 32**-0.5 * 32 * 16 * 2.0**-24
    assert np.abs(by_key).max() <= 400 * 5e4 * 32**-0.5 * 32 * 16 * 2.0**-24
    assert np.all(np.abs(np.asarray(by_value)) <= np.abs(weight).sum(axis=1, keepdims=True))


@pytest.mark.full
@pytest.mark.parametrize("together", [False, True])
def test_float64_is_exact_to_its_rounding(together: bool) -> None:
    with jax.enable_x64(True):
        assert_exact(plain(SIZES[3], "asymmetric"), small(together=together), "float64")


@pytest.mark.parametrize(
    ("q_offset", "is_masked"), first_of([(1_000_000, True), (1_000_000, False), (-1_000_000, False)])
)
def test_distances_are_counted_from_the_nearest_key(q_offset: int, is_masked: bool) -> None:
    mask = np.arange(11) % 4 != 3
    case = plain(SIZES[3], "symmetric", q_offset=q_offset, **({"mask": mask[None, None, None]} if is_masked else {}))
    # So steep that a rounded product of slope and distance would be off by much.
    assert_exact(case.with_arrays(slopes=np.asarray([1.7, 0.3], np.float32).astype(np.float64)), small())


def test_distances_are_counted_from_the_nearest_key_that_is_not_hidden() -> None:
    # Two neighbours far from the query, which weigh the same: the farther one has the higher score.
    slopes = np.linspace(90.1, 120.7, 8).astype(np.float32).astype(np.float64)
    key, value = np.zeros((2, 1, 8, 400, 1))
    key[0, :, 0, 0], value[..., 0, :], value[..., 1, :] = slopes, 1, -1
    case = plain(Sizes(1, 8, 1, (1, 400), 1), mask=(np.arange(400) < 2)[None, None, None])
    case = case.with_arrays(query=np.ones((1, 8, 1, 1)), key=key, value=value, slopes=slopes)
    result, _ = forward(*operands_of(case))
    assert_within(BACKEND.layout(JAX.numpy(result)), case.exact("float32").output)


@pytest.mark.full
@pytest.mark.parametrize("length", [17, 1, 15, 16, 33])
def test_lengths_about_those_of_tiles(length: int) -> None:
    case = plain(Sizes(2, 2, 1, (length, length + 1), 3))
    result, _ = forward(*operands_of(case), small(16, 16))
    assert_within(BACKEND.layout(JAX.numpy(result)), case.exact("float32").output)


# --- The guarantee -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tolerance", first_of([0.01, 0.3, 2.0**-24]))
@pytest.mark.parametrize("data", first_of(["outlier", "sinks", "equal_keys"]))
def test_no_more_is_left_out_than_the_tolerance(data: str, tolerance: float) -> None:
    case = in_long_rows(plain(LONGER[0], "symmetric" if data == "sinks" else "causal"))
    tensors = {name: case.arrays[name].copy() for name in TENSORS}
    DATA[data](**tensors)
    case = case.with_arrays(**tensors)
    result, _ = forward(*operands_of(case, tolerance=tolerance), small(16, 16))
    assert_within(BACKEND.layout(JAX.numpy(result)), within_tolerance(case.exact("float32").output, case, tolerance))


# --- What is computed ----------------------------------------------------------------------------------------------


def many_tokens(length: int, heads: tuple[int, int] = (8, 8), q_len: int | None = None) -> tuple[Rules, Operands]:
    rng = np.random.default_rng(0)
    num_heads, num_kv_heads = heads
    query = rng.standard_normal((1, q_len or length, num_heads, 16), np.float32)
    key, value = rng.standard_normal((2, 1, length, num_kv_heads, 16), np.float32)
    tensors = [jnp.asarray(x) for x in (query, key, value)]
    return take_apart(AttentionCall.check(*tensors, layout=LENGTH_FIRST, xp=jnp), *tensors)


@pytest.mark.full
def test_about_as_many_keys_are_visited_as_are_needed() -> None:
    rules, operands = many_tokens(16384)
    sizes = sizes_of(rules, operands, DEFAULT)
    part = sizes.part

    def count(operands: Operands) -> tuple[Any, Any]:
        needed = needed_keys(rules, operands, part["q"], DEFAULT.plan_keys)
        blocks = jobs_of(rules, operands, sizes).blocks
        return jnp.sum(needed.stop - needed.first), jnp.sum(jnp.max(blocks, axis=1)) * sizes.lanes * part["k"]

    needed, visited = map(int, jax.jit(count)(operands))
    assert needed <= visited <= 1.1 * needed
    assert visited * part["q"] <= 0.3 * 8 * 16384**2 / 2  # of the triangles


@pytest.mark.parametrize("heads", [(8, 2), pytest.param((8, 8), marks=pytest.mark.full)])
@pytest.mark.parametrize("q_len", first_of([300, 1]))
def test_nothing_but_the_needed_keys_is_read(q_len: int, heads: tuple[int, int]) -> None:
    # Norms are given, so that no key has to be looked at for the plan; what nobody needs is poison.
    length = 4096
    rules, operands = many_tokens(length, heads, q_len)
    operands = operands._replace(slopes=jnp.full((1, 8), 0.25, jnp.float32))
    norms = jnp.linalg.norm(operands.key, axis=-1).max(axis=1)[..., None]
    operands = operands._replace(key_norms=jnp.broadcast_to(norms * 1.001, (1, heads[1], length // NORM_BLOCK)))
    expected, _ = forward(rules, operands)
    read = length - 200 - q_len - DEFAULT.keys_of_few
    poisoned = {name: getattr(operands, name).at[:, :read].set(jnp.nan) for name in ("key", "value")}
    result, sums, *gradients = forward_and_backward(rules, operands._replace(**poisoned), jnp.ones_like(operands.query))
    np.testing.assert_allclose(result, expected, atol=1e-6)
    assert np.isfinite(sums).all()
    for gradient in gradients[:4]:
        assert np.isfinite(gradient).all()


@pytest.mark.full
@pytest.mark.parametrize("together", [False, True])
def test_memory_grows_with_the_length(together: bool) -> None:
    tiling = Tiling(together=together)

    def temporaries(length: int) -> int:
        rules, operands = many_tokens(length, (4, 2))

        def both(operands: Operands) -> tuple[Any, ...]:
            result, sums = _tiled.forward(rules, operands, jnp.float32, tiling)
            return _tiled.backward(rules, operands, result, sums, operands.query, tiling, slopes_too=True)

        compiled = jax.jit(both).lower(operands).compile()
        return int(compiled.memory_analysis().temp_size_in_bytes)

    assert temporaries(32768) <= 80 * 32768 * 4 * 16  # bytes: 20 tensors of the size of the query


def test_few_queries_make_small_tiles() -> None:
    for q_len, together in ((1, False), (1, True), (5, False), (257, False), (300, True)):
        rules, operands = many_tokens(5000, (8, 2), q_len)
        sizes = sizes_of(rules, operands, Tiling(together=together))
        assert q_len <= sizes.part["q"] * sizes.grid[-1] <= q_len + 32
        assert sizes.part["q"] <= DEFAULT.rows
        assert sizes.part["k"] <= DEFAULT.keys_of_few


def test_heads_of_short_sequences_share_a_step() -> None:
    operands = Operands(*(jnp.zeros((8, 128, 12, 64)),) * 3, slopes=jnp.ones((1, 12)))
    rules = Rules(is_causal=True, q_offset=0, window_size=None, scale=1.0, tolerance=0.0)
    sizes = sizes_of(rules, operands, DEFAULT)
    assert sizes.steps <= 2
    assert not sizes.has_idle_rows
