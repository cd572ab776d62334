"""The oracle that judges all others: plain loops say the same, and it obeys what must be true of attention anyway."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alibi_core.conformance._cases.case import SQUARE, Case, cases
from alibi_core.conformance._cases.oracle import Answer, Attention, Rules, assert_within, penalties, rounded


def looped_penalties(rules: Rules, batch: int, heads: int, q_len: int, kv_len: int) -> np.ndarray:
    """Return the bias ``[batch, heads, q_len, kv_len]``, -inf where masked, one element at a time."""
    result = np.full((batch, heads, q_len, kv_len), -np.inf)
    slopes = np.broadcast_to(rules.slopes, (batch, heads))
    future = slopes if rules.future_slopes is None else np.broadcast_to(rules.future_slopes, (batch, heads))
    mask = None if rules.mask is None else np.broadcast_to(rules.mask, result.shape)
    offsets = np.broadcast_to(rules.q_offset, (batch,))
    q_ids, kv_ids = (
        None if ids is None else np.broadcast_to(ids, (batch, ids.shape[-1]))
        for ids in (rules.q_segment_ids, rules.kv_segment_ids)
    )
    for b, h, i, j in np.ndindex(*result.shape):
        ahead = int(j - (offsets[b] + i))  # how many tokens the key lies after the query
        if rules.is_causal and ahead > 0:
            continue
        if rules.window_size is not None and abs(ahead) > rules.window_size:
            continue
        if q_ids is not None and kv_ids is not None and q_ids[b, i] != kv_ids[b, j]:
            continue
        if mask is not None and not mask[b, h, i, j]:
            continue
        slope = future[b, h] if ahead > 0 else slopes[b, h]
        result[b, h, i, j] = -float(slope) * abs(ahead)
    return result


def looped_output(problem: Attention) -> np.ndarray:
    """Return the output, one query at a time."""
    result = np.zeros(problem.query.shape)
    for b, h, i in np.ndindex(*problem.query.shape[:3]):
        kv_head = h // problem.group
        bias = problem.bias[b, h, i]
        bias = bias - max(bias.max(), -1e30)  # or a bias of far keys would round their scores
        scores = problem.scale * problem.key[b, kv_head] @ problem.query[b, h, i] + bias
        if np.isfinite(scores).any():
            weights = np.exp(scores - scores.max())
            result[b, h, i] = weights / weights.sum() @ problem.value[b, kv_head]
    return result


@given(case=cases())
def test_the_bias_is_that_of_plain_loops(case: Case) -> None:
    rules, sizes = case.rules(case.arrays["slopes"]), case.sizes
    shape = (sizes.batch, case.num_heads, *sizes.lengths)
    np.testing.assert_array_equal(penalties(rules, *shape), looped_penalties(rules, *shape))


@given(case=cases())
def test_the_output_is_that_of_plain_loops(case: Case) -> None:
    problem = case.exact("float64")
    # Both sum in float64, in another order: within what the oracle allows float64 itself.
    assert_within(looped_output(problem), problem.output)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_is_to_even_in_every_dtype(dtype: str) -> None:
    values = np.random.default_rng(0).standard_normal(10_000) * np.exp2(np.random.default_rng(1).integers(-30, 16))
    values = np.concatenate([values, [0.0, -0.0, np.inf, -np.inf, 1e-30, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 65519.0]])
    dtypes = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
    expected = values.astype(np.float32).astype(dtypes[dtype]).astype(np.float64)
    np.testing.assert_array_equal(rounded(values, dtype), expected)


def finite_difference(inputs: dict[str, np.ndarray], name: str, index: tuple[int, ...], cotangent: np.ndarray) -> float:
    step, sides = 1e-6, []
    for sign in (1, -1):
        moved = inputs[name].copy()
        moved[index] += sign * step
        sides.append((problem_of(**(inputs | {name: moved})).output.value * cotangent).sum())
    return float(sides[0] - sides[1]) / (2 * step)


def problem_of(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, slopes: np.ndarray, future_slopes: np.ndarray
) -> Attention:
    rules = Rules(slopes, q_offset=1, is_causal=False, future_slopes=future_slopes)
    return Attention(query, key, value, penalties(rules, 1, 2, 3, 5), 0.7, "float64")


def test_gradients_are_those_of_finite_differences() -> None:
    rng = np.random.default_rng(0)
    query, cotangent = rng.standard_normal((2, 1, 2, 3, 2))
    key, value = rng.standard_normal((2, 1, 1, 5, 2))
    inputs = {"query": query, "key": key, "value": value, "slopes": np.asarray([0.5, 0.1])}
    inputs["future_slopes"] = np.asarray([0.2, 0.3])
    back = np.arange(1, 4)[:, None] - np.arange(5)
    problem = problem_of(**inputs)
    gradients = problem.gradients(cotangent, np.maximum(back, 0))
    gradients["future_slopes"] = problem.gradients(cotangent, np.maximum(-back, 0))["slopes"]
    for name, x in inputs.items():
        for index in np.ndindex(*x.shape):
            actual = gradients[name].value.reshape(x.shape)[index]
            assert abs(finite_difference(inputs, name, index, cotangent) - actual) < 1e-8


def agree(actual: np.ndarray, case: Case, rows: slice = slice(None)) -> None:
    """Assert that a result is what the oracle makes of a case, but for float64's rounding."""
    answer = case.exact("float64").output
    assert_within(actual, Answer(answer.value[:, :, rows], 2 * answer.budget[:, :, rows]))


