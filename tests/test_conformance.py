"""The laws of ALiBi attention, for every backend alike."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.cases import SIZES, SQUARE, Case, cases
from tests.frameworks import BACKENDS, DIFFERENTIABLE, Backend
from tests.oracle import Answer, Attention, Rules, assert_within, penalties

LOW_PRECISION = [
    pytest.param(*backend.values, dtype, id=f"{backend.id}-{dtype}", marks=backend.marks)
    for backend in BACKENDS
    for dtype in ("float16", "bfloat16")
    # NumPy and the standard itself know no low-precision floats that can be computed with.
    if backend.values[0].framework.name in ("torch", "jax", "mlx")
]

FLOAT64 = [
    backend
    for backend in BACKENDS
    if backend.values[0].framework.name
    in ("numpy", "array_api_strict", "torch", "dask")  # MLX and JAX: their own files
]


def attend(backend: Backend, case: Case, dtype: str = "float32", **changes: object) -> np.ndarray:
    """Return ``backend``'s answer to ``case``, some of its arrays or arguments changed."""
    arrays = {name: changes.pop(name, case.arrays[name]) for name in ("query", "key", "value", "slopes")}
    return backend.attention(**arrays, dtype=dtype, **(case.arguments | changes))


def exact(backend: Backend, case: Case, dtype: str = "float32") -> Answer:
    return case.exact(backend.framework, dtype).output


@pytest.mark.parametrize("backend", BACKENDS)
@given(case=cases())
def test_attention_is_exact_to_rounding(backend: Backend, case: Case) -> None:
    assert_within(attend(backend, case), exact(backend, case))


@pytest.mark.parametrize(("backend", "dtype"), LOW_PRECISION)
@given(case=cases())
def test_low_precision_attention_is_exact_to_its_rounding(backend: Backend, dtype: str, case: Case) -> None:
    assert_within(attend(backend, case, dtype), exact(backend, case, dtype))


@pytest.mark.parametrize("backend", FLOAT64)
@given(case=cases())
def test_float64_attention_is_exact_to_its_rounding(backend: Backend, case: Case) -> None:
    assert_within(attend(backend, case, "float64"), exact(backend, case, "float64"))


@pytest.mark.parametrize(("backend", "dtype"), LOW_PRECISION)
def test_low_precision_attention_keeps_the_bias_in_float32(backend: Backend, dtype: str) -> None:
    # Far from the diagonal the spacing of low-precision numbers exceeds a step of the bias: if the bias were rounded,
    # neighbouring keys would weigh the same, where they should differ by a factor of exp(1/2).
    length, values = 2048, np.asarray([0.0, 1.0])
    value = np.resize(values, length)[None, None, :, None]
    query = np.zeros((1, 1, 1, 1))
    far = backend.attention(query, value * 0, value, np.asarray([0.5]), dtype=dtype, q_offset=3 * length)
    odd_over_even = np.exp(0.5)
    expected = odd_over_even / (1 + odd_over_even)
    np.testing.assert_allclose(far, expected, rtol=2 * 2.0**-8 if dtype == "bfloat16" else 2 * 2.0**-11)


@pytest.mark.parametrize("backend", DIFFERENTIABLE)
@given(case=cases())
def test_gradients_are_exact_to_rounding(backend: Backend, case: Case) -> None:
    assert_gradients(backend, case, "float32")


@pytest.mark.parametrize(("backend", "dtype"), [x for x in LOW_PRECISION if x.values[0].module != "alibi_core"])
@example(case=Case(SIZES[1], "causal", None, None, None, None, slopes_per_batch=False, seed=6))  # tiny weights
@given(case=cases())
def test_low_precision_gradients_are_exact_to_their_rounding(backend: Backend, dtype: str, case: Case) -> None:
    assert_gradients(backend, case, dtype)


