"""The search for the fewest departures that explain every observation."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from alibi_core.conformance._cases import UNIT_ROUNDOFF
from alibi_core.conformance._diagnosis._departures import Departure
from alibi_core.conformance._diagnosis._observations import Observation

LOW = ("bfloat16", "float16")
LONGEST = 2.0  # seconds for the pairs of one observation
MOST_ALIKE = 64  # how many pairs of departures that look alike are told apart
MOST_CANDIDATES = 40  # of those that explain a stage, how many are compared on all others


@dataclass(frozen=True)
class Finding:
    """A departure, and where it holds: everywhere, or only in calls under a condition, or without some."""

    departure: Departure
    condition: str | None = None
    exceptions: frozenset[str] = frozenset()

    def holds(self, observation: Observation) -> bool:
        """Return whether it is about this observation."""
        is_excepted = bool(self.exceptions & observation.conditions)
        return not is_excepted and (self.condition is None or self.condition in observation.conditions)

    @property
    def told(self) -> Departure:
        """The departure, as it is to be told."""
        return self.departure if self.condition is None else self.departure.under(self.condition)


Findings = tuple[Finding, ...]
Places = Sequence[str | None]
Estimates = Callable[[Observation, Any], Iterable[Departure]]


@dataclass
class Search:
    """Explains observations one after the other: each adds as few departures as possible to those found before.

    Attributes:
        catalogue: All departures worth trying.
        base: The reading that is no departure.
        estimates: Departures with numbers, from measurements.
        deadline: When to stop, in seconds of ``time.thread_time``: what others use of the processor does not count.
        found: The findings so far.
        explained, unexplained: The observations, sorted.
    """

    catalogue: Sequence[Departure]
    base: Any
    estimates: Estimates
    deadline: float
    found: Findings = ()
    explained: list[Observation] = field(default_factory=list)
    unexplained: list[Observation] = field(default_factory=list)

    def run(self, observations: Sequence[Observation]) -> None:
        """Explain all observations, as far as that is possible."""
        for index, observation in enumerate(observations):
            if self.explains(self.found, observation):
                self.explained.append(observation)
                continue
            if any(other.conditions <= observation.conditions for other in self.unexplained):
                self.unexplained.append(observation)  # it has what is not understood yet, and perhaps more
                continue
            found = self._next(observation, observations[index + 1 :])
            if found is None:
                self.unexplained.append(observation)
            else:
                self.found = found
                self.explained.append(observation)
                again, self.unexplained = self.unexplained, []
                for other in again:
                    (self.explained if self.explains(found, other) else self.unexplained).append(other)
        self._drop_superfluous()

    def reading(self, found: Findings, observation: Observation) -> Any:
        """Return how this observation is read, given what was found."""
        reading = self.base
        for finding in found:
            if finding.holds(observation):
                reading = finding.departure.applied(reading)
        return reading

    def explains(self, found: Findings, observation: Observation) -> bool:
        """Return whether what was found explains the observation."""
        return observation.excess(self.reading(found, observation)) <= 1

    def _next(self, observation: Observation, later: Sequence[Observation]) -> Findings | None:
        known = frozenset().union(*(x.conditions for x in self.explained)) if self.explained else frozenset()
        places: Places = [None, *sorted(observation.conditions, key=lambda x: (x in known, x))]
        current = self.reading(self.found, observation)
        measured = [observation, *(x for x in later if x.conditions <= observation.conditions | {"long", "lengths"})]
        estimated = [x for o in measured for x in self.estimates(o, self.reading(self.found, o))]
        departures = [*self.catalogue, *estimated]
        candidates: list[Findings] = []
        noisy: list[Findings] = []
        # What is not much better than nothing explains nothing.
        before = observation.excess(current)
        most = min(1.0, before / 2)
        for departure in departures:
            reading = departure.applied(current)
            if reading == current or not observation.tells(reading) or time.thread_time() > self.deadline:
                continue
            if departure.key == "signed" and current.is_noisy and "symmetric" not in observation.conditions:
                continue  # what rounding hides of the bias says nothing of future keys
            if departure.is_noisy:
                noisy += self._noisy((departure,), observation, later)
            elif observation.excess(reading) <= most and (
                np.isinf(before) or observation.distance(reading) <= 0.9 * observation.distance(current)
            ):
                candidates += [f for f in self._placed((departure,), places) if self._keeps_explained(f)]
        candidates += self._with_exceptions(observation, places)
        best = self._best(candidates, observation, later) if candidates else None
        if best is not None and not noisy:
            return best
        if observation.dtype in LOW and (current.is_noisy or not noisy):
            noisy += self._noisy_pairs(departures, observation, later)
        if noisy:
            near = (observation, *later[:2])
            rounded = min(noisy, key=lambda f: sum(o.distance(self.reading(f, o)) for o in near))
            if best is None or self._missed(rounded, later) < self._missed(best, later):
                return rounded
        return best or self._pair(observation, later, departures, places)

    def _noisy(
        self, departures: tuple[Departure, ...], observation: Observation, later: Sequence[Observation]
    ) -> list[Findings]:
        """Return the findings with these departures, which round sums, if the error looks like their rounding."""
        found = (*self.found, *(Finding(x) for x in departures))
        reading = self.reading(found, observation)
        if observation.excess(reading) > 1 or not self._keeps_explained(found):
            return []
        is_reproduced = observation.distance(reading) < observation.distance(self.reading(self.found, observation)) / 2
        is_likely = reading.noise[1] == observation.dtype
        if not is_reproduced and not (is_likely and observation.is_like_noise(reading)):
            return []
        others = [x for x in (*self.explained, *later) if x.conditions <= observation.conditions | {"long", "lengths"}]
        return [] if any(x.lacks_noise(self.reading(found, x)) for x in others) else [found]

    def _noisy_pairs(
        self, departures: Sequence[Departure], observation: Observation, later: Sequence[Observation]
    ) -> list[Findings]:
        """Return the findings by which bias and scores are both rounded to the dtype of the tensors."""
        dtype = observation.dtype
        found: list[Findings] = []
        for one in departures:
            if one.changes.get("rounding", ("", ""))[1] != dtype:
                continue
            for other in departures:
                if other.changes.get("noise") in (("scores", dtype), ("all scores", dtype)):
                    found += self._noisy((one, other), observation, later)
        return found

    def _with_exceptions(self, observation: Observation, places: Places) -> list[Findings]:
        """Return the findings with one of them limited to calls without some condition, if that explains all."""
        result = []
        for place in places:
            for finding in self.found:
                if place is not None and finding.holds(observation):
                    limited = replace(finding, exceptions=finding.exceptions | {place})
                    found = tuple(limited if x is finding else x for x in self.found)
                    if self.explains(found, observation) and self._keeps_explained(found):
                        result.append(found)
        return result

    def _missed(self, found: Findings, observations: Sequence[Observation]) -> int:
        return sum(not self.explains(found, x) for x in observations)

    def _pair(
        self, observation: Observation, later: Sequence[Observation], departures: Sequence[Departure], places: Places
    ) -> Findings | None:
        """Return two departures that explain the observation together."""
        current = self.reading(self.found, observation)
        before = observation.fingerprint(current)
        # Those alike in this observation are tried as one, and told apart by others.
        alike: dict[float, list[Departure]] = {}
        deadline = min(self.deadline, time.thread_time() + LONGEST)
        for departure in departures:
            if time.thread_time() > deadline:
                return None
            mark = observation.fingerprint(departure.applied(current))
            if not departure.is_noisy and (mark != before or departure.is_latent):
                alike.setdefault(mark if mark != before else float(len(alike)), []).append(departure)
        classes = list(alike.items())
        candidates: list[Findings] = []
        for index, (_, ones) in enumerate(classes):
            for _, others in classes[index + 1 :]:
                if time.thread_time() > deadline or len(candidates) > MOST_CANDIDATES:
                    break
                pair = _compatible(ones, others)
                if pair is None:
                    continue
                reading = pair[1].applied(pair[0].applied(current))
                if not observation.tells(reading) or observation.excess(reading) > 1:
                    continue
                for one, other in itertools.islice(itertools.product(ones, others), MOST_ALIKE):
                    if one.changes.keys() & other.changes.keys():
                        continue
                    if observation.excess(other.applied(one.applied(current))) <= 1:
                        candidates += [f for f in self._placed((one, other), places) if self._keeps_explained(f)]
        return self._best(candidates, observation, later) if candidates else None

    def _placed(self, departures: tuple[Departure, ...], places: Places) -> list[Findings]:
        """Return the findings so far with these departures, everywhere or under one condition."""
        return [(*self.found, *(Finding(x, place) for x in departures)) for place in places]

    def _keeps_explained(self, found: Findings) -> bool:
        return all(self.explains(found, x) for x in self.explained)

    def _best(self, candidates: list[Findings], observation: Observation, later: Sequence[Observation]) -> Findings:
        """Return the candidate that explains most later observations; of equals the simplest, and the closest here."""

        def badness(found: Findings) -> tuple[Any, ...]:
            unexplained = self._missed(found, (*later, *self.unexplained))
            is_bounded = sum(x.condition is not None for x in found)
            reading = self.reading(found, observation)
            is_other_dtype = reading.rounding[1] not in ("float64", observation.dtype)
            excess, distance = observation.excess(reading), observation.distance(reading)
            return unexplained, is_bounded, round(4 * excess), is_other_dtype, float(f"{distance:.1g}")

        best, least = candidates[0], badness(candidates[0])
        for found in candidates[1 : 2 * MOST_CANDIDATES]:
            if time.thread_time() > self.deadline + 0.5:
                break
            if (bad := badness(found)) < least:
                best, least = found, bad
        return best

    def _drop_superfluous(self) -> None:
        for finding in self.found:
            fewer = tuple(x for x in self.found if x is not finding)
            if all(self.explains(fewer, x) for x in self.explained):
                self.found = fewer


def _compatible(ones: Sequence[Departure], others: Sequence[Departure]) -> tuple[Departure, Departure] | None:
    """Return one of each that change different things."""
    for one, other in itertools.islice(itertools.product(ones, others), MOST_ALIKE):
        if not one.changes.keys() & other.changes.keys():
            return one, other
    return None


def rounded_scores(search: Search, observations: Sequence[Observation]) -> list[Departure]:
    """Return whether scores are rounded, though too little for any one observation to show it.

    Only such errors grow with scores: the two observations are compared in which rounding would show most.
    """
    for departure in search.catalogue:
        if departure.changes.get("noise", ("", ""))[0] != "scores":
            continue
        reading = departure.applied(search.base)
        shown = [x for x in observations if x.dtype in LOW and x.dtype == reading.noise[1]]
        most = sorted((x.noise_share(reading), index) for index, x in enumerate(shown))[-2:]
        is_clear = all(x > UNIT_ROUNDOFF[shown[index].dtype] for x, index in most)
        if len(most) == 2 and is_clear and all(shown[index].is_like_noise(reading) for _, index in most):
            return [departure]
    return []


def contract_that_explains(search: Search, observations: Sequence[Observation], contracts: Iterable[Departure]) -> bool:
    """Return whether one contract explains all observations, and the paper does not; if so, keep it as found."""
    if all(search.explains((), x) for x in observations if "symmetric" not in x.conditions):
        return False
    causal = [x for x in observations if "symmetric" not in x.conditions]  # which is all that contracts are made for
    for contract in contracts:
        found = (Finding(contract),)
        if causal and all(search.explains(found, x) for x in causal):
            search.found, search.explained = found, causal
            return True
    return False
