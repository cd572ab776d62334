"""The kernels in Triton: interpreted on a CPU, where ``test_triton.py`` runs this file, or on a GPU.

pytest -m '' tests/torch/triton_cases.py        on a GPU
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from typing import Any

import array_api_compat.torch as xp
import pytest
import torch
from hypothesis import example, given, settings

import alibi_torch
from alibi_core.backend import AttentionCall
from alibi_core.conformance import LAWS, check
from alibi_torch._flex.mask import needed_blocks
from alibi_torch._triton import launch, plan
from alibi_torch.caches import KVCache
from alibi_torch.conformance import adapters
from tests.contracts import test_tiled as contract
from tests.support.frameworks import Backend, OnDevice
from tests.support.problems import Problem
from tests.test_same_answer_everywhere import assert_exact, problems
from tests.torch.test_tiled import STRIDES, tensors

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton", "ignore:.*:RuntimeWarning:numpy")


TRITON = Backend(OnDevice("torch", "torch", DEVICE), "alibi_torch", "triton")
attend = functools.partial(alibi_torch.attention, implementation="triton")
# Some lengths have several tiles, and several blocks of the plan.
LENGTHS = ((7, 7), (5, 11), (11, 5), (1, 13), (64, 64), (150, 150), (60, 300), (270, 140))


@pytest.fixture(autouse=True)
def _plans_for_few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "LEAST_MEASURED", 130)
    monkeypatch.setattr(plan, "FEW", 0)


def taken(problem: Problem) -> Problem:
    """Return a problem as near to this one as the kernels take; a mask is that of a tokenizer."""
    changes: dict[str, Any] = {"dtype": problem.dtype.replace("float64", "float32"), "law": "linear"}
    changes |= dict.fromkeys(("gates", "sinks"))
    changes |= {"mask": problem.mask and "bk:int", "points": None, "adds_bias": False, "returns_weights": False}
    changes |= {"tiling": None, "wrt": tuple(x for x in problem.wrt if x not in ("log_gates", "sinks"))}
    return dataclasses.replace(problem, **changes)


FAR = Problem((40, 150), mask="b11k", is_causal=False, future="shared", q_offset=2**31 - 10_000, wrt=("query", "key"))
DRAWN = given(problem=problems(LENGTHS).map(taken))


@settings(max_examples=8)
@example(problem=FAR)
@example(problem=dataclasses.replace(FAR, q_offset=-(10**6)))
@DRAWN
def test_results_and_gradients_are_exact(problem: Problem) -> None:
    assert_exact(TRITON, problem)


@pytest.mark.slow
@settings(max_examples=max(120, settings.default.max_examples))
@DRAWN
def test_many_results_and_gradients_are_exact(problem: Problem) -> None:
    assert_exact(TRITON, problem)


# --- The plan ---------------------------------------------------------------------------------------------------------


def opposed(query: torch.Tensor, key: torch.Tensor) -> None:
    """Have all queries like the far half of the keys, and not the near half: as the bound fears."""
    query[:] = 1.0
    key *= 0.1
    key[:, :, : key.shape[2] // 2] += 1.0
    key[:, :, key.shape[2] // 2 :] -= 1.0


def spoiled(query: torch.Tensor, key: torch.Tensor) -> None:
    key[:, 1, 400] = math.nan


KEYS = {"opposed": opposed, "a common mean": lambda _, key: key.add_(3), "a NaN": spoiled}


@pytest.mark.parametrize(("change", "is_causal"), list(zip(KEYS.values(), (True, False, True), strict=True)), ids=KEYS)
def test_the_plan_keeps_what_it_must_and_no_more_than_the_core(change: Any, is_causal: bool) -> None:
    length, tolerance, slopes = 700, 2.0**-8, torch.tensor([0.5, 0.06, 0.004, 0.0], device=DEVICE)
    query, key, _ = (x.to(DEVICE) for x in tensors((length, length), batch=1, heads=(4, 4), head_dim=16))
    change(query, key)
    call = AttentionCall.check(query, key, key, slopes, tolerance=tolerance, is_causal=is_causal, xp=xp)
    found = plan.plan_of(call, launch.arguments(call, query, key, key), None)
    first, stop = found.first.base.cpu(), found.stop.base.cpu()
    core_first, core_stop = (x.cpu() for x in needed_blocks(call, query, key))
    assert (stop - first).sum() <= (core_stop - core_first).sum()
    bias, _ = call.bias()
    weights = torch.softmax((query.double() @ key.double().mT * call.scale + bias).cpu(), dim=-1)
    block = torch.arange(length) // plan.PLAN
    kept = (block >= first.repeat_interleave(plan.PLAN, -1)[..., :length, None]) & (
        block < stop.repeat_interleave(plan.PLAN, -1)[..., :length, None]
    )
    left_out = torch.where(kept, 0.0, weights).sum(dim=-1)
    assert torch.nan_to_num(left_out).max() <= tolerance


# --- Decoding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lengths", "dtype"), [(None, torch.float32), ([1300, 40], torch.bfloat16)])
def test_steps_over_a_cache_are_exact(
    lengths: list[int] | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alibi_torch.caches.uses_norms", lambda _: True)  # as on a GPU
    query, key, value = (x.to(DEVICE, dtype) for x in tensors((1, 1300), head_dim=20))
    opposed(query, key)
    cache = KVCache(2, 2, 1400, 20, dtype=dtype, device=DEVICE)
    cache.append(key, value, lengths=None if lengths is None else torch.tensor(lengths))
    given = {} if lengths is None else {"lengths": torch.ones(2, dtype=torch.int64)}
    for rules in ({}, {"window_size": 200}):
        found, right = (cache.attend(query, implementation=x, **rules, **given) for x in ("triton", "dense"))
        assert (found - right).abs().max() <= 8 * torch.finfo(dtype).eps


# --- Hard numbers, and memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1e30, 1e19, math.inf, math.nan])
def test_extreme_scores_are_those_of_dense_attention(number: float) -> None:
    query, key, value = (x.to(DEVICE) for x in tensors((40, 40), heads=(2, 2)))
    query = query.abs()
    key[0, 1, 7] = number
    mask = torch.arange(40, device=DEVICE) > 1  # the first two queries see no key
    inputs = [x.requires_grad_() for x in (query, key, value)]
    results = [alibi_torch.attention(*inputs, mask=mask, implementation=x) for x in ("triton", "dense")]
    if not math.isfinite(number):  # dense attention lets a NaN of a hidden key through
        assert torch.isfinite(results[0][:, :, :7]).all()
        results = [x[:, :, 7:] for x in results]
    torch.testing.assert_close(*results, equal_nan=True, rtol=1e-5, atol=1e-5)
    if math.isfinite(number):
        gradients = [torch.autograd.grad(x.square().sum(), inputs) for x in results]
        # Gradients of scores are rounded, and multiplied by that key.
        for found, right in zip(*gradients, strict=True):
            assert (found - right).abs().max() <= 2.0**-20 * number
        assert not results[0][:, :, :2].any()
        assert not gradients[0][0][:, :, :2].any()


@pytest.mark.slow
@pytest.mark.parametrize("layout", STRIDES)
def test_strides_change_nothing(layout: str) -> None:
    inputs = [STRIDES[layout](x.to(DEVICE)) for x in tensors((32, 40))]
    weight = STRIDES[layout](torch.randn(2, 4, 32, 5, device=DEVICE))

    def gradients(inputs: list[torch.Tensor], weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = [x.detach().requires_grad_() for x in inputs]
        result = attend(*inputs)
        return result, *torch.autograd.grad(result, inputs, weight)

    actual = gradients(inputs, weight)
    torch.testing.assert_close(actual, gradients([x.contiguous() for x in inputs], weight.contiguous()), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_means_that_keys_or_values_have_in_common_cost_no_digits(dtype: str) -> None:
    contract.test_means_that_keys_or_values_have_in_common_cost_no_digits(TRITON, dtype, 200, 100, 30, 0)


def test_rounded_weights_cost_gradients_of_slopes_few_digits() -> None:
    inputs = [x.to(DEVICE, torch.bfloat16) for x in tensors((96, 96), head_dim=32)]
    slopes = torch.tensor([0.3, 0.1, 0.02, 0.5], device=DEVICE).requires_grad_()
    weight = tensors((96, 97), head_dim=32)[0].to(DEVICE, torch.bfloat16)
    found = torch.autograd.grad(attend(*inputs, slopes), slopes, weight)[0]
    exact = alibi_torch.attention(*(x.double() for x in inputs), slopes.double(), implementation="dense")
    right = torch.autograd.grad(exact, slopes, weight.double())[0]
    assert (found - right).abs().max() <= 2.0**-10 * right.abs().max()


# --- Compilers and transforms -----------------------------------------------------------------------------------------


def test_one_graph_serves_varying_lengths_with_gradients_and_theirs() -> None:
    slopes = torch.rand(4, device=DEVICE)
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ((7, 11), (13, 13)):
        inputs = [x.to(DEVICE).requires_grad_() for x in (*tensors(lengths), slopes)]
        with torch.compiler.set_stance("fail_on_recompile" if lengths == (13, 13) else "default"):
            graphed = compiled(*inputs, is_causal=False)
        eager = attend(*inputs, is_causal=False)
        torch.testing.assert_close(graphed, eager, rtol=0, atol=0)
        gradients = [torch.autograd.grad(x.square().sum(), inputs) for x in (graphed, eager)]
        torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)
    second = []
    for name in ("triton", "dense"):
        result = alibi_torch.attention(*inputs, is_causal=False, implementation=name)
        first = torch.autograd.grad(result.square().sum(), inputs, create_graph=True)
        second.append(torch.autograd.grad(sum(x.square().sum() for x in first), inputs))
    torch.testing.assert_close(*second, rtol=1e-3, atol=1e-3)
    mapped = torch.func.vmap(torch.func.grad(lambda *x: attend(*x).square().sum()))(*inputs[:3])
    looped = torch.autograd.grad(attend(*inputs[:3]).square().sum(), inputs[0])[0]
    torch.testing.assert_close(mapped, looped, rtol=1e-6, atol=1e-6)


# --- The kit ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kit_finds_no_mistake(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":  # The interpreter takes as long for a large tile as for a small one.
        tile = launch.Tile(128, 128, 4, 1)
        monkeypatch.setattr(launch, "IN_FLOAT32", tile)
        monkeypatch.setattr(launch, "TILES", {kernel: {"amd": (tile, tile)} for kernel in launch.TILES})
    adapter = next(x for x in adapters(DEVICE) if x.name == "alibi_torch[triton]" and x.dtype == dtype)
    report = check(adapter, laws=[law.name for law in LAWS])
    assert report.passed, report
