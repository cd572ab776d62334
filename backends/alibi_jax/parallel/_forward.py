"""The forward pass of sequence-parallel attention: hops that a plan lists, or a loop for as long as data ask for it."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from alibi_core import Hop
from alibi_jax._call import Operands
from alibi_jax._compatible import varying_alike
from alibi_jax.parallel._exchange import Halo, exchange
from alibi_jax.parallel._reach import Measured, largest_anywhere, needed_tokens
from alibi_jax.parallel._ring import Arrived, Part, Ring, Sums, add, arrived_part, attended, own_part


class Taken(NamedTuple):
    """Which way the forward pass went, for the backward pass to follow."""

    follows_plan: jax.Array  # boolean scalar
    hops: jax.Array  # int32 [2]: how many hops a loop makes for keys before and after


def forward(ring: Ring, local: Operands) -> tuple[Sums, Taken]:
    """Return attention to all keys, and which way it went: along the plan, unless data prove to need more."""
    sums, plan = attended(ring, own_part(ring, local)), ring.plan
    taken = Taken(jnp.asarray(plan is not None), jnp.zeros(2, jnp.int32))
    if ring.shards.num_chunks == 1:
        return sums, taken
    # What neighbours send is on its way while own keys are attended to.
    hops = () if plan is None else plan.hops
    sent = {hop.distance: made(ring, local, hop) for hop in hops if abs(hop.distance) == 1}
    measured = Measured.of(ring, local)
    lower = measured.lower(sums.log_sum_exps)
    if plan is not None and plan.is_complete:
        return _by_plan(ring, local, sums, lower, sent), taken
    needed = needed_tokens(ring, local, sums.log_sum_exps, measured)
    taken = taken._replace(hops=largest_anywhere(ring, -(-needed.max(axis=1) // ring.shards.chunk_len)))
    if plan is None:
        return _by_loop(ring, local, sums, lower, taken.hops), taken
    covered = jnp.asarray([plan.covered(1), plan.covered(-1)], jnp.int32)
    follows = largest_anywhere(ring, jnp.max(needed - covered)) <= 0

    def looped(local: Operands, sums: Sums, lower: jax.Array, sent: Any) -> Sums:
        with jax.named_scope("alibi_fallback"):
            return _by_loop(ring, local, sums, lower, taken.hops)

    sums = lax.cond(follows, partial(_by_plan, ring), looped, *varying_alike((local, sums, lower, sent)))
    return sums, taken._replace(follows_plan=follows)


def made(ring: Ring, local: Operands, hop: Hop) -> Arrived:
    """Make a hop: send, and receive."""
    halo = Halo(hop.tokens, hop.distance > 0)
    with jax.named_scope("alibi_halo"):
        tensors = [ring.by_slot(halo.cut(x)) for x in (local.key, local.value)]
        packed = halo.pack(jnp.concatenate(tensors, axis=-1))
        arrived = halo.unpack(exchange(ring.shards, ring.axis_name, packed, hop.distance))
        ids = local.q_segment_ids
        if ids is not None:
            ids = exchange(ring.shards, ring.axis_name, ring.by_slot(ids[:, halo.tokens_sent]), hop.distance)
    return Arrived(arrived, ids)


def _by_plan(ring: Ring, local: Operands, sums: Sums, lower: jax.Array, sent: dict[int, Arrived]) -> Sums:
    for hop in ring.plan.hops:
        arrived = sent[hop.distance] if hop.distance in sent else made(ring, local, hop)
        sums = add(ring, sums, part_of_hop(ring, local, hop, arrived, lower))
    return sums


def part_of_hop(ring: Ring, local: Operands, hop: Hop, arrived: Arrived, lower: jax.Array) -> Part:
    heads, is_past = Halo(hop.tokens, hop.distance > 0).heads, hop.distance > 0
    return arrived_part(ring, local, len(ring.plan.hops), arrived, hop.distance, heads, lower, is_past=is_past)


# --- In a loop, whole chunks of all heads go round ------------------------------------------------------------------


def _by_loop(ring: Ring, local: Operands, sums: Sums, lower: jax.Array, hops: jax.Array) -> Sums:
    for sign in signs(ring):

        def step(hop: jax.Array, state: Any, sign: int = sign) -> Any:
            arrived, part = next_of_loop(ring, local, state[0], sign * (hop + 1), lower, sign)
            return arrived, add(ring, state[1], part)

        # All that goes round varies over all that anything varies over.
        state = varying_alike((travelling(ring, local), sums, local))[:2]
        sums = lax.fori_loop(0, hops[0 if sign > 0 else 1], step, state)[1]
    return sums


def signs(ring: Ring) -> tuple[int, ...]:
    return (1,) if ring.rules.is_causal else (1, -1)


def travelling(ring: Ring, local: Operands) -> Arrived:
    """Return what goes round, where it starts."""
    tensors = ring.by_slot(jnp.concatenate([local.key, local.value], axis=-1))
    return Arrived(tensors, None if local.q_segment_ids is None else ring.by_slot(local.q_segment_ids))


def next_of_loop(
    ring: Ring, local: Operands, arrived: Arrived, distance: jax.Array, lower: jax.Array, sign: int
) -> tuple[Arrived, Part]:
    """Send all on by one chunk, round and round, so that nothing that is to return falls off, and return the part."""
    with jax.named_scope("alibi_ring"):
        arrived = jax.tree.map(lambda x: exchange(ring.shards, ring.axis_name, x, sign, cyclic=True), arrived)
    heads = tuple(range(local.key.shape[2]))
    count = ring.shards.num_chunks
    return arrived, arrived_part(ring, local, count, arrived, distance, heads, lower, is_past=sign > 0)