@pytest.mark.parametrize("backend", DIFFERENTIABLE)
@given(case=cases(forms=("asymmetric",)))
def test_gradients_of_both_kinds_of_slopes_add_up(backend: Backend, case: Case) -> None:
    # With the same slopes on both sides, moving both moves the symmetric form's slopes.
    slopes = case.arrays["slopes"].astype(np.float32)
    arguments = {name: value for name, value in case.arguments.items() if name != "future_slopes"}
    symmetric = case.with_arguments("symmetric", arguments)
    tensors = {name: case.arrays[name] for name in ("query", "key", "value")}
    cotangent = case.arrays["cotangent"]
    together = backend.gradients(tensors | {"slopes": slopes}, cotangent, dtype="float32", **arguments)["slopes"]
    both = {"slopes": slopes, "future_slopes": slopes}
    past, future = (backend.gradients(tensors | both, cotangent, dtype="float32", **arguments)[name] for name in both)
    budget = gradient_answers(backend, symmetric, "float32")["slopes"].budget
    assert np.all(np.abs(past + future - together) <= 3 * budget)
    if case.sizes.lengths == (7, 7) and not case.slopes_per_batch and len(arguments) == 1:
        assert np.abs(future).max() > 0


def assert_gradients(backend: Backend, case: Case, dtype: str) -> None:
    tensors = {name: case.arrays[name] for name in ("query", "key", "value", "slopes")}
    actual = backend.gradients(tensors, case.arrays["cotangent"], dtype=dtype, **case.arguments)
    for name, answer in gradient_answers(backend, case, dtype).items():
        assert_within(actual[name], answer)


def gradient_answers(backend: Backend, case: Case, dtype: str) -> dict[str, Answer]:
    problem = case.exact(backend.framework, dtype)
    ones = dataclasses.replace(case.rules(np.ones(case.num_heads)), future_slopes=None)
    if "future_slopes" in case.arguments:  # the slopes then count backwards only
        ones = dataclasses.replace(ones, future_slopes=np.zeros(case.num_heads))
    distances = -penalties(ones, case.sizes.batch, case.num_heads, *case.sizes.lengths)
    cotangent = backend.framework.numpy(backend.framework.array(case.arrays["cotangent"], dtype))
    expected = problem.gradients(cotangent, np.where(np.isfinite(distances), distances, 0))
    if not case.slopes_per_batch:
        by_batch = expected["slopes"]
        expected["slopes"] = Answer(
            by_batch.value.sum(axis=0), by_batch.budget.sum(axis=0) * (1 + case.sizes.batch * 2**-20)
        )
    return expected


def test_the_oracles_gradients_are_those_of_finite_differences() -> None:
    rng = np.random.default_rng(0)
    query, cotangent = rng.standard_normal((2, 1, 2, 3, 2))
    key, value = rng.standard_normal((2, 1, 1, 5, 2))
    slopes, step = np.asarray([0.5, 0.1]), 1e-6

    def problem(query: np.ndarray, key: np.ndarray, value: np.ndarray, slopes: np.ndarray) -> Attention:
        return Attention(query, key, value, penalties(Rules(slopes, q_offset=2), 1, 2, 3, 5), 0.7, "float64")

    inputs = {"query": query, "key": key, "value": value, "slopes": slopes}
    distances = np.maximum(np.arange(2, 5)[:, None] - np.arange(5), 0)
    gradients = problem(**inputs).gradients(cotangent, distances)
    for name, x in inputs.items():
        for index in np.ndindex(*x.shape):
            sides = []
            for sign in (1, -1):
                moved = x.copy()
                moved[index] += sign * step
                sides.append((problem(**(inputs | {name: moved})).output.value * cotangent).sum())
            actual = gradients[name].value.reshape(x.shape)[index]
            assert abs((sides[0] - sides[1]) / (2 * step) - actual) < 1e-8


@pytest.mark.parametrize("backend", BACKENDS)
@given(case=cases(forms=("causal",), sizes=SQUARE, plain=True), steps=st.sampled_from([1, 3]))
def test_decoding_in_steps_equals_prefill(backend: Backend, case: Case, steps: int) -> None:
    a, answer = case.arrays, exact(backend, case)
    for start in range(0, 7, steps):
        end = min(start + steps, 7)
        seen = {"query": a["query"][:, :, start:end], "key": a["key"][:, :, :end], "value": a["value"][:, :, :end]}
        rows = slice(None), slice(None), slice(start, end)
        assert_within(attend(backend, case, **seen), Answer(answer.value[rows], answer.budget[rows]))


