"""Slopes that stay float32 whatever precision their module is cast to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import array_api_compat.torch as xp
import numpy as np
import torch
from torch import Tensor, nn

from alibi_core.backend.models import LayerShape


def host_copy(slopes: Any) -> Tensor:
    """Return a PyTorch or NumPy array as float32 on the CPU (or on ``meta``), sharing no memory with it."""
    if isinstance(slopes, Tensor):
        place = "meta" if slopes.is_meta else "cpu"
        return slopes.detach().to(place, torch.float32, copy=True)
    return torch.from_numpy(np.array(slopes, dtype=np.float32)).clone()


class KeepsSlopes(nn.Module):
    """A module whose slopes follow it between devices, but not to another precision, and come to life after ``meta``.

    A slope rounded to bfloat16 is off by up to 0.4 %, which over thousands of tokens is whole units of bias.
    """

    def register_slopes(self, name: str, slopes: Tensor | None, device: torch.device) -> None:
        """Register fixed slopes, as :func:`host_copy` returns them, as a buffer on ``device`` that is not saved."""
        if not hasattr(self, "host_slopes"):
            self.host_slopes: dict[str, Tensor | None] = {}
            self.register_load_state_dict_post_hook(_revive)
        self.host_slopes[name] = slopes
        self.register_buffer(name, None if slopes is None else slopes.to(device, copy=True), persistent=False)

    @property
    def current_slopes(self) -> Tensor:
        """A layer's slopes, fixed or learnt."""
        return self.slopes if self.log_slopes is None else self.log_slopes.exp()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        names = [*self.host_slopes, "log_slopes"]
        before = {name: tensor.detach() for name in names if (tensor := getattr(self, name, None)) is not None}
        super()._apply(fn, recurse)
        for name, kept in before.items():
            moved = getattr(self, name)
            host = self.host_slopes.get(name)
            if kept.is_meta and host is not None:
                moved.data = host.to(moved.device, copy=True)  # to_empty left it without values
            elif moved.dtype != kept.dtype:
                gradient = moved.grad
                moved.grad = None
                moved.data = kept.to(moved.device)
                moved.grad = None if gradient is None else gradient.to(kept.dtype)
        return self


def register_layer_slopes(layer: Any, shape: LayerShape, slopes: Any, future_slopes: Any, *, learnable: bool) -> None:
    """Register a layer's slopes on the device of its ``out_proj``; learnable ones as ``log_slopes``."""
    place = layer.out_proj.weight.device
    given, future = (None if x is None else host_copy(x) for x in (slopes, future_slopes))
    initial = shape.fixed_slopes(xp, given, "cpu")
    layer.log_slopes = nn.Parameter(initial.log().to(place)) if learnable else None
    layer.register_slopes("slopes", None if learnable else initial, place)
    layer.register_slopes("future_slopes", future, place)


def _revive(module: KeepsSlopes, incompatible_keys: object) -> None:
    """Give fixed slopes, which no state dict holds, their values where one was loaded over ``meta`` parameters."""
    place = next((parameter.device for parameter in module.parameters() if not parameter.is_meta), None)
    for name, host in module.host_slopes.items():
        slopes = getattr(module, name)
        if place is not None and slopes is not None and slopes.is_meta and host is not None and not host.is_meta:
            setattr(module, name, host.to(place, copy=True))
