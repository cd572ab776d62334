"""Keys and values of earlier tokens, and attention to them.

Input: new keys and values. Output: attention over all cached tokens.
"""

from alibi_mlx.caches._kv_cache import KVCache

__all__ = ["KVCache"]