@pytest.mark.parametrize("backend", BACKENDS)
@given(case=cases(forms=("causal",), sizes=SQUARE))
def test_decoding_equals_prefill_with_windows_segments_and_masks(backend: Backend, case: Case) -> None:
    case = dataclasses.replace(case, q_offset=None, packing="same" if case.packing else None)
    a, arguments, answer = case.arrays, case.arguments, exact(backend, case)
    for start, end in ((0, 4), (4, 7)):
        seen = {"query": a["query"][:, :, start:end], "key": a["key"][:, :, :end], "value": a["value"][:, :, :end]}
        if "segment_ids" in arguments:
            ids = arguments["segment_ids"]
            seen["segment_ids"] = (ids[:, start:end], ids[:, :end])
        if "mask" in arguments:
            seen["mask"] = np.broadcast_to(arguments["mask"], (2, 6, 7, 7))[:, :, start:end, :end].copy()
        rows = slice(None), slice(None), slice(start, end)
        assert_within(attend(backend, case, **seen), Answer(answer.value[rows], answer.budget[rows]))


@pytest.mark.parametrize("backend", BACKENDS)
@given(case=cases(sizes=SQUARE))
def test_a_shard_of_heads_equals_the_slice(backend: Backend, case: Case) -> None:
    a, answer = case.arrays, exact(backend, case)
    kv, heads = slice(1, 3), slice(case.sizes.group, 3 * case.sizes.group)
    shard = {"query": a["query"][:, heads], "key": a["key"][:, kv], "value": a["value"][:, kv]}
    shard["slopes"] = a["slopes"][..., heads]
    if "future_slopes" in case.arguments:
        shard["future_slopes"] = case.arguments["future_slopes"][..., heads]
    if case.masking == "by head":
        shard["mask"] = case.arguments["mask"][heads]
    assert_within(attend(backend, case, **shard), Answer(answer.value[:, heads], answer.budget[:, heads]))


