"""The problems that implementations are held to, and their answers.

In goes a seed. Out come small frozen cases, the float64 oracle's answers to them, and the budget of rounding for each.
"""

from alibi_core.conformance._cases.case import COTANGENTS, FAR, FORMS, LONGER, PER_BATCH, Case, Sizes, smaller_cases
from alibi_core.conformance._cases.data import DATA
from alibi_core.conformance._cases.family import SEEDS, Family
from alibi_core.conformance._cases.oracle import (
    SMALLEST,
    U32,
    UNIT_ROUNDOFF,
    Answer,
    Attention,
    Rules,
    Values,
    excess,
    penalties,
    rounded,
    summed_over_batch,
)

__all__ = [
    "COTANGENTS",
    "DATA",
    "FAR",
    "FORMS",
    "LONGER",
    "PER_BATCH",
    "SEEDS",
    "SMALLEST",
    "U32",
    "UNIT_ROUNDOFF",
    "Answer",
    "Attention",
    "Case",
    "Family",
    "Rules",
    "Sizes",
    "Values",
    "excess",
    "penalties",
    "rounded",
    "smaller_cases",
    "summed_over_batch",
]
