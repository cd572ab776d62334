"""This backend's implementations as adapters of :mod:`alibi_core.conformance`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alibi_core.conformance import BackendAdapter, Library
from alibi_torch._attention import attention
from alibi_torch._dispatch import triton_runs_on
from alibi_torch.caches import KVCache

__all__ = ["adapters"]

DTYPES = ("float32", "float64", "float16", "bfloat16")
ON_GPUS = {"flex": ("points",), "triton": ("points", "pair_masks", "wide_heads")}
LACKS = {"tiled": (), "dense": (), "sdpa": ("log_gates",)} | {x: ("log_gates", *y) for x, y in ON_GPUS.items()}


def adapters(device: str = "cpu") -> list[BackendAdapter]:
    """Return an adapter for each implementation and dtype.

    Args:
        device: The device of the tensors. ``"cuda"`` adds ``"flex"`` and ``"triton"``, and leaves out ``"tiled"``.
            ``"triton"`` is there for ``"cpu"``, too, if Triton is interpreted (``TRITON_INTERPRET=1``), which is slow.

    Example:
        >>> sorted({adapter.name for adapter in adapters()})
        ['alibi_torch[dense]', 'alibi_torch[sdpa]', 'alibi_torch[tiled]']
    """
    names = ("tiled", "sdpa", "dense") if device == "cpu" else ("flex", "sdpa", "dense", "triton")
    names = (*names, "triton") if device == "cpu" and triton_runs_on("cpu") else names
    pairs = [(name, dtype) for name in names for dtype in DTYPES if name not in ON_GPUS or dtype != "float64"]
    return [_adapter(*pair, device) for pair in pairs]


def _adapter(implementation: str, dtype: str, device: str) -> BackendAdapter:
    def array(values: Any, dtype: str | None) -> Tensor:
        tensor = torch.from_numpy(np.array(values)).to(device)  # a copy, because a view may have other strides
        return tensor if dtype is None else tensor.to(getattr(torch, dtype))

    return BackendAdapter(
        f"alibi_torch[{implementation}]",
        Library(torch, array, _numpy, _gradients),
        functools.partial(attention, implementation=implementation),
        dtype=dtype,
        cached=functools.partial(_decode_step, implementation),
        lacks=("continuations", *LACKS[implementation]),
    )


def _numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _gradients(
    function: Callable[..., Tensor], arguments: Mapping[str, Any], wrt: tuple[str, ...], weight: Tensor | float
) -> Sequence[Tensor]:
    asked = [arguments[name].requires_grad_() for name in wrt]
    result = function(**arguments)
    if not isinstance(weight, Tensor):  # expanded, stride 0, like the gradient of sum()
        weight = result.new_tensor(weight).expand_as(result)
    return torch.autograd.grad(result, asked, weight)


@torch.no_grad()
def _decode_step(
    implementation: str, query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, cache: KVCache | None
) -> tuple[Tensor, KVCache]:
    if cache is None:
        batch, heads, _, head_dim = key.shape
        sizes = (batch, heads, BackendAdapter.MAX_LENGTH, head_dim)
        cache = KVCache(*sizes, dtype=key.dtype, device=key.device)
    cache.append(key, value)
    return cache.attend(query, slopes, implementation=implementation), cache
