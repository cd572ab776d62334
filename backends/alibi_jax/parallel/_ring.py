"""One device's shard of a sequence, and attention of its queries to the keys of one shard at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from alibi_core.backend.sharding import HALO_SHARE, Shards
from alibi_jax._call import Operands, Rules
from alibi_jax._dispatch import Implementation, backward, forward

OWN_SHARE = 0.5  # of the tolerance of kernels: for the shard's own keys, the rest for keys of other shards


@dataclass(frozen=True)
class Ring:
    """What is known of sequence-parallel attention when it is traced. Hashable."""

    rules: Rules  # of the whole sequence, with the whole tolerance
    shards: Shards
    axis_name: str  # the mesh axis that tokens are divided along
    all_axes: tuple[str, ...]  # the mesh axes along which all devices make as many hops
    implementation: Implementation | None

    @property
    def halo_tolerance(self) -> float:
        """The share of softmax weight on one side of a query that may be left out by not sending it."""
        return HALO_SHARE * self.rules.tolerance * (1.0 if self.rules.is_causal else 0.5)

    def part_rules(self, share: float, **changes: Any) -> Rules:
        """Return the rules of a part that may leave out this share of the tolerance of kernels."""
        return replace(self.rules, tolerance=(1 - HALO_SHARE) * self.rules.tolerance * share, is_part=True, **changes)

    def is_token(self, distance: int | jax.Array = 0) -> jax.Array:
        """Return which tokens exist of the shard that is ``distance`` shards before this one: ``[shard_len]``."""
        start = (lax.axis_index(self.axis_name) - distance) * self.shards.shard_len
        positions = start + jnp.arange(self.shards.shard_len, dtype=jnp.int32)
        return (positions >= 0) & (positions < self.shards.length)

    def passed_on(self, tree: Any, step: int) -> Any:
        """Return the arrays of the shard that is ``step`` before this one; the last shard is before the first."""
        count = self.shards.num_shards
        pairs = [(shard, (shard + step) % count) for shard in range(count)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis_name, pairs), tree)


class Sums(NamedTuple):
    """Attention to the keys so far."""

    result: jax.Array  # [batch, shard_len, num_heads, head_dim], working dtype
    log_sum_exps: jax.Array  # [batch, num_heads, shard_len]


class Visitors(NamedTuple):
    """Keys and values that go round the ring."""

    key: jax.Array  # [batch, shard_len, num_kv_heads, head_dim]
    value: jax.Array
    ids: jax.Array | None  # [batch, shard_len]: their segments


class Part(NamedTuple):
    """The keys of one shard, and the queries that may see them."""

    rules: Rules
    operands: Operands
    rows: jax.Array  # [shard_len]: the queries that may see these keys


def local_operands(ring: Ring, operands: Operands) -> Operands:
    """Return the operands of a shard with zeros in place of padding."""
    query, key, value, mask = *operands[:3], None
    if ring.shards.has_padding:
        tokens = ring.is_token()
        query, key, value = (jnp.where(tokens[:, None, None], x, 0).astype(x.dtype) for x in (query, key, value))
        # Causal queries that are tokens do not see padding, which follows them.
        mask = None if ring.rules.is_causal else tokens[None, None, None]
    ids = operands.q_segment_ids
    ids = None if ids is None else jnp.broadcast_to(ids, query.shape[:2])
    return operands._replace(query=query, key=key, value=value, q_segment_ids=ids, mask=mask)


def own_part(ring: Ring, local: Operands) -> Part:
    """Return the part of the shard's own keys."""
    return Part(ring.part_rules(OWN_SHARE, q_offset=0), local, ring.is_token())


def visiting_part(ring: Ring, local: Operands, visitors: Visitors, hops: jax.Array, sign: int, lower: Any) -> Part:
    """Return the part of the keys of the shard that is ``hops`` before this one (``sign`` 1) or after it (-1).

    ``lower``, ``[batch, num_heads, shard_len]``, are lower bounds of log-sum-exps.
    """
    distance, is_past = sign * hops, sign > 0
    source = ring.is_token(distance)
    rows = ring.is_token() & source[0]
    operands = Operands(
        local.query,
        visitors.key,
        visitors.value,
        local.slopes,
        None if is_past else local.future_slopes,
        q_offset=(distance * ring.shards.shard_len).astype(jnp.int32).reshape(1),
        q_segment_ids=local.q_segment_ids,
        kv_segment_ids=visitors.ids,
        mask=None if local.mask is None or is_past else source[None, None, None],
        # An infinite lower bound makes every key negligible for queries that may not see these keys.
        lower=jnp.where(rows, lower, jnp.inf),
    )
    rules = ring.part_rules((1 - OWN_SHARE) / ring.shards.num_shards, is_causal=is_past, q_offset=None)
    return Part(rules, operands, rows)


def attended(ring: Ring, part: Part) -> Sums:
    """Return attention to a part alone."""
    result, logs = forward(part.rules, part.operands, ring.implementation, with_log_sum_exps=True)
    return Sums(result, jnp.where(part.rows, logs, -jnp.inf))


def add(ring: Ring, sums: Sums, part: Part) -> Sums:
    """Return attention to the keys so far and to those of another part."""
    both = sums, attended(ring, part)
    highest = jnp.maximum(*(x.log_sum_exps for x in both))
    highest = jnp.where(jnp.isneginf(highest), 0, highest)
    weights = [jnp.exp(x.log_sum_exps - highest) for x in both]  # [batch, num_heads, shard_len]
    total = weights[0] + weights[1]
    shares = [jnp.swapaxes(x / jnp.where(total == 0, 1, total), 1, 2)[..., None] for x in weights]
    return Sums(both[0].result * shares[0] + both[1].result * shares[1], highest + jnp.log(total))


def gradients(ring: Ring, part: Part, sums: Sums, cotangent: jax.Array, slopes_too: bool) -> tuple[Any, ...]:
    """Return what a part adds to the gradients of its own operands, of the attention ``sums`` to all parts."""
    logs = jnp.where(part.rows & ~jnp.isneginf(sums.log_sum_exps), sums.log_sum_exps, jnp.inf)
    arguments = sums.result, logs, cotangent, ring.implementation
    return backward(part.rules, part.operands, *arguments, slopes_too=slopes_too)
