"""The mistakes that are known by name.

In goes nothing. Out comes a catalogue: what each mistake is called, and what of a reading it changes.
"""

from alibi_core.conformance._diagnosis._departures.catalogue import ATTENTION as ATTENTION
from alibi_core.conformance._diagnosis._departures.catalogue import CONTRACTS as CONTRACTS
from alibi_core.conformance._diagnosis._departures.catalogue import FUTURE_RIGHT as FUTURE_RIGHT
from alibi_core.conformance._diagnosis._departures.departure import Departure as Departure
from alibi_core.conformance._diagnosis._departures.departure import make as make
from alibi_core.conformance._diagnosis._departures.of_bias import FAR_AWAY as FAR_AWAY
from alibi_core.conformance._diagnosis._departures.of_gradients import FOLLOWING as FOLLOWING
from alibi_core.conformance._diagnosis._departures.of_gradients import FORWARD_RIGHT as FORWARD_RIGHT
from alibi_core.conformance._diagnosis._departures.of_gradients import GRADIENTS as GRADIENTS
