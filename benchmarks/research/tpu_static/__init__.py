"""What the TPU's compiler says of kernels: bundles, memory and visits to blocks of keys."""

from benchmarks.research.tpu_static.visits import HEADS, visits

__all__ = ["HEADS", "visits"]
