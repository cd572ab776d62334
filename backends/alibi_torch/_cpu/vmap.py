"""vmap rules of the operators: the mapped axis is merged into the batch axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from alibi_core.backend import ARRAY_AXES

# The number of axes after the batch axis, for each tensor argument of the operators, in order.
_RULES = (*ARRAY_AXES.values(), 2)  # the last argument is the key norms
FORWARD = (3, 3, 3, *_RULES)  # query, key, value
BACKWARD = (3, 3, 3, 3, 3, 2, *_RULES)  # gradient, query, key, value, result, log-sum-exp


def register(forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
    """Register vmap rules for both operators."""

    def map_forward(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        merged = _merged(info.batch_size, in_dims, arguments, FORWARD)
        return tuple(x.unflatten(0, (info.batch_size, -1)) for x in forward(*merged)), (0, 0)

    def map_backward(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        size, first = info.batch_size, len(BACKWARD) - len(_RULES)
        merged = _merged(size, in_dims, arguments, BACKWARD)
        summed = []  # True if slopes have no batch axis, so that their gradient is summed over it
        for index in (first, first + 1):
            slopes, dim = arguments[index], in_dims[index]
            if slopes is None:  # its gradient then has the shape of that of slopes
                summed.append(summed[0])
                continue
            summed.append(slopes.ndim - (dim is not None) == 1)
            merged[index] = merged[index].expand(len(merged[0]), -1)  # one gradient per mapped entry
        *tensors, past, future = (x.unflatten(0, (size, -1)) for x in backward(*merged))
        rates = [x.sum(dim=1) if is_summed else x for x, is_summed in zip((past, future), summed, strict=True)]
        return (*tensors, *rates), (0,) * 5

    torch.library.register_vmap(forward, map_forward)
    torch.library.register_vmap(backward, map_backward)


def _merged(size: int, in_dims: tuple[int | None, ...], arguments: tuple[Any, ...], axes: tuple[int, ...]) -> list[Any]:
    """Return the arguments, the mapped axis of each tensor merged with its batch axis."""
    query, dim = arguments[1], in_dims[1]  # the key in the forward operator; both have a batch axis
    batch = query.shape[0] if dim is None else query.movedim(dim, 0).shape[1]
    merged = list(arguments)
    for index, (x, dim, rest) in enumerate(zip(arguments, in_dims, axes, strict=False)):
        if not isinstance(x, Tensor) or (dim is None and (x.ndim <= rest or x.shape[0] == 1 < batch)):
            continue  # not mapped and without a batch axis: the same for all entries
        x = x[None] if dim is None else x.movedim(dim, 0)
        x = x.reshape(len(x), *(1,) * (rest + 2 - x.ndim), *x.shape[1:])  # [size or 1, batch or 1, ...]
        merged[index] = x.expand(size, batch, *x.shape[2:]).flatten(0, 1)
    return merged
