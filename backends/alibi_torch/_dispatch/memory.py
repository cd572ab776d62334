"""Calls that were checked before: of short ones, checking takes longer than the rest of what is not attention."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _get_tracing_state, _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from alibi_core import AttentionCall

ROOM = 32  # calls, each with the biases by distance of its heads
NUMBERS_OF_MASKS = 2**19  # of the masks of the last call of its sizes, of which a copy is kept
MANY = 2048  # keys of the longest call of several queries to be remembered; longer ones take long enough
NUMBERS = frozenset((bool, int, float, type(None)))
OF_MASKS = frozenset((torch.bool, torch.int32, torch.int64))
NO_MASKS: dict[str, Tensor] = {}
PLAIN = frozenset((Tensor, torch.nn.Parameter))
Prepared = TypeVar("Prepared")
_calls: OrderedDict[Any, Any] = OrderedDict()


def key_of(
    query: Tensor, key: Tensor, value: Tensor, slopes: Any, options: dict[str, Any], masks: dict[str, Tensor] = NO_MASKS
) -> Any:
    """Return what a checked call of plain CPU tensors follows from; None if that is more than sizes and numbers.

    The values of slopes are part of the answer; ``options`` are the other arguments, by name, as given by the caller,
    but ``masks``, of :func:`masks_of`: of these the answer has kinds and sizes alone.
    """
    if _is_watched() or forward_ad._current_level >= 0:  # slopes may carry a derivative
        return None
    if not (type(query) in PLAIN and type(key) in PLAIN and type(value) in PLAIN):
        return None
    if not (query.is_cpu and key.is_cpu and value.is_cpu):
        return None
    if not query.layout is key.layout is value.layout is torch.strided:
        return None
    given: Any = ()
    if options or slopes is not None:
        given = _given(slopes, options)
        if given is None:
            return None
    if masks:
        if not all(_is_ordinary(x) and x.dtype in OF_MASKS for x in masks.values()):
            return None
        given = given, *((name, x.dtype, x.shape) for name, x in masks.items())
    try:
        return query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype, given
    except RuntimeError:  # nested tensors have no shape
        return None


def masks_of(options: dict[str, Any]) -> dict[str, Tensor]:
    """Take out of the arguments of a call, and return, tensors whose values say who sees whom."""
    return {name: options.pop(name) for name in ("mask", "segment_ids") if isinstance(options.get(name), Tensor)}


def of_any_length(key: Any, options: dict[str, Any]) -> Any:
    """Return the part of a key that calls of other lengths share; None where what was checked depends on lengths."""
    if key is None or options.get("q_offset") is not None:
        return None
    query, keys, values, *rest = key
    if keys != values:  # which is refused
        return None
    return of_any_length, query[-2] == 1, *(x[:-2] + x[-1:] for x in (query, keys)), *rest


def _given(slopes: Any, options: dict[str, Any]) -> Any:
    """Return arguments as part of a key, slopes by their values; None if others are arrays."""
    given = {**options, "slopes": slopes}
    values: list[Any] = []
    for name in ("slopes", "future_slopes"):
        rates = given.get(name)
        if isinstance(rates, Tensor):
            if not _is_ordinary(rates) or rates.ndim != 1 or (rates.requires_grad and torch.is_grad_enabled()):
                return None
            values += name, rates.dtype, *rates.tolist()
            given[name] = None
    kinds = tuple(map(type, given.values()))  # 1, 1.0 and True are equal, but not as arguments
    return (*given.items(), *kinds, *values) if NUMBERS.issuperset(kinds) else None


def own(call: AttentionCall) -> AttentionCall:
    """Return a call to keep, with arrays of its own: the caller may write to those given."""
    with torch.inference_mode(False), torch.no_grad():  # it may take part in a differentiated call
        return call.map_arrays(lambda array, _: array.clone())


def own_masks(masks: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return masks to keep, likewise."""
    with torch.inference_mode(False), torch.no_grad():
        return {name: x.clone() for name, x in masks.items()}


def is_worthwhile(query: Tensor, key: Tensor) -> bool:
    """Whether checking a call takes a part of its time that is worth to be saved."""
    return min(query.ndim, key.ndim) > 2 and (query.shape[-2] == 1 or key.shape[-2] <= MANY)


def recalled(key: Any) -> Any:
    """Return what is kept under a key, or None."""
    return None if key is None else _calls.get(key)  # a compiler would watch what is looked up


def keep(key: Any, prepared: Prepared) -> Prepared:
    """Keep what is prepared for a call, and return it; of many calls, the last are kept."""
    _calls[key] = prepared
    while len(_calls) > ROOM:
        _calls.popitem(last=False)
    return prepared


def _is_ordinary(tensor: Tensor) -> bool:
    return type(tensor) in PLAIN and tensor.is_cpu and tensor.layout is torch.strided


def is_watched(*tensors: Tensor) -> bool:
    """Whether something is to see operators: a compiler, a tracer, a mapping, a mode, or a tensor of its own kind."""
    return _is_watched() or any(type(x) not in PLAIN or x.is_meta for x in tensors)


def _is_watched() -> bool:
    return (
        is_compiling()
        or peek_interpreter_stack() is not None
        or _len_torch_dispatch_stack() > 0
        or _get_tracing_state() is not None
    )
