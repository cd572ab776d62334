"""Attention on CUDA through FlexAttention.

In go a call and its tensors. Out come results and gradients; block masks leave out the keys beyond the horizons. To
import this room is to import PyTorch's compiler, so functions do so when they need it.
"""

from alibi_torch._flex.kernels import flex_attention as flex_attention
