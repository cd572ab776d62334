"""Reverse-mode first derivatives of attention, in memory linear in the lengths. Dense attention has all derivatives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from alibi_core.backend import AttentionCall, dense_attention, no_gradient
from alibi_jax._call import MOVING, Operands
from alibi_jax._compatible import broadcasting, materialised

RESIDUALS = "alibi_residuals"  # their name in policies of jax.checkpoint


def without_gradient(positions: Any) -> Any:
    """Return positions, which must not be differentiated, of whatever kind they are."""
    is_floating = isinstance(positions, jax.Array) and jnp.issubdtype(positions.dtype, jnp.floating)
    return _constant(positions) if is_floating else positions


@jax.custom_jvp
def _constant(array: jax.Array) -> jax.Array:
    return array


@partial(_constant.defjvp, symbolic_zeros=True)
def _(primals: Any, tangents: Any) -> Any:
    if not isinstance(tangents[0], SymbolicZero):
        raise no_gradient("jax.lax.stop_gradient(positions)")
    return primals[0], tangents[0]


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


def differentiable(
    forward: Callable[..., tuple[jax.Array, Any]], backward: Callable[..., list[jax.Array]]
) -> Callable[[Any, Operands], jax.Array]:
    """Return the attention of operands as a function with gradients of query, key, value and :data:`MOVING`.

    The function takes hashable options and the operands, and returns a result with the query's dtype.

    Args:
        forward: Takes the options, the operands, and whether a backward pass follows. Returns the result and residuals;
            for a backward pass the result has the working dtype. The gradient of a score is a difference from a mean,
            which follows from the result. A rounded result would shift it by the same amount in all scores of a row;
            summed over keys, the shift grows without bound.
        backward: Takes the options, the operands, that result, the residuals, the cotangent, and whether gradients of
            the call's arrays are needed. Returns the gradients of query, key, value and, if needed, of each entry's
            arrays.
    """

    @partial(jax.custom_vjp, nondiff_argnums=(0,))
    def attend(options: Any, moving: Any, others: Operands) -> jax.Array:
        return forward(options, _joined(moving, others), False)[0].astype(moving[0].dtype)

    def forward_rule(options: Any, moving: Any, others: Any) -> tuple[jax.Array, Any]:
        # The shape of a residual, [1] or [0], says statically whether the call has gradients. Its pytree structure must
        # not: JAX keeps one structure for a traced function, whichever arguments have gradients.
        marker = jnp.zeros(int(any(x is not None and x.perturbed for x in moving[3:])))
        moving, others = jax.tree.map(lambda x: x.value, (moving, others), is_leaf=lambda x: hasattr(x, "perturbed"))
        result, residuals = checkpoint_name(forward(options, _joined(moving, others), True), RESIDUALS)
        return result.astype(moving[0].dtype), (moving, others, result, residuals, marker)

    def backward_rule(options: Any, saved: Any, cotangent: Any) -> tuple[Any, None]:
        moving, others, result, residuals, marker = saved
        call_too = marker.size > 0
        if isinstance(cotangent, SymbolicZero):
            return None, None
        dtype, operands = moving[0].dtype, _joined(moving, others)
        found = iter(backward(options, operands, result, residuals, cotangent.astype(dtype), call_too))
        of_tensors = [next(found).astype(dtype) for _ in range(3)]
        # JAX requires gradients of slopes even if they were not requested: return zeros.
        of_call = [
            None if x is None else _summed_as(next(found), x) if call_too else jnp.zeros_like(x) for x in moving[3:]
        ]
        return (*of_tensors, *of_call), None

    attend.defvjp(forward_rule, backward_rule, symbolic_zeros=True)

    def of_operands(options: Any, operands: Operands) -> jax.Array:
        others = replace(operands.call, **dict.fromkeys(MOVING))
        return attend(
            options,
            (*operands[:3], *(getattr(operands.call, name) for name in MOVING)),
            operands._replace(query=None, key=None, value=None, call=others),
        )

    return of_operands


def _joined(moving: Any, others: Operands) -> Operands:
    query, key, value, *of_call = moving
    call = replace(others.call, **dict(zip(MOVING, of_call, strict=True)))
    return others._replace(query=query, key=key, value=value, call=call)


def _summed_as(gradient: jax.Array, operand: jax.Array) -> jax.Array:
    """Return the gradient summed over the batch if all entries share the operand, as they may share slopes."""
    return gradient if operand.shape[0] == gradient.shape[0] else jnp.sum(gradient, axis=0, keepdims=True)
