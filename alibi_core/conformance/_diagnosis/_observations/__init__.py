"""What an adapter makes of a fixed set of rich cases, and how far that is from what a reading says.

In go an adapter's calls, or failures. Out come observations.
"""

from alibi_core.conformance._diagnosis._observations.observation import Observation
from alibi_core.conformance._diagnosis._observations.probes import (
    FLAT,
    GRADIENT_PROBES,
    LATE_ROWS,
    LONG,
    LONG_ROWS,
    NUM_HEADS,
    SHORT,
    SQUARE,
    STEEP,
    Probe,
    as_slopes,
    cases_of,
    make_case,
    observe,
    observed_failures,
    sized,
)

__all__ = [
    "FLAT",
    "GRADIENT_PROBES",
    "LATE_ROWS",
    "LONG",
    "LONG_ROWS",
    "NUM_HEADS",
    "SHORT",
    "SQUARE",
    "STEEP",
    "Observation",
    "Probe",
    "as_slopes",
    "cases_of",
    "make_case",
    "observe",
    "observed_failures",
    "sized",
]
