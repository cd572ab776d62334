"""Attention as Pallas kernels for TPUs, which load only the keys inside the horizons."""

from alibi_jax._tpu.passes import backward as backward
from alibi_jax._tpu.passes import forward as forward
from alibi_jax._tpu.shape import TPU as TPU
