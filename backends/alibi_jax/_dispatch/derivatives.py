"""Attention as a differentiable function of its operands."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from alibi_jax._call import Operands, Rules
from alibi_jax._dispatch import primitive
from alibi_jax._dispatch.choice import Implementation


def fused_attention(rules: Rules, implementation: Implementation | None, operands: Operands) -> jax.Array:
    """Return ``[batch, q_len, num_heads, head_dim]``, by an implementation that never holds all scores."""
    return _attention(rules, implementation, primitive.in_reverse_mode_alone(operands))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(rules: Rules, implementation: Implementation | None, operands: Operands) -> jax.Array:
    return primitive.forward(rules, operands, implementation, with_log_sum_exps=False)[0]


def _forward(rules: Rules, implementation: Implementation | None, operands: Any) -> tuple[jax.Array, Any]:
    operands, slopes_too = unperturbed(operands)
    exact, log_sum_exps = primitive.forward(rules, operands, implementation, with_log_sum_exps=True)
    # A score's gradient is a difference from a mean, which follows from the result. Of a rounded one it is off by as
    # much in all scores of a row: times what keys, or queries, or distances have in common, that may be anything.
    return exact.astype(operands.query.dtype), (operands, exact, log_sum_exps, slopes_too)


def _backward(rules: Rules, implementation: Implementation | None, kept: Any, cotangent: Any) -> tuple[Operands]:
    operands, result, log_sum_exps, slopes_too = kept
    if isinstance(cotangent, SymbolicZero):
        return (gradients_of(operands),)
    if rules.kv_heads_first:  # a cache is seldom differentiated: a copy will do
        rules = replace(rules, kv_heads_first=False)
        (gradients,) = _backward(rules, implementation, (_turned(operands), *kept[1:]), cotangent)
        return (_turned(gradients),)
    cotangent = cotangent.astype(operands.query.dtype)
    gradients = primitive.backward(
        rules, operands, result, log_sum_exps, cotangent, implementation, slopes_too=slopes_too is not None
    )
    return (gradients_of(operands, *gradients),)


def _turned(operands: Operands) -> Operands:
    """Exchange the axes of tokens and heads of keys and values."""
    return operands._replace(key=jnp.swapaxes(operands.key, 1, 2), value=jnp.swapaxes(operands.value, 1, 2))


def unperturbed(operands: Any) -> tuple[Operands, bool | None]:
    """Return the operands of a forward pass that knows symbolic zeros, and True if slopes are to have gradients.

    Else None: what is known now has to be told by the structure of what is kept for the backward pass.
    """
    slopes_too = any(x is not None and x.perturbed for x in (operands.slopes, operands.future_slopes))
    return jax.tree.map(lambda x: x.value, operands, is_leaf=lambda x: hasattr(x, "perturbed")), slopes_too or None


def gradients_of(operands: Operands, *found: jax.Array | None) -> Operands:
    """Return gradients as the operands that they belong to: those of tensors and of slopes, if there are any at all."""
    nothing = jax.tree.map(lambda x: None, operands)
    if not found:
        return nothing
    # A gradient that nobody asks for is zero rather than absent: JAX 0.8 wants one structure, however often it traces.
    by_slopes = [
        None if operand is None else jnp.zeros_like(operand) if gradient is None else _summed_as(gradient, operand)
        for gradient, operand in zip(found[3:], (operands.slopes, operands.future_slopes), strict=True)
    ]
    names = ("query", "key", "value", "slopes", "future_slopes")
    return nothing._replace(**dict(zip(names, (*found[:3], *by_slopes), strict=True)))


def _summed_as(gradient: jax.Array, operand: jax.Array) -> jax.Array:
    """Return the gradient of slopes that all batch entries may share."""
    return gradient if operand.shape[0] == gradient.shape[0] else jnp.sum(gradient, axis=0, keepdims=True)


_attention.defvjp(_forward, _backward, symbolic_zeros=True)
