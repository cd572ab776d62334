"""Derivatives of derivatives, which FlexAttention has not: they come from attention spelled out, as on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from alibi_core import AttentionCall
from alibi_core.backend import dense_attention
from alibi_torch._tiled import differentiable

RATES = ("slopes", "future_slopes")


def twice_differentiable(
    attend: Callable[..., Tensor], call: AttentionCall, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Return ``attend(call, query, key, value)``, whose gradients autograd can differentiate, too."""
    cotangent: list[Tensor] = []  # of the result, from when it is known until gradients follow from it

    def keep(grad: Tensor) -> None:
        if torch.is_grad_enabled():
            cotangent[:] = [grad]

    rates = {name: call.arrays.get(name) for name in RATES}
    others = {name: x for name, x in call.arrays.items() if name not in RATES}
    formula = partial(_spelled_out, call, tuple(others))
    inputs = _Inputs.apply(formula, cotangent, len(others), *others.values(), query, key, value, *rates.values())
    rates = {name: x for name, x in zip(RATES, inputs[3:], strict=True) if x is not None}
    result = attend(replace(call, **rates), *inputs[:3])
    result.register_hook(keep)
    return result


def _spelled_out(
    call: AttentionCall, names: tuple[str, ...], inputs: Sequence[Tensor | None], others: Sequence[Tensor]
) -> Tensor:
    query, key, value, *rates = inputs
    call = replace(call, **dict(zip(RATES, rates, strict=True)), **dict(zip(names, others, strict=True)))
    return dense_attention(call, query, key, value, softmax=partial(torch.softmax, dim=-1))


class _Inputs(torch.autograd.Function):
    """Query, key, value and slopes as they are, on their way to a kernel; their gradients on their way back."""

    @staticmethod
    def forward(
        ctx: Any, formula: Callable[..., Tensor], cotangent: list[Tensor], count: int, *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.formula, ctx.cotangent, ctx.count = formula, cotangent, count
        ctx.save_for_backward(*tensors)
        inputs = [None if x is None else x.view_as(x) for x in tensors[count:]]
        pairs = zip(inputs, ctx.needs_input_grad[3 + count :], strict=True)
        ctx.mark_non_differentiable(*(x for x, is_needed in pairs if x is not None and not is_needed))
        ctx.set_materialize_grads(False)
        return tuple(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        before = (None,) * (3 + ctx.count)
        if not torch.is_grad_enabled():
            return *before, *gradients
        others, inputs = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        return *before, *differentiable(gradients, ctx.formula, ctx.cotangent.pop(), inputs, others)
