"""What an adapter makes of a fixed set of rich cases, and how far that is from what a reading says.

In go an adapter's calls, or failures. Out come observations.
"""

from alibi_core.conformance._diagnosis._observations.observation import Observation, conditions_of
from alibi_core.conformance._diagnosis._observations.probes import (
    FLAT,
    LATE_ROWS,
    NUM_HEADS,
    STEEP,
    as_slopes,
    case_with_slopes,
    filled,
    long_probes,
    make_case,
    observe,
    observed_failures,
    short_probes,
    sized,
)

__all__ = [
    "FLAT",
    "LATE_ROWS",
    "NUM_HEADS",
    "STEEP",
    "Observation",
    "as_slopes",
    "case_with_slopes",
    "conditions_of",
    "filled",
    "long_probes",
    "make_case",
    "observe",
    "observed_failures",
    "short_probes",
    "sized",
]
