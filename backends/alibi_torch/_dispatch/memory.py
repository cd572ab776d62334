"""Calls that were checked before: of short ones, checking takes longer than the rest of what is not attention."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from alibi_core import AttentionCall

ROOM = 32  # calls, each with the biases by distance of its heads
MANY = 2048  # keys of the longest call of several queries to be remembered; longer ones take long enough
NUMBERS = frozenset((bool, int, float, type(None)))
_calls: OrderedDict[tuple[Any, ...], AttentionCall] = OrderedDict()


def key_of(
    tensors: tuple[Tensor, Tensor, Tensor],
    slopes: Any,
    future_slopes: Any,
    rules: dict[str, Any],
) -> Any:
    """Return what a checked call of plain CPU tensors follows from; None if that is more than sizes and numbers.

    The values of slopes are part of the answer; ``rules`` are the other arguments, by name, as given by the caller.
    """
    for x in tensors:
        if not _is_ordinary(x) or x.ndim < 3:
            return None
    if is_watched():
        return None
    query, key, value = tensors
    if key.shape[-2] > MANY and query.shape[-2] > 1:
        return None
    if forward_ad._current_level >= 0:  # slopes may carry a derivative
        return None
    numbers = tuple(rules.values())
    kinds = tuple(map(type, numbers))
    if not NUMBERS.issuperset(kinds):
        return None
    rates = []
    for given in (slopes, future_slopes):
        if isinstance(given, Tensor):
            if not _is_ordinary(given) or given.ndim != 1 or (given.requires_grad and torch.is_grad_enabled()):
                return None
            given = (given.dtype, *given.tolist())
        elif given is not None and type(given) is not int:
            return None
        rates.append(given)
    sizes = query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype
    return sizes, *rates, numbers, kinds  # 1, 1.0 and True are equal, but not as arguments


def recalled(key: Any, check: Callable[[], AttentionCall]) -> AttentionCall:
    """Return the call of a key, checked before or now; of many that were checked, the last are kept."""
    call = None if key is None else _calls.get(key)
    if call is not None:
        return call
    call = check()
    if key is None:
        return call
    with torch.inference_mode(False), torch.no_grad():  # what it keeps may take part in a differentiated call
        _calls[key] = call.map_arrays(lambda array, _: array.clone())  # the caller may write to those given
    while len(_calls) > ROOM:
        _calls.popitem(last=False)
    return call


def _is_ordinary(tensor: Tensor) -> bool:
    if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
        return False
    return tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_nested


def is_watched(*tensors: Tensor) -> bool:
    """Whether something is to see operators: a compiler, a tracer, a mapping, a mode, or a tensor of its own kind."""
    for x in tensors:
        if (type(x) is not Tensor and type(x) is not torch.nn.Parameter) or x.is_meta:
            return True
    return (
        torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
    )
