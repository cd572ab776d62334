"""Keys and values of earlier tokens, and attention to them.

In go new keys and values. Out comes attention to all that a cache holds.
"""

from alibi_torch.caches._kv_cache import BLOCK as BLOCK  # for the package's own caches elsewhere, like check_appended
from alibi_torch.caches._kv_cache import KVCache
from alibi_torch.caches._kv_cache import autocast_dtype as autocast_dtype
from alibi_torch.caches._kv_cache import check_appended as check_appended

__all__ = ["KVCache"]
