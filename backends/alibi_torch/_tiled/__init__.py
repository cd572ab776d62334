"""Attention on the CPU, tile by tile, as operators of PyTorch.

In go a call and its tensors. Out come results and gradients, computed in as few calls of PyTorch's fused kernel as the
horizons allow.
"""

from alibi_core.backend import KeyNorms
from alibi_torch._tiled import step
from alibi_torch._tiled.blocks import stays_low
from alibi_torch._tiled.configuration import SIZES, norm_bounds, tiling
from alibi_torch._tiled.operators import tiled_attention, tiled_attention_with_sums
from alibi_torch._tiled.plan import jobs, needed_keys, told_apart, with_masks
from alibi_torch._tiled.second import differentiable, pulled_back
from alibi_torch._tiled.short import is_short, of_lengths, prepared

__all__ = [
    "SIZES",
    "KeyNorms",
    "differentiable",
    "is_short",
    "jobs",
    "needed_keys",
    "norm_bounds",
    "of_lengths",
    "prepared",
    "pulled_back",
    "stays_low",
    "step",
    "tiled_attention",
    "tiled_attention_with_sums",
    "tiling",
    "told_apart",
    "with_masks",
]
