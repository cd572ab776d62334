"""Sequence-parallel attention of one device: shards of keys go around a ring until no device needs more of them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from alibi_core.backend.horizon import norm_bounds, score_rounding
from alibi_core.backend.sharding import HALO_SHARE, Shards, tokens_beyond
from alibi_jax._call import Operands, OtherKeys
from alibi_jax._compatible import materialised, varying_alike, varying_over
from alibi_jax._dispatch import Implementation, backward, differentiable, forward

OWN_SHARE = 0.5  # The share of the kernels' tolerance for the shard's own keys; the rest is for keys of other shards.


@dataclass(frozen=True)
class Ring:
    """The static parameters of sequence-parallel attention. Hashable."""

    shards: Shards
    axis_name: str  # the mesh axis along which tokens are sharded
    all_axes: tuple[str, ...]  # all manual mesh axes: devices along them make the same number of hops
    implementation: Implementation | None

    def is_token(self, distance: int | jax.Array = 0) -> jax.Array:
        """Return ``[shard_len]`` booleans: the tokens that exist in the shard ``distance`` shards before this one."""
        start = (lax.axis_index(self.axis_name) - distance) * self.shards.shard_len
        positions = start + jnp.arange(self.shards.shard_len, dtype=jnp.int32)
        return (positions >= 0) & (positions < self.shards.length)

    def passed_on(self, tree: Any, step: int) -> Any:
        """Return the arrays of the shard ``step`` shards before this one, cyclically."""
        count = self.shards.num_shards
        pairs = [(shard, (shard + step) % count) for shard in range(count)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis_name, pairs), tree)


class Sums(NamedTuple):
    """Attention to the keys seen so far."""

    result: jax.Array  # [batch, num_heads, shard_len, head_dim], working dtype
    log_sum_exps: jax.Array  # [batch, num_heads, shard_len]; -inf for a query that sees no key


class Visitors(NamedTuple):
    """Keys and values that go round the ring."""

    key: jax.Array  # [batch, num_kv_heads, shard_len, head_dim]
    value: jax.Array  # [batch, num_kv_heads, shard_len, head_dim]
    ids: jax.Array | None  # [batch or 1, shard_len]: segment ids of the keys


class Part(NamedTuple):
    """The keys of one shard, and the local queries that may see them."""

    operands: Operands
    rows: jax.Array  # [shard_len]: True for queries that may see these keys

    @classmethod
    def own(cls, ring: Ring, local: Operands) -> Part:
        """Return the part with the shard's own keys."""
        # HALO_SHARE of the tolerance is for keys that are not sent; the kernels share the rest.
        tolerance = (1 - HALO_SHARE) * OWN_SHARE * local.call.tolerance
        call = replace(local.call, q_offset=0, tolerance=tolerance)
        return cls(local._replace(call=call, other_keys=OtherKeys()), ring.is_token())

    @classmethod
    def visiting(cls, ring: Ring, local: Operands, visitors: Visitors, hops: Any, sign: int, lower: jax.Array) -> Part:
        """Return the part with the keys of the shard ``hops`` shards before this one (``sign`` 1) or after it (-1).

        ``lower``, ``[batch, num_heads, shard_len]``, are lower bounds of the log-sum-exps.
        """
        distance, is_past, call = sign * hops, sign > 0, local.call
        source = ring.is_token(distance)
        rows = ring.is_token() & source[0]
        call = replace(
            call,
            is_causal=is_past,
            future_slopes=None if is_past else call.future_slopes,
            q_offset=(distance * ring.shards.shard_len).astype(jnp.int32).reshape(1),
            kv_segment_ids=visitors.ids,
            mask=None if call.mask is None or is_past else source[None, None, None],
            tolerance=(1 - HALO_SHARE) * (1 - OWN_SHARE) / ring.shards.num_shards * call.tolerance,
            shares_ids=False,
        )
        # An infinite lower bound makes every key negligible for queries that may not see these keys.
        others = OtherKeys(jnp.where(rows, lower, jnp.inf))
        return cls(Operands(local.query, visitors.key, visitors.value, call, other_keys=others), rows)

    def attended(self, ring: Ring) -> Sums:
        """Return attention to this part alone."""
        result, logs = forward(ring.implementation, self.operands, True)
        return Sums(result, jnp.where(self.rows & (logs != jnp.inf), logs, -jnp.inf))

    def added(self, ring: Ring, sums: Sums) -> Sums:
        """Merge ``sums`` with the attention to this part, weighted by their log-sum-exps."""
        both = sums, self.attended(ring)
        highest = jnp.maximum(*(x.log_sum_exps for x in both))
        # Neither part has a key for this query: avoid -inf - -inf.
        highest = jnp.where(jnp.isneginf(highest), 0, highest)
        weights = [jnp.exp(x.log_sum_exps - highest) for x in both]  # [batch, num_heads, shard_len]
        total = weights[0] + weights[1]
        shares = [(x / jnp.where(total == 0, 1, total))[..., None] for x in weights]
        return Sums(both[0].result * shares[0] + both[1].result * shares[1], highest + jnp.log(total))

    def gradients(self, ring: Ring, sums: Sums, cotangent: jax.Array, slopes_too: bool) -> list[jax.Array]:
        """Return this part's contribution to the gradients; ``sums`` is the attention to all parts."""
        logs = jnp.where(self.rows & ~jnp.isneginf(sums.log_sum_exps), sums.log_sum_exps, jnp.inf)
        return backward(ring.implementation, self.operands, sums.result, logs, cotangent, slopes_too)


