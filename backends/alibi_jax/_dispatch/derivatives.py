"""Derivatives of attention's primitives.

The tangent of attention is a primitive, linear in the tangents of tensors and slopes; its transpose is the backward
primitive. So a first derivative in reverse mode runs the backward primitive, in memory linear in the lengths. Forward
mode (the tangent itself) and second derivatives differentiate dense attention, in memory for all scores.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from alibi_core.backend import AttentionCall, dense_attention
from alibi_jax._call import Operands
from alibi_jax._compatible import broadcasting, is_zero, materialised, new_primitive, set_rules, zero
from alibi_jax._dispatch.primitive import (
    backward,
    backward_primitive,
    forward_primitive,
    map_backward,
    map_forward,
    unpacked,
)


@broadcasting
def dense(call: AttentionCall, *tensors: jax.Array, dropout_key: jax.Array | None = None) -> Any:
    """Compute a call on heads-first tensors by dense attention, which JAX can differentiate any number of times."""

    def drop(weights: jax.Array) -> jax.Array:
        kept = jax.random.bernoulli(dropout_key, 1 - call.dropout, weights.shape)
        return jnp.where(kept, weights / (1 - call.dropout), 0)

    # jax.nn.softmax treats the maximum as a constant. The derivative of a plain max compares scores with the maximum;
    # if XLA computes the scores twice with different rounding, none is equal, and the derivative divides by zero.
    found = dense_attention(call, *map(materialised, tensors), softmax=jax.nn.softmax, drop=drop)
    # Materialise the result so that its cotangent is materialised, too.
    return (materialised(found[0]), found[1]) if call.return_weights else materialised(found)


def _dense_of_leaves(structure: Any, *leaves: Any) -> jax.Array:
    operands = unpacked(structure, leaves)
    result: jax.Array = dense(operands.call, *operands[:3])
    return result


def _refuse_other_keys(structure: Any, leaves: Any) -> None:
    if unpacked(structure, leaves).other_keys is not None:
        raise NotImplementedError("alibi_jax.parallel.attention has first derivatives, in reverse mode, alone")


def _num_differentiable(operands: Operands) -> int:
    """Return the number of differentiable leaves, which come first: query, key, value, slopes and future slopes."""
    return 4 if operands.call.future_slopes is None else 5


def _moving_jvp(function: Callable[..., Any], primals: Any, tangents: Any) -> Any:
    """Return the tangents of a function's results, through the arguments whose tangents are not symbolic zeros."""
    moving = [i for i, tangent in enumerate(tangents) if not is_zero(tangent)]

    def of_moving(*values: Any) -> Any:
        given = dict(zip(moving, values, strict=True))
        return function(*(given.get(i, primal) for i, primal in enumerate(primals)))

    return jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])[1]


def summed_as(gradient: jax.Array, operand: Any) -> jax.Array:
    """Return the gradient summed over the batch if all entries share the operand, as they may share slopes."""
    return gradient if operand.shape[0] == gradient.shape[0] else jnp.sum(gradient, axis=0, keepdims=True)


# --- The forward pass -----------------------------------------------------------------------------------------------


def _forward_jvp(leaves: Any, tangents: Any, *, with_log_sum_exps: bool, **parameters: Any) -> tuple[Any, Any]:
    _refuse_other_keys(parameters["structure"], leaves)
    # The gradient of a score is a difference from a mean, which follows from the result. A rounded result shifts it by
    # the same amount in all scores of a row; summed over keys, the shift grows without bound. So use the unrounded one.
    exact, log_sum_exps = forward_primitive.bind(*leaves, **parameters, with_log_sum_exps=True)
    operands = unpacked(parameters["structure"], leaves)
    result = exact.astype(exact.dtype if with_log_sum_exps else operands.query.dtype)
    wanted = tuple(i for i in range(_num_differentiable(operands)) if not is_zero(tangents[i]))
    tangent = zero(jax.typeof(result))
    if wanted:
        given = (exact, log_sum_exps, *leaves, *(tangents[i] for i in wanted))
        tangent = tangent_primitive.bind(*given, **parameters, wanted=wanted)[0].astype(result.dtype)
    if not with_log_sum_exps:
        return [result], [tangent]
    # The backward pass treats log-sum-exps as functions of the operands, so their own tangent is zero.
    return [result, log_sum_exps], [tangent, zero(jax.typeof(log_sum_exps))]


