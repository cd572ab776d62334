"""Derivatives of derivatives: gradients come from tiles, their own derivatives from attention spelled out.

So gradients take memory in proportion to the lengths, also where autograd records them, until they are differentiated
themselves: that takes memory for all scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from alibi_torch._dispatch import no_autocast

# Of the tensors to differentiate by, and of others; those that a call lacks are None.
Formula = Callable[[Sequence[Any], Sequence[Any]], Tensor]


def differentiable(
    gradients: Sequence[Tensor | None],
    formula: Formula,
    grad: Tensor,
    inputs: Sequence[Tensor | None],
    others: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Return ``gradients`` of ``sum(formula(inputs, others) * grad)`` by each of ``inputs``, for autograd to record.

    Those that nobody wants may be None.
    """
    known = (None if x is None else x.detach() for x in gradients)  # which may have a node that refuses to run
    return _Gradients.apply(formula, len(inputs), *known, grad, *inputs, *others)


def tangent_of(
    function: Callable[[Sequence[Any]], Any], primals: Sequence[Tensor | None], tangents: Sequence[Tensor | None]
) -> Any:
    """Return the derivative of a function of ``primals`` along those tangents that are not None."""
    moving = [i for i, x in enumerate(tangents) if x is not None]
    with no_autocast(primals[0].device.type):
        return torch.func.jvp(
            lambda *x: function(_with(primals, moving, x)),
            tuple(primals[i].contiguous() for i in moving),  # PyTorch lays out tangents alike, and writes to them
            tuple(tangents[i] for i in moving),
        )[1]


def differentiable_kernel(gradients: tuple[Tensor | None, ...], grads: tuple[Tensor]) -> Any:
    """Make the gradients of PyTorch's fused CPU kernel, which it cannot differentiate, differentiable.

    It is a hook of the kernel's node.
    """
    if not torch.is_grad_enabled():
        return None
    node = torch._C._current_autograd_node()  # a hook that held it would keep it, and what it has saved, for ever
    inputs = node._saved_query, node._saved_key, node._saved_value
    return differentiable(gradients, partial(_kernel, node._saved_scale), grads[0], inputs, (node._saved_attn_mask,))


def packs_what_is_saved() -> bool:
    """Whether a context packs what autograd saves: :func:`differentiable_kernel` cannot read what a checkpoint does."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _kernel(scale: float, inputs: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """Return what PyTorch's fused CPU kernel does, of query, key, value and bias."""
    (query, key, value), (bias,) = inputs, others
    return torch.softmax(query @ key.mT * scale + bias, dim=-1) @ value


class _Gradients(torch.autograd.Function):
    """Gradients that are known, as a function of what they follow from."""

    generate_vmap_rule = True

    @staticmethod
    def forward(formula: Formula, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if x is None else x.clone() for x in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        ctx.formula, count, *tensors = inputs
        ctx.wanted = [i for i, x in enumerate(output) if x is not None]
        ctx.sizes = 1 + count, len(tensors) - 2 * count - 1
        ctx.save_for_backward(*tensors[count:])
        ctx.save_for_forward(*tensors[count:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        count, others = ctx.sizes
        gradients, primals = _function_of(ctx)
        moving = [i for i in range(count) if ctx.needs_input_grad[1 + count + i]]
        with no_autocast(primals[0].device.type):
            found = pulled_back(
                lambda *x: gradients(_with(primals, moving, x)),
                [primals[i] for i in moving],
                tuple(cotangents[i] for i in ctx.wanted),
            )
        return *(None,) * (1 + count), *_with([None] * count, moving, found), *(None,) * others

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor | None, ...]:
        count, _ = ctx.sizes
        found = tangent_of(*_function_of(ctx), tangents[1 + count :][:count])
        return tuple(_with([None] * (count - 1), ctx.wanted, found))


def _function_of(ctx: Any) -> tuple[Callable[[Sequence[Any]], tuple[Tensor, ...]], Sequence[Tensor | None]]:
    """Return those gradients that are wanted as a function of ``[grad, *inputs]``, and the values of these."""
    count, _ = ctx.sizes
    saved = ctx.saved_tensors
    others = saved[count:]

    def gradients(tensors: Sequence[Any]) -> tuple[Tensor, ...]:
        grad, *inputs = tensors
        wanted = [inputs[i] for i in ctx.wanted]
        return pulled_back(lambda *x: ctx.formula(_with(inputs, ctx.wanted, x), others), wanted, grad)

    return gradients, saved[:count]


def pulled_back(function: Callable[..., Any], primals: Sequence[Tensor], cotangents: Any) -> tuple[Tensor, ...]:
    """Return the gradients of ``sum(function(*primals) * cotangents)`` by each of ``primals``."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return torch.func.vjp(function, *primals)[1](cotangents)
    # Elsewhere not by torch.func, which refuses to run where a context packs what autograd saves.
    is_recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        own = [x.view_as(x).requires_grad_() for x in primals]  # one may be computed from another, or be it
        results = function(*own)
    return torch.autograd.grad(results, own, cotangents, create_graph=is_recorded, materialize_grads=True)


def _with(tensors: Sequence[Any], places: Sequence[int], others: Sequence[Any]) -> list[Any]:
    """Return tensors, with others at some places."""
    given = dict(zip(places, others, strict=True))
    return [given.get(i, x) for i, x in enumerate(tensors)]
