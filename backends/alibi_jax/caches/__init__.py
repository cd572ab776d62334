"""Keys and values of earlier tokens, and attention to them.

In go new keys and values. Out come a longer cache, and attention to all that it holds; one that evicts drops keys that
no query to come can need. Caches are pytrees, and nothing changes in place.
"""

from alibi_jax.caches._evicting import EvictingKVCache
from alibi_jax.caches._kv_cache import KVCache

__all__ = ["EvictingKVCache", "KVCache"]
