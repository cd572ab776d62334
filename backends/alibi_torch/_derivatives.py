"""Second derivatives, computed from dense attention (memory for all scores), whichever implementation ran."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from alibi_core.backend import AttentionCall, dense_attention
from alibi_torch._internals import in_transform

RATES = ("slopes", "future_slopes")


def dense_reference(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, *rates: Tensor) -> Tensor:
    """Return dense attention in the working dtype; ``rates`` (slopes, future slopes) replace those of the call."""
    call = replace(call, dtype=call.working_dtype, **dict(zip(RATES, rates, strict=False)))
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
