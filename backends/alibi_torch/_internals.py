"""Private names of PyTorch, each with a fallback for versions that lack it.

A missing name makes calls slower, never wrong: fused kernels are replaced by plain operators, calls go through
PyTorch's dispatcher, as they do under a compiler, CUDA calls take "sdpa", and accelerated models of transformers run
their own code. ``tests/torch/test_internals.py`` removes each name. PyTorch 2.9 to 2.15 have all of them.

Two kinds of names decide what is computed, so they are checked when they are imported: the fused kernels, below, and
``Module._apply`` in ``nn/_slopes.py``. ``nn/_multihead.py`` has two locks.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def _found(path: str) -> Any:
    """Return the object at a dotted path below ``torch``, or None if it does not exist."""
    place: Any = torch
    for name in path.split("."):
        place = getattr(place, name, None)
    return place


# Fused CPU attention: takes query, key, value, dropout, is_causal, attn_mask, scale; returns result and log-sum-exp.
FLASH = _found("_scaled_dot_product_flash_attention_for_cpu")
FLASH_BACKWARD = _found("ops.aten._scaled_dot_product_flash_attention_for_cpu_backward")
# Returns the number of active transforms of torch.func, also under torch.compile, which guards it.
_TRANSFORMS = _found("_C._functorch.get_dynamic_layer_stack_depth")
# Returns the active transforms of torch.func, innermost last; None if there are none.
_INTERPRETERS = _found("_C._functorch.get_interpreter_stack")
_DISPATCH_MODES = _found("_C._len_torch_dispatch_stack")  # returns the number of active modes
_MODE_OF, _FAKE = _found("_C._get_dispatch_mode"), _found("_C._TorchDispatchModeKey.FAKE")  # the mode of fake tensors
try:
    _PROXY_MODE = importlib.import_module("torch.fx.experimental.proxy_tensor").get_proxy_mode  # the mode of make_fx
except (ImportError, AttributeError):
    _PROXY_MODE = None
# Whether a tensor is batched by torch.autograd.grad(is_grads_batched=True), which is not a torch.func transform.
_IS_BATCH_OF_GRADIENTS = _found("_C._functorch.is_legacy_batchedtensor")
# Makes compilers skip a function. The private one does not import the compiler, half a second, until the first call.
skipped_by_compilers: Any = _found("_disable_dynamo") or torch.compiler.disable
PLAIN_TENSORS = (Tensor, torch.nn.Parameter)


def fused_forward(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return attention with a bias, ``[batch, heads, rows, head_dim]``, and the log-sum-exp, ``[batch, heads, rows]``.

    All tensors have the same dtype; query, key and value have the same number of heads; the bias broadcasts.
    """
    if FLASH is not None:
        return FLASH(query, key, value, 0.0, False, attn_mask=bias, scale=scale)
    return _forward(query, key, value, bias, scale)


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
    """Return the gradients with respect to query, key and value, for a subset of the keys of :func:`fused_forward`.

    The weights are ``exp(scores - logsumexp)``; ``logsumexp`` may include keys that are not in ``key``.
    """
    tensors = grad, query, key, value, result, logsumexp
    if FLASH_BACKWARD is not None:
        return FLASH_BACKWARD(*tensors, 0.0, False, attn_mask=bias, scale=scale)
    return _backward(*tensors, bias, scale)


