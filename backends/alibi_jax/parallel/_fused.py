"""Sequence-parallel attention as a differentiable function of its operands."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from alibi_jax._call import Operands
from alibi_jax._dispatch import in_reverse_mode_alone, summed_as
from alibi_jax.parallel._backward import backward
from alibi_jax.parallel._forward import forward
from alibi_jax.parallel._ring import Ring, Sums, local_operands


def ring_attention(ring: Ring, operands: Operands) -> jax.Array:
    """Return this device's ``[batch, shard_len, num_heads, head_dim]``, of the dtype of the query.

    Args:
        ring: The setup.
        operands: Those of this device, along all axes that any of them varies over.
    """
    return _attention(ring, in_reverse_mode_alone(operands))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(ring: Ring, operands: Operands) -> jax.Array:
    return _result(ring, operands, forward(ring, local_operands(ring, operands))[0])


def _result(ring: Ring, operands: Operands, sums: Sums) -> jax.Array:
    result = ring.join(sums.result)
    if ring.shards.length < ring.shards.padded_length:
        tokens = ring.is_token(ring.chunks()).reshape(1, -1, 1, 1)
        result = jnp.where(tokens, result, 0)
    return result.astype(operands.query.dtype)


def _forward(ring: Ring, operands: Any) -> tuple[jax.Array, Any]:
    slopes_too = any(x is not None and x.perturbed for x in (operands.slopes, operands.future_slopes))
    operands = jax.tree.map(lambda x: x.value, operands, is_leaf=lambda x: hasattr(x, "perturbed"))
    sums, taken = forward(ring, local_operands(ring, operands))
    # As on one device, a rounded result would not do.
    return _result(ring, operands, sums), (operands, sums, taken, slopes_too or None)


def _backward(ring: Ring, kept: Any, cotangent: Any) -> tuple[Operands]:
    operands, sums, taken, slopes_too = kept
    nothing = jax.tree.map(lambda x: None, operands)
    if isinstance(cotangent, SymbolicZero):
        return (nothing,)
    local = local_operands(ring, operands)
    cotangent = ring.split(cotangent.astype(operands.query.dtype))
    found = backward(ring, local, sums, taken, cotangent, slopes_too is not None)
    tensors = {name: ring.join(getattr(found, name)).astype(operands.query.dtype) for name in ("query", "key", "value")}
    shared = {
        name: jnp.zeros_like(operand) if gradient is None else summed_as(gradient, operand)
        for name, gradient, operand in (
            ("slopes", found.slopes, operands.slopes),
            ("future_slopes", found.future_slopes, operands.future_slopes),
        )
        if operand is not None
    }
    return (nothing._replace(**tensors, **shared),)


_attention.defvjp(_forward, _backward, symbolic_zeros=True)
