"""Speed and memory of attention, forward, backward and decoding, beside its peers.

In goes the name of a library. Out come its contestants and clocks, and exact results to compare with.
"""

from benchmarks.attention.backends import load
from benchmarks.attention.exact import Reference, errors_of_gradients, sample
from benchmarks.attention.sizes import Shape

__all__ = ["Reference", "Shape", "errors_of_gradients", "load", "sample"]
