"""Keys and values of earlier tokens, and attention to them.

In go new keys and values. Out come a longer cache, and attention to all that it holds.
"""

from alibi_jax.caches._kv_cache import KVCache, append, attend, empty_cache

__all__ = ["KVCache", "append", "attend", "empty_cache"]
