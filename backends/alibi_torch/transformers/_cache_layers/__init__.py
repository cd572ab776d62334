"""Keys and values of one layer, in the caches of transformers.

In go a layer's new keys and values, and the rules of its attention. Out comes attention to all tokens so far; what is
kept for it grows, lies in a cache of transformers' own, or is what the horizons of the heads reach.
"""

from alibi_torch.transformers._cache_layers.evicting import EvictingLayer
from alibi_torch.transformers._cache_layers.layers import AttendingLayer, GrowingLayer, as_held, extended, unknown_cache

__all__ = ["AttendingLayer", "EvictingLayer", "GrowingLayer", "as_held", "extended", "unknown_cache"]
