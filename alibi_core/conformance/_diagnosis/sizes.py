"""Beyond which size results are wrong, where they are right below: heads, features, batch entries, tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from alibi_core.conformance._cases import Case
from alibi_core.conformance._laws import all_gradients, large_case
from alibi_core.conformance._report import Diagnosis
from alibi_core.conformance._trial import Caller, CallError, DepartureError, Evidence, Trial

SMALL, LARGE = 6, 8  # of an axis: no path of a kernel begins at the one, and some do beyond the other
WIDTHS = {
    "head_dim": "features a head",
    "batch": "batch entries",
    "num_kv_heads": "heads",
    "group": "query heads to a key/value head",
}
TOKENS = {"lengths": "tokens"}


def beyond_sizes(
    caller: Caller, function: str, features: frozenset[str], failures: Sequence[Evidence], axes: dict[str, str]
) -> list[Diagnosis]:
    """Return beyond which size of an axis results are wrong; nothing if there is a failure that is no matter of it.

    Args:
        caller: Of the adapter.
        function: ``"attention"`` or ``"attention_grad"``.
        features: What it offers.
        failures: Calls of the function that failed.
        axes: Those to look at: ``WIDTHS`` or ``TOKENS``.
    """
    trial, found = Trial(caller, features, 1, 0), []
    hold = trial.attention if function == "attention" else lambda x: trial.gradients(x, all_gradients(trial))
    for case in (x.case for x in failures):
        sentences = [] if case is None else [_sentence(hold, case, axis, axes[axis]) for axis in axes]
        if not any(sentences):
            return []
        found += [Diagnosis("wrong beyond a size", x) for x in sentences if x]
    return found


def _sentence(hold: Callable[[Case], None], case: Case, axis: str, words: str) -> str:
    """Return beyond which size of an axis results are wrong, in words; none if it does not depend on that."""
    right, wrong = SMALL, case.sizes.lengths[1] if axis == "lengths" else getattr(case.sizes, axis)
    if wrong <= LARGE or not _is_right(hold, case, axis, right) or _is_right(hold, case, axis, wrong):
        return ""
    # At powers of two first, for that is where code ends, and from the smallest one, for large cases take long.
    tries = [number for power in range(3, 12) for number in (2**power, 2**power + 1)]
    while wrong - right > 1:
        number = next((x for x in tries if right < x < wrong), (right + wrong) // 2)
        right, wrong = (number, wrong) if _is_right(hold, case, axis, number) else (right, number)
    return f"Results are wrong with more than {right} {words}."


def _is_right(hold: Callable[[Case], None], case: Case, axis: str, number: int) -> bool:
    """Return whether a case is answered as it should be with that many of an axis."""
    q_len, kv_len = case.sizes.lengths
    value: Any = (number if q_len == kv_len else min(q_len, number), number) if axis == "lengths" else number
    sized = large_case(dataclasses.replace(case.sizes, **{axis: value}), case.seed, case.form)
    try:
        hold(sized)
    except (DepartureError, CallError):
        return False
    return True
