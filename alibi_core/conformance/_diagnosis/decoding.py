"""What is wrong with decoding: each step is attention of the new tokens to all so far."""

from __future__ import annotations

from collections.abc import Sequence
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


def decoded(caller: Caller, case: Case, steps: Sequence[int] = STEPS) -> list[Observation]:
    """Decode a sequence in steps and return what came of each."""
    cache, start = None, 0
    found: list[Observation] = []
    for step in steps:
        end = start + step
        tensors = {name: case.arrays[name][:, :, start:end] for name in TENSORS}
        try:
            output, cache = caller.decode_step(tensors, case.arrays["slopes"], cache)
        except CallError:
            return found
        found.append(_observed(caller, case, start, end, output))
        start = end
    return found


def _observed(caller: Caller, case: Case, start: int, end: int, output: Any) -> Observation:
    parts = {"query": slice(start, end), "key": slice(end), "value": slice(end)}
    part = case.with_arrays(**{name: case.arrays[name][:, :, rows] for name, rows in parts.items()})
    conditions = {"grouped"} if case.sizes.group > 1 else set()
    conditions |= {"decoding", "single steps" if end - start == 1 else "chunks"} if start else {"prefill"}
    return Observation.of(caller, part, {"output": output}, slice(-LATE_ROWS, None), frozenset(conditions))


def observations(caller: Caller, features: frozenset[str]) -> list[Observation]:
    """Decode sequences and return what came of all steps, the plainest first."""
    case = decoding_case(caller)
    found = decoded(caller, decoding_case(caller, one_hot=True)) + decoded(caller, case)
    large = case.with_arrays(query=60 * case.arrays["query"])
    found += decoded(caller, large)  # scores of which rounding leaves much
    found += decoded(caller, case, (1, 1, 1, 1, 1, 1, 1, 1)) + decoded(caller, case, (2, 3, 3))
    if "grouped" in features:
        found += decoded(caller, decoding_case(caller, group=2))
    length = 2 * STEPS[0] + 290
    long = make_case(caller.offer, sized((length, length), batch=1), slopes=FLAT)
    return found + decoded(caller, long, (length - 4, 1, 3))


def mixed_up(caller: Caller, reading: Any) -> list[Departure]:
    """Decode two sequences, steps read as ``reading`` says, and return what the second one takes from the first."""
    one, other = decoding_case(caller, seed=1), decoding_case(caller, seed=2, flat=True)
    first = decoded(caller, one, MIXED_STEPS)
    if not _all_explained(first, reading):
        return []
    second = decoded(caller, other, MIXED_STEPS)
    if not _all_explained(second, reading):
        if _all_explained([_with_arrays(x, slopes=one.arrays["slopes"]) for x in second], reading):
            return [_STALE_SLOPES]
        taken = [_with_keys_of(x, y) for x, y in zip(second, first, strict=False)]
        return [_STALE if _all_explained(taken, reading) else _MIXED]
    return [_MIXED] if not _explained_in_turn(caller, one, other, reading) else []


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


def _explained_in_turn(caller: Caller, one: Case, other: Case, reading: Any) -> bool:
    """Whether two sequences that take turns are decoded as each alone is."""
    caches: list[Any] = [None, None]
    start = 0
    for step in MIXED_STEPS:
        for n, case in enumerate((one, other)):
            tensors = {name: case.arrays[name][:, :, start : start + step] for name in TENSORS}
            try:
                output, caches[n] = caller.decode_step(tensors, case.arrays["slopes"], caches[n])
            except CallError:
                return True
            if not _all_explained([_observed(caller, case, start, start + step, output)], reading):
                return False
        start += step
    return True


def _all_explained(found: list[Observation], reading: Any) -> bool:
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
