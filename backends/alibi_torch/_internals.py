"""Private names of PyTorch, all that attention on the CPU uses, each with what stands in where a version lacks it.

A name that is gone makes calls slower, never wrong: the fused kernels are spelled out, and calls take the way through
PyTorch's dispatcher that compilers take. All were seen in PyTorch 2.9 to 2.13.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode


def _found(path: str) -> Any:
    """Return the object at a dotted path below ``torch``, None where there is none."""
    place: Any = torch
    for name in path.split("."):
        place = getattr(place, name, None)
    return place


# Attention on the CPU: query, key, value, dropout, is_causal, attn_mask and scale. Returns result and log-sum-exp.
FLASH = _found("_scaled_dot_product_flash_attention_for_cpu")
FLASH_BACKWARD = _found("ops.aten._scaled_dot_product_flash_attention_for_cpu_backward")
# The innermost transform of torch.func, None outside of all.
_INTERPRETER = _found("_C._functorch.peek_interpreter_stack")
_DISPATCH_MODES = _found("_C._len_torch_dispatch_stack")  # how many are active
# Whether a tensor is one of a batch of gradients that torch.autograd computes at once, which is no transform.
_IS_BATCH_OF_GRADIENTS = _found("_C._functorch.is_legacy_batchedtensor")
PLAIN = (Tensor, torch.nn.Parameter)


def fused_forward(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return attention with a bias, ``[batch, heads, rows, head_dim]``, and the log-sum-exp, ``[batch, heads, rows]``.

    All tensors have one dtype, query, key and value as many heads; the bias broadcasts.
    """
    if FLASH is not None:
        return FLASH(query, key, value, 0.0, False, attn_mask=bias, scale=scale)
    scores = query @ key.mT * scale + bias
    return torch.softmax(scores, dim=-1) @ value, scores.logsumexp(dim=-1)


def fused_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    result: Tensor,
    logsumexp: Tensor,
    bias: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients by query, key and value of what :func:`fused_forward` gave for more keys, maybe, than these.

    The weights are those that ``logsumexp`` makes, whose denominators may count other keys, too.
    """
    if FLASH_BACKWARD is not None:
        tensors = grad, query, key, value, result, logsumexp
        return FLASH_BACKWARD(*tensors, 0.0, False, attn_mask=bias, scale=scale)
    weights = torch.exp(query @ key.mT * scale + bias - logsumexp[..., None])
    by_score = weights * (grad @ value.mT - (grad * result).sum(dim=-1, keepdim=True)) * scale
    return by_score @ key, by_score.mT @ query, weights.mT @ grad


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16, so that a cast takes longer than it saves; without the name, False."""
    is_supported = _found("ops.mkldnn._is_mkldnn_bf16_supported")
    return is_supported is not None and torch.backends.mkldnn.is_available() and bool(is_supported())


def in_transform() -> bool:
    """Whether a transform of ``torch.func`` is active; without the name to ask by, True, as what follows is safe."""
    return _INTERPRETER is None or _INTERPRETER() is not None


def has_dispatch_mode() -> bool:
    """Whether a dispatch mode is active, which sees each operator; without the name to ask by, True."""
    return _DISPATCH_MODES is None or _DISPATCH_MODES() > 0


def is_recorded(tensor: Tensor) -> bool:
    """Whether a recorder other than PyTorch's compilers keeps what a call does, for calls with other values."""
    if torch.compiler.is_compiling():
        return False
    if torch.jit.is_tracing() or isinstance(tensor, FakeTensor) or get_proxy_mode() is not None:
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def is_watched(*tensors: Tensor) -> bool:
    """Whether a compiler, tracer, transform or dispatch mode is active, or a tensor is of another class."""
    return (
        torch.compiler.is_compiling()
        or in_transform()
        or torch.jit.is_tracing()
        or has_dispatch_mode()
        or _IS_BATCH_OF_GRADIENTS is None
        or any(type(x) not in PLAIN or x.is_meta or _IS_BATCH_OF_GRADIENTS(x) for x in tensors)
    )


def has_tangent(*tensors: Tensor | None) -> bool:
    """Whether forward mode may carry a derivative on by any of these: inside a transform, by all."""
    if torch.compiler.is_compiling() or getattr(forward_ad, "_current_level", 0) < 0:
        return False
    if _INTERPRETER is not None and _INTERPRETER() is not None:
        return True
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)
