"""Bytes sent and time taken by a sequence divided among processes or devices."""

from benchmarks.parallel.jax import program
from benchmarks.parallel.torch import FULL, Sizes, measurements, together

__all__ = ["FULL", "Sizes", "measurements", "program", "together"]
