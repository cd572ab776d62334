"""Observations: one call, what came of it, and how far that is from what a reading says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Self

import numpy as np

from alibi_core.conformance._cases import UNIT_ROUNDOFF, Answer, Case, Values
from alibi_core.conformance._diagnosis._readings import Inputs, Reading
from alibi_core.conformance._trial import Caller

MOST_NOISE = 6  # times the largest error of rounding sums once: other sums may be rounded too
FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Observation:
    """One call, and what came of it.

    Attributes:
        case: What was asked.
        results: By name: ``output``, or gradients.
        dtype: Of the adapter.
        share: How much of a row's weight it may leave out.
        conditions: What is true of this call and not of all, among ``CONDITIONS``.
        rows: Which of the queries are looked at, the first and how many; None for all.
        ignores_nowhere: Whether queries that may look nowhere are left aside.
    """

    case: Case
    results: Mapping[str, Values]
    dtype: str
    share: float
    conditions: frozenset[str]
    rows: tuple[int, int] | None = None
    ignores_nowhere: bool = False
    _cache: dict[Reading, float] = field(default_factory=dict, compare=False)

    @classmethod
    def of(
        cls,
        caller: Caller,
        case: Case,
        results: Mapping[str, Values],
        rows: slice = slice(None),
        conditions: frozenset[str] | None = None,
    ) -> Self:
        """Return what came of a call, of some of the queries alone.

        Args:
            caller: Of the adapter.
            case: What was asked.
            results: By name.
            rows: Which of the queries to look at, in results ``[..., q_len, axis]``.
            conditions: What is true of this call and not of all. Default, what the case says.
        """
        q_len = case.sizes.lengths[0]
        shown = range(q_len)[rows]
        some = None
        if len(shown) < q_len:
            some, results = (shown[0], len(shown)), {name: x[..., rows, :] for name, x in results.items()}
        conditions = conditions_of(case) if conditions is None else conditions
        return cls(case, results, caller.offer.dtype, caller.offer.tolerance, conditions, some)

    @cached_property
    def inputs(self) -> Inputs:
        """The case, resolved."""
        inputs = Inputs.of(self.case, self.dtype)
        return inputs if self.rows is None else inputs.only(*self.rows)

    @property
    def leeway(self) -> dict[str, float]:
        """What leaving out keys may cost, by name."""
        return {"output": float(2 * self.share * np.abs(self.inputs.value).max(initial=0))}

    @cached_property
    def unseen(self) -> Any:
        """Which queries are left aside."""
        if not self.ignores_nowhere:
            return False
        visible = np.broadcast_to(Reading().visible(self.inputs), self.inputs.products.shape)
        return ~visible.any(axis=-1, keepdims=True)

    def answers(self, reading: Any) -> dict[str, Answer]:
        """Return what the reading says."""
        return {"output": reading.answer(self.inputs)}

    def excess(self, reading: Reading) -> float:
        """Return the largest error, relative to what rounding can do: at most 1 where the reading explains it all."""
        if reading not in self._cache:
            self._cache[reading] = self._excess(reading)
        return self._cache[reading]

    def _excess(self, reading: Reading) -> float:
        if not self.tells(reading):
            return 0.0
        with np.errstate(all="ignore"):
            far = self._far_off(reading)
            if far is not None:
                return far
            answers = self.answers(reading)
            noise = dict.fromkeys(answers, 0.0)
            if reading.is_noisy:
                exact = self.answers(reading.without_noise)
                noise = {name: _largest(x.value - exact[name].value) for name, x in answers.items()}
            worst = 0.0
            for name, actual in self.results.items():
                if name not in answers:
                    continue
                answer = answers[name]
                if actual.shape != answer.value.shape or np.any(np.isnan(actual) != np.isnan(answer.value)):
                    return float("inf")
                allowed = answer.budget + self.leeway.get(name, 0.0) + MOST_NOISE * noise[name]
                value = _overflowed(answer.value)
                ratio = np.where(actual == value, 0, np.abs(actual - value)) / allowed
                ratio = np.where(np.isnan(actual) | (self.unseen if name == "output" else False), 0, ratio)
                worst = max(worst, _largest(ratio))
            return worst

    @cached_property
    def _largest_budget(self) -> float:
        return _largest(Reading().answer(self.inputs).budget) + self.leeway["output"]

    def _far_off(self, reading: Any) -> float | None:
        """Return the approximate excess of a reading that is so far off that its own budget does not matter."""
        if type(self) is not Observation or reading.is_noisy:
            return None
        actual, value = self.results["output"], _overflowed(reading.output(self.inputs))
        error = np.where(actual == value, 0, np.abs(actual - value))
        # Weights that are not divided by their sum may be huge, and what rounds them, too.
        rounding = 1024 * UNIT_ROUNDOFF[self.dtype] * np.where(np.isfinite(value), np.abs(value), 0)
        ratio = _largest(np.where(self.unseen, 0, error) / (self._largest_budget + rounding))
        return ratio if ratio > 200 else None

    def tells(self, reading: Any) -> bool:
        """Return whether it can judge this reading: a softmax over queries needs all queries."""
        return self.rows is None or getattr(reading, "softmax", "") != "softmax over queries"

    def fingerprint(self, reading: Any) -> float:
        """Return a number that two readings share if they say the same."""
        with np.errstate(all="ignore"):
            if type(self) is Observation:
                values = [reading.output(self.inputs)]
            else:
                values = [x.value for name, x in self.answers(reading).items() if name in self.results]
            total = 0.0
            for x in values:
                total += float(np.nan_to_num(x, nan=0.7, posinf=0.3, neginf=0.1).ravel() @ _mix(x.size))
            return float(f"{total:.10g}")

    def is_like_noise(self, reading: Any) -> bool:
        """Return whether the error has about the size of the rounding of a noisy reading."""
        error, noise = self._error_and_noise(reading)
        return noise / 4 <= error <= 4 * noise

    def is_noise_of(self, reading: Any) -> bool:
        """Return whether the reading is noisy, and the error no larger than its rounding."""
        if not reading.is_noisy:
            return False
        error, noise = self._error_and_noise(reading)
        return error <= 8 * noise

    def noise_share(self, reading: Any) -> float:
        """Return the size of the rounding of a noisy reading, relative to all results."""
        return self._error_and_noise(reading)[1] / max(_mean_size(self.results), 1e-300)

    def lacks_noise(self, reading: Any) -> bool:
        """Return whether the rounding of a noisy reading would be seen here, and is not."""
        error, noise = self._error_and_noise(reading)
        return error < noise / 4 and noise > _mean_size({x: y.budget for x, y in self.answers(reading).items()})

    def _error_and_noise(self, reading: Any) -> tuple[float, float]:
        with np.errstate(all="ignore"):
            exact, noisy = self.answers(reading.without_noise), self.answers(reading)
            results = {name: x for name, x in self.results.items() if name in exact}
            error = _mean_size({name: x - exact[name].value for name, x in results.items()})
            return error, _mean_size({name: noisy[name].value - exact[name].value for name in results})

    def distance(self, reading: Reading) -> float:
        """Return the root of the mean squared error, of all results together."""
        with np.errstate(all="ignore"):
            answers = self.answers(reading)
            return _mean_size(
                {name: self.results[name] - x.value for name, x in answers.items() if name in self.results}
            )


def _mean_size(values: Mapping[str, Values]) -> float:
    """Return the root of the mean square of what is not NaN, NaN if all is."""
    together = np.concatenate([np.ravel(x) for x in values.values()])
    known = together[~np.isnan(together)]
    return float(np.sqrt(np.mean(known**2))) if known.size else math.nan if together.size else 0.0


def _overflowed(values: Values) -> Values:
    """Return values with infinities where float32 has them."""
    return np.where(np.abs(values) > FLOAT32_MAX, np.copysign(np.inf, values), values)


@lru_cache(maxsize=64)
def _mix(size: int) -> Values:
    return np.random.default_rng(size).standard_normal(size)


def _largest(values: Values) -> float:
    return float(np.nan_to_num(np.abs(values), nan=0.0, posinf=np.inf).max(initial=0))


def conditions_of(case: Case) -> frozenset[str]:
    """Return what is true of a case and not of all."""
    arguments, (q_len, kv_len) = case.arguments, case.sizes.lengths
    offset = arguments.get("q_offset", kv_len - q_len)
    is_array = np.ndim(offset) > 0
    facts = {
        "lengths": q_len != kv_len,
        "offset": not is_array and bool(np.any(offset != kv_len - q_len)),
        "batch_offsets": is_array,
        "far": bool(np.any(np.abs(offset) > 100_000)),
        "symmetric": not arguments.get("is_causal", True),
        "asymmetric": "future_slopes" in arguments,
        "grouped": case.sizes.group > 1,
        "window": "window_size" in arguments,
        "segments": "segment_ids" in arguments,
        "mask": "mask" in arguments,
        "batch_slopes": case.arrays["slopes"].ndim > 1,
        "scale": "scale" in arguments,
        "one query": q_len == 1,
        "long": kv_len >= 100,
    }
    return frozenset(name for name, is_so in facts.items() if is_so)
