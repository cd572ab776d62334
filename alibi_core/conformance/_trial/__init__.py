"""One adapter before one law.

In go an adapter and cases. Out comes nothing if every answer is within its budget, else an error with the evidence.
"""

from alibi_core.conformance._trial.caller import MASKED as MASKED
from alibi_core.conformance._trial.caller import TENSORS as TENSORS
from alibi_core.conformance._trial.caller import Caller as Caller
from alibi_core.conformance._trial.caller import CallError as CallError
from alibi_core.conformance._trial.caller import DepartureError as DepartureError
from alibi_core.conformance._trial.trial import Trial as Trial
