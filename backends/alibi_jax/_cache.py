"""Keys and values of the tokens seen so far, for decoding."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from alibi_core._checks import positive_int


class KVCache(NamedTuple):
    """A key/value cache of fixed size: a pytree to pass through ``jax.jit`` or carry through ``jax.lax.scan``.

    Its shapes do not change as it fills, so one compiled step serves all of a decoding loop.

    Attributes:
        key: ``[batch, max_length, num_kv_heads, head_dim]``; what lies at ``length`` and beyond is not in use.
        value: Likewise.
        length: Tokens held, int32 scalar.
    """

    key: jax.Array
    value: jax.Array
    length: jax.Array


def empty_cache(batch_size: int, max_length: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype) -> KVCache:
    """Return a cache that holds nothing yet."""
    shape = (positive_int("batch_size", batch_size), positive_int("max_length", max_length), num_kv_heads, head_dim)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((), jnp.int32))


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
    max_length = cache.key.shape[1] if cache.key.ndim == 4 else "max_length"
    expected = (batch_size, max_length, num_kv_heads, head_dim)
    for name, array in (("key", cache.key), ("value", cache.value)):
        if array.shape != expected:
            sizes = ", ".join(map(str, expected))
            raise ValueError(
                f"cache.{name} must have shape ({sizes}) (batch, max_length, num_kv_heads, head_dim), got {array.shape}"
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
    longer = KVCache(
        jax.lax.dynamic_update_slice_in_dim(cache.key, key, cache.length, axis=1),
        jax.lax.dynamic_update_slice_in_dim(cache.value, value, cache.length, axis=1),
        cache.length + new,
    )
    return longer, longer.length <= max_length if held is None else None


def _known(length: jax.Array) -> int | None:
    try:
        return int(length)
    except jax.errors.ConcretizationTypeError:  # traced
        return None
