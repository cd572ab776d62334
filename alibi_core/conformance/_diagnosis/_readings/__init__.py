"""What an implementation would compute that makes certain mistakes: a reading of what attention is.

In go a case and the mistakes. Out come the result and the gradients that would follow, in float64.
"""

from alibi_core.conformance._diagnosis._readings.gradients import GradientReading as GradientReading
from alibi_core.conformance._diagnosis._readings.inputs import Inputs as Inputs
from alibi_core.conformance._diagnosis._readings.reading import Reading as Reading
from alibi_core.conformance._diagnosis._readings.slopes import CHANGES as CHANGES
from alibi_core.conformance._diagnosis._readings.slopes import RULES as RULES
from alibi_core.conformance._diagnosis._readings.slopes import Rule as Rule
from alibi_core.conformance._diagnosis._readings.slopes import power_below as power_below
from alibi_core.conformance._diagnosis._readings.slopes import scheme as scheme
