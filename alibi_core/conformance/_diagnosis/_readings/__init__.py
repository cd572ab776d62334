"""What an implementation would compute that makes certain mistakes: a reading of what attention is.

In go a case and the mistakes. Out come the result and the gradients that would follow, in float64.
"""

from alibi_core.conformance._diagnosis._readings.gradients import GradientReading
from alibi_core.conformance._diagnosis._readings.inputs import Inputs
from alibi_core.conformance._diagnosis._readings.reading import Reading
from alibi_core.conformance._diagnosis._readings.slopes import CHANGES, RULES, Rule, power_below, scheme

__all__ = ["CHANGES", "RULES", "GradientReading", "Inputs", "Reading", "Rule", "power_below", "scheme"]
