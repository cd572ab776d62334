"""One adapter before one law.

In go an adapter and cases. Out comes nothing if every answer is within its budget, else an error with the evidence.
"""

from alibi_core.conformance._trial.caller import MASKED, TENSORS, Caller, CallError, DepartureError
from alibi_core.conformance._trial.trial import Trial

__all__ = ["MASKED", "TENSORS", "CallError", "Caller", "DepartureError", "Trial"]
