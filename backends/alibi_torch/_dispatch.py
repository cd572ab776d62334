"""The choice of an implementation for a call, and the reasons why others cannot run it."""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from alibi_core.backend import AttentionCall
from alibi_torch._derivatives import RATES
from alibi_torch._internals import has_tangent, in_transform, is_differentiated

_NOTHING = nullcontext()
# The first that can run a call is the default; "triton", behind "dense", which runs them all, never is.
IMPLEMENTATIONS = ("tiled", "flex", "sdpa", "dense", "triton")
HAS_TRITON = importlib.util.find_spec("triton") is not None
LARGEST_HEAD_DIM = 256  # of the kernels in Triton


def choose(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, implementation: str | None) -> str:
    """Return ``implementation``, or raise if it cannot run the call; by default, the first that can."""
    if implementation is None:
        names = IMPLEMENTATIONS
        if torch.compiler.is_exporting():  # torch.onnx converts "sdpa" of one batch axis alone
            names = ("sdpa", "dense") if query.ndim == 4 else ("dense",)
        return next(name for name in names if refusal(name, call, query, key, value) is None)
    reason = refusal(implementation, call, query, key, value)
    if reason is not None:
        able = [repr(name) for name in IMPLEMENTATIONS if refusal(name, call, query, key, value) is None]
        raise NotImplementedError(f"implementation {implementation!r} {reason}; {' and '.join(able)} can run this call")
    return implementation


def refusal(name: str, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Return why an implementation cannot run a call, as the predicate of a sentence about it; None if it can."""
    device = query.device.type
    if name != "dense" and call.dense_only is not None:
        return call.dense_only
    if name != "dense" and has_tangent(query, key, value, *rates_of(call)):
        return "has no derivatives in forward mode"
    if name != "dense" and torch.compiler.is_compiling() and is_differentiated():
        return "cannot be differentiated by torch.func under a compiler"
    if call.log_gates is not None and name not in ("tiled", "dense"):
        return "takes no log_gates"
    if call.sinks is not None and name in ("flex", "triton"):
        return "takes no sinks"
    of_cpu = call.is_linear or call.log_gates is not None or call.sinks is not None
    if name == "tiled" and device not in ("cpu", "meta") and of_cpu:
        return f"runs on the CPU alone, got {device}"
    if name == "triton":
        return _refusal_of_triton(call, device)
    if name != "flex":
        return None
    if device not in ("cuda", "cpu"):
        return f"runs on cuda and cpu, got {device}"
    if call.dtype == torch.float64:
        return "must be given float32, float16 or bfloat16, got torch.float64"
    if device == "cpu" and needs_gradients(query, key, value, *rates_of(call)):
        return "has no gradients on a CPU"
    if not torch.compiler.is_compiling() and in_transform():
        return "cannot be mapped or differentiated by torch.func"
    return None


def triton_runs_on(device: str) -> bool:
    """Whether Triton computes on a type of device: on GPUs, or in its interpreter."""
    return device == "cuda" or (device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")


def _refusal_of_triton(call: AttentionCall, device: str) -> str | None:
    if not triton_runs_on(device):
        return f"runs on cuda (ROCm included), or interpreted on a CPU under TRITON_INTERPRET=1, got {device}"
    if not HAS_TRITON:
        return "needs Triton, which PyTorch for CUDA and ROCm brings along"
    if call.dtype == torch.float64:
        return "must be given float32, float16 or bfloat16, got torch.float64"
    if call.head_dim > LARGEST_HEAD_DIM:
        return f"takes a head_dim of at most {LARGEST_HEAD_DIM}, got {call.head_dim}"
    if not call.is_linear:
        return "takes neither positions of the caller's own nor other laws than the linear one"
    if call.mask is not None and call.mask.ndim > 1 and call.mask.shape[-2] != 1:
        return "takes masks of keys alone, equal for all queries"
    return None


def rates_of(call: AttentionCall) -> tuple[Tensor | None, ...]:
    """Return the arrays of a call, besides its tensors, that may be differentiated."""
    return tuple(getattr(call, name) for name in RATES)


def needs_gradients(*tensors: Tensor | None) -> bool:
    """Whether autograd records operations on any of these tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def no_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Return a context without autocast on a device type; a null context, which is faster, where it is off already."""
    return _NOTHING if autocast_dtype(device_type) is None else torch.autocast(device_type, enabled=False)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype that autocast uses on a device type, or None if it is off."""
    # The meta device has no autocast. torch.compile of PyTorch 2.9 and 2.11 cannot trace is_autocast_available.
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def autocasted(*tensors: Any) -> tuple[Any, ...]:
    """Return tensors as autocast casts those of ``scaled_dot_product_attention``: to its dtype, except from float64."""
    dtype = autocast_dtype(tensors[0].device.type) if isinstance(tensors[0], Tensor) else None
    if dtype is None:
        return tensors
    others = (torch.float64, dtype)
    floats = (isinstance(x, Tensor) and x.is_floating_point() and x.dtype not in others for x in tensors)
    return tuple(x.to(dtype) if is_float else x for x, is_float in zip(tensors, floats, strict=True))
