"""Attention on the CPU, tile by tile, as operators of PyTorch.

In go a call and its tensors. Out come results and gradients, computed in as few calls of PyTorch's fused kernel as the
horizons allow.
"""

from alibi_torch._tiled.operators import tiled_attention
from alibi_torch._tiled.plan import SIZES, KeyNorms, _lower_bounds, jobs, needed_keys, norm_bounds

__all__ = ["SIZES", "KeyNorms", "_lower_bounds", "jobs", "needed_keys", "norm_bounds", "tiled_attention"]
