"""What an adapter makes of a fixed set of rich cases, and how far that is from what a reading says.

In go an adapter's calls, or failures. Out come observations.
"""

from alibi_core.conformance._diagnosis._observations.observation import Observation as Observation
from alibi_core.conformance._diagnosis._observations.probes import FLAT as FLAT
from alibi_core.conformance._diagnosis._observations.probes import GRADIENT_PROBES as GRADIENT_PROBES
from alibi_core.conformance._diagnosis._observations.probes import LATE_ROWS as LATE_ROWS
from alibi_core.conformance._diagnosis._observations.probes import LONG as LONG
from alibi_core.conformance._diagnosis._observations.probes import LONG_ROWS as LONG_ROWS
from alibi_core.conformance._diagnosis._observations.probes import NUM_HEADS as NUM_HEADS
from alibi_core.conformance._diagnosis._observations.probes import SHORT as SHORT
from alibi_core.conformance._diagnosis._observations.probes import SQUARE as SQUARE
from alibi_core.conformance._diagnosis._observations.probes import STEEP as STEEP
from alibi_core.conformance._diagnosis._observations.probes import Probe as Probe
from alibi_core.conformance._diagnosis._observations.probes import as_slopes as as_slopes
from alibi_core.conformance._diagnosis._observations.probes import cases_of as cases_of
from alibi_core.conformance._diagnosis._observations.probes import make_case as make_case
from alibi_core.conformance._diagnosis._observations.probes import observe as observe
from alibi_core.conformance._diagnosis._observations.probes import observed_failures as observed_failures
from alibi_core.conformance._diagnosis._observations.probes import sized as sized
