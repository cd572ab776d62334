"""Attention on CUDA through FlexAttention.

Input: a call and its tensors. Output: results and gradients; block masks skip the keys beyond the horizons. Importing
this package imports PyTorch's compiler, so other modules import it inside functions.
"""

from alibi_torch._flex.kernels import flex_attention as flex_attention
