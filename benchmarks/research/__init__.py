"""What models hardware that is not here: schedules of TPU kernels, code of GPU kernels, and a million tokens."""

from benchmarks.research import cuda_static

__all__ = ["cuda_static"]
