"""What torch.func.vmap makes of the tiled operators: the mapped axis becomes a part of the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from alibi_core.backend import ARRAY_AXES

# Axes of an operator's tensors besides the batch axis, in their order.
INPUTS = {"query": 3, "key": 3, "value": 3}
RULES = ARRAY_AXES | {"key_norms": 2}
OF_FORWARD = (*INPUTS.values(), *RULES.values())
OF_BACKWARD = (3, *INPUTS.values(), 3, 2, *RULES.values())


def register(forward: Any, backward: Any) -> None:
    """Teach both operators to be mapped."""

    def map_forward(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        batch = _batch(arguments[0], in_dims[0])
        merged = _merge(info.batch_size, batch, in_dims, arguments, OF_FORWARD)
        return _split(forward(*merged), info.batch_size), (0, 0)

    def map_backward(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        batch = _batch(arguments[1], in_dims[1])
        merged = _merge(info.batch_size, batch, in_dims, arguments, OF_BACKWARD)
        first = len(OF_BACKWARD) - len(RULES)
        shared = []
        for index in (first, first + 1):  # slopes: each mapped entry is to have a gradient of its own
            slopes = arguments[index]
            lacks_batch = slopes is not None and slopes.ndim - (in_dims[index] is not None) == 1
            if slopes is not None and merged[index].ndim == 1:
                merged[index] = merged[index].expand(info.batch_size * batch, -1)
            shared.append(lacks_batch)
        *tensors, past, future = _split(backward(*merged), info.batch_size)
        of_future = shared[0] if arguments[first + 1] is None else shared[1]
        slopes = [x.sum(dim=1) if is_shared else x for x, is_shared in ((past, shared[0]), (future, of_future))]
        return (*tensors, *slopes), (0,) * 5

    torch.library.register_vmap(forward, map_forward)
    torch.library.register_vmap(backward, map_backward)


def _batch(tensor: Tensor, dim: int | None) -> int:
    return (tensor if dim is None else tensor.movedim(dim, 0)[0]).shape[0]


def _merge(
    size: int, batch: int, in_dims: tuple[int | None, ...], arguments: tuple[Any, ...], axes: tuple[int, ...]
) -> list[Any]:
    """Return the arguments, the mapped axis of each tensor merged with its batch axis."""
    merged = [
        _merge_one(size, batch, dim, argument, rest) if isinstance(argument, Tensor) else argument
        for argument, dim, rest in zip(arguments, in_dims, axes, strict=False)
    ]
    return [*merged, *arguments[len(axes) :]]


def _merge_one(size: int, batch: int, dim: int | None, tensor: Tensor, axes: int) -> Tensor:
    if dim is None:
        if tensor.ndim <= axes or tensor.shape[0] == 1 < batch:
            return tensor  # the same for all
        return tensor.expand(size, *tensor.shape).flatten(0, 1)
    tensor = tensor.movedim(dim, 0)
    rest = tensor.shape[1:]
    rest = (1,) * (axes + 1 - len(rest)) + rest  # [batch or 1, ...]
    return tensor.reshape(size, *rest).expand(size, batch, *rest[1:]).flatten(0, 1)


def _split(results: tuple[Tensor, ...], size: int) -> tuple[Tensor, ...]:
    return tuple(x.unflatten(0, (size, -1)) for x in results)
