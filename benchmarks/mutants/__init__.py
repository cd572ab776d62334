"""Wrong implementations of ALiBi attention, one realistic mistake each: what a conformance kit is there to find.

``python -m benchmarks.mutants`` holds all of them to the laws of :mod:`alibi_core.conformance`.
"""

from benchmarks.mutants import (
    bias,
    blocks,
    conduct,
    decoding,
    gradients,
    heads,
    large,
    positions,
    precision,
    slopes,
    visibility,
)
from benchmarks.mutants._mutant import Mutant
from benchmarks.mutants.reference import Blockwise, Reference

_MODULES = (slopes, bias, positions, visibility, heads, large, precision, blocks, gradients, decoding, conduct)
MUTANTS: tuple[Mutant, ...] = tuple(x for module in _MODULES for x in vars(module).values() if isinstance(x, Mutant))

__all__ = ["MUTANTS", "Blockwise", "Mutant", "Reference"]
