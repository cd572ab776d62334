"""Keys and values of earlier tokens, and attention to them.

Input: new keys and values. Output: attention over all cached tokens.
"""

from alibi_torch.caches._kv_cache import KVCache
from alibi_torch.caches._kv_cache import autocast_dtype as autocast_dtype

__all__ = ["KVCache"]
