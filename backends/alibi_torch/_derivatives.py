"""Second derivatives, computed from dense attention (memory for all scores), whichever implementation ran."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from alibi_core.backend import AttentionCall, dense_attention, no_gradient
from alibi_torch._internals import has_tangent, in_transform

RATES = ("slopes", "future_slopes", "log_gates", "sinks")


def without_gradient(positions: Any) -> Any:
    """Return positions, which must not be differentiated, of whatever kind they are."""
    if not isinstance(positions, Tensor) or not positions.is_floating_point():
        return positions
    if positions.requires_grad and torch.is_grad_enabled():
        raise no_gradient("positions.detach()")
    is_transformed = (torch.is_grad_enabled() and in_transform()) or has_tangent(positions)
    return _Constant.apply(positions) if is_transformed else positions.detach()


class _Constant(torch.autograd.Function):
    """The identity of a tensor without derivatives. Inside a vmap, ``requires_grad`` says nothing of a grad outside."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        if ctx.needs_input_grad[0]:
            raise no_gradient("positions.detach()")

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        raise no_gradient("positions.detach()")


def dense_reference(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, *rates: Tensor) -> Tensor:
    """Return dense attention in the working dtype; ``rates``, those of RATES that the call has, replace its own."""
    names = [name for name in RATES if getattr(call, name) is not None]
    call = replace(call, dtype=call.working_dtype, **dict(zip(names, rates, strict=False)))
    return dense_attention(call, query, key, value, softmax=partial(torch.softmax, dim=-1))


def pulled_back(function: Callable[..., Any], primals: Sequence[Tensor], cotangents: Any) -> tuple[Tensor, ...]:
    """Return the gradients of ``sum(function(*primals) * cotangents)``, differentiable where autograd records."""
    if in_transform():
        return torch.func.vjp(function, *primals)[1](cotangents)
    # torch.func.vjp raises under saved_tensors_hooks, so use torch.autograd outside transforms.
    is_recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        own = [x.view_as(x).requires_grad_() for x in primals]  # views: one primal may depend on another
        results = function(*own)
    return torch.autograd.grad(results, own, cotangents, create_graph=is_recorded, materialize_grads=True)


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
        needed = zip(inputs, ctx.needs_input_grad[2:], strict=True)
        ctx.mark_non_differentiable(*(x for x, is_needed in needed if not is_needed))
        ctx.set_materialize_grads(False)
        return tuple(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            gradients = pulled_back(partial(dense_reference, ctx.call), ctx.saved_tensors, ctx.cotangent.pop())
        needed = zip(gradients, ctx.needs_input_grad[2:], strict=True)
        return None, None, *(x if is_needed else None for x, is_needed in needed)
