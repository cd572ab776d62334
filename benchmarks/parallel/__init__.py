"""Time taken by a sequence divided among processes."""

from benchmarks.parallel.torch import FULL, Sizes, measurements, together

__all__ = ["FULL", "Sizes", "measurements", "together"]
