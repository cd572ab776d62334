"""One adapter before one law: cases are tried, the smallest first, and results are compared with the exact ones."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

import alibi_core
from alibi_core._contracts import named
from alibi_core.conformance.adapter import Offer
from alibi_core.conformance.caller import Caller, CallError, DepartureError
from alibi_core.conformance.case import SMALL, Case, Family
from alibi_core.conformance.oracle import Answer, Attention, Values, excess


@dataclass
class Trial:
    """An adapter, and what a law needs to know of it.

    Attributes:
        caller: Calls the adapter.
        features: Those that it offers.
        examples: How many cases a law tries where it has a choice.
        seed: Of the cases.
        share: The largest part of an error budget that was used up.
    """

    caller: Caller
    features: frozenset[str]
    examples: int
    seed: int
    share: float = 0.0

    @property
    def is_thorough(self) -> bool:
        """Whether there are so many cases that the time of compilers does not matter."""
        return self.examples > 100

    @property
    def offer(self) -> Offer:
        """The adapter, resolved."""
        return self.caller.offer

    def every(self, cases: Iterable[Case], body: Callable[[Case], None]) -> None:
        """Run ``body`` on cases with several seeds each, more where they are small."""
        for case in cases:
            seeds = range(4 if case.sizes.elements <= SMALL else 2)
            for seed in seeds:
                body(dataclasses.replace(case, seed=seed and seed + self.seed))

    def family(self, family: Family, body: Callable[[Case], None], *, share: float = 1) -> None:
        """Run ``body`` on the design of a family, and on as many cases at random as a thorough profile has."""
        self.every(family.design(max(1, round(min(self.examples, 20) * share / 2)), self.seed), body)
        rng = random.Random(self.seed)
        for _ in range(round(self.examples * share) if self.is_thorough else 0):
            case = family.draw(rng, dense=True)
            body(dataclasses.replace(case, seed=rng.randrange(2**16)))

    @contextlib.contextmanager
    def told(self, case: Case) -> Iterator[None]:
        """Let an error of a call say by which case it came."""
        try:
            yield
        except CallError as error:
            error.inputs = error.inputs or str(case)
            raise

    def exact(self, case: Case) -> Attention:
        """Return the exact answer to a case, and how far off it may be by the adapter's dtype and contract."""
        problem = case.exact(self.offer.dtype, counted_from_anywhere="far" not in self.features)
        contract = named(self.offer.contract)
        if self.offer.has_slopes or not contract.is_key_only:
            return problem
        rules, (q_len, kv_len) = case.rules(case.arrays["slopes"]), case.sizes.lengths
        bias = alibi_core.bias(case.num_heads, q_len, kv_len, q_offset=int(rules.q_offset), contract=contract.name)
        visible = np.isfinite(problem.bias)
        factor = case.scale if contract.name == "falcon" else 1.0  # its models add the bias before they scale
        bias = np.where(visible, np.where(visible, bias, 0).astype(np.float64) * factor, -np.inf)
        return dataclasses.replace(problem, bias=bias)

    def fitted(self, case: Case) -> Case:
        """Return the case with the slopes that the adapter has, if it takes none."""
        if self.offer.has_slopes:
            return case
        own = np.asarray(alibi_core.slopes(case.num_heads, contract=self.offer.contract), np.float64)
        return case.with_arrays(slopes=own)

    def attention(self, case: Case, *, nowhere: bool = False) -> None:
        """Hold the adapter's attention to a case; with ``nowhere``, also the queries that may look nowhere."""
        case = self.fitted(case)
        problem = self.exact(case)
        with self.told(case):
            actual = self.caller.attention(case)
        if not nowhere:
            sees = np.isfinite(problem.bias).any(axis=-1, keepdims=True)
            actual = np.where(sees, actual, 0.0)
        self.compare("attention", str(case), actual, problem.output_without(self.offer.tolerance), case)

    def gradients(self, case: Case, names: tuple[str, ...]) -> None:
        """Hold the adapter's gradients of these inputs to a case."""
        case = self.fitted(case)
        problem = self.exact(case)
        if "nowhere" not in self.features and not np.isfinite(problem.bias).any(axis=-1).all():
            return
        with self.told(case):
            actual = self.caller.gradients(case)
        answers = case.gradients(self.offer.dtype, self.offer.tolerance, problem=problem)
        names = tuple(x for x in names if x in answers and (case.wrt is None or x in case.wrt))
        for name in (x for x in names if self.offer.has_slopes or "slopes" not in x):
            if name not in actual:
                remark = f"attention_grad returned no gradient of {name}"
                raise DepartureError("attention_grad", str(case), None, answers[name], case, name, remark)
            self.compare("attention_grad", str(case), actual[name], answers[name], case, name)

    def compare(
        self, function: str, inputs: str, actual: Values, answer: Answer, case: Case | None = None, part: str = ""
    ) -> None:
        """Raise :class:`DepartureError` unless a result is within the budget of the exact answer."""
        finite = np.isfinite(answer.value)
        remark = ""
        if np.isnan(actual).any():
            remark = "NaN"
        elif not np.array_equal(np.isfinite(actual), finite):
            hides = bool((~np.isfinite(actual) & finite).any())
            remark = "infinite where it should not be" if hides else "finite where it should be minus infinity"
        share = float(excess(actual, answer).max(initial=0))
        if remark or share > 1:
            raise DepartureError(function, inputs, actual, answer, case, part, remark)
        self.share = max(self.share, share)