# --- The tangent ----------------------------------------------------------------------------------------------------


def _run_tangent(_: Any, result: Any, __: Any, *leaves: Any, structure: Any, wanted: Any, **___: Any) -> list[Any]:
    leaves, tangents = leaves[: structure.num_leaves], leaves[structure.num_leaves :]

    def function(*moving: Any) -> Any:
        given = dict(zip(wanted, moving, strict=True))
        return _dense_of_leaves(structure, *(given.get(i, leaf) for i, leaf in enumerate(leaves)))

    # Shared slopes, [1, num_heads], may have one tangent per batch entry.
    primals = [jnp.broadcast_to(leaves[i], tangent.shape) for i, tangent in zip(wanted, tangents, strict=True)]
    return [jax.jvp(function, primals, list(tangents))[1].astype(result.dtype)]


def _map_tangent(leaves: Any, axes: Any, **parameters: Any) -> Any:
    return jax.vmap(partial(_run_tangent, None, **parameters), in_axes=tuple(axes))(*leaves), [0]


def _tangent_jvp(primals: Any, tangents: Any, **parameters: Any) -> tuple[Any, Any]:
    found = tangent_primitive.bind(*primals, **parameters)
    return found, _moving_jvp(partial(_run_tangent, None, **parameters), primals, tangents)


def _tangent_transpose(
    cotangents: Any, result: Any, log_sum_exps: Any, *leaves: Any, structure: Any, wanted: Any, implementation: Any
) -> list[Any]:
    leaves, tangents = leaves[: structure.num_leaves], leaves[structure.num_leaves :]
    others, (cotangent,) = [None] * (2 + len(leaves)), cotangents
    if is_zero(cotangent):
        return others + [zero(x.aval) for x in tangents]
    operands = unpacked(structure, leaves)
    cotangent = cotangent.astype(operands.query.dtype)
    slopes_too = any(i >= 3 for i in wanted)
    found = backward(operands, result, log_sum_exps, cotangent, implementation, slopes_too=slopes_too)
    return others + [summed_as(found[i], x.aval) for i, x in zip(wanted, tangents, strict=True)]


# --- The backward pass ----------------------------------------------------------------------------------------------


def _backward_jvp(primals: Any, tangents: Any, **parameters: Any) -> tuple[Any, Any]:
    _refuse_other_keys(parameters["structure"], primals[3:])
    found = backward_primitive.bind(*primals, **parameters)
    return found, _moving_jvp(partial(_dense_gradients, **parameters), primals, tangents)


def _dense_gradients(
    _: Any, __: Any, cotangent: Any, *leaves: Any, structure: Any, slopes_too: bool, **___: Any
) -> list[Any]:
    operands = unpacked(structure, leaves)
    count = _num_differentiable(operands)
    slopes = [jnp.broadcast_to(x, operands.query.shape[:2]) for x in leaves[3:count]]
    function = lambda *first: _dense_of_leaves(structure, *first, *leaves[count:])  # noqa: E731
    gradients = jax.vjp(function, *leaves[:3], *slopes)[1](cotangent)
    return list(gradients if slopes_too else gradients[:3])


tangent_primitive = new_primitive(
    "alibi_attention_tangent", _run_tangent, lambda result, *_, **__: [result.update(weak_type=False)]
)
set_rules(forward_primitive, vmap=map_forward, jvp=_forward_jvp)
set_rules(backward_primitive, vmap=map_backward, jvp=_backward_jvp)
set_rules(tangent_primitive, vmap=_map_tangent, jvp=_tangent_jvp, transpose=_tangent_transpose)
