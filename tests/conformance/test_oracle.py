"""The oracle that judges all others: plain loops and finite differences say the same."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alibi_core.conformance.case import GATES
from alibi_core.conformance.testing import Attention, Case, Sizes, cases, penalties, rounded
from alibi_core.conformance.testing import assert_within_budget as assert_within


def looped_penalties(
    shape: tuple[int, ...],
    slopes: np.ndarray,
    *,
    q_offset: Any = None,
    is_causal: bool = True,
    future_slopes: Any = None,
    window_size: int | None = None,
    segment_ids: Any = (0, 0),
    mask: Any = True,
    log_gates: Any = None,
) -> np.ndarray:
    """Return the bias of ``shape`` ``[batch, heads, q_len, kv_len]``, -inf where masked, one element at a time."""
    result, (batch, heads, *lengths) = np.full(shape, -np.inf), shape
    future = np.broadcast_to(slopes if future_slopes is None else future_slopes, (batch, heads))
    gates = np.zeros((batch, heads, lengths[1])) if log_gates is None else log_gates.astype(np.float64)
    if np.ndim(mask) and mask.shape[-2] == 1:  # a mask of keys
        gates = np.where(mask[..., 0, :], gates, 0)
    slopes, mask = np.broadcast_to(slopes, (batch, heads)), np.broadcast_to(mask, shape)
    offsets = np.broadcast_to(lengths[1] - lengths[0] if q_offset is None else q_offset, (batch,))
    q_ids, kv_ids = (np.broadcast_to(x, (batch, n)) for x, n in zip(segment_ids, lengths, strict=True))
    for b, h, i, j in np.ndindex(*shape):
        ahead = int(j - (offsets[b] + i))  # how many tokens the key lies after the query
        if is_causal and ahead > 0:
            continue
        if window_size is not None and abs(ahead) > window_size:
            continue
        if q_ids[b, i] != kv_ids[b, j] or not mask[b, h, i, j]:
            continue
        slope = future[b, h] if ahead > 0 else slopes[b, h]
        forgotten = math.fsum(gates[b, h, j + 1 : max(0, min(j - ahead, lengths[1] - 1)) + 1])
        result[b, h, i, j] = forgotten - float(slope) * abs(ahead)
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


def looped_bias(case: Case, slopes: np.ndarray, compute: Callable[..., Any] = looped_penalties) -> np.ndarray:
    ids = {"segment_ids": case.segment_ids} if "segment_ids" in case.arguments else {}
    return compute((case.sizes.batch, case.num_heads, *case.sizes.lengths), slopes, **case.arguments | ids)


@given(case=cases())
def test_the_bias_is_that_of_plain_loops(case: Case) -> None:
    bias, slopes = case.exact("float64").bias, case.arrays["slopes"]
    np.testing.assert_array_equal(bias, looped_bias(case, slopes))
    np.testing.assert_array_equal(bias, looped_bias(case, slopes, penalties))


@given(case=cases())
def test_the_output_is_that_of_plain_loops(case: Case) -> None:
    problem = case.exact("float64")
    # Both sum in float64, in another order: within what the oracle allows float64 itself.
    assert_within(looped_output(problem), problem.output)


@given(case=cases(forms=("causal",)), kind=st.sampled_from(sorted(GATES)))
def test_sums_of_gates_are_those_of_plain_loops_and_may_be_off_by_two_units(case: Case, kind: str) -> None:
    case = dataclasses.replace(case, gates=kind)
    problem, sums = case.exact("float32"), looped_bias(case, 0 * case.arrays["slopes"])
    np.testing.assert_array_equal(problem.bias == -np.inf, sums == -np.inf)
    sums = np.where(sums > -np.inf, sums, 0)
    np.testing.assert_allclose(np.where(problem.bias > -np.inf, problem.forgotten, 0), sums, rtol=1e-15)
    assert_within(looped_output(problem), dataclasses.replace(problem, dtype="float64").output)
    off = sums * np.random.default_rng(case.seed).choice([-1, 1], sums.shape) * 2.0**-22
    moved = dataclasses.replace(problem, bias=problem.bias + off)
    assert_within(moved.output.value, problem.output)
    found = case.gradients("float32", problem=moved)
    for name, answer in case.gradients("float32", problem=problem).items():
        assert_within(found[name].value, answer)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_is_to_even_in_every_dtype(dtype: str) -> None:
    values = np.random.default_rng(0).standard_normal(10_000) * np.exp2(np.random.default_rng(1).integers(-30, 16))
    values = np.concatenate([values, [0.0, -0.0, np.inf, -np.inf, 1e-30, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 65519.0]])
    dtypes = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
    expected = values.astype(np.float32).astype(dtypes[dtype]).astype(np.float64)
    np.testing.assert_array_equal(rounded(values, dtype), expected)


def finite_difference(inputs: dict[str, np.ndarray], name: str, index: tuple[int, ...], cotangent: np.ndarray) -> float:
    step = np.zeros_like(inputs[name])
    step[index] = 1e-6
    above, below = (problem_of(**(inputs | {name: inputs[name] + x})).output.value for x in (step, -step))
    return float(((above - below) * cotangent).sum()) / 2e-6


def problem_of(query: np.ndarray, key: np.ndarray, value: np.ndarray, slopes: np.ndarray, **more: Any) -> Attention:
    bias = penalties((1, 2, 3, 5), slopes, q_offset=1, is_causal="log_gates" in more, **more)
    return Attention(query, key, value, bias, 0.7, "float64")


@pytest.mark.parametrize("more", ["future_slopes", "log_gates"])
def test_gradients_are_those_of_finite_differences(more: str) -> None:
    rng = np.random.default_rng(0)
    query, cotangent = rng.standard_normal((2, 1, 2, 3, 2))
    key, value = rng.standard_normal((2, 1, 1, 5, 2))
    inputs = {"query": query, "key": key, "value": value, "slopes": np.asarray([0.5, 0.1])}
    inputs[more] = np.asarray([0.2, 0.3]) if more == "future_slopes" else -rng.random((1, 2, 5))
    back = np.arange(1, 4)[:, None] - np.arange(5)
    problem = problem_of(**inputs)
    gradients = problem.gradients(cotangent, np.maximum(back, 0))
    gradients["future_slopes"] = problem.gradients(cotangent, np.maximum(-back, 0))["slopes"]
    for name, x in inputs.items():
        for index in np.ndindex(*x.shape):
            actual = gradients[name].value.reshape(x.shape)[index]
            assert abs(finite_difference(inputs, name, index, cotangent) - actual) < 1e-8


def test_constant_gates_are_alibi_and_keys_that_were_forgotten_cost_no_budget() -> None:
    case = Case(Sizes(2, 3, 1, (5, 7), 3), seed=1)
    rates = case.arrays["slopes"][None, :, None]
    gates = np.broadcast_to(-rates, (2, 3, 7))
    gated = case.with_arguments("causal", {"log_gates": gates}).with_arrays(slopes=np.zeros(3))
    found = gated.gradients("float64") | {"output": gated.exact("float64").output}
    for name, expected in (case.gradients("float64") | {"output": case.exact("float64").output}).items():
        actual = -found["log_gates"].value.sum(axis=(0, 2)) if name == "slopes" else found[name].value
        np.testing.assert_allclose(actual, expected.value, rtol=1e-12, atol=1e-14)
    large = Case(Sizes(1, 2, 1, (6, 130), 4), gates="large")
    budgets = [x.exact("float32").output.budget for x in (large, dataclasses.replace(large, gates=None))]
    assert (budgets[0] <= 2 * budgets[1].max()).all()


@given(case=cases(plain=True))
def test_keys_that_are_left_out_move_results_within_a_budget_that_is_no_larger(case: Case) -> None:
    problem, exact = case.exact("float64", 0.01), case.exact("float64")
    order = np.argsort(problem.weights, axis=-1)
    sums, left_out = np.take_along_axis(problem.weights, order, axis=-1).cumsum(axis=-1), np.empty(order.shape, bool)
    np.put_along_axis(left_out, order, sums <= 0.01, axis=-1)
    fewer = dataclasses.replace(problem, bias=np.where(left_out, -np.inf, problem.bias))
    assert_within(fewer.output.value, problem.output)
    assert (problem.output.budget - exact.output.budget).max() <= 0.0203 * np.abs(problem.value).max()
    cotangent, distances = case.arrays["cotangent"], np.arange(float(case.sizes.lengths[1]))
    for name, answer in problem.gradients(cotangent, distances).items():
        assert_within(fewer.gradients(cotangent, distances)[name].value, answer)
