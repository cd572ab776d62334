"""Attention as Pallas kernels for TPUs.

In go rules and operands. Out come results and gradients; each grid step loads the keys inside the horizons alone.
"""

from alibi_jax._tpu.passes import backward as backward
from alibi_jax._tpu.passes import forward as forward
from alibi_jax._tpu.shape import TPU as TPU
from alibi_jax._tpu.shape import KernelShape as KernelShape
