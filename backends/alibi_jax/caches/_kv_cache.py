"""Keys and values of the tokens seen so far, for decoding."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from alibi_core import AttentionCall
from alibi_core.backend import positive_int
from alibi_jax._attention import run
from alibi_jax._call import NORM_BLOCK, norm_bounds
from alibi_jax._dispatch import Implementation


class KVCache(NamedTuple):
    """A key/value cache of fixed size: a pytree to pass through ``jax.jit`` or carry through ``jax.lax.scan``.

    Its shapes do not change as it fills, so one compiled step serves all of a decoding loop.

    Attributes:
        key: ``[batch, num_kv_heads, max_length, head_dim]``; what lies at ``length`` and beyond is not in use. Heads
            come first, so that those keys of a head that a query needs can be read by themselves.
        value: Likewise.
        key_norms: ``[batch, num_kv_heads, blocks]``, float32 (float64 for float64 keys): what no norm of each 128 keys
            exceeds, which tells how far back a query has to look.
        length: Tokens held, int32 scalar.
    """

    key: jax.Array
    value: jax.Array
    key_norms: jax.Array
    length: jax.Array


def empty_cache(batch_size: int, max_length: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype) -> KVCache:
    """Return a cache that holds nothing yet."""
    shape = (positive_int("batch_size", batch_size), num_kv_heads, positive_int("max_length", max_length), head_dim)
    norms = jnp.zeros((*shape[:2], -(-max_length // NORM_BLOCK)), jnp.promote_types(dtype, jnp.float32))
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), norms, jnp.zeros((), jnp.int32))


def append(cache: KVCache, key: jax.Array, value: jax.Array) -> tuple[KVCache, jax.Array | None]:
    """Return the cache with the keys and values of further tokens.

    Args:
        cache: What was there.
        key: ``[batch, new, num_kv_heads, head_dim]``.
        value: Likewise.

    Returns:
        cache: The longer cache.
        fits: Boolean scalar, False if the tokens did not fit, in which case the cache is of no more use; None if it is
            known that they did.

    Raises:
        TypeError: If ``cache`` is no cache.
        ValueError: If it is of another size or dtype, or has no room as far as can be known.
    """
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache must be an alibi_jax.KVCache, as make_cache returns it, got {type(cache).__name__}")
    batch_size, new, num_kv_heads, head_dim = key.shape
    max_length = cache.key.shape[2] if cache.key.ndim == 4 else "max_length"
    expected = (batch_size, num_kv_heads, max_length, head_dim)
    for name, array in (("key", cache.key), ("value", cache.value)):
        if array.shape != expected:
            sizes = ", ".join(map(str, expected))
            raise ValueError(
                f"cache.{name} must have shape ({sizes}) (batch, num_kv_heads, max_length, head_dim), got {array.shape}"
            )
        if array.dtype != key.dtype:
            raise ValueError(
                f"cache.{name} must have the dtype of the layer's keys, {key.dtype}, got {array.dtype}; give the layer "
                "a dtype if its input has another than its parameters"
            )
    held = _known(cache.length)
    if (held or 0) + new > max_length:
        raise ValueError(
            f"cache must have room for {new} more tokens, got max_length {max_length} with "
            f"{'an unknown number' if held is None else held} in use"
        )
    key, value = (jnp.swapaxes(x, 1, 2) for x in (key, value))
    norms = norm_bounds(key.astype(cache.key_norms.dtype))  # [batch, num_kv_heads, new]
    blocks = (cache.length + jnp.arange(new)) // NORM_BLOCK
    longer = KVCache(
        jax.lax.dynamic_update_slice_in_dim(cache.key, key, cache.length, axis=2),
        jax.lax.dynamic_update_slice_in_dim(cache.value, value, cache.length, axis=2),
        cache.key_norms.at[:, :, blocks].max(jax.lax.stop_gradient(norms), mode="drop"),
        cache.length + new,
    )
    return longer, longer.length <= max_length if held is None else None


def attend(
    cache: KVCache,
    query: jax.Array,
    slopes: jax.Array,
    q_offset: jax.Array,
    implementation: Implementation | None,
    **arguments: Any,
) -> jax.Array:
    """Return the causal attention of queries to what a cache holds, reading no more keys than they need.

    Args:
        cache: What is held.
        query: ``[batch, q_len, num_heads, head_dim]``.
        slopes: ``[num_heads]``.
        q_offset: Position of the first query, in tokens.
        implementation: As for :func:`alibi_jax.attention`.
        **arguments: ``segment_ids``, ``window_size`` and ``mask`` of it; keys are all ``max_length`` slots.
    """
    heads_first = jnp.swapaxes(query, 1, 2)  # to be checked beside the cache, which is too large to turn around
    call = AttentionCall.check(heads_first, *cache[:2], slopes, q_offset=q_offset, xp=jnp, **arguments)
    return run(call, query, cache.key, cache.value, implementation, cache.key_norms)


def _known(length: jax.Array) -> int | None:
    try:
        return int(length)
    except jax.errors.ConcretizationTypeError:  # traced
        return None
