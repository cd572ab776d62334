"""How many tokens beyond its chunk a device's queries need, from what has been measured of them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from alibi_core.backend import score_rounding, tokens_beyond
from alibi_jax._call import Operands, norm_bounds
from alibi_jax._compatible import varying_over
from alibi_jax._tiled import materialised
from alibi_jax.parallel._ring import Ring


class Measured(NamedTuple):
    """What is known of queries and of all keys of the sequence, by chunk: ``[slots * batch, num_heads, chunk_len]``."""

    bound: jax.Array  # no score with a centred key is larger in size
    shift: jax.Array  # the score with the centre
    margin: jax.Array  # how far a log-sum-exp may be off for rounding

    @classmethod
    def of(cls, ring: Ring, local: Operands) -> Measured:
        """Measure them. All devices along the sequence have to take part."""
        group = local.query.shape[2] // local.key.shape[2]
        dtype = local.slopes.dtype
        keys = ring.by_slot(local.key.astype(dtype))  # [slots, batch, chunk_len, num_kv_heads, head_dim]
        # About the mean, which softmax does not notice. Padding is zeros, which are no part of the sum, but may be far
        # from the centre.
        centre = lax.psum(jnp.sum(keys, axis=(0, 2)), ring.axis_name) / ring.shards.length
        tokens = ring.is_token(ring.chunks())[:, None, :, None]
        largest = [jnp.max(jnp.where(tokens, norm_bounds(x), 0), axis=(0, 2)) for x in (keys - centre[:, None], keys)]
        sizes = centre, *lax.pmax(jnp.stack(largest), ring.axis_name)
        by_entry = (jnp.tile(x, (ring.shards.slots, *(1,) * (x.ndim - 1))) for x in sizes)
        centre, centred, plain = (jnp.repeat(x, group, axis=1) for x in by_entry)
        query = local.query.astype(dtype)
        shift = jnp.einsum("bqhd,bhd->bhq", query, materialised(centre), precision="highest")
        norms = jnp.swapaxes(norm_bounds(query), 1, 2) * abs(ring.rules.scale)
        rounding = score_rounding(query.shape[-1])
        return cls(
            norms * centred[..., None] * (1 + rounding),
            shift * ring.rules.scale,
            norms * plain[..., None] * 2 * rounding,
        )

    def lower(self, log_sum_exps: jax.Array) -> jax.Array:
        """Return what log-sum-exps are at least, given those of some of the keys."""
        return log_sum_exps - self.margin


def needed_tokens(ring: Ring, local: Operands, log_sum_exps: jax.Array, measured: Measured) -> jax.Array:
    """Return how many tokens before each of this device's chunks its queries need, and after: int32.

    Log-sum-exps are those of each chunk's own keys.

    Returns:
        ``[2, num_kv_heads]``: before and after, of the chunk and batch entry that needs the most.
    """
    shards, (batch, size, num_heads, _) = ring.shards, local.query.shape
    chunks = ring.chunks()
    index = jnp.arange(size, dtype=jnp.int32)
    tokens = ring.is_token(chunks)[:, None, None]  # [slots, 1 (batch), 1 (heads), chunk_len]
    excess = measured.bound - (measured.lower(log_sum_exps) - measured.shift)
    # What cannot be bounded may exceed everything.
    excess = jnp.where(jnp.abs(excess) < jnp.inf, excess, jnp.asarray(jnp.inf, excess.dtype))
    future = local.slopes if local.future_slopes is None else local.future_slopes
    before, after = chunks * size, jnp.maximum(shards.length - (chunks + 1) * size, 0)  # tokens that there are
    needs = []
    for slopes, inside, exist in ((local.slopes, index, before), (future, size - 1 - index, after)):
        limit = exist if ring.rules.window_size is None else jnp.minimum(exist, ring.rules.window_size)
        limit = jnp.repeat(limit, batch // shards.slots)[:, None, None]
        far = tokens_beyond(jnp, slopes[..., None], excess, ring.halo_tolerance, inside, limit).astype(jnp.int32)
        far = far.reshape(shards.slots, batch // shards.slots, num_heads, size)
        needs.append(jnp.max(jnp.where(tokens, far, 0), axis=(0, 1, 3)))
    needed = jnp.stack(needs).reshape(2, local.key.shape[2], -1).max(axis=-1)
    return needed.at[1].set(0) if ring.rules.is_causal else needed


def largest_anywhere(ring: Ring, number: jax.Array) -> jax.Array:
    """Return the largest of the whole mesh, so that all devices decide alike."""
    return lax.pmax(varying_over(number, ring.all_axes), ring.all_axes)