def _forward(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = query @ key.mT * scale + bias
    return torch.softmax(scores, dim=-1) @ value, scores.logsumexp(dim=-1)


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, result: Tensor, lse: Tensor, bias: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    weights = torch.exp(query @ key.mT * scale + bias - lse[..., None])
    by_score = weights * (grad @ value.mT - (grad * result).sum(dim=-1, keepdim=True)) * scale
    return by_score @ key, by_score.mT @ query, weights.mT @ grad


def is_as_known(forward: Callable[..., Any], backward: Callable[..., Any]) -> bool:
    """Whether fused attention and its gradients agree with plain operators on a small case."""
    numbers = torch.linspace(-2, 2, 96, dtype=torch.float32, device="cpu").sin()
    query, key, value, grad = numbers.view(4, 1, 2, 3, 4).unbind()
    case = (query.new_tensor([[0.0, -1.0, -3.0]]), 0.7)
    expected = _forward(query, key, value, *case)
    try:
        found = forward(query, key, value, *case)
        found += backward(grad, query, key, value, *expected, *case)
        expected += _backward(grad, query, key, value, *expected, *case)
        return all(torch.allclose(*pair, atol=1e-5) for pair in zip(found, expected, strict=True))
    except (RuntimeError, TypeError, ValueError):
        return False


if not is_as_known(fused_forward, fused_backward):
    warnings.warn(
        f"the fused attention of PyTorch {torch.__version__} on CPUs has changed: calls are slower", stacklevel=2
    )
    FLASH = FLASH_BACKWARD = None


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether this CPU has bfloat16 products, so that a cast to float32 does not pay; False if PyTorch cannot say."""
    is_supported = _found("ops.mkldnn._is_mkldnn_bf16_supported")
    return is_supported is not None and torch.backends.mkldnn.is_available() and bool(is_supported())


def in_transform(*, unknown: bool = True) -> bool:
    """Whether a transform of ``torch.func`` is active; ``unknown`` (True is the safe answer) if PyTorch cannot say."""
    return unknown if _TRANSFORMS is None else _TRANSFORMS() > 0


def is_differentiated() -> bool:
    """Whether a transform of ``torch.func`` that differentiates is active; True if PyTorch cannot say."""
    return _INTERPRETERS is None or any(x.key().name in ("Grad", "Jvp") for x in _INTERPRETERS() or ())


# A compiler cannot trace it, but guards which transforms are active. torch.compiler.assume_constant_result does the
# same, and imports the compiler.
is_differentiated._dynamo_marked_constant = True  # type: ignore[attr-defined]


def has_dispatch_mode() -> bool:
    """Whether a dispatch mode, which intercepts each operator, is active; True if PyTorch cannot say."""
    return _DISPATCH_MODES is None or _DISPATCH_MODES() > 0


def is_recorded(tensor: Tensor) -> bool:
    """Whether a tracer other than torch.compile records the operators of a call, to replay them with other values.

    If PyTorch cannot say, any dispatch mode is taken for one.
    """
    if torch.compiler.is_compiling():
        return False
    if torch.jit.is_tracing() or type(tensor) not in PLAIN_TENSORS:
        return True
    if _PROXY_MODE is None or _MODE_OF is None or _FAKE is None:
        return has_dispatch_mode()
    return _PROXY_MODE() is not None or _MODE_OF(_FAKE) is not None


def is_unreadable(tensor: Tensor) -> bool:
    """Whether a tensor's values cannot be read: on ``meta``, in a compiler, recorder, transform or CUDA graph."""
    is_traced = torch.compiler.is_compiling() or is_recorded(tensor) or in_transform()
    return tensor.is_meta or is_traced or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def is_watched(*tensors: Tensor) -> bool:
    """Whether a compiler, tracer, transform or dispatch mode is active, or a tensor is not a plain one."""
    return (
        torch.compiler.is_compiling()
        or in_transform()
        or torch.jit.is_tracing()
        or has_dispatch_mode()
        or _IS_BATCH_OF_GRADIENTS is None
        or any(type(x) not in PLAIN_TENSORS or x.is_meta or _IS_BATCH_OF_GRADIENTS(x) for x in tensors)
    )


def has_tangent(*tensors: Tensor | None) -> bool:
    """Whether any tensor may have a forward-mode tangent; assumed in forward mode under a compiler or a transform."""
    if getattr(forward_ad, "_current_level", 0) < 0:
        return False
    if torch.compiler.is_compiling() or in_transform():
        return True
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def version(tensor: Tensor) -> int:
    """Return the number of in-place writes to a tensor; 0 if PyTorch, whose own check comes later, cannot say."""
    return getattr(tensor, "_version", 0)


def has_backend(group: Any, device: torch.device) -> bool:
    """Whether a process group can send tensors of this device; True if PyTorch, which would raise, cannot say."""
    find = getattr(group, "_get_backend", None)
    try:
        return find is None or find(device) is not None
    except RuntimeError:
        return False


def mark_dynamic(tensor: Tensor, axes: Iterable[int]) -> Tensor:
    """Return the tensor with the sizes of these axes dynamic for compilers, which else compile for each length."""
    tensor, mark = tensor.view_as(tensor), _found("_dynamo.maybe_mark_dynamic")  # a mark on the caller's would stay
    if mark is not None:
        mark(tensor, tuple(axes))
    return tensor


def without_recompile_limit(function: Callable[..., Tensor], limit: int) -> Callable[..., Tensor]:
    """Return a compiled function that may be compiled for ``limit`` kinds of calls, where PyTorch has such limits."""
    config = _found("_dynamo.config")
    names = [x for x in ("recompile_limit", "accumulated_recompile_limit") if hasattr(config, x)]
    patch = getattr(config, "patch", None)
    return function if patch is None else patch(dict.fromkeys(names, limit))(function)
