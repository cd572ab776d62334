"""One device's share of a sequence: its chunks, and what their queries make of the keys that arrive."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from alibi_core import ShardPlan, Shards
from alibi_core.backend import HALO_SHARE
from alibi_jax._call import Operands, Rules
from alibi_jax._dispatch import Implementation, backward, forward
from alibi_jax.parallel._exchange import take

OWN_SHARE = 0.5  # of what tiles may leave out: for a chunk's own keys, the rest for those that arrive


@dataclass(frozen=True)
class Ring:
    """What of sequence-parallel attention is known when it is traced. Hashable."""

    rules: Rules  # of the whole sequence, with the whole tolerance
    shards: Shards
    plan: ShardPlan | None  # None: the devices decide
    axis_name: str  # of the mesh axis that tokens are divided along
    all_axes: tuple[str, ...]  # of the mesh, over which decisions have to be the same
    implementation: Implementation | None

    @property
    def halo_tolerance(self) -> float:
        """The share of softmax weight on one side of a query that may be left out by not sending it."""
        return HALO_SHARE * self.rules.tolerance * (1.0 if self.rules.is_causal else 0.5)

    def part_rules(self, share: float, **changes: Any) -> Rules:
        """Return the rules of a part that may leave out this share of the tolerance that is not for halos.

        That is twice the share for keys that are not sent: so much may those weigh that stand in for them, too.
        """
        tolerance = (1 - 2 * HALO_SHARE) * self.rules.tolerance * share
        return replace(self.rules, tolerance=tolerance, is_part=True, **changes)

    def chunks(self) -> jax.Array:
        """Return which chunks this device has: int32 ``[slots]``."""
        table = np.asarray([self.shards.chunks(shard) for shard in range(self.shards.num_shards)], np.int32)
        return jnp.asarray(table)[lax.axis_index(self.axis_name)]

    def split(self, array: jax.Array) -> jax.Array:
        """Return ``[batch, shard_len, ...]`` as ``[slots * batch, chunk_len, ...]``."""
        array = array.reshape(array.shape[0], self.shards.slots, self.shards.chunk_len, *array.shape[2:])
        return jnp.swapaxes(array, 0, 1).reshape(-1, self.shards.chunk_len, *array.shape[3:])

    def join(self, array: jax.Array) -> jax.Array:
        """Undo :meth:`split`."""
        array = self.by_slot(array)
        return jnp.swapaxes(array, 0, 1).reshape(array.shape[1], self.shards.shard_len, *array.shape[3:])

    def by_slot(self, array: jax.Array) -> jax.Array:
        """Return ``[slots * batch, ...]`` as ``[slots, batch, ...]``."""
        return array.reshape(self.shards.slots, -1, *array.shape[1:])

    def is_token(self, chunks: jax.Array) -> jax.Array:
        """Return which tokens of chunks ``[slots]`` exist, and are no padding: ``[slots, chunk_len]``."""
        within = chunks[:, None] * self.shards.chunk_len + jnp.arange(self.shards.chunk_len, dtype=jnp.int32)
        return (within >= 0) & (within < self.shards.length)


class Sums(NamedTuple):
    """Attention to the keys so far."""

    result: jax.Array  # [slots * batch, chunk_len, num_heads, head_dim], working dtype
    log_sum_exps: jax.Array  # [slots * batch, num_heads, chunk_len]


class Arrived(NamedTuple):
    """What comes from other chunks."""

    tensors: jax.Array  # [slots, batch, tokens, heads, 2 * head_dim]: keys and values
    ids: jax.Array | None  # [slots, batch, tokens]: their segments; None if there are none
    gradients: jax.Array | None = None  # as tensors, working dtype: what they have got so far, if it goes with them


class Part(NamedTuple):
    """Keys that have arrived, and the queries they are for."""

    rules: Rules
    operands: Operands
    rows: jax.Array  # [slots * batch, 1, chunk_len]: the queries that they are for
    heads: tuple[int, ...]  # the query heads


def local_operands(ring: Ring, operands: Operands) -> Operands:
    """Return the operands of a shard by chunk, ``[slots * batch, chunk_len, ...]``, padding as zeros."""
    query, key, value = (ring.split(x) for x in operands[:3])
    mask = None
    if ring.shards.length < ring.shards.padded_length:
        tokens = _per_entry(ring, ring.is_token(ring.chunks()), query.shape[0])
        query, key, value = (jnp.where(tokens[:, :, None, None], x, 0).astype(x.dtype) for x in (query, key, value))
        mask = None if ring.rules.is_causal else tokens[:, None, None, :]  # keys after all queries hide by themselves
    ids = operands.q_segment_ids
    ids = None if ids is None else ring.split(jnp.broadcast_to(ids, operands.query.shape[:2]))
    return operands._replace(query=query, key=key, value=value, q_segment_ids=ids, mask=mask)


def _per_entry(ring: Ring, by_slot: jax.Array, entries: int) -> jax.Array:
    """Return ``[slots, ...]`` for each entry of ``[slots * batch, ...]``."""
    return jnp.repeat(by_slot, entries // ring.shards.slots, axis=0)


def own_part(ring: Ring, local: Operands) -> Part:
    """Return the part that is there from the start: each chunk's own keys."""
    rows = _per_entry(ring, ring.is_token(ring.chunks()), local.query.shape[0])[:, None]
    return Part(ring.part_rules(OWN_SHARE, q_offset=0), local, rows, tuple(range(local.query.shape[2])))


