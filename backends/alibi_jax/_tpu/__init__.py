"""Attention as Pallas kernels for TPUs.

In go rules and operands. Out come results and gradients; each grid step loads the keys inside the horizons alone.
"""

from alibi_jax._tpu.blocks import product
from alibi_jax._tpu.operands import LOG2_E, both_slopes, by_slopes, first_positions, row_products
from alibi_jax._tpu.passes import backward, forward
from alibi_jax._tpu.shape import TPU, KernelShape

__all__ = [
    "LOG2_E",
    "TPU",
    "KernelShape",
    "backward",
    "both_slopes",
    "by_slopes",
    "first_positions",
    "forward",
    "product",
    "row_products",
]