# --- The passes -----------------------------------------------------------------------------------------------------


def _forward(ring: Ring, operands: Operands, *_: bool) -> tuple[jax.Array, Any]:
    """Return attention to all keys, its log-sum-exps, and the number of hops for keys before and after: int32 ``[2]``.

    The result is ``[batch, num_heads, shard_len, head_dim]``, in the working dtype; zeros for padding.
    """
    local = _without_padding(ring, operands)
    sums, hops = Part.own(ring, local).attended(ring), jnp.zeros(2, jnp.int32)
    if ring.shards.num_shards > 1:
        measured = Measured.of(ring, local)
        lower = measured.lower(sums.log_sum_exps)
        hops = _hops_needed(ring, local, lower, measured)
        for sign, count in _directions(local, hops):

            def step(hop: jax.Array, state: Any, sign: int = sign) -> Any:
                visitors, sums = state
                following = ring.passed_on(visitors, sign)  # the next hop's keys, under way meanwhile
                return following, Part.visiting(ring, local, visitors, hop + 1, sign, lower).added(ring, sums)

            # The loop state must vary over the same mesh axes as the values computed in the loop.
            state = varying_alike((_visitors(ring, local, sign), sums, local))[:2]
            with jax.named_scope("alibi_ring"):
                sums = lax.fori_loop(0, count, step, state)[1]
    result = jnp.where(ring.is_token()[:, None], sums.result, 0) if ring.shards.has_padding else sums.result
    return result, (sums.log_sum_exps, hops)


def _backward(
    ring: Ring, operands: Operands, result: jax.Array, residuals: Any, cotangent: jax.Array, slopes_too: bool
) -> list[jax.Array]:
    """Return the gradients of query, key and value, in the working dtype, and if requested of each entry's slopes."""
    local, (log_sum_exps, hops) = _without_padding(ring, operands), residuals
    sums = Sums(result, log_sum_exps)
    of_query, of_key, of_value, *of_slopes = Part.own(ring, local).gradients(ring, sums, cotangent, slopes_too)
    if ring.shards.num_shards == 1:
        return [of_query, of_key, of_value, *of_slopes]
    lower = Measured.of(ring, local).lower(sums.log_sum_exps)
    for sign, count in _directions(local, hops):

        def step(hop: jax.Array, state: Any, sign: int = sign) -> Any:
            # The gradients of keys travel one hop behind them: neither waits for this hop's gradients.
            visitors, of_visitors, of_own = state
            following, of_visitors = ring.passed_on((visitors, of_visitors), sign)
            part = Part.visiting(ring, local, visitors, hop + 1, sign, lower)
            by_query, by_key, by_value, *by_slopes = part.gradients(ring, sums, cotangent, slopes_too)
            # Keys before the queries give no gradient for future slopes.
            of_own = [x + y for x, y in itertools.zip_longest(of_own, [by_query, *by_slopes], fillvalue=0)]
            return following, [of_visitors[0] + by_key, of_visitors[1] + by_value], of_own

        def home(_: jax.Array, of_visitors: Any, sign: int = sign) -> Any:
            return ring.passed_on(of_visitors, -sign)

        zeros = [jnp.zeros_like(x) for x in (of_key, of_value)]
        state = varying_alike((_visitors(ring, local, sign), zeros, [of_query, *of_slopes], local, sums, cotangent))[:3]
        with jax.named_scope("alibi_ring"):
            _, of_visitors, (of_query, *of_slopes) = lax.fori_loop(0, count, step, state)
        with jax.named_scope("alibi_ring_back"):
            of_visitors = lax.fori_loop(0, count, home, of_visitors)
        of_key, of_value = of_key + of_visitors[0], of_value + of_visitors[1]
    return [of_query, of_key, of_value, *of_slopes]


