"""The backward pass of sequence-parallel attention, and what is differentiable with it.

Keys come again, and what they get goes back where they live.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from alibi_jax._call import Operands
from alibi_jax._compatible import varying_alike
from alibi_jax._dispatch import summed_as
from alibi_jax.parallel._exchange import Halo, exchange, take
from alibi_jax.parallel._forward import Taken, forward, made, next_of_loop, part_of_hop, signs, travelling
from alibi_jax.parallel._reach import Measured
from alibi_jax.parallel._ring import Part, Ring, Sums, gradients, local_operands, own_part, put


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring_attention(ring: Ring, operands: Operands) -> jax.Array:
    """Return this device's ``[batch, shard_len, num_heads, head_dim]``, of the dtype of the query.

    The operands are those of this device, along all axes that any of them varies over.
    """
    return _result(ring, operands, forward(ring, local_operands(ring, operands))[0])


def _result(ring: Ring, operands: Operands, sums: Sums) -> jax.Array:
    result = ring.join(sums.result)
    if ring.shards.length < ring.shards.padded_length:
        tokens = ring.is_token(ring.chunks()).reshape(1, -1, 1, 1)
        result = jnp.where(tokens, result, 0)
    return result.astype(operands.query.dtype)


def _forward(ring: Ring, operands: Any) -> tuple[jax.Array, Any]:
    # That slopes are to have gradients has to be told by the structure of what is kept for the backward pass.
    slopes_too = any(x is not None and x.perturbed for x in (operands.slopes, operands.future_slopes)) or None
    operands = jax.tree.map(lambda x: x.value, operands, is_leaf=lambda x: hasattr(x, "perturbed"))
    sums, taken = forward(ring, local_operands(ring, operands))
    # As on one device, a rounded result would not do.
    return _result(ring, operands, sums), (operands, sums, taken, slopes_too)


def _backward(ring: Ring, kept: Any, cotangent: Any) -> tuple[Operands]:
    operands, sums, taken, slopes_too = kept
    nothing = jax.tree.map(lambda x: None, operands)
    if isinstance(cotangent, SymbolicZero):
        return (nothing,)
    cotangent = ring.split(cotangent.astype(operands.query.dtype))
    given = Given(local_operands(ring, operands), sums, cotangent)
    found = _backward_of_chunks(ring, given, taken, slopes_too is not None)
    query, key, value = (ring.join(x).astype(operands.query.dtype) for x in found[:3])
    # A gradient that nobody asks for is zero rather than absent: JAX 0.8 wants one structure, however often it traces.
    by_slopes = {
        name: jnp.zeros_like(getattr(operands, name))
        if gradient is None
        else summed_as(gradient, getattr(operands, name))
        for name, gradient in (("slopes", found.slopes), ("future_slopes", found.future_slopes))
        if getattr(operands, name) is not None
    }
    return (nothing._replace(query=query, key=key, value=value, **by_slopes),)


ring_attention.defvjp(_forward, _backward, symbolic_zeros=True)


class Given(NamedTuple):
    """What gradients are made of."""

    local: Operands
    sums: Sums  # of all keys
    cotangent: jax.Array
    lower: Any = None  # bounds of log-sum-exps


def _backward_of_chunks(ring: Ring, given: Given, taken: Taken, slopes_too: bool) -> Operands:
    """Return the gradients of operands, in the working dtype; slopes for each entry, None unless asked for."""
    total = Operands(*gradients(ring, own_part(ring, given.local), *given[1:3], slopes_too))
    if ring.shards.num_chunks == 1:
        return total
    given = given._replace(lower=Measured.of(ring, given.local).lower(given.sums.log_sum_exps))
    planned = partial(_backward_by_plan, ring, slopes_too)

    def looped(total: Operands, given: Given) -> Operands:
        with jax.named_scope("alibi_loop" if ring.plan is None else "alibi_fallback"):
            return _backward_by_loop(ring, slopes_too, total, given, taken.hops)

    if ring.plan is None:
        return looped(total, given)
    if ring.plan.is_complete:
        return planned(total, given)
    return lax.cond(taken.follows_plan, planned, looped, *varying_alike((total, given)))


def _backward_by_plan(ring: Ring, slopes_too: bool, total: Operands, given: Given) -> Operands:
    for hop in ring.plan.hops:
        part = part_of_hop(ring, given.local, hop, made(ring, given.local, hop), given.lower)
        query, *tensors, by_slopes, by_future_slopes = gradients(ring, part, given.sums, given.cotangent, slopes_too)
        halo = Halo(hop.tokens, hop.distance > 0)
        with jax.named_scope("alibi_halo_back"):
            packed = halo.pack(ring.by_slot(jnp.concatenate(tensors, axis=-1)))
            returned = exchange(ring.shards, ring.axis_name, packed, hop.distance, back=True)
            returned = halo.unpack(returned, "constant")
        returned = returned.reshape(-1, *returned.shape[2:])
        sent = halo.tokens_sent
        by_key, by_value = (
            array.at[:, sent].set(_added(array[:, sent], new, halo.heads, 2))
            for array, new in zip(total[1:3], jnp.split(returned, 2, axis=-1), strict=True)
        )
        total = _with_rows(total._replace(key=by_key, value=by_value), part, query, by_slopes, by_future_slopes)
    return total


def _backward_by_loop(ring: Ring, slopes_too: bool, total: Operands, given: Given, hops: jax.Array) -> Operands:
    local = given.local
    for sign in signs(ring):
        count = hops[0 if sign > 0 else 1]

        def step(hop: jax.Array, state: Any, sign: int = sign) -> Any:
            arrived, part = next_of_loop(ring, local, state[0], sign * (hop + 1), given.lower, sign)
            query, *tensors, by_slopes, by_future = gradients(ring, part, given.sums, given.cotangent, slopes_too)
            returning = ring.by_slot(jnp.concatenate(tensors, axis=-1))
            arrived = arrived._replace(gradients=arrived.gradients + returning)
            return arrived, _with_rows(state[1], part, query, by_slopes, by_future)

        def home(_: jax.Array, returning: jax.Array, sign: int = sign) -> jax.Array:
            with jax.named_scope("alibi_ring_back"):
                return exchange(ring.shards, ring.axis_name, returning, sign, back=True, cyclic=True)

        start = travelling(ring, local)
        start = start._replace(gradients=jnp.zeros(start.tensors.shape, total.key.dtype))
        arrived, total = lax.fori_loop(0, count, step, varying_alike((start, total, local))[:2])
        returning = lax.fori_loop(0, count, home, arrived.gradients)
        returning = returning.reshape(-1, *returning.shape[2:])
        by_key, by_value = jnp.split(returning, 2, axis=-1)
        total = total._replace(key=total.key + by_key, value=total.value + by_value)
    return total


def _with_rows(total: Operands, part: Part, *found: jax.Array | None) -> Operands:
    """Add the gradients of queries, slopes and future slopes that a part makes."""
    for (name, axis), new in zip((("query", 2), ("slopes", 1), ("future_slopes", 1)), found, strict=True):
        if new is not None:
            total = total._replace(**{name: _added(getattr(total, name), new, part.heads, axis)})
    return total


def _added(array: jax.Array, new: jax.Array, index: tuple[int, ...], axis: int) -> jax.Array:
    return put(array, take(array, index, axis) + new, index, axis)
