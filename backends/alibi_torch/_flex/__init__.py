"""Attention on CUDA through FlexAttention.

In go a call and its tensors. Out come results and gradients; block masks leave out the keys beyond the horizons. To
import this room is to import PyTorch's compiler, so functions do so when they need it.
"""

from alibi_torch._flex.blocks import Gpu, kernel_options, options_on
from alibi_torch._flex.kernels import flex_attention, has_exact_positions, mods
from alibi_torch._flex.mask import BLOCK, are_few, needed_blocks

__all__ = [
    "BLOCK",
    "Gpu",
    "are_few",
    "flex_attention",
    "has_exact_positions",
    "kernel_options",
    "mods",
    "needed_blocks",
    "options_on",
]
