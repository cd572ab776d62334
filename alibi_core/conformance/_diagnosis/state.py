"""What calls take from those before them: a bias kept by its lengths alone, or anything else that is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from alibi_core.conformance._cases import Case
from alibi_core.conformance._diagnosis._departures import Departure
from alibi_core.conformance._diagnosis.observation import Observation
from alibi_core.conformance._diagnosis.probes import (
    FLAT,
    NUM_HEADS,
    STEEP,
    as_slopes,
    case_with_slopes,
    filled,
    make_case,
    observe,
)
from alibi_core.conformance._trial import Caller

_WORDS = {
    "slopes": "slopes",
    "is_causal": "is_causal",
    "q_offset": "q_offset",
    "window_size": "window_size",
    "scale": "scale",
    "mask": "mask",
    "future_slopes": "future_slopes",
}


def stale(caller: Caller, features: frozenset[str], reading: Callable[[Observation], Any]) -> list[Departure]:
    """Return what is taken from earlier calls of the same lengths.

    Args:
        caller: Of the adapter.
        features: What it offers.
        reading: How a call is read, but for that.
    """
    found: dict[str, Departure] = {}
    for length, turn in ((9, 1), (10, -1), (12, 1)):
        cases = list(_cases(caller, features, length))[::turn]
        observations = [(x, observe(caller, x)) for x in (*cases, cases[0])]
        if observations[0][1] is None or observations[0][1].excess(reading(observations[0][1])) > 1:
            return []
        for n, (case, observation) in enumerate(observations):
            if observation is not None and observation.excess(reading(observation)) > 1:
                earlier = [x for x, _ in observations[:n]][::-1]
                for departure in _taken(observation, case, earlier, reading):
                    if departure.key not in found and _is_right_at_first(
                        caller, features, n % len(cases), turn, reading
                    ):
                        found[departure.key] = departure
    return list(found.values())


def _is_right_at_first(
    caller: Caller, features: frozenset[str], place: int, turn: int, reading: Callable[[Observation], Any]
) -> bool:
    """Return whether the case is answered as it should be where it is the first of its lengths."""
    length = 20 + caller.calls % 90  # not asked for yet, as every call counts
    observation = observe(caller, list(_cases(caller, features, length))[::turn][place])
    return observation is not None and observation.excess(reading(observation)) <= 1


def _cases(caller: Caller, features: frozenset[str], length: int) -> Iterator[Case]:
    offer, lengths = caller.offer, (length, length)
    plain = make_case(offer, lengths)
    yield plain
    if offer.has_slopes:
        yield case_with_slopes(plain, as_slopes(*FLAT))
        yield case_with_slopes(plain, as_slopes(*STEEP[::-1]))
    if "symmetric" in features:
        yield make_case(offer, lengths, form="symmetric")
    if "asymmetric" in features:
        yield make_case(offer, lengths, form="asymmetric", future_slopes=as_slopes(*FLAT))
    if "offset" in features:
        yield make_case(offer, lengths, q_offset=2)
    if "window" in features:
        yield make_case(offer, lengths, window_size=2)
    if "scale" in features:
        yield make_case(offer, lengths, scale=0.2)
    if "mask" in features:
        mask = np.random.default_rng(length).random((2, NUM_HEADS, length, length)) < 0.6
        yield make_case(offer, lengths, mask=mask | np.eye(length, dtype=bool))
    rng = np.random.default_rng(1)
    other = {name: rng.permutation(plain.arrays[name], axis=2) for name in ("query", "key", "value")}
    yield filled(plain, plain.arrays | other, {})


def _taken(
    observation: Observation, case: Case, earlier: list[Case], reading: Callable[[Observation], Any]
) -> Iterator[Departure]:
    """Yield what the call takes from one of those before it, the latest that explains it."""
    for other in earlier:
        for name, hybrid in _hybrids(case, other):
            seen = dataclasses.replace(observation, case=hybrid, _cache={})
            if seen.excess(reading(seen)) <= 1:
                if name in ("query", "key", "value"):
                    words = f"A call of the same lengths gets the {name} of an earlier one: it is kept."
                else:
                    words = (
                        f"A call of the same lengths gets the {_WORDS[name]} of an earlier one: the bias, or what it "
                        f"is made from, is kept by its lengths alone. Keep it by {_WORDS[name]} too, or not at all."
                    )
                yield Departure(f"stale {name}", words, {})
                return


def _hybrids(case: Case, other: Case) -> Iterator[tuple[str, Case]]:
    """Yield the case with one ingredient of the other, or with all that make up its bias."""
    if not np.array_equal(case.arrays["slopes"], other.arrays["slopes"]):
        yield "slopes", case_with_slopes(case, other.arrays["slopes"])
    for name in ("is_causal", "q_offset", "window_size", "scale", "mask", "future_slopes"):
        values = [x.arguments.get(name) for x in (case, other)]
        if not (values[0] is values[1] or np.array_equal(np.asarray(values[0]), np.asarray(values[1]))):
            names = [name, "future_slopes"] if name == "is_causal" else [name]
            arguments = {key: x for key, x in case.arguments.items() if key not in names}
            arguments |= {key: other.arguments[key] for key in names if key in other.arguments}
            yield name, filled(case, case.arrays, arguments)
            yield name, filled(case, case.arrays | {"slopes": other.arrays["slopes"]}, arguments)
    for name in ("query", "key", "value"):
        if not np.array_equal(case.arrays[name], other.arrays[name]):
            yield name, filled(case, case.arrays | {name: other.arrays[name]}, case.arguments)