def _without_padding(ring: Ring, operands: Operands) -> Operands:
    """Return the operands of this shard, with padding replaced by zeros and masked."""
    if not ring.shards.has_padding:
        return operands
    tokens, call = ring.is_token(), operands.call
    tensors = (jnp.where(tokens[:, None], x, 0).astype(x.dtype) for x in operands[:3])
    # Padding is at the end, so causal attention needs no mask for it.
    return Operands(*tensors, replace(call, mask=None if call.is_causal else tokens[None, None, None]))


def _directions(local: Operands, hops: jax.Array) -> list[tuple[int, jax.Array]]:
    """Return the directions from which keys come, 1 for before and -1 for after, each with its number of hops."""
    return [(1, hops[0])] if local.call.is_causal else [(1, hops[0]), (-1, hops[1])]


def _visitors(ring: Ring, local: Operands, sign: int) -> Visitors:
    """Return the first keys and values to visit this shard, those of the shard before (``sign`` 1) or after it (-1)."""
    return Visitors(*ring.passed_on((local.key, local.value, local.call.kv_segment_ids), sign))


# --- The number of hops ---------------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """Bounds for each query of the shard, from norms of all keys: ``[batch, num_heads, shard_len]``."""

    bound: jax.Array  # upper bound of the absolute score with any centred key
    shift: jax.Array  # the score with the centre, the mean of all keys
    margin: jax.Array  # upper bound of the rounding error of a log-sum-exp

    @classmethod
    def of(cls, ring: Ring, local: Operands) -> Measured:
        """Measure queries and keys. All devices along the sequence must take part."""
        call, dtype = local.call, local.call.working_dtype
        keys, query = local.key.astype(dtype), local.query.astype(dtype)
        # A vector subtracted from every key cancels in softmax; without their mean, keys have smaller norms. Padding is
        # zeros, which add nothing to the sum but may be far from the mean, so it is excluded from the norms.
        centre = lax.psum(jnp.sum(keys, axis=2), ring.axis_name) / ring.shards.length  # [batch, num_kv_heads, head_dim]
        tokens = ring.is_token()
        largest = [jnp.max(jnp.where(tokens, norm_bounds(x), 0), axis=2) for x in (keys - centre[:, :, None], keys)]
        sizes = centre, *lax.pmax(jnp.stack(largest), ring.axis_name)
        group = call.num_heads // call.num_kv_heads
        centre, centred, plain = (jnp.repeat(x, group, axis=1) for x in sizes)  # [batch, num_heads, ...]
        shift = jnp.einsum("bhqd,bhd->bhq", query, materialised(centre), precision="highest")
        norms, rounding = norm_bounds(query) * abs(call.scale), score_rounding(call.head_dim)
        bound, margin = norms * centred[..., None] * (1 + rounding), norms * plain[..., None] * 2 * rounding
        return cls(bound, shift * call.scale, margin)

    def lower(self, log_sum_exps: jax.Array) -> jax.Array:
        """Return lower bounds of log-sum-exps over all keys, from the log-sum-exps over a part of them."""
        return log_sum_exps - self.margin


def _hops_needed(ring: Ring, local: Operands, lower: jax.Array, measured: Measured) -> jax.Array:
    """Return how many shards before and after its own a device needs at most: int32 ``[2]``, equal on all devices.

    ``lower`` are lower bounds of the log-sum-exps.
    """
    call, shards, size = local.call, ring.shards, ring.shards.shard_len
    shard, index = lax.axis_index(ring.axis_name), jnp.arange(size, dtype=jnp.int32)
    excess = measured.bound - (lower - measured.shift)  # [batch, num_heads, shard_len]
    # NaN and inf: the score cannot be bounded, so all keys are needed.
    excess = jnp.where(jnp.abs(excess) < jnp.inf, excess, jnp.asarray(jnp.inf, excess.dtype))
    future = call.slopes if call.future_slopes is None else call.future_slopes
    tolerance = HALO_SHARE * call.tolerance * (1.0 if call.is_causal else 0.5)  # on one side of a query
    before, after = shard * size, jnp.maximum(shards.length - (shard + 1) * size, 0)  # tokens that exist
    needs = []
    for slopes, inside, exist in ((call.slopes, index, before), (future, size - 1 - index, after)):
        limit = exist if call.window_size is None else jnp.minimum(exist, call.window_size)
        far = tokens_beyond(jnp, slopes[..., None], excess, tolerance, inside, limit).astype(jnp.int32)
        needs.append(jnp.max(jnp.where(ring.is_token(), far, 0)))
    # From tokens to shards, rounded up; all devices take the largest number.
    hops = -(-jnp.stack(needs) // size)
    return lax.pmax(varying_over(hops, ring.all_axes), ring.all_axes)


# Takes the ring and this device's operands, which all vary over the same mesh axes.
ring_attention = differentiable(_forward, _backward)
