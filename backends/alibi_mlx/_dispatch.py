"""The choice of an implementation, and the rules by which MLX transforms attention and its gradients.

The kernels take a call with one batch axis. Here they become custom functions of all arrays involved. Their vmap rule
merges the mapped axis into the batch, so the kernels need no vmap rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx

from alibi_core.backend import AttentionCall, no_gradient
from alibi_core.backend.horizon import Job
from alibi_mlx import _kernels

IMPLEMENTATIONS = ("tiled", "dense")


def choose(call: AttentionCall, implementation: str | None) -> str:
    """Return the implementation that runs a call: ``implementation``, or by default the first that can.

    Raises:
        NotImplementedError: If ``implementation`` cannot run the call.
    """
    if implementation is None:
        return next(name for name in IMPLEMENTATIONS if refusal(name, call) is None)
    if (reason := refusal(implementation, call)) is not None:
        able = [repr(name) for name in IMPLEMENTATIONS if refusal(name, call) is None]
        raise NotImplementedError(f"implementation {implementation!r} {reason}; {' and '.join(able)} can run this call")
    return implementation


def refusal(name: str, call: AttentionCall) -> str | None:
    """Return why an implementation cannot run a call, as the predicate of a sentence about it; None if it can."""
    if name == "dense":
        return None
    if call.dense_only is not None:
        return call.dense_only
    if call.dtype == mx.float64:
        return "cannot compute in float64 (MLX's attention takes its scale and exponential in float32)"
    return None


def without_gradient(positions: Any) -> Any:
    """Return positions, which must not be differentiated, of whatever kind they are."""
    is_floating = isinstance(positions, mx.array) and mx.issubdtype(positions.dtype, mx.floating)
    return _constant(positions) if is_floating else positions


@mx.custom_function
def _constant(array: mx.array) -> mx.array:
    return array


@_constant.vmap
def _(array: mx.array, axis: int | None) -> Any:
    return _constant(array), axis


def _refuse(*_: Any) -> mx.array:
    raise no_gradient("mx.stop_gradient(positions)")


_constant.vjp(_refuse)
_constant.jvp(_refuse)


# Returns the tiles that make up a call with one batch axis, given query, key and value.
Plan = Callable[[AttentionCall, mx.array, mx.array, mx.array], list[Job]]


def attend(call: AttentionCall, query: mx.array, key: mx.array, value: mx.array, plan: Plan) -> mx.array:
    """Return the attention of a call with one batch axis, with gradients in memory linear in the lengths.

    Only the arguments are saved for the backward pass, which recomputes the scores.
    """
    operands = call.arrays
    planned: dict[tuple[int, ...], list[Job]] = {}  # jobs by batch shape, shared by forward and backward pass

    def jobs(call: AttentionCall, *tensors: mx.array) -> list[Job]:
        if call.batch not in planned:
            planned[call.batch] = plan(call, *tensors)
        return planned[call.batch]

    def of_arrays(query: mx.array, key: mx.array, value: mx.array, *arrays: mx.array) -> mx.array:
        this = call.having(**dict(zip(operands, arrays, strict=True)))
        return _kernels.forward(this, query, key, value, jobs(this, query, key, value))

    function = mx.custom_function(of_arrays)

    @function.jvp
    def push_forward(primals: Any, tangents: Any) -> mx.array:
        # Inputs without a tangent get zeros.
        filled = [mx.zeros_like(x) if dx is None else dx for x, dx in zip(primals, tangents, strict=True)]
        return mx.jvp(of_arrays, primals, filled)[1][0]

    @function.vjp
    def differentiate(primals: Any, grad: mx.array, result: mx.array) -> Any:
        query, key, value, *arrays = primals
        this = call.having(**dict(zip(operands, arrays, strict=True)))
        found = _gradients(this, query, key, value, grad, jobs)
        names = "slopes", "future_slopes", *(name for name in ("log_gates", "sinks") if name in operands)
        by_name = zip(names, found[3:], strict=True)
        grads = {n: _of_shape(getattr(this, n).shape, x) for n, x in by_name if n in operands}
        # MLX drops a None, and later gradients would become those of arguments before them.
        return *found[:3], *(grads.get(name, mx.zeros_like(x)) for name, x in zip(operands, arrays, strict=True))

    @function.vmap
    def mapped(operands: Any, axes: Any) -> tuple[mx.array, int]:
        size, longer, tensors = _as_longer_batch(call, operands, axes, 3)
        return attend(longer, *tensors, plan).reshape(size, *call.batch, *tensors[0].shape[1:]), 0

    return function(query, key, value, *operands.values())


def _gradients(
    call: AttentionCall, query: mx.array, key: mx.array, value: mx.array, grad: mx.array, plan: Plan
) -> tuple[mx.array, ...]:
    """Return the gradients of query, key, value, and of slopes, future slopes, gates and sinks per batch entry."""
    operands = call.arrays

    @mx.custom_function
    def function(query: mx.array, key: mx.array, value: mx.array, grad: mx.array, *arrays: mx.array) -> Any:
        this = call.having(**dict(zip(operands, arrays, strict=True)))
        return _kernels.backward(this, (query, key, value), grad, plan(this, query, key, value))

    @function.vmap
    def mapped(operands: Any, axes: Any) -> tuple[tuple[mx.array, ...], tuple[int, ...]]:
        size, longer, tensors = _as_longer_batch(call, operands, axes, 4)
        grads = _gradients(longer, *tensors, plan)
        return tuple(x.reshape(size, *call.batch, *x.shape[1:]) for x in grads), (0,) * len(grads)

    return tuple(function(query, key, value, grad, *operands.values()))


def _of_shape(shape: tuple[int, ...], by_entry: mx.array) -> mx.array:
    """Return gradients ``[batch, num_heads, ...]`` in the shape of their array: summed if the entries share it."""
    return by_entry if by_entry.shape == shape else mx.sum(by_entry, axis=0).reshape(shape)


def _as_longer_batch(
    call: AttentionCall, operands: Any, axes: Any, count: int
) -> tuple[int, AttentionCall, list[mx.array]]:
    """Return the mapped size, and the call and first ``count`` operands with the mapped axis merged into the batch."""
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    tensors = []
    for x, axis in zip(operands[:count], axes[:count], strict=True):
        whole = mx.broadcast_to(x, (size, *x.shape)) if axis is None else mx.moveaxis(x, axis, 0)
        tensors.append(whole.reshape(size * whole.shape[1], *whole.shape[2:]))
    given = zip(operands[count:], axes[count:], strict=True)

    def longer(_: mx.array, own_axes: int) -> mx.array:
        x, axis = next(given)
        if axis is None:
            return x
        x = mx.moveaxis(x, axis, 0)
        missing = 2 + own_axes - x.ndim  # batch and leading axes that the array lacks; they broadcast
        return x.reshape(size, *[1] * missing, *x.shape[1:])

    return size, replace(call.map_arrays(longer), batch=(size, *call.batch)).with_one_batch_axis(), tensors