@pytest.mark.parametrize("backend", BACKENDS)
@given(case=cases(sizes=SQUARE, plain=True))
def test_packed_sequences_equal_separate_ones(backend: Backend, case: Case) -> None:
    packed = attend(backend, case, segment_ids=np.asarray([[4, 4, 4, 2, 2, 2, 2]] * case.sizes.batch, dtype=np.int32))
    for part in (slice(0, 3), slice(3, 7)):
        alone = {name: case.arrays[name][:, :, part] for name in ("query", "key", "value")}
        assert_within(packed[:, :, part], exact(backend, case.with_tensors(**alone)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("side", ["left", "right"])
@given(case=cases(sizes=SQUARE, plain=True))
def test_padding_changes_nothing(backend: Backend, side: str, case: Case) -> None:
    padding = 4
    widths = (padding, 0) if side == "left" else (0, padding)
    padded = {
        name: np.pad(case.arrays[name], ((0, 0), (0, 0), widths, (0, 0)), constant_values=9.0)
        for name in ("query", "key", "value")
    }
    real = slice(padding, None) if side == "left" else slice(0, 7)
    is_real = np.zeros(7 + padding, dtype=bool)
    is_real[real] = True
    by_mask = attend(backend, case, **padded, mask=is_real[None, None, None, :])
    by_segment = attend(
        backend, case, **padded, segment_ids=is_real.astype(np.int32)[None].repeat(case.sizes.batch, axis=0)
    )
    for result in (by_mask, by_segment):
        assert_within(result[:, :, real], exact(backend, case))


@pytest.mark.parametrize("backend", BACKENDS)
@given(case=cases())
def test_grouped_heads_equal_repeated_heads(backend: Backend, case: Case) -> None:
    repeated = {name: case.arrays[name].repeat(case.sizes.group, axis=1) for name in ("key", "value")}
    assert_within(attend(backend, case, **repeated), exact(backend, case))


@pytest.mark.parametrize("backend", BACKENDS)
@given(case=cases(forms=("symmetric",), plain=True))
def test_symmetric_attention_commutes_with_reversal(backend: Backend, case: Case) -> None:
    reversed_ = {name: case.arrays[name][:, :, ::-1].copy() for name in ("query", "key", "value")}
    q_offset = 0  # aligned ends become aligned beginnings
    assert_within(attend(backend, case, **reversed_, q_offset=q_offset)[:, :, ::-1], exact(backend, case))


@pytest.mark.parametrize("backend", BACKENDS)
@given(case=cases())
def test_slopes_of_zero_equal_no_bias(backend: Backend, case: Case) -> None:
    none = np.zeros_like(case.arrays["slopes"])
    changes = {"future_slopes": case.arguments["future_slopes"] * 0} if "future_slopes" in case.arguments else {}
    problem = case.exact(backend.framework, "float32")
    plain = dataclasses.replace(problem, bias=np.where(np.isfinite(problem.bias), 0.0, -np.inf))
    assert_within(attend(backend, case, slopes=none, **changes), plain.output)


@pytest.mark.parametrize("backend", BACKENDS)
@given(case=cases(forms=("causal",)), constant=st.sampled_from([-64.0, 0.25, 8.0]))
def test_what_is_constant_along_rows_cancels(backend: Backend, case: Case, constant: float) -> None:
    # One more feature, constant in the keys, adds a constant to each row of scores.
    a = case.arrays
    extra = {
        "query": np.concatenate([a["query"], np.full_like(a["query"][..., :1], constant)], axis=-1),
        "key": np.concatenate([a["key"], np.ones_like(a["key"][..., :1])], axis=-1),
        "value": np.concatenate([a["value"], np.zeros_like(a["value"][..., :1])], axis=-1),
    }
    result = attend(backend, case, **extra, scale=case.scale)
    answer = exact(backend, case)
    shifted = dataclasses.replace(
        case.exact(backend.framework, "float32"), query=extra["query"], key=extra["key"], value=extra["value"]
    )
    assert_within(result[..., :-1], Answer(answer.value, shifted.output.budget[..., :-1]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arguments", [{"q_offset": -9}, {"mask": np.zeros((1, 1, 1, 1), dtype=bool)}])
def test_a_query_that_may_look_nowhere_gives_zeros(backend: Backend, arguments: dict[str, object]) -> None:
    query, key, value = (np.ones((2, 3, n, 5)) for n in (4, 7, 7))
    result = backend.attention(query, key, value, dtype="float32", **arguments)
    np.testing.assert_array_equal(result, np.zeros_like(query))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window_size", [2**31, 2**70])
def test_a_window_wider_than_any_row_is_none(backend: Backend, window_size: int) -> None:
    query, key, value = np.random.default_rng(5).standard_normal((3, 1, 3, 7, 5))
    windowed = backend.attention(query, key, value, dtype="float32", window_size=window_size)
    np.testing.assert_array_equal(windowed, backend.attention(query, key, value, dtype="float32"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", [(0, 5), (3, 0), (0, 0)])
@pytest.mark.parametrize("batch", [0, 2])
def test_nothing_in_gives_zeros_of_the_right_shape_out(backend: Backend, lengths: tuple[int, int], batch: int) -> None:
    query, key = (np.ones((batch, 3, n, 5)) for n in lengths)
    for arguments in ({}, {"is_causal": False}, {"mask": np.ones((1, 1, 1, 1), dtype=bool)}):
        result = backend.attention(query, key, key, dtype="float32", **arguments)
        np.testing.assert_array_equal(result, np.zeros_like(query))


@pytest.mark.parametrize("backend", DIFFERENTIABLE)
@pytest.mark.parametrize("lengths", [(0, 5), (3, 0)])
def test_gradients_of_nothing_are_zeros(backend: Backend, lengths: tuple[int, int]) -> None:
    query, key = (np.ones((2, 3, n, 5)) for n in lengths)
    tensors = {"query": query, "key": key, "value": key, "slopes": np.ones(3)}
    for name, gradient in backend.gradients(tensors, query, dtype="float32").items():
        np.testing.assert_array_equal(gradient, np.zeros_like(tensors[name]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_default_slopes_are_the_canonical_ones(backend: Backend) -> None:
    rng = np.random.default_rng(4)
    query, key, value = (rng.standard_normal((1, 3, 7, 5)) for _ in range(3))
    canonical = np.asarray([2.0**-4, 2.0**-8, 2.0**-2])
    answer = Attention(
        *(backend.framework.numpy(backend.framework.array(x, "float32")) for x in (query, key, value)),
        bias=penalties(Rules(canonical, q_offset=0), 1, 3, 7, 7),
        scale=5**-0.5,
        dtype="float32",
    ).output
    assert_within(backend.attention(query, key, value, dtype="float32"), answer)
