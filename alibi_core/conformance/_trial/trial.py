"""One adapter before one law: cases drawn, results compared, and the smallest counterexample kept."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import strategies as st

import alibi_core
from alibi_core._contracts import named
from alibi_core.conformance._adapter import Offer
from alibi_core.conformance._cases import Answer, Attention, Case, Family, Values, excess, smaller_cases
from alibi_core.conformance._trial.caller import Caller, CallError, DepartureError

Drawn = TypeVar("Drawn")


@dataclass
class Trial:
    """What a law needs to know of an adapter, and what it does to it.

    Attributes:
        caller: Calls the adapter.
        features: Those that it offers.
        examples: How many cases a law draws.
        seed: Of the draws.
        shrinking: Seconds, after which the smallest counterexample so far has to do.
        share: The largest part of an error budget that was used up.
    """

    caller: Caller
    features: frozenset[str]
    examples: int
    seed: int
    shrinking: float = 8.0
    share: float = 0.0

    @property
    def is_thorough(self) -> bool:
        """Whether cases are many, so that it does not matter how long compilers take over them."""
        return self.examples > 100

    @property
    def offer(self) -> Offer:
        """The adapter, resolved."""
        return self.caller.offer

    def for_cases(self, family: Family, body: Callable[[Case], None], *, share: float = 1) -> None:
        """Run ``body`` on cases of a family, as :meth:`for_all` does: in a quick profile, on those of its design.

        Each case of the design is tried twice in a row, with other data. Once one fails, the smallest one is looked
        for among all of the family.
        """
        if self.is_thorough:
            return self.for_all(dataclasses.replace(family, is_dense=True).cases(), body, share=share)
        design = family.design(max(1, round(self.examples * share / 2)), self.seed)
        numbers = itertools.count()

        def placed(drawn: Case) -> Case:
            return dataclasses.replace(design[next(numbers) // 2 % len(design)], seed=drawn.seed, data=drawn.data)

        return self.for_all(family.cases(), body, share=share, placed=placed)

    def for_all(
        self,
        strategy: st.SearchStrategy[Drawn],
        body: Callable[[Drawn], None],
        *,
        share: float = 1,
        placed: Callable[[Drawn], Drawn] | None = None,
    ) -> None:
        """Run ``body`` on what Hypothesis draws; raise the error of the smallest case for which it raises one.

        Args:
            strategy: What to draw.
            body: Raises :class:`DepartureError` or :class:`CallError`.
            share: Of the examples that laws have otherwise.
            placed: What to try in place of what is drawn, as long as nothing has failed. Default, what is drawn.
        """
        failures: list[DepartureError | CallError] = []
        smallest: list[Drawn] = []
        tried: dict[Drawn, Drawn] = {}  # what is tried in place of each draw: Hypothesis expects the same for the same
        since = 0.0

        def test(drawn: Drawn) -> None:
            nonlocal since
            if placed is not None:
                if not failures and drawn not in tried:
                    tried[drawn] = placed(drawn)
                drawn = tried.get(drawn, drawn)
            late = failures and time.monotonic() - since > self.shrinking
            if late and drawn != smallest[-1]:
                return
            try:
                body(drawn)
            except (DepartureError, CallError) as error:
                if isinstance(error, CallError):
                    error.inputs = ", then ".join(map(str, drawn)) if isinstance(drawn, tuple) else str(drawn)
                if not failures:
                    since = time.monotonic()
                if not self.caller.hung or not failures:
                    failures.append(error)
                    smallest.append(drawn)
                raise

        examples = max(1, round(self.examples * share))
        run = settings(
            max_examples=examples,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            report_multiple_bugs=False,
            verbosity=Verbosity.quiet,
            suppress_health_check=list(HealthCheck),
        )(hypothesis.seed(self.seed)(hypothesis.given(strategy)(test)))
        try:
            run()
        except BaseException:
            # One that Hypothesis could not repeat counts too: then the answer depends on more than the arguments.
            if not failures:
                raise
            raise self._smaller(smallest[-1], body) or failures[-1] from None

    def _smaller(self, drawn: Any, body: Callable[[Any], None]) -> DepartureError | CallError | None:
        """Return the error of a case like the one drawn, but of fewer and shorter axes, if there is one."""
        since = time.monotonic()
        if not isinstance(drawn, Case) or self.caller.hung:
            return None
        for case in smaller_cases(drawn):
            if time.monotonic() - since > self.shrinking:
                break
            try:
                body(case)
            except DepartureError as error:
                return error
            except CallError:
                continue
        return None

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
        actual, problem = self.caller.attention(case), self.exact(case)
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
