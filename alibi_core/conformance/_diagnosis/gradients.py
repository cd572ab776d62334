"""What is wrong with gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from alibi_core.conformance._cases import Answer, Case, rounded
from alibi_core.conformance._diagnosis._observations import (
    FLAT,
    STEEP,
    Observation,
    as_slopes,
    case_with_slopes,
    conditions_of,
    make_case,
    sized,
)
from alibi_core.conformance._diagnosis._readings import GradientReading
from alibi_core.conformance._report import Diagnosis
from alibi_core.conformance._trial import Caller, CallError, Evidence


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
    return GradientObservation(case, results, caller.offer.dtype, caller.offer.tolerance, conditions_of(case))


def gradient_probes(caller: Caller, features: frozenset[str]) -> Iterator[Case]:
    """Yield cases of what is offered, the plainest first."""
    offer, future = caller.offer, np.asarray([0.2, 0.5, 0.05, 0.9, 0.013, 0.33])

    def make(*arguments: Any, **options: Any) -> Case:
        return make_case(offer, *arguments, **options)

    yield make()
    yield make(size=8.0)  # scores of which rounding leaves much
    yield make(size=60.0)  # scores whose exponentials overflow
    if "scale" in features:
        yield make(scale=0.2)
    if "batch_slopes" in features and offer.has_slopes:
        yield case_with_slopes(make(), as_slopes(STEEP, FLAT))
    if "lengths" in features:
        yield make((4, 11))
    if "offset" in features:
        yield make((5, 11) if "lengths" in features else (7, 7), q_offset=3)
    if "symmetric" in features:
        yield make(form="symmetric")
    if "asymmetric" in features:
        yield make(form="asymmetric", future_slopes=future)
    if "grouped" in features:
        yield make(sized((7, 7), group=2))
    forms = ["causal", "symmetric"] if "symmetric" in features else ["causal"]
    if "window" in features:
        yield from (make((9, 9), form=form, window_size=3) for form in forms)
    if {"batch_offsets", "lengths"} <= features:
        yield make((5, 11), q_offset=np.asarray([2, 9], np.int32))
    if "segments" in features:
        ids = np.asarray([[0, 0, 0, 1, 1, 2, 2], [3, 3, 5, 5, 5, 5, 0]], np.int32)
        yield make(segment_ids=(ids, ids))
    if "mask" in features:
        yield make(mask=(np.random.default_rng(5).random((2, 6, 7, 7)) < 0.6) | np.eye(7, dtype=bool))
    if {"nowhere", "lengths"} <= features:
        yield make((9, 5))
    yield make(sized((150, 150), num_heads=2, batch=1), slopes=FLAT)


def circumstances(caller: Caller, failures: Sequence[Evidence], base: GradientReading) -> list[Diagnosis]:
    """Return which gradients are asked for, and what ``grad_output`` is, where nothing else is wrong.

    Nothing, if there is a failure that is no matter of those.
    """
    found = []
    for x in failures:
        if x.case is None or (x.case.wrt is None and x.case.cotangent == "random"):
            return []

        def is_right(case: Case) -> bool:
            observation = observe_gradients(caller, case, slopes=True)
            return observation is not None and observation.excess(base) <= 1

        whole, random = asked_otherwise(x.case, wrt=None), asked_otherwise(x.case, cotangent="random")
        if not is_right(asked_otherwise(whole, cotangent="random")):
            return []
        by_wrt = x.case.wrt is not None and is_right(whole)
        by_cotangent = x.case.cotangent != "random" and is_right(random)
        conditions = []
        if x.case.wrt is not None and (by_wrt or not by_cotangent):
            conditions.append(f"no gradients but those of {' and '.join(x.case.wrt)} are asked for")
        if x.case.cotangent != "random" and (by_cotangent or not by_wrt):
            conditions.append(f"grad_output is {_WORDS[x.case.cotangent]}")
        is_nan = x.actual is not None and bool(np.isnan(x.actual).any())
        sentence = f"The gradient of {x.part} is {'NaN' if is_nan else 'wrong'} where {' and '.join(conditions)}."
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
    changed.__dict__.update(arrays=arrays, arguments=case.arguments)  # where cached_property keeps its values
    return changed


def base_gradients(contract: str, dtype: str, *, has_slopes: bool) -> GradientReading:
    """Return how the gradients of an adapter of this contract should be read."""
    if contract == "falcon" and not has_slopes:
        return GradientReading(slope_dtype="bfloat16", rounding=("falcon", "bfloat16"), factor="bias scaled")
    return GradientReading()
