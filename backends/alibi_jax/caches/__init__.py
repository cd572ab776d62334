"""Keys and values of earlier tokens, and attention to them.

In go new keys and values. Out come a longer cache, and attention to all that it holds. Caches are pytrees; nothing
changes in place.
"""

from alibi_jax.caches._kv_cache import KVCache

__all__ = ["KVCache"]
