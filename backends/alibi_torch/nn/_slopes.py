"""Slopes, forget gates and sinks that stay float32 when their module is cast to a lower precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from alibi_core.backend.models import KEY, LayerShape, layer_record, mismatch

NAMES = ("slopes", "future_slopes", "log_slopes", "sinks")


class KeepsSlopes(nn.Module):
    """A module whose slopes move with it between devices, keep float32, and get their values when it leaves ``meta``.

    Fixed slopes are buffers outside of the state dict; ``shape`` holds their values. Rounded to bfloat16, a slope would
    be off by up to 0.4 %: several units of bias at a distance of thousands of tokens. The metadata of a state dict says
    what the module computes; ``load_state_dict`` compares it.
    """

    shape: LayerShape
    slopes: Tensor | None
    future_slopes: Tensor | None
    log_slopes: nn.Parameter | None

    def _register_slopes(self, device: torch.device | str | None, *, learnable: bool = False) -> None:
        """Register the slopes of ``shape`` as buffers, or learnable ones as the parameter ``log_slopes``."""
        past, future = (self._slopes_on(name, device) for name in ("slopes", "future_slopes"))
        self.log_slopes = nn.Parameter(past.log()) if learnable and past is not None else None
        for name, slopes in (("slopes", None if learnable else past), ("future_slopes", future)):
            if slopes is None:
                setattr(self, name, None)  # accelerate 1.15 cannot offload a buffer that is None
            else:
                self.register_buffer(name, slopes, persistent=False)
        self.register_load_state_dict_post_hook(_revive)
        self.register_state_dict_post_hook(_record)
        self.register_load_state_dict_pre_hook(_compare)

    def _slopes_on(self, name: str, device: torch.device | str | None) -> Tensor | None:
        values = getattr(self.shape, name)
        return None if values is None else torch.tensor(values, dtype=torch.float32, device=device)

    @property
    def _current_slopes(self) -> Tensor:
        """The slopes in use, ``[num_heads]``, fixed or learned."""
        if self.log_slopes is not None:
            return self.log_slopes.exp()
        if self.slopes.is_meta:  # parameters may have been set one by one, as accelerate does
            _revive(self)
        return self.slopes

    def _stored_slopes(self) -> list[tuple[nn.Module, str]]:
        """Return where slopes are stored, as modules and names; pruning and parametrizations rename them."""
        parametrized: Any = getattr(self, "parametrizations", {})
        places: list[tuple[nn.Module, tuple[str, ...]]] = [(self, NAMES)]
        places += [(parametrized[x], ("original",)) for x in NAMES if x in parametrized]
        names = ((x, name, start) for x, start in places for name in (*x._parameters, *x._buffers))
        return [(x, name) for x, name, start in names if name.startswith(start) and getattr(x, name) is not None]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        stored = [(module, name, getattr(module, name)) for module, name in self._stored_slopes()]
        # accelerate's init_empty_weights puts parameters on meta, and leaves buffers where they are.
        is_empty = any(x.is_meta for x in self.parameters())
        fixed = [(module, name, x) for module, name, x in stored if name in NAMES[:2] and (is_empty or x.is_meta)]
        unfilled = {id(x): (module, name) for module, name, x in fixed}
        # A list of gradients would prevent torch.utils.swap_tensors, by which DTensors are cast.
        proj: Any = getattr(self, "forget_proj", None)
        gate = [] if proj is None else proj.parameters()
        uncast = {id(y) for x in (*(x for _, _, x in stored), *gate) for y in (x, x.grad) if y is not None}

        def moved(tensor: Tensor) -> Tensor:
            try:
                result = fn(tensor)
            except NotImplementedError:  # nothing can be copied out of meta
                if id(tensor) not in unfilled:
                    raise
                tensor = self._slopes_on(unfilled[id(tensor)][1], "cpu")
                result = fn(tensor)
            return tensor.to(result.device) if id(tensor) in uncast and result.dtype != tensor.dtype else result

        super()._apply(moved, recurse)
        for module, name in unfilled.values():  # to_empty allocates without values
            slopes = getattr(module, name)
            slopes.data = self._slopes_on(name, slopes.device)
        return self


def _record(module: KeepsSlopes, state_dict: Any, prefix: str, local_metadata: dict[str, Any]) -> None:
    """Write what the module computes to the metadata of its state dict."""
    local_metadata[KEY] = layer_record(module)


def _compare(module: KeepsSlopes, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *rest: Any) -> None:
    """Refuse the weights of a module that computes something else: ``rest`` ends with the list of errors."""
    message = mismatch(prefix[:-1], local_metadata.get(KEY, {}), module)
    if message is not None:
        rest[-1].append(f"{message}; a plain dict(state_dict), which has no metadata, loads all the same")


def _revive(module: KeepsSlopes, incompatible_keys: object = None) -> None:
    """Give fixed slopes their values once a module that was made on ``meta`` has parameters elsewhere."""
    device = next((x.device for x in module.parameters() if not x.is_meta), None)
    for name in ("slopes", "future_slopes"):
        slopes = getattr(module, name)
        if device is not None and slopes is not None and slopes.is_meta:
            setattr(module, name, module._slopes_on(name, device))


_probe = KeepsSlopes()
_probe.log_slopes = nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))
if _probe.bfloat16().log_slopes.dtype != torch.float32:
    raise ImportError(
        f"PyTorch must cast modules by Module._apply, got {torch.__version__}, which would round slopes; take one "
        "that the page on support names"
    )
