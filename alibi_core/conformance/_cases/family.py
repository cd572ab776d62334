"""What a law draws its cases from, and the few of them that a quick profile tries.

Compilers take their time over each new combination of shapes and options. So laws do not try whichever combinations
they happen to draw, but those of a *design*: half as many as there are examples, chosen one after the other so that
more values of two options meet in one of them than in as many that are drawn at random.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from alibi_core.conformance._cases.case import FAR, PER_BATCH, Case, Sizes

# Before the first key, at it, among the keys, and beyond the last.
OFFSETS, ALL_OFFSETS = (-3, 0, 4, 13), tuple(range(-3, 14))
WINDOWS, ALL_WINDOWS = (0, 1, 4), tuple(range(7))
SCALES = (0.25, 1.0, 2.0**-5)
CANDIDATES = 40  # of which the best is the next one of a design
SEEDS = st.integers(0, 2**16)


@dataclass(frozen=True)
class Family:
    """Cases of these sizes, forms and data, that use no features but these (of the kit's ``FEATURES``).

    Attributes:
        sizes: Of the cases.
        forms: Of the cases.
        uses: Features.
        data: Names of data.
        asked: Names of the arguments whose gradients are asked for.
        cotangents: Names of what ``grad_output`` is.
        is_dense: Whether offsets and windows are of all lengths, for those who try many.
    """

    sizes: tuple[Sizes, ...]
    forms: tuple[str, ...] = ("causal",)
    uses: frozenset[str] = frozenset()
    data: tuple[str, ...] = ("normal",)
    asked: tuple[tuple[str, ...] | None, ...] = (None,)
    cotangents: tuple[str, ...] = ("random",)
    is_dense: bool = False

    def options(self, size: Sizes) -> dict[str, tuple[Any, ...]]:
        """Return the values that each option takes with these sizes, the simplest first."""
        offsets: tuple[int, ...] = ALL_OFFSETS if self.is_dense else OFFSETS
        offsets += (FAR,) * ("far" in self.uses) + (PER_BATCH,) * ("batch_offsets" in self.uses)
        values = {
            "q_offset": ("offset", offsets),
            "window_size": ("window", ALL_WINDOWS if self.is_dense else WINDOWS),
            "packing": ("segments", ("pair", *(("same", "one row") if size.lengths[0] == size.lengths[1] else ()))),
            "masking": ("mask", ("by query", "by key", "by head")),
            "scaling": ("scale", SCALES),
        }
        options: dict[str, tuple[Any, ...]] = {"form": self.forms}
        options |= {name: (None, *(x if feature in self.uses else ())) for name, (feature, x) in values.items()}
        options |= {"slopes_per_batch": (False, True) if "batch_slopes" in self.uses else (False,)}
        gradients = {"wrt": self.asked, "cotangent": self.cotangents}
        return options | {name: values for name, values in gradients.items() if len(values) > 1}

    def cases(self) -> st.SearchStrategy[Case]:
        """Return what draws a case."""

        def of(size: Sizes) -> st.SearchStrategy[Case]:
            options = {name: st.sampled_from(values) for name, values in self.options(size).items()}
            return st.builds(Case, st.just(size), seed=SEEDS, data=st.sampled_from(self.data), **options)

        return st.sampled_from(self.sizes).flatmap(of)

    def design(self, number: int, seed: int) -> tuple[Case, ...]:
        """Return at most so many cases, in which as many pairs of values as possible meet."""
        rng, met = random.Random(seed), set[tuple[Any, ...]]()
        design: dict[Case, None] = {}
        for _ in range(number):
            candidates = [self._any(rng) for _ in range(CANDIDATES)]
            best = max(candidates, key=lambda case: len(_pairs(case) - met))
            met |= _pairs(best)
            design[best] = None
        return tuple(design)

    def _any(self, rng: random.Random) -> Case:
        size = rng.choice(self.sizes)
        return Case(size, seed=0, **{name: rng.choice(values) for name, values in self.options(size).items()})


_OF_GRADIENTS = ("wrt", "cotangent")
_OPTIONS = tuple(x.name for x in dataclasses.fields(Case) if x.name not in ("seed", "data", *_OF_GRADIENTS))


def _pairs(case: Case) -> set[tuple[Any, ...]]:
    """Return what of a case is other than data, two by two."""
    options = [(name, getattr(case, name)) for name in _OPTIONS]
    options += [(name, getattr(case, name)) for name in _OF_GRADIENTS if (case.wrt, case.cotangent) != (None, "random")]
    return set(itertools.combinations(options, 2))
