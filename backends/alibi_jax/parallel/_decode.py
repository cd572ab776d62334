"""Decoding with a cache whose tokens a mesh axis divides, inside ``jax.shard_map``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from alibi_core import AttentionCall
from alibi_core.backend import checks, reach, score_rounding, tolerance_of
from alibi_jax._call import NORM_BLOCK, norm_bounds, take_apart
from alibi_jax._compatible import varying_alike
from alibi_jax._dispatch import Implementation, forward
from alibi_jax.caches import KVCache
from alibi_jax.parallel._attention import axis_sizes, check_implementation, default_slopes, local_slopes


def append(cache: KVCache, key: jax.Array, value: jax.Array, *, axis_name: str) -> KVCache:
    """Return a divided cache with the keys and values of further tokens, each on the device that has its place.

    Args:
        cache: This device's shard: its ``key`` and ``value`` are slots ``[batch, num_kv_heads, shard_len, head_dim]``,
            contiguous, a multiple of 128 tokens, its ``key_norms`` those of them; ``length`` counts the tokens that all
            devices hold together.
        key: ``[batch, new, num_kv_heads, head_dim]``, the same on every device along the axis.
        value: Likewise.
        axis_name: The mesh axis that slots are divided along.

    Returns:
        The longer cache. Tokens that do not fit are dropped, though ``length`` counts them, and the cache is of no more
        use: :func:`decode` returns NaN.

    Raises:
        TypeError: If ``cache`` is no cache.
        ValueError: If shapes do not fit, or there is no such mesh axis.

    Example:
        A mesh of one device; on several, each would hold 128 slots:

        >>> from functools import partial
        >>> from jax.sharding import Mesh, PartitionSpec
        >>> mesh, slots, whole = Mesh(jax.devices()[:1], "tokens"), PartitionSpec(None, None, "tokens"), PartitionSpec()
        >>> shards = KVCache(slots, slots, slots, whole)
        >>> add = jax.shard_map(
        ...     partial(append, axis_name="tokens"), mesh=mesh, in_specs=(shards, whole, whole), out_specs=shards
        ... )
        >>> key = value = jnp.ones((1, 3, 2, 4))
        >>> int(jax.jit(add)(KVCache.make(1, 2, 128, 4), key, value).length)
        3
    """
    axis_sizes(axis_name)
    _check_cache(cache)
    batch, num_kv_heads, shard_len, head_dim = cache.key.shape
    new = checks.array("key", key).shape[1] if key.ndim == 4 else "new"
    for name, array in (("key", key), ("value", value)):
        expected = (batch, new, num_kv_heads, head_dim)
        if tuple(checks.array(name, array).shape) != expected:
            raise ValueError(
                f"{name} must have shape {expected} (batch, new, num_kv_heads, head_dim), got {array.shape}"
            )
    slots = cache.length + jnp.arange(new, dtype=jnp.int32) - lax.axis_index(axis_name) * shard_len
    # An index below 0 would count from the end.
    slots = jnp.where(slots < 0, shard_len, slots)
    key, value = (jnp.swapaxes(x, 1, 2) for x in (key, value))
    norms = lax.stop_gradient(norm_bounds(key.astype(cache.key_norms.dtype)))
    return KVCache(
        cache.key.at[:, :, slots].set(key, mode="drop"),
        cache.value.at[:, :, slots].set(value, mode="drop"),
        cache.key_norms.at[:, :, slots // NORM_BLOCK].max(norms, mode="drop"),
        cache.length + new,
    )


def decode(
    query: jax.Array,
    cache: KVCache,
    slopes: jax.Array | None = None,
    *,
    axis_name: str,
    head_axis: str | None = None,
    window_size: int | None = None,
    scale: float | None = None,
    tolerance: float | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Return the causal attention of the last tokens to a cache that is divided along a mesh axis.

    Each device attends to its own slots, if any lies within the horizon of one of its heads, which norms of queries and
    keys decide; the others do nothing. Results are merged by log-sum-exps: what devices send does not grow with the
    cache. To be called inside ``jax.shard_map``; without derivatives.

    Args:
        query: ``[batch, q_len, num_heads, head_dim]``, the last ``q_len`` tokens that the cache holds: the same on
            every device along the axis.
        cache: This device's shard of it; see :func:`append`.
        slopes: ``[num_heads]``, those of *all* devices' heads. Default: the canonical slopes; not if the query is
            divided along a further axis, which may be that of the batch, and there is no ``head_axis``.
        axis_name: The mesh axis that slots are divided along.
        head_axis: The mesh axis that heads are divided along; None if they are not.
        window_size: Mask keys farther than this many tokens: with 4 a query sees 5 keys, its own among them.
        scale: Factor of the scores. Default ``head_dim ** -0.5``.
        tolerance: The share of softmax weight that may be left out. Default: the dtype's rounding error.
        implementation: ``"tpu"``, :class:`alibi_jax.TPU` or ``"tiled"``; default, as for :func:`alibi_jax.attention`.

    Returns:
        ``[batch, q_len, num_heads, head_dim]``, of the dtype of ``query``, the same on every device along the axis; NaN
        if the cache was given more tokens than it has room for.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value or shape is wrong, or there is no such mesh axis.
        NotImplementedError: As for :func:`alibi_jax.parallel.attention`.

    Example:
        A mesh of one device, whose cache holds three tokens:

        >>> from functools import partial
        >>> from jax.sharding import Mesh, PartitionSpec
        >>> mesh, slots, whole = Mesh(jax.devices()[:1], "tokens"), PartitionSpec(None, None, "tokens"), PartitionSpec()
        >>> shards = KVCache(slots, slots, slots, whole)
        >>> attend = jax.shard_map(
        ...     partial(decode, axis_name="tokens"), mesh=mesh, in_specs=(whole, shards), out_specs=whole
        ... )
        >>> cache = KVCache.make(1, 2, 128, 4).append(jnp.ones((1, 3, 2, 4)), jnp.ones((1, 3, 2, 4)))
        >>> jax.jit(attend)(jnp.ones((1, 1, 2, 4)), cache).shape
        (1, 1, 2, 4)
    """
    num_shards, head_shards = axis_sizes(axis_name, head_axis)
    _check_cache(cache)
    check_implementation(implementation)
    if checks.array("query", query).ndim != 4:
        raise ValueError(f"query must have shape (batch, q_len, num_heads, head_dim), got {query.shape}")
    heads = query.shape[2]
    given = default_slopes(query, cache.key, axis_name, head_axis, head_shards) if slopes is None else slopes
    shard_len = cache.key.shape[2]
    checks.positions_fit(0, query.shape[1], num_shards * shard_len)
    start = lax.axis_index(axis_name) * shard_len
    call = AttentionCall.check(
        jnp.swapaxes(query, 1, 2),
        *cache[:2],
        local_slopes("slopes", given, heads, head_axis, head_shards),
        q_offset=(cache.length - query.shape[1] - start).astype(jnp.int32),
        window_size=window_size,
        scale=scale,
        tolerance=tolerance,
        xp=jnp,
    )
    if call.is_empty:
        return jnp.zeros_like(query)
    rules, operands = take_apart(call, query, *cache[:2])
    # Half of the tolerance is for the devices that do nothing, the rest for what the others leave out.
    rules = replace(rules, kv_heads_first=True, is_part=True, tolerance=rules.tolerance / (2 * num_shards))
    group = call.num_heads // call.num_kv_heads
    norms = lax.pmax(cache.key_norms.max(axis=-1), axis_name)  # [batch, num_kv_heads]
    bound = jnp.swapaxes(norm_bounds(query.astype(call.working_dtype)), 1, 2) * abs(call.scale)
    bound = bound * jnp.repeat(norms, group, axis=1)[..., None] * (1 + 2 * score_rounding(call.head_dim))
    # A query's own key is in the cache, so that its log-sum-exp is no less than that key's score.
    operands = operands._replace(key_norms=cache.key_norms, lower=-bound)
    far = reach(jnp, operands.slopes[..., None], 2 * bound, tolerance_of(call) / 2)
    nearest = operands.q_offset.reshape(-1, 1, 1) + jnp.arange(query.shape[1]) - (shard_len - 1)
    sees = (nearest > -shard_len) & ~(nearest >= far)  # a NaN compares as within
    if window_size is not None:
        sees &= nearest <= window_size

    def attend(operands: Any) -> tuple[jax.Array, jax.Array]:
        return forward(rules, operands, implementation, with_log_sum_exps=True)

    def skip(operands: Any) -> tuple[jax.Array, jax.Array]:
        kinds = jax.eval_shape(attend, operands)
        filled = [jnp.full(x.shape, value, x.dtype) for x, value in zip(kinds, (0, -jnp.inf), strict=True)]
        return tuple(varying_alike((*filled, operands))[:2])

    result, sums = lax.cond(jnp.any(sees), attend, skip, varying_alike(operands))
    highest = lax.pmax(sums, axis_name)
    weights = jnp.exp(sums - jnp.where(jnp.isneginf(highest), 0, highest))
    weighted = lax.psum(result * jnp.swapaxes(weights, 1, 2)[..., None], axis_name)
    total = jnp.swapaxes(lax.psum(weights, axis_name), 1, 2)[..., None]
    merged = weighted / jnp.where(total == 0, 1, total)
    return jnp.where(cache.length > num_shards * shard_len, jnp.nan, merged).astype(query.dtype)


def _check_cache(cache: Any) -> None:
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache must be an alibi_jax.KVCache, got {type(cache).__name__}")
    if cache.key.ndim != 4 or cache.key.shape[2] % NORM_BLOCK:
        raise ValueError(
            f"cache.key must have shape (batch, num_kv_heads, shard_len, head_dim) with shard_len a multiple of "
            f"{NORM_BLOCK}, got {cache.key.shape}"
        )
    expected = (*cache.key.shape[:2], cache.key.shape[2] // NORM_BLOCK)
    if cache.key_norms.shape != expected:
        raise ValueError(f"cache.key_norms must have shape {expected}, as its keys, got {cache.key_norms.shape}")
