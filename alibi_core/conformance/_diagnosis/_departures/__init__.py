"""The mistakes that are known by name.

In goes nothing. Out comes a catalogue: what each mistake is called, and what of a reading it changes.
"""

from alibi_core.conformance._diagnosis._departures.catalogue import ATTENTION, CONTRACTS, FUTURE_RIGHT
from alibi_core.conformance._diagnosis._departures.departure import Departure, make
from alibi_core.conformance._diagnosis._departures.of_bias import FAR_AWAY
from alibi_core.conformance._diagnosis._departures.of_gradients import FOLLOWING, FORWARD_RIGHT, GRADIENTS

__all__ = [
    "ATTENTION",
    "CONTRACTS",
    "FAR_AWAY",
    "FOLLOWING",
    "FORWARD_RIGHT",
    "FUTURE_RIGHT",
    "GRADIENTS",
    "Departure",
    "make",
]
