"""Keys and values of earlier tokens, and attention to them.

Input: new keys and values. Output: a longer cache, and attention over all cached tokens. Caches are immutable pytrees.
"""

from alibi_jax.caches._kv_cache import KVCache

__all__ = ["KVCache"]
