"""Attention on CUDA through FlexAttention.

In go a call and its tensors. Out come results and gradients; block masks leave out the keys beyond the horizons. To
import this room is to import PyTorch's compiler, so functions do so when they need it.
"""

from alibi_torch._flex.blocks import Gpu as Gpu
from alibi_torch._flex.blocks import kernel_options as kernel_options
from alibi_torch._flex.blocks import options_on as options_on
from alibi_torch._flex.kernels import flex_attention as flex_attention
from alibi_torch._flex.kernels import has_exact_positions as has_exact_positions
from alibi_torch._flex.kernels import mods as mods
from alibi_torch._flex.mask import BLOCK as BLOCK
from alibi_torch._flex.mask import are_few as are_few
from alibi_torch._flex.mask import needed_blocks as needed_blocks
