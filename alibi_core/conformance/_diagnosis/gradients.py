"""What is wrong with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from alibi_core.conformance._cases import Answer, Case, rounded
from alibi_core.conformance._diagnosis._observations import Observation
from alibi_core.conformance._diagnosis._readings import GradientReading
from alibi_core.conformance._report import Diagnosis
from alibi_core.conformance._trial import Caller, CallError, DepartureError


@dataclass(frozen=True)
class GradientObservation(Observation):
    """Gradients, and what they should be."""

    def answers(self, reading: Any) -> dict[str, Answer]:
        """Return what the reading says, by name."""
        cotangent = rounded(self.case.arrays["cotangent"], self.dtype)
        shares_slopes = self.case.arrays["slopes"].ndim == 1
        found: dict[str, Answer] = reading.gradients(self.inputs, cotangent, shares_slopes=shares_slopes)
        return found

    @property
    def leeway(self) -> dict[str, float]:
        """What leaving out keys may cost, by name."""
        inputs, cotangent = self.inputs, np.abs(self.case.arrays["cotangent"])
        largest = 8 * self.share * inputs.head_dim * cotangent.max(initial=0) * np.abs(inputs.value).max(initial=0)
        rows, scale = inputs.q_len * inputs.group, abs(inputs.scale)
        return {
            "query": largest * scale * np.abs(inputs.key).max(initial=0),
            "key": largest * scale * np.abs(inputs.query).max(initial=0) * rows,
            "value": 4 * self.share * cotangent.max(initial=0) * rows,
            "slopes": largest * rows * inputs.batch * inputs.kv_len,
            "future_slopes": largest * rows * inputs.batch * inputs.kv_len,
        }


def observe_gradients(caller: Caller, case: Case, *, slopes: bool) -> GradientObservation | None:
    """Call the adapter's gradients and return what came of it, or None if nothing did."""
    try:
        results = caller.gradients(case)
    except CallError:
        return None
    results = {name: x for name, x in results.items() if slopes or "slopes" not in name}
    return GradientObservation.of(caller, case, results)


def circumstances(caller: Caller, failures: Sequence[DepartureError], base: GradientReading) -> list[Diagnosis]:
    """Return which gradients are asked for, and what ``grad_output`` is, where nothing else is wrong.

    Nothing, if a failure has another cause.
    """

    def is_right(case: Case) -> bool:
        observation = observe_gradients(caller, case, slopes=True)
        return observation is not None and observation.excess(base) <= 1

    found = []
    for x in failures:
        case = x.case
        if case is None or (case.wrt is None and case.cotangent == "random"):
            return []
        whole, random = asked_otherwise(case, wrt=None), asked_otherwise(case, cotangent="random")
        if not is_right(asked_otherwise(whole, cotangent="random")):
            return []
        by_wrt = case.wrt is not None and is_right(whole)
        by_cotangent = case.cotangent != "random" and is_right(random)
        conditions = []
        if case.wrt is not None and (by_wrt or not by_cotangent):
            conditions.append(f"no gradients but those of {' and '.join(case.wrt)} are asked for")
        if case.cotangent != "random" and (by_cotangent or not by_wrt):
            conditions.append(f"grad_output is {_WORDS[case.cotangent]}")
        wrong = "NaN" if x.actual is not None and np.isnan(x.actual).any() else "wrong"
        sentence = f"The gradient of {x.part} is {wrong} where {' and '.join(conditions)}."
        found.append(Diagnosis("gradients in some calls", sentence))
    return found


_WORDS = {
    "ones": "all ones",
    "zeros": "all zeros",
    "one row": "zero but for one row",
    "one element": "zero but for one element",
}


def asked_otherwise(case: Case, **changes: Any) -> Case:
    """Return the case with another ``wrt`` or ``cotangent``."""
    changed = replace(case, **changes)
    arrays = case.arrays | {"cotangent": changed.arrays["cotangent"]}
    return changed.with_arguments(case.form, case.arguments).with_arrays(**arrays)
