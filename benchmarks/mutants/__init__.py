"""Wrong implementations of ALiBi attention, one realistic mistake each: what a conformance kit is there to find.

``python -m benchmarks.mutants`` holds all of them to the laws of :mod:`alibi_core.conformance`. Most are mistakes of
the kit's own catalogue, run as adapters; the others are what no reading of ALiBi explains: state, sizes, conduct.
"""

from benchmarks.mutants import blocks, catalogue, conduct, decoding, forward, gradients, large
from benchmarks.mutants._mutant import Mutant, Outcome, tried
from benchmarks.mutants.reference import Blockwise, Reference

_BY_HAND = [x for module in (forward, blocks, gradients, decoding, conduct) for x in vars(module).values()]
MUTANTS: tuple[Mutant, ...] = (
    *catalogue.MUTANTS,
    *large.MUTANTS,
    *decoding.PAGED,
    *decoding.SHORT_CACHES,
    *decoding.LONG_CACHES,
    *gradients.IN_SOME_CALLS,
    *(x for x in _BY_HAND if isinstance(x, Mutant)),
)


def tried_by_name(name: str) -> Outcome:
    """Hold the mutant of this name to all laws: names go from process to process more easily than classes."""
    return tried({mutant.name: mutant for mutant in MUTANTS}[name])


__all__ = ["MUTANTS", "Blockwise", "Mutant", "Reference", "tried", "tried_by_name"]
