"""Keys and values of earlier tokens, and attention to them.

In go new keys and values. Out comes attention to all that a cache holds.
"""

from alibi_torch.caches._kv_cache import KVCache
from alibi_torch.caches._kv_cache import autocast_dtype as autocast_dtype

__all__ = ["KVCache"]
