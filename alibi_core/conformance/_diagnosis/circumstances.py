"""What results must not depend on: earlier calls, and the size of an axis beyond some number."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from alibi_core.conformance._cases import Case
from alibi_core.conformance._diagnosis._departures import Departure
from alibi_core.conformance._diagnosis._observations import (
    FLAT,
    NUM_HEADS,
    STEEP,
    Observation,
    Probe,
    as_slopes,
    cases_of,
    observe,
)
from alibi_core.conformance._laws import all_gradients, large_case
from alibi_core.conformance._report import Diagnosis
from alibi_core.conformance._trial import TENSORS, Caller, CallError, DepartureError, Trial

SMALL, LARGE = 6, 8  # of an axis: no path of a kernel begins at the one, and some do at the other
WIDTHS = {
    "head_dim": "features a head",
    "batch": "batch entries",
    "num_kv_heads": "heads",
    "group": "query heads to a key/value head",
}
TOKENS = {"lengths": "tokens"}

ARGUMENTS = ("is_causal", "q_offset", "window_size", "scale", "mask", "future_slopes")


def stale(caller: Caller, features: frozenset[str], reading: Callable[[Observation], Any]) -> list[Departure]:
    """Return what is taken from earlier calls of the same lengths; but for that, calls are read as ``reading`` says."""

    def is_right(observation: Observation | None) -> bool:
        return observation is not None and observation.excess(reading(observation)) <= 1

    found: dict[str, Departure] = {}
    for length, turn in ((9, 1), (10, -1), (12, 1)):
        cases = list(_cases(caller, features, length))[::turn]
        observations = [(x, observe(caller, x)) for x in (*cases, cases[0])]
        if not is_right(observations[0][1]):
            return []
        for n, (case, observation) in enumerate(observations):
            if observation is None or is_right(observation):
                continue
            for departure in _taken(observation, case, [x for x, _ in observations[:n]][::-1], reading):
                if departure.key in found:
                    continue
                # Where it is the first case of its lengths, which are none asked for yet, as every call counts.
                others = list(_cases(caller, features, 20 + caller.calls % 90))[::turn]
                if is_right(observe(caller, others[n % len(cases)])):
                    found[departure.key] = departure
    return list(found.values())


def _cases(caller: Caller, features: frozenset[str], length: int) -> Iterator[Case]:
    square = (length, length)
    own = (STEEP, FLAT, STEEP[::-1]) if caller.offer.has_slopes else (STEEP,)
    mask = np.random.default_rng(length).random((2, NUM_HEADS, *square)) < 0.6
    probes = (
        *(Probe("", square, {"slopes": slopes}) for slopes in own),
        Probe("symmetric", square),
        Probe("asymmetric", square, {"future_slopes": as_slopes(FLAT)}),
        Probe("offset", square, {"q_offset": 2}),
        Probe("window", square, {"window_size": 2}),
        Probe("scale", square, {"scale": 0.2}),
        Probe("mask", square, {"mask": mask | np.eye(length, dtype=bool)}),
    )
    cases = [case for case, _ in cases_of(caller.offer, features, probes)]
    yield from cases
    rng = np.random.default_rng(1)
    yield cases[0].with_arrays(**{name: rng.permutation(cases[0].arrays[name], axis=2) for name in TENSORS})


def _taken(
    observation: Observation, case: Case, earlier: list[Case], reading: Callable[[Observation], Any]
) -> Iterator[Departure]:
    """Yield the ingredient that a call takes from an earlier one: the latest call that explains the result."""
    for other in earlier:
        for name, hybrid in _hybrids(case, other):
            seen = dataclasses.replace(observation, case=hybrid, _cache={})
            if seen.excess(reading(seen)) <= 1:
                if name in TENSORS:
                    words = f"A call of the same lengths gets the {name} of an earlier one: it is kept."
                else:
                    words = (
                        f"A call of the same lengths gets the {name} of an earlier one: the bias, or what it "
                        f"is made from, is kept by its lengths alone. Keep it by {name} too, or not at all."
                    )
                yield Departure(f"stale {name}", words, {})
                return


def _hybrids(case: Case, other: Case) -> Iterator[tuple[str, Case]]:
    """Yield the case with one ingredient of the other, by name; the ingredients of a bias also with its slopes."""
    if not np.array_equal(case.arrays["slopes"], other.arrays["slopes"]):
        yield "slopes", case.with_arrays(slopes=other.arrays["slopes"])
    for name in ARGUMENTS:
        values = [x.arguments.get(name) for x in (case, other)]
        if not (values[0] is values[1] or np.array_equal(np.asarray(values[0]), np.asarray(values[1]))):
            names = [name, "future_slopes"] if name == "is_causal" else [name]
            arguments = {key: x for key, x in case.arguments.items() if key not in names}
            arguments |= {key: other.arguments[key] for key in names if key in other.arguments}
            hybrid = case.with_arguments(case.form, arguments)
            yield name, hybrid
            yield name, hybrid.with_arrays(slopes=other.arrays["slopes"])
    for name in TENSORS:
        if not np.array_equal(case.arrays[name], other.arrays[name]):
            yield name, case.with_arrays(**{name: other.arrays[name]})


def beyond_sizes(
    caller: Caller, function: str, features: frozenset[str], failures: Sequence[DepartureError], axes: dict[str, str]
) -> list[Diagnosis]:
    """Return at or beyond which size of an axis results are wrong; nothing if a failure has another cause.

    Args:
        caller: Of the adapter.
        function: ``"attention"`` or ``"attention_grad"``.
        features: What it offers.
        failures: Calls of the function that failed.
        axes: Those to look at: ``WIDTHS`` or ``TOKENS``.
    """
    trial, found = Trial(caller, features, 1, 0), []

    def is_right(case: Case, axis: str, number: int) -> bool:
        """Return whether a case is answered as it should be with that many of an axis."""
        q_len, kv_len = case.sizes.lengths
        value: Any = (number if q_len == kv_len else min(q_len, number), number) if axis == "lengths" else number
        case = large_case(dataclasses.replace(case.sizes, **{axis: value}), case.seed, case.form)
        try:
            trial.attention(case) if function == "attention" else trial.gradients(case, all_gradients(trial))
        except (DepartureError, CallError):
            return False
        return True

    for case in (x.case for x in failures):
        limits = {} if case is None else {axis: _limit(is_right, case, axis) for axis in axes}
        if case is None or not any(limits.values()):
            return []
        for axis in (axis for axis in axes if limits[axis]):
            limit, words = limits[axis], axes[axis]
            if axis == "num_kv_heads" and case.sizes.group > 1:
                words = "key/value heads"
            key, where = "wrong beyond a size", f"more than {limit} {words}"
            if is_right(case, axis, limit + 2):
                key, where = "wrong at a size", f"{limit + 1} {words}, but not one more or fewer"
            found.append(Diagnosis(key, f"Results are wrong with {where}."))
    return found


def _limit(is_right: Callable[[Case, str, int], bool], case: Case, axis: str) -> int:
    """Return beyond which size of an axis results are wrong; 0 if it does not depend on that."""
    right, wrong = SMALL, case.sizes.lengths[1] if axis == "lengths" else getattr(case.sizes, axis)
    if wrong < LARGE or not is_right(case, axis, right) or is_right(case, axis, wrong):
        return 0
    # At powers of two first, for that is where code ends, and from the smallest one, for large cases take long.
    tries = [number for power in range(3, 12) for number in (2**power, 2**power + 1)]
    while wrong - right > 1:
        number = next((x for x in tries if right < x < wrong), (right + wrong) // 2)
        right, wrong = (number, wrong) if is_right(case, axis, number) else (right, number)
    return right
