"""What an implementation would compute that makes certain mistakes: a reading of what attention is.

In go a case and the mistakes. Out come the result and the gradients that would follow, in float64.
"""

from alibi_core.conformance._diagnosis._readings.gradients import GradientReading
from alibi_core.conformance._diagnosis._readings.inputs import Inputs
from alibi_core.conformance._diagnosis._readings.reading import Reading

__all__ = ["GradientReading", "Inputs", "Reading"]
