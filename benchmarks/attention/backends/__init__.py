"""Whose attention is timed: this library in each framework, beside its peers, and as another checkout has it.

In goes a name, or a folder. Out come data, clocks, contestants and a cache, or a process that times calls.
"""

from benchmarks.attention.backends.backend import BACKENDS, Backend, Call, Contestant, load
from benchmarks.attention.backends.earlier import Earlier, Timer, earlier_in

__all__ = ["BACKENDS", "Backend", "Call", "Contestant", "Earlier", "Timer", "earlier_in", "load"]
