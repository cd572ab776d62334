"""The passes of sequence-parallel attention: shards of keys go round until no device needs more of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from alibi_jax._call import Operands
from alibi_jax._compatible import varying_alike
from alibi_jax._dispatch import summed_as
from alibi_jax.parallel._reach import Measured, hops_needed
from alibi_jax.parallel._ring import (
    Ring,
    Sums,
    Visitors,
    add,
    attended,
    gradients,
    local_operands,
    own_part,
    visiting_part,
)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring_attention(ring: Ring, operands: Operands) -> jax.Array:
    """Return this device's ``[batch, shard_len, num_heads, head_dim]``, of the dtype of the query.

    The operands are those of this device, along all axes that any of them varies over.
    """
    return _result(ring, operands, _attended_to_all(ring, local_operands(ring, operands))[0])


def _result(ring: Ring, operands: Operands, sums: Sums) -> jax.Array:
    result = sums.result
    if ring.shards.has_padding:
        result = jnp.where(ring.is_token()[:, None, None], result, 0)
    return result.astype(operands.query.dtype)


def _forward(ring: Ring, operands: Any) -> tuple[jax.Array, Any]:
    # The structure of the residuals says whether slopes are to have gradients.
    slopes_too = any(x is not None and x.perturbed for x in (operands.slopes, operands.future_slopes)) or None
    operands = jax.tree.map(lambda x: x.value, operands, is_leaf=lambda x: hasattr(x, "perturbed"))
    sums, hops = _attended_to_all(ring, local_operands(ring, operands))
    # The residual is the result before it is rounded: see alibi_jax._dispatch.derivatives.
    return _result(ring, operands, sums), (operands, sums, hops, slopes_too)


def _backward(ring: Ring, kept: Any, cotangent: Any) -> tuple[Operands]:
    operands, sums, hops, slopes_too = kept
    nothing = jax.tree.map(lambda x: None, operands)
    if isinstance(cotangent, SymbolicZero):
        return (nothing,)
    local = local_operands(ring, operands)
    cotangent = cotangent.astype(operands.query.dtype)
    found = _gradients(ring, local, sums, cotangent, hops, slopes_too is not None)
    query, key, value = (x.astype(operands.query.dtype) for x in found[:3])
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


def _attended_to_all(ring: Ring, local: Operands) -> tuple[Sums, jax.Array]:
    """Return attention to all keys, and how many hops it took for keys before, and after: int32 ``[2]``."""
    sums, hops = attended(ring, own_part(ring, local)), jnp.zeros(2, jnp.int32)
    if ring.shards.num_shards == 1:
        return sums, hops
    measured = Measured.of(ring, local)
    lower = measured.lower(sums.log_sum_exps)
    hops = hops_needed(ring, local, sums.log_sum_exps, measured)
    for sign, count in _directions(ring, hops):

        def step(hop: jax.Array, state: Any, sign: int = sign) -> Any:
            visitors, sums = state
            visitors = ring.passed_on(visitors, sign)
            return visitors, add(ring, sums, visiting_part(ring, local, visitors, hop + 1, sign, lower))

        # What goes round varies over all mesh axes that anything varies over.
        state = varying_alike((_visitors(local), sums, local))[:2]
        with jax.named_scope("alibi_ring"):
            sums = lax.fori_loop(0, count, step, state)[1]
    return sums, hops


def _gradients(
    ring: Ring, local: Operands, sums: Sums, cotangent: jax.Array, hops: jax.Array, slopes_too: bool
) -> Operands:
    """Return the gradients of operands, in the working dtype; slopes for each entry, None unless asked for."""
    total = Operands(*gradients(ring, own_part(ring, local), sums, cotangent, slopes_too))
    if ring.shards.num_shards == 1:
        return total
    lower = Measured.of(ring, local).lower(sums.log_sum_exps)
    for sign, count in _directions(ring, hops):

        def step(hop: jax.Array, state: Any, sign: int = sign) -> Any:
            # The gradients of keys travel with them.
            visitors, by_visitors, total = state
            visitors, by_visitors = ring.passed_on((visitors, by_visitors), sign)
            part = visiting_part(ring, local, visitors, hop + 1, sign, lower)
            by_query, by_key, by_value, *by_slopes = gradients(ring, part, sums, cotangent, slopes_too)
            by_visitors = by_visitors[0] + by_key, by_visitors[1] + by_value
            added = {"query": by_query, "slopes": by_slopes[0], "future_slopes": by_slopes[1]}
            changes = {name: getattr(total, name) + x for name, x in added.items() if x is not None}
            return visitors, by_visitors, total._replace(**changes)

        def home(_: jax.Array, by_visitors: Any, sign: int = sign) -> Any:
            return ring.passed_on(by_visitors, -sign)

        zeros = tuple(jnp.zeros_like(x) for x in (total.key, total.value))
        state = varying_alike((_visitors(local), zeros, total, local, sums, cotangent))[:3]
        with jax.named_scope("alibi_ring"):
            _, by_visitors, total = lax.fori_loop(0, count, step, state)
        with jax.named_scope("alibi_ring_back"):
            by_key, by_value = lax.fori_loop(0, count, home, by_visitors)
        total = total._replace(key=total.key + by_key, value=total.value + by_value)
    return total


def _directions(ring: Ring, hops: jax.Array) -> list[tuple[int, jax.Array]]:
    """Return the directions that keys come from, 1 for before and -1 for after, and how many hops each takes."""
    return [(1, hops[0])] if ring.rules.is_causal else [(1, hops[0]), (-1, hops[1])]


def _visitors(local: Operands) -> Visitors:
    """Return what goes round, where it starts."""
    return Visitors(local.key, local.value, local.q_segment_ids)
