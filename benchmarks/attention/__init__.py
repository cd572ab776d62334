"""The speed of attention, compared with attention without positions and with other implementations of ALiBi."""

from benchmarks.attention.exact import MOST_ERROR, ROUNDOFF, Reference, attend, relative_error, sample, slopes
from benchmarks.attention.libraries import Call, Contestant, Library, Shape, fixed, load

__all__ = [
    "MOST_ERROR",
    "ROUNDOFF",
    "Call",
    "Contestant",
    "Library",
    "Reference",
    "Shape",
    "attend",
    "fixed",
    "load",
    "relative_error",
    "sample",
    "slopes",
]
