"""The backward pass of sequence-parallel attention: keys come again, and what they get goes back where they live."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from alibi_jax._call import Operands
from alibi_jax._compatible import varying_alike
from alibi_jax.parallel._exchange import Halo, exchange, take
from alibi_jax.parallel._forward import Taken, made, part_of_hop, part_of_loop, sent_on, signs, travelling_of
from alibi_jax.parallel._reach import Measured, lower_bounds
from alibi_jax.parallel._ring import Part, Ring, Sums, gradients, own_part, put


def backward(ring: Ring, local: Operands, sums: Sums, taken: Taken, cotangent: jax.Array, slopes_too: bool) -> Operands:
    """Return the gradients of operands, in the working dtype; slopes for each entry, None unless asked for.

    Args:
        ring: The setup.
        local: As for :func:`forward`.
        sums: From it, the result in any dtype.
        taken: From it.
        cotangent: As the result.
        slopes_too: Whether gradients of slopes are asked for.
    """
    total = Operands(*gradients(ring, own_part(ring, local), *sums, cotangent, slopes_too))
    if ring.shards.num_chunks == 1:
        return total
    given = Given(local, sums, cotangent, lower_bounds(sums.log_sum_exps, Measured.of(ring, local)))

    def planned(total: Operands, given: Given) -> Operands:
        return _backward_by_plan(ring, total, given, slopes_too)

    def looped(total: Operands, given: Given) -> Operands:
        with jax.named_scope("alibi_loop" if ring.plan is None else "alibi_fallback"):
            return _backward_by_loop(ring, total, given, slopes_too, taken.hops)

    if ring.plan is None:
        return looped(total, given)
    if ring.plan.is_complete:
        return planned(total, given)
    return lax.cond(taken.follows_plan, planned, looped, *varying_alike((total, given)))


class Given(NamedTuple):
    """What gradients are made of."""

    local: Operands
    sums: Sums  # of all keys
    cotangent: jax.Array
    lower: jax.Array  # bounds of log-sum-exps


def _backward_by_plan(ring: Ring, total: Operands, given: Given, slopes_too: bool) -> Operands:
    for hop in ring.plan.hops:
        part = part_of_hop(ring, given.local, hop, made(ring, given.local, hop), given.lower)
        query, key, value, *slopes = gradients(ring, part, *given.sums, given.cotangent, slopes_too)
        halo = Halo(hop.tokens, hop.distance > 0)
        with jax.named_scope("alibi_halo_back"):
            packed = halo.pack(ring.by_slot(jnp.concatenate([key, value], axis=-1)))
            returned = exchange(ring.shards, ring.axis_name, packed, hop.distance, back=True)
            returned = halo.unpack(returned, "constant")
        returned = returned.reshape(-1, *returned.shape[2:])
        by_key, by_value = (
            _add_ends(array, new, halo) for array, new in zip(total[1:3], jnp.split(returned, 2, axis=-1), strict=True)
        )
        total = _add_rows(total._replace(key=by_key, value=by_value), part, query, slopes)
    return total


def _add_ends(array: jax.Array, new: jax.Array, halo: Halo) -> jax.Array:
    """Add what has come back to the tokens that were sent."""
    tokens = slice(-halo.length, None) if halo.is_past else slice(0, halo.length)
    ends = array[:, tokens]
    return array.at[:, tokens].set(put(ends, take(ends, halo.heads, 2) + new, halo.heads, 2))


def _add_rows(total: Operands, part: Part, query: jax.Array, slopes: list[jax.Array | None]) -> Operands:
    """Add the gradients of queries and slopes that a part makes."""
    total = total._replace(query=put(total.query, take(total.query, part.heads, 2) + query, part.heads, 2))
    if total.slopes is None:
        return total
    behind, ahead = slopes
    if part.rules.is_causal or total.future_slopes is None:
        names = {"slopes": behind}
    else:
        names = {"slopes": behind, "future_slopes": ahead}
    for name, new in names.items():
        before = getattr(total, name)
        total = total._replace(**{name: put(before, take(before, part.heads, 1) + new, part.heads, 1)})
    return total


def _backward_by_loop(ring: Ring, total: Operands, given: Given, slopes_too: bool, hops: jax.Array) -> Operands:
    local = given.local
    for sign in signs(ring):
        count = hops[0 if sign > 0 else 1]

        def step(hop: jax.Array, state: Any, sign: int = sign) -> Any:
            travelling, total = state
            travelling = sent_on(ring, travelling, sign)
            part = part_of_loop(ring, local, travelling, sign * (hop + 1), given.lower, sign)
            query, key, value, *slopes = gradients(ring, part, *given.sums, given.cotangent, slopes_too)
            returning = ring.by_slot(jnp.concatenate([key, value], axis=-1))
            travelling = travelling._replace(gradients=travelling.gradients + returning)
            return travelling, _add_rows(total, part, query, slopes)

        def home(_: jax.Array, returning: jax.Array, sign: int = sign) -> jax.Array:
            with jax.named_scope("alibi_ring_back"):
                return exchange(ring.shards, ring.axis_name, returning, sign, back=True, cyclic=True)

        travelling = travelling_of(ring, local)
        nothing = jnp.zeros(travelling.tensors.shape, total.key.dtype)
        state = varying_alike((travelling._replace(gradients=nothing), total, local))[:2]
        travelling, total = lax.fori_loop(0, count, step, state)
        returning = lax.fori_loop(0, count, home, travelling.gradients)
        returning = returning.reshape(-1, *returning.shape[2:])
        by_key, by_value = jnp.split(returning, 2, axis=-1)
        total = total._replace(key=total.key + by_key, value=total.value + by_value)
    return total
