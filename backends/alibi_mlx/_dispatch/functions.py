"""Attention and its gradients as functions that MLX's transformations know.

What computes attention, or its gradients, takes a call with one batch axis. Here it becomes a custom function of all
arrays concerned, of which ``mx.vmap`` makes a longer batch, so that nothing below has to know how to be mapped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx

from alibi_core.backend import ARRAY_AXES, AttentionCall, Job
from alibi_mlx import _tiled

# Returns the tiles that make up a call with one batch axis, given query, key and value.
Plan = Callable[[AttentionCall, mx.array, mx.array, mx.array], list[Job]]


def attend(call: AttentionCall, query: mx.array, key: mx.array, value: mx.array, plan: Plan) -> mx.array:
    """Return the attention of a call with one batch axis, differentiable in memory that grows with the lengths alone.

    Nothing is kept for the backward pass but the arguments: scores are computed anew.
    """
    operands = call.arrays
    names = tuple(operands)
    planned: dict[tuple[int, ...], list[Job]] = {}  # once for both passes, and once more for a longer batch

    def jobs(call: AttentionCall, *tensors: mx.array) -> list[Job]:
        if call.batch not in planned:
            planned[call.batch] = plan(call, *tensors)
        return planned[call.batch]

    def of_arrays(query: mx.array, key: mx.array, value: mx.array, *arrays: mx.array) -> mx.array:
        this = replace(call, **dict(zip(names, arrays, strict=True)))
        return _tiled.forward(this, query, key, value, jobs(this, query, key, value))

    function = mx.custom_function(of_arrays)

    @function.jvp
    def push_forward(primals: Any, tangents: Any) -> mx.array:
        filled = [mx.zeros_like(x) if dx is None else dx for x, dx in zip(primals, tangents, strict=True)]
        return mx.jvp(of_arrays, primals, filled)[1][0]

    @function.vjp
    def differentiate(primals: Any, grad: mx.array, result: mx.array) -> Any:
        query, key, value, *arrays = primals
        this = replace(call, **dict(zip(names, arrays, strict=True)))
        *by_tensors, past, future = _gradients(this, query, key, value, grad, jobs)
        by_slopes = {"slopes": past, "future_slopes": future}
        if this.future_slopes is None:
            by_slopes["slopes"] = past + future
        grads = {n: _of_shape(getattr(this, n).shape, x) for n, x in by_slopes.items() if n in names}
        return *by_tensors, *(grads.get(name) for name in names)

    @function.vmap
    def mapped(operands: Any, axes: Any) -> tuple[mx.array, int]:
        size, longer, tensors = _as_longer_batch(call, operands, axes, 3)
        return attend(longer, *tensors, plan).reshape(size, *call.batch, *tensors[0].shape[1:]), 0

    return function(query, key, value, *operands.values())


def _gradients(
    call: AttentionCall, query: mx.array, key: mx.array, value: mx.array, grad: mx.array, plan: Plan
) -> tuple[mx.array, ...]:
    """Return the gradients by query, key, value, and by the slopes of each batch entry, past and future."""
    names = tuple(call.arrays)

    @mx.custom_function
    def function(*operands: mx.array) -> tuple[mx.array, ...]:
        query, key, value, grad, *arrays = operands
        this = replace(call, **dict(zip(names, arrays, strict=True)))
        return _tiled.backward(this, (query, key, value), grad, plan(this, query, key, value))

    @function.vmap
    def mapped(operands: Any, axes: Any) -> tuple[tuple[mx.array, ...], tuple[int, ...]]:
        size, longer, tensors = _as_longer_batch(call, operands, axes, 4)
        grads = _gradients(longer, *tensors, plan)
        return tuple(x.reshape(size, *call.batch, *x.shape[1:]) for x in grads), (0,) * len(grads)

    return tuple(function(query, key, value, grad, *call.arrays.values()))


def _of_shape(shape: tuple[int, ...], by_entry: mx.array) -> mx.array:
    """Return gradients of each batch entry, ``[batch, num_heads]``, summed if the entries share what they are of."""
    return by_entry if by_entry.shape == shape else mx.sum(by_entry, axis=0).reshape(shape)


def _as_longer_batch(
    call: AttentionCall, operands: Any, axes: Any, count: int
) -> tuple[int, AttentionCall, list[mx.array]]:
    """Return how many were mapped, and the call and the first ``count`` operands with that axis part of the batch."""
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    tensors = []
    for x, axis in zip(operands[:count], axes[:count], strict=True):
        whole = mx.broadcast_to(x, (size, *x.shape)) if axis is None else mx.moveaxis(x, axis, 0)
        tensors.append(whole.reshape(size * whole.shape[1], *whole.shape[2:]))
    fields = {}
    for name, x, axis in zip(call.arrays, operands[count:], axes[count:], strict=True):
        if axis is not None:
            x = mx.moveaxis(x, axis, 0)
            missing = 2 + ARRAY_AXES[name] - x.ndim  # axes that are the same for all of the batch
            x = x.reshape(size, *[1] * missing, *x.shape[1:])
        fields[name] = x
    return size, replace(call, batch=(size, *call.batch), **fields).with_one_batch_axis(), tensors
