"""Positions of the caller's own in PyTorch: transformations, export for any length."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from alibi_torch import attention  # noqa: E402
from benchmarks.harness import peak_growth  # noqa: E402

between = partial(attention, distance="euclidean", is_causal=False)
SLOPES = torch.tensor([0.5, 0.2, 0.1])


def problem(length: int) -> list[Tensor]:
    """Return query, key, value and points of two texts."""
    draws = torch.Generator().manual_seed(length)
    return [torch.randn(*shape, generator=draws) for shape in [(2, 3, length, 8)] * 3 + [(2, length, 2)]]


def test_points_in_torch_func_and_in_derivatives_of_derivatives() -> None:
    query, key, value, points = problem(23)
    dense = partial(between, implementation="dense")

    def loss(function: Any, query: Tensor) -> Tensor:
        return function(query, key, value, SLOPES, positions=points).square().sum()

    query.requires_grad_()
    gradients, expected = (torch.autograd.grad(loss(f, query), query, create_graph=True)[0] for f in (between, dense))
    torch.testing.assert_close(torch.func.grad(partial(loss, between))(query.detach()), expected, rtol=0, atol=1e-5)
    second, second_expected = (torch.autograd.grad(x.square().sum(), query)[0] for x in (gradients, expected))
    torch.testing.assert_close(second, second_expected, rtol=1e-4, atol=1e-4)


def test_a_program_with_points_is_exported_for_any_length() -> None:
    class Program(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, points: Tensor) -> Tensor:
            return between(query, key, value, SLOPES, positions=points)

    length = torch.export.Dim("length", min=4, max=4096)
    shapes = ({2: length},) * 3 + ({1: length},)
    program = torch.export.export(Program(), tuple(problem(50)), dynamic_shapes=shapes).module()
    torch.testing.assert_close(program(*problem(33)), Program()(*problem(33)), rtol=0, atol=1e-6)


def compiled_between(length: int) -> Any:
    """Return a compiled call with its gradients for 8 texts, warmed up."""
    positions, compiled = torch.rand(length, 2) * 90, torch.compile(between, fullgraph=True, backend="aot_eager")
    tensors = [x.requires_grad_() for x in torch.randn(3, 8, 3, length, 8).unbind()]

    def call() -> Any:
        return torch.autograd.grad(compiled(*tensors, SLOPES, positions=positions).sum(), tensors)

    call()
    return call


def test_a_compiled_call_holds_no_bias() -> None:
    assert peak_growth("tests.torch.test_points:compiled_between", 2048) < 3 * 2048**2 * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_low_precision_are_rounded_once(dtype: torch.dtype) -> None:
    """Values with a common part and equal cotangents: a rounded result would shift the gradients of whole rows."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 1025, 16, generator=generator).to(dtype).unbind()
    positions, value = torch.randn(1, 1025, 2, generator=generator) * 20, value + 3
    found, exact = [], []
    for gradients, of, implementation in ((found, dtype, "tiled"), (exact, torch.float64, "dense")):
        inputs = [x.to(of).requires_grad_() for x in (query, key, value)]
        rules = {"positions": positions, "is_causal": False, "implementation": implementation}
        gradients += torch.autograd.grad(attention(*inputs, **rules).sum(), inputs)
    for one, right in zip(found, exact, strict=True):
        assert (one.double() - right).abs().max() <= torch.finfo(dtype).eps / 2 * right.abs().max()


@pytest.mark.parametrize("count", [3, 4])  # without and with the gradient of slopes
@pytest.mark.parametrize("run", [lambda f: f, partial(torch.compile, backend="aot_eager")], ids=["eager", "compiled"])
def test_any_layout_of_tensors_and_of_their_gradients(run: Any, count: int) -> None:
    *tensors, points = problem(23)
    given = [x.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0).requires_grad_() for x in tensors]
    given.append(SLOPES.clone().requires_grad_(count > 3))
    found, expected = (
        torch.autograd.grad(f(*given, positions=points).sum(), given[:count])  # of a result's gradient without memory
        for f in (run(between), partial(between, implementation="dense"))
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rules", [{}, {"law": "log"}], ids=str)
def test_compiled_results_and_gradients_lie_in_memory_as_their_tensors(rules: dict[str, str]) -> None:
    tensors = [x.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0).requires_grad_() for x in problem(23)[:3]]

    @partial(torch.compile, fullgraph=True, backend="aot_eager")
    def flat(*tensors: Tensor) -> Tensor:  # a view, which a compiler checks against the strides that it was promised
        return attention(*tensors, SLOPES, **rules).permute(3, 1, 2, 0).view(-1)

    gradients = torch.autograd.grad(flat(*tensors).sum(), tensors)
    assert [x.stride() for x in gradients] == [x.stride() for x in tensors]
