"""alibi_jax._gpu"""

from alibi_jax._gpu.passes import GPU, KernelShape, refusal

__all__ = ["GPU", "KernelShape", "refusal"]
