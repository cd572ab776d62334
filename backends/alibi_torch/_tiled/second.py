"""Second derivatives, which tiles have none of: who asks for them is told who has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def refuse_to_differentiate(ctx: Any, *grads: Tensor) -> None:
    """Refuse, as the backward pass of a backward pass."""
    raise NotImplementedError(
        "implementation 'tiled' has no second derivatives; attention with implementation='dense' has them, and so has "
        "a model of transformers after alibi_torch.transformers.restore(model)"
    )


def refuse_second_derivatives(gradients: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...] | None:
    """Return gradients that refuse to be differentiated, as a hook of a node of PyTorch's own."""
    if not torch.is_grad_enabled():
        return None
    return tuple(None if x is None else _Once.apply(x) for x in gradients)


class _Once(torch.autograd.Function):
    """A gradient that cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    backward = staticmethod(refuse_to_differentiate)