@given(case=cases(forms=("causal",), sizes=SQUARE))
def test_decoding_equals_prefill(case: Case) -> None:
    case = dataclasses.replace(case, q_offset=None, packing="same" if case.packing else None)
    a, arguments = case.arrays, case.arguments
    for start, end in ((0, 4), (4, 6), (6, 7)):
        seen = {"query": a["query"][:, :, start:end], "key": a["key"][:, :, :end], "value": a["value"][:, :, :end]}
        some = dict(arguments)
        if "segment_ids" in arguments:
            some["segment_ids"] = (arguments["segment_ids"][:, start:end], arguments["segment_ids"][:, :end])
        if "mask" in arguments:
            some["mask"] = np.broadcast_to(arguments["mask"], (2, 6, 7, 7))[:, :, start:end, :end]
        step = case.with_tensors(**seen).with_arguments("causal", some).exact("float64").output.value
        agree(step, case, slice(start, end))


@given(case=cases(sizes=SQUARE))
def test_a_shard_of_heads_equals_the_slice(case: Case) -> None:
    a, kv, heads = case.arrays, slice(1, 3), slice(case.sizes.group, 3 * case.sizes.group)
    rules = case.rules(a["slopes"])
    answer = case.exact("float64").output.value[:, heads]
    future = None if rules.future_slopes is None else rules.future_slopes[..., heads]
    mask = None if rules.mask is None else np.broadcast_to(rules.mask, (2, 6, 7, 7))[:, heads]
    rules = dataclasses.replace(rules, slopes=rules.slopes[..., heads], future_slopes=future, mask=mask)
    bias = penalties(rules, 2, 4, 7, 7)
    shard = Attention(a["query"][:, heads], a["key"][:, kv], a["value"][:, kv], bias, case.scale, "float64")
    np.testing.assert_array_equal(shard.output.value, answer)


@given(case=cases(sizes=SQUARE, plain=True))
def test_packed_sequences_equal_separate_ones(case: Case) -> None:
    ids = np.asarray([[4, 4, 4, 2, 2, 2, 2]] * case.sizes.batch, dtype=np.int32)
    packed = case.with_arguments(case.form, case.arguments | {"segment_ids": ids}).exact("float64").output.value
    for part in (slice(0, 3), slice(3, 7)):
        alone = {name: case.arrays[name][:, :, part] for name in ("query", "key", "value")}
        agree(packed[:, :, part], case.with_tensors(**alone).with_arguments(case.form, case.arguments))


@pytest.mark.parametrize("side", ["left", "right"])
@given(case=cases(sizes=SQUARE, plain=True))
def test_padding_changes_nothing(side: str, case: Case) -> None:
    widths, real = ((4, 0), slice(4, None)) if side == "left" else ((0, 4), slice(0, 7))
    padded = {
        name: np.pad(case.arrays[name], ((0, 0), (0, 0), widths, (0, 0)), constant_values=9.0)
        for name in ("query", "key", "value")
    }
    is_real = np.zeros(11, dtype=bool)
    is_real[real] = True
    longer = case.with_tensors(**padded)
    for hidden in ({"mask": is_real[None, None, None, :]}, {"segment_ids": is_real.astype(np.int32)}):
        result = longer.with_arguments(case.form, case.arguments | hidden).exact("float64").output.value
        agree(result[:, :, real], case)


@given(case=cases(forms=("symmetric",), plain=True))
def test_symmetric_attention_commutes_with_reversal(case: Case) -> None:
    tensors = {name: case.arrays[name][:, :, ::-1] for name in ("query", "key", "value")}
    # Aligned ends become aligned beginnings.
    turned = case.with_tensors(**tensors).with_arguments("symmetric", case.arguments | {"q_offset": 0})
    agree(turned.exact("float64").output.value[:, :, ::-1], case)


@given(case=cases(forms=("causal",)), constant=st.sampled_from([-64.0, 0.25, 8.0]))
def test_what_is_constant_along_rows_cancels(case: Case, constant: float) -> None:
    problem = case.exact("float64")
    rows = constant * np.arange(case.sizes.lengths[0])[:, None]
    moved = dataclasses.replace(problem, bias=problem.bias + rows)
    answer = problem.output
    # A bias of such a size is rounded to its last place, which moves a weight by as much relatively, twice.
    slack = 4 * 2.0**-53 * np.abs(rows).max() * np.abs(case.arrays["value"]).max()
    assert_within(moved.output.value, Answer(answer.value, answer.budget + slack))


@given(case=cases())
def test_slopes_of_zero_equal_no_bias(case: Case) -> None:
    none = np.zeros_like(case.arrays["slopes"])
    future = {"future_slopes": case.arguments["future_slopes"] * 0} if "future_slopes" in case.arguments else {}
    problem = case.exact("float64")
    plain = dataclasses.replace(problem, bias=np.where(np.isfinite(problem.bias), 0.0, -np.inf))
    flat = case.with_arguments(case.form, case.arguments | future).with_arrays(slopes=none)
    np.testing.assert_array_equal(flat.exact("float64").output.value, plain.output.value)


def test_a_query_that_may_look_nowhere_gives_zeros() -> None:
    case = Case(SQUARE, "causal", None, None, None, None, False, seed=0).with_arguments("causal", {"q_offset": -9})
    problem = case.exact("float64")
    np.testing.assert_array_equal(problem.output.value, np.zeros_like(problem.query))
    for gradient in case.gradients("float64").values():
        np.testing.assert_array_equal(gradient.value, np.zeros_like(gradient.value))
