"""How many hops keys have to make, from what is measured of queries and keys."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from alibi_core.backend.horizon import score_rounding
from alibi_core.backend.sharding import tokens_beyond
from alibi_jax._call import Operands, norm_bounds
from alibi_jax._compatible import varying_over
from alibi_jax._tiled import materialised
from alibi_jax.parallel._ring import Ring


class Measured(NamedTuple):
    """What is known of a shard's queries and of all keys of the sequence: ``[batch, num_heads, shard_len]``."""

    bound: jax.Array  # no score with a centred key is larger in size
    shift: jax.Array  # the score with the centre
    margin: jax.Array  # how far a log-sum-exp may be off for rounding

    @classmethod
    def of(cls, ring: Ring, local: Operands) -> Measured:
        """Measure them. All devices along the sequence have to take part."""
        group, dtype = local.query.shape[2] // local.key.shape[2], local.slopes.dtype
        keys, query = local.key.astype(dtype), local.query.astype(dtype)
        # Softmax ignores a vector taken from every key; without their mean they are smaller. Padding is zeros, which
        # add nothing to the sum but may be far from the mean.
        centre = lax.psum(jnp.sum(keys, axis=1), ring.axis_name) / ring.shards.length
        tokens = ring.is_token()[:, None]
        largest = [jnp.max(jnp.where(tokens, norm_bounds(x), 0), axis=1) for x in (keys - centre[:, None], keys)]
        sizes = centre, *lax.pmax(jnp.stack(largest), ring.axis_name)
        centre, centred, plain = (jnp.repeat(x, group, axis=1) for x in sizes)  # [batch, num_heads, ...]
        shift = jnp.einsum("bqhd,bhd->bhq", query, materialised(centre), precision="highest")
        norms = jnp.swapaxes(norm_bounds(query), 1, 2) * abs(ring.rules.scale)
        rounding = score_rounding(query.shape[-1])
        return cls(
            norms * centred[..., None] * (1 + rounding),
            shift * ring.rules.scale,
            norms * plain[..., None] * 2 * rounding,
        )

    def lower(self, log_sum_exps: jax.Array) -> jax.Array:
        """Return lower bounds of log-sum-exps, given those of a part of the keys."""
        return log_sum_exps - self.margin


def hops_needed(ring: Ring, local: Operands, log_sum_exps: jax.Array, measured: Measured) -> jax.Array:
    """Return how many shards before its own any device's queries need, and after: int32 ``[2]``, the same everywhere.

    Log-sum-exps are those of each shard's own keys.
    """
    shards, size = ring.shards, ring.shards.shard_len
    shard, index = lax.axis_index(ring.axis_name), jnp.arange(size, dtype=jnp.int32)
    excess = measured.bound - (measured.lower(log_sum_exps) - measured.shift)  # [batch, num_heads, shard_len]
    # A score that cannot be bounded may exceed everything.
    excess = jnp.where(jnp.abs(excess) < jnp.inf, excess, jnp.asarray(jnp.inf, excess.dtype))
    future = local.slopes if local.future_slopes is None else local.future_slopes
    before, after = shard * size, jnp.maximum(shards.length - (shard + 1) * size, 0)  # tokens that exist
    needs = []
    for slopes, inside, exist in ((local.slopes, index, before), (future, size - 1 - index, after)):
        limit = exist if ring.rules.window_size is None else jnp.minimum(exist, ring.rules.window_size)
        far = tokens_beyond(jnp, slopes[..., None], excess, ring.halo_tolerance, inside, limit).astype(jnp.int32)
        needs.append(jnp.max(jnp.where(ring.is_token(), far, 0)))
    hops = -(-jnp.stack(needs) // size)
    return lax.pmax(varying_over(hops, ring.all_axes), ring.all_axes)
