"""What is wrong with decoding: each step is attention of the new tokens to all so far."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from alibi_core.conformance._cases import Case
from alibi_core.conformance._diagnosis._departures import FOLLOWING, Departure
from alibi_core.conformance._diagnosis._observations import (
    FLAT,
    LATE_ROWS,
    STEEP,
    Observation,
    make_case,
    sized,
)
from alibi_core.conformance._trial import TENSORS, Caller, CallError

STEPS = (3, 1, 1, 2, 1)
MIXED_STEPS = (9, 1, 2)  # whose lengths no other sequence has

DECODING = (
    Departure(
        "previous keys forgotten", "New tokens see one another alone: the cache is not used.", {"keys": ("own step", 0)}
    ),
    *FOLLOWING,
)


def decoding_case(caller: Caller, *, group: int = 1, seed: int = 0, flat: bool = False, one_hot: bool = False) -> Case:
    """Return a whole sequence; those with a seed are of other lengths."""
    length = sum(MIXED_STEPS if seed else STEPS)
    sizes, slopes = sized((length, length), group=group), FLAT if flat else STEEP
    case = make_case(caller.offer, sizes, slopes=slopes, one_hot=one_hot)
    rng = np.random.default_rng(seed)
    tensors = {} if one_hot else {name: rng.permutation(case.arrays[name], axis=2) for name in TENSORS}
    return case.with_arrays(**tensors)


def decoded(caller: Caller, *cases: Case, steps: Sequence[int] = STEPS) -> Iterator[Observation]:
    """Decode sequences by turns in these steps and yield what came of each, until a call comes to nothing."""
    with contextlib.suppress(CallError):
        for number, start, end, output, _ in caller.decoded(cases, [steps] * len(cases)):
            yield _observed(caller, cases[number], start, end, output)


def _observed(caller: Caller, case: Case, start: int, end: int, output: Any) -> Observation:
    parts = {"query": slice(start, end), "key": slice(end), "value": slice(end)}
    part = case.with_arrays(**{name: case.arrays[name][:, :, rows] for name, rows in parts.items()})
    conditions = {"grouped"} if case.sizes.group > 1 else set()
    conditions |= {"decoding", "single steps" if end - start == 1 else "chunks"} if start else {"prefill"}
    return Observation.of(caller, part, {"output": output}, slice(-LATE_ROWS, None), frozenset(conditions))


def observations(caller: Caller, features: frozenset[str]) -> list[Observation]:
    """Decode sequences and return what came of all steps, the plainest first."""
    case = decoding_case(caller)
    large = case.with_arrays(query=60 * case.arrays["query"])  # scores of which rounding leaves much
    length = 2 * STEPS[0] + 290
    long = make_case(caller.offer, sized((length, length), batch=1), slopes=FLAT)
    sequences: list[tuple[Case, Sequence[int]]] = [
        (decoding_case(caller, one_hot=True), STEPS),
        (case, STEPS),
        (large, STEPS),
    ]
    sequences += [(case, (1,) * sum(STEPS)), (case, (2, 3, 3))]
    sequences += [(decoding_case(caller, group=2), STEPS)] if "grouped" in features else []
    sequences += [(long, (length - 4, 1, 3))]
    return [x for case, steps in sequences for x in decoded(caller, case, steps=steps)]


def mixed_up(caller: Caller, reading: Any) -> list[Departure]:
    """Decode two sequences, steps read as ``reading`` says, and return what the second one takes from the first."""
    one, other = decoding_case(caller, seed=1), decoding_case(caller, seed=2, flat=True)
    first = list(decoded(caller, one, steps=MIXED_STEPS))
    if not _all_explained(first, reading):
        return []
    second = list(decoded(caller, other, steps=MIXED_STEPS))
    if not _all_explained(second, reading):
        if _all_explained([_with_arrays(x, slopes=one.arrays["slopes"]) for x in second], reading):
            return [_STALE_SLOPES]
        taken = [_with_keys_of(x, y) for x, y in zip(second, first, strict=False)]
        return [_STALE if _all_explained(taken, reading) else _MIXED]
    return [] if _all_explained(decoded(caller, one, other, steps=MIXED_STEPS), reading) else [_MIXED]


_STALE_SLOPES = Departure(
    "stale slopes",
    "A second sequence gets the slopes of the first: a bias is kept by its lengths alone, whatever slopes are given.",
    {},
)
_STALE = Departure(
    "stale cache",
    "A second sequence sees the keys of an earlier one: what is kept between calls is not told apart. Keep it "
    "in the cache that is returned.",
    {},
)
_MIXED = Departure(
    "sequences mixed",
    "Sequences get into each other: something is kept between calls beside the cache that is returned.",
    {},
)


def _all_explained(found: Iterable[Observation], reading: Any) -> bool:
    return all(x.excess(reading(x)) <= 1 for x in found)


def _with_arrays(observation: Observation, **arrays: Any) -> Observation:
    """Return the observation as that of a case with other arrays."""
    return replace(observation, case=observation.case.with_arrays(**arrays), _cache={})


def _with_keys_of(observation: Observation, other: Observation) -> Observation:
    """Return the observation as that of a case with another's keys and values, but for its own new tokens."""
    new = observation.case.sizes.lengths[0]
    pairs = {name: (other.case.arrays[name], observation.case.arrays[name]) for name in ("key", "value")}
    arrays = {
        name: np.concatenate([theirs[:, :, :-new], own[:, :, -new:]], axis=2) for name, (theirs, own) in pairs.items()
    }
    return _with_arrays(observation, **arrays)
