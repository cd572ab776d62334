"""Keys and values of earlier tokens, and attention to them.

In go new keys and values. Out comes attention to all that a cache holds.
"""

from alibi_mlx.caches._kv_cache import KVCache

__all__ = ["KVCache"]
