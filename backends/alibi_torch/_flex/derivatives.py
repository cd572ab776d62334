"""Second derivatives, which FlexAttention lacks: they are computed from dense attention, as on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from alibi_core.backend import AttentionCall
from alibi_torch._derivatives import RATES, dense_reference, pulled_back


def twice_differentiable(
    attend: Callable[..., Tensor], call: AttentionCall, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Return ``attend(call, query, key, value)`` with gradients that autograd can differentiate again."""
    cotangent: list[Tensor] = []  # the gradient of the result, stored by the hook for _Inputs.backward

    def keep(grad: Tensor) -> None:
        if torch.is_grad_enabled():
            cotangent[:] = [grad]

    rates = {name: x for name, x in call.arrays.items() if name in RATES}
    query, key, value, *own = _Inputs.apply(call, cotangent, query, key, value, *rates.values())
    result = attend(replace(call, **dict(zip(rates, own, strict=True))), query, key, value)
    result.register_hook(keep)
    return result


class _Inputs(torch.autograd.Function):
    """The identity on query, key, value and slopes; its backward replaces their gradients if those are recorded."""

    @staticmethod
    def forward(ctx: Any, call: AttentionCall, cotangent: list[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.cotangent = call, cotangent
        ctx.save_for_backward(*tensors)
        inputs = [x.view_as(x) for x in tensors]
        ctx.mark_non_differentiable(
            *(x for x, is_needed in zip(inputs, ctx.needs_input_grad[2:], strict=True) if not is_needed)
        )
        ctx.set_materialize_grads(False)
        return tuple(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            gradients = pulled_back(partial(dense_reference, ctx.call), ctx.saved_tensors, ctx.cotangent.pop())
        return (
            None,
            None,
            *(x if is_needed else None for x, is_needed in zip(gradients, ctx.needs_input_grad[2:], strict=True)),
        )