def arrived_part(
    ring: Ring,
    local: Operands,
    parts: int,
    arrived: Arrived,
    distance: int | jax.Array,
    heads: tuple[int, ...],
    lower: jax.Array,
    *,
    is_past: bool,
) -> Part:
    """Return the part of keys that have arrived: the last tokens of chunks before, or the first of chunks after.

    Args:
        ring: The setup.
        local: From :func:`local_operands`.
        parts: How many of this kind there may be.
        arrived: Keys and values.
        distance: How many chunks before; negative for after. May be traced.
        heads: Their key/value heads.
        lower: ``[slots * batch, num_heads, chunk_len]``: bounds of log-sum-exps.
        is_past: Whether the distance is positive.
    """
    ids, group = arrived.ids, local.query.shape[2] // local.key.shape[2]
    size, tokens = ring.shards.chunk_len, arrived.tensors.shape[2]
    key, value = jnp.split(arrived.tensors.reshape(-1, *arrived.tensors.shape[2:]), 2, axis=-1)
    q_heads = tuple(head * group + member for head in heads for member in range(group))
    chunks = ring.chunks()
    source = ring.is_token(chunks - distance)  # [slots, chunk_len]
    entries = local.query.shape[0]
    rows = _per_entry(ring, ring.is_token(chunks) & source[:, :1], entries)[:, None]
    lower = take(lower, q_heads, 1)
    offset = distance * size + (tokens - size if is_past else 0)
    is_static = isinstance(offset, int)
    mask = None
    if local.mask is not None and not is_past:
        mask = _per_entry(ring, source[:, :tokens], entries)[:, None, None, :]
    operands = Operands(
        take(local.query, q_heads, 2),
        key,
        value,
        take(local.slopes, q_heads, 1),
        None if is_past or local.future_slopes is None else take(local.future_slopes, q_heads, 1),
        q_offset=None if is_static else offset.astype(jnp.int32).reshape(1),
        q_segment_ids=local.q_segment_ids,
        kv_segment_ids=None if ids is None else ids.reshape(-1, tokens),
        mask=mask,
        # Nothing is more than infinity: these queries need no key.
        lower=jnp.where(rows, lower, jnp.inf),
    )
    rules = ring.part_rules((1 - OWN_SHARE) / parts, is_causal=is_past, q_offset=offset if is_static else None)
    return Part(rules, operands, rows, q_heads)


def attended(ring: Ring, part: Part) -> Sums:
    """Return attention to a part alone."""
    result, logs = forward(part.rules, part.operands, ring.implementation, with_log_sum_exps=True)
    return Sums(result, jnp.where(part.rows, logs, -jnp.inf))


def add(ring: Ring, sums: Sums, part: Part) -> Sums:
    """Return attention to the keys so far and to those of another part."""
    both = Sums(take(sums.result, part.heads, 2), take(sums.log_sum_exps, part.heads, 1)), attended(ring, part)
    highest = jnp.maximum(*(x.log_sum_exps for x in both))
    highest = jnp.where(jnp.isneginf(highest), 0, highest)
    weights = [jnp.exp(x.log_sum_exps - highest) for x in both]
    total = weights[0] + weights[1]
    shares = [jnp.swapaxes(x / jnp.where(total == 0, 1, total), 1, 2)[..., None] for x in weights]
    merged = both[0].result * shares[0] + both[1].result * shares[1]
    logs = highest + jnp.log(total)
    return Sums(put(sums.result, merged, part.heads, 2), put(sums.log_sum_exps, logs, part.heads, 1))


def gradients(ring: Ring, part: Part, sums: Sums, cotangent: jax.Array, slopes_too: bool) -> tuple[Any, ...]:
    """Return what a part adds to the gradients of its own operands, of the attention ``sums`` to all parts."""
    logs = take(sums.log_sum_exps, part.heads, 1)
    logs = jnp.where(part.rows & ~jnp.isneginf(logs), logs, jnp.inf)
    rows = (take(x, part.heads, 2) for x in (sums.result, cotangent))
    arguments = next(rows), logs, next(rows), ring.implementation
    return backward(part.rules, part.operands, *arguments, slopes_too=slopes_too)


def put(array: jax.Array, part: jax.Array, index: tuple[int, ...], axis: int) -> jax.Array:
    """Return an array with other elements at some places along an axis."""
    if len(index) == array.shape[axis]:
        return part
    places = (slice(None),) * axis + (np.asarray(index),)
    return array.at[places].set(part, indices_are_sorted=True, unique_indices=True)
