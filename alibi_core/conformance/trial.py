"""Trials of an adapter: draw cases, call the adapter, and compare results with the exact ones."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import alibi_core
from alibi_core._contracts import named
from alibi_core.conformance.adapter import Offer
from alibi_core.conformance.caller import Caller, CallError, DepartureError
from alibi_core.conformance.case import FORMS, SMALL, Case, Choose, Sizes, design, draw_case
from alibi_core.conformance.oracle import Answer, Attention, excess
from alibi_core.conformance.reference import Values


@dataclass
class Trial:
    """An adapter under one law: its caller, its features, the number of cases to draw, and their seed."""

    caller: Caller
    features: frozenset[str]
    examples: int = 1
    seed: int = 0
    share: float = 0.0  # the largest error so far, as a share of its budget

    @property
    def is_thorough(self) -> bool:
        """Whether the profile is thorough: also draw cases at random, whatever compilation costs."""
        return self.examples > 100

    @property
    def offer(self) -> Offer:
        """The validated adapter."""
        return self.caller.offer

    def seeded(self, cases: Iterable[Case]) -> Iterator[Case]:
        """Yield each case with two seeds, or with four if it is small."""
        for case in cases:
            for seed in range(4 if case.sizes.elements <= SMALL else 2):
                yield dataclasses.replace(case, seed=seed and seed + self.seed)

    def offers(self, case: Case) -> bool:
        """Return whether the adapter offers the features of a case."""
        return case.features <= self.features

    def drawn(
        self, sizes: Sequence[Sizes], share: float = 1, features: frozenset[str] | None = None, **more: Any
    ) -> Iterator[Case]:
        """Yield drawn cases, ``share`` of the profile's number: a design; if thorough, random cases, too."""
        features = self.features if features is None else features & self.features
        sizes = [size for size in sizes if self.offers(Case(size))]
        forms = [form for form in FORMS if self.offers(Case(sizes[0], form))]

        def draw(choose: Choose) -> Case:
            return draw_case(choose, sizes, forms, features, **more)

        yield from self.seeded(design(draw, max(1, round(min(self.examples, 20) * share / 2)), self.seed))
        rng = random.Random(self.seed)
        for _ in range(round(self.examples * share) if self.is_thorough else 0):
            yield dataclasses.replace(draw(rng.choice), seed=rng.randrange(2**16))

    def fitted(self, case: Case) -> Case:
        """Return the case; with the slopes of the adapter's contract if the adapter takes no slopes."""
        if self.offer.has_slopes:
            return case
        own = np.asarray(alibi_core.slopes(case.num_heads, contract=self.offer.contract), np.float64)
        return case.with_arrays(slopes=own)

    def exact(self, case: Case) -> Attention:
        """Return the exact problem of a case, with error budgets for the adapter's dtype and contract."""
        offer, is_near = self.offer, "far" not in self.features
        problem = case.exact(offer.dtype, offer.tolerance, counted_from_anywhere=is_near)
        contract = named(offer.contract)
        if offer.has_slopes or not contract.is_key_only:
            return problem
        (q_len, kv_len), offset = case.sizes.lengths, case.arguments.get("q_offset")
        bias = alibi_core.bias(case.num_heads, q_len, kv_len, q_offset=offset, contract=contract.name)
        visible = np.isfinite(problem.bias)
        factor = case.scale if contract.name == "falcon" else 1.0  # Falcon adds the bias before it scales
        bias = np.where(visible, np.where(visible, bias, 0).astype(np.float64) * factor + problem.sums, -np.inf)
        return dataclasses.replace(problem, bias=bias)

    def attention(self, case: Case, *, nowhere: bool = False) -> None:
        """Check the adapter's attention in a case; fully masked queries are checked only with ``nowhere``."""
        case = self.fitted(case)
        actual, problem = self._called("attention", case), self.exact(case)
        if not nowhere:
            actual = np.where(np.isfinite(problem.bias).any(axis=-1, keepdims=True), actual, 0.0)
        self.compare("attention", str(case), actual, problem.output, case)

    def gradients(self, case: Case, names: tuple[str, ...]) -> None:
        """Check the adapter's gradients by these inputs in a case."""
        case = self.fitted(case)
        problem = self.exact(case)
        if "nowhere" not in self.features and not np.isfinite(problem.bias).any(axis=-1).all():
            return
        actual = self._called("gradients", case)
        for name, answer in case.gradients(self.offer.dtype, problem=problem).items():
            is_asked = name in names and (case.wrt is None or name in case.wrt)
            if not is_asked or ("slopes" in name and not self.offer.has_slopes):
                continue
            if name not in actual:
                raise CallError("returned", f"attention_grad returned no gradient of {name}")
            self.compare("attention_grad", str(case), actual[name], answer, case, name)

    def _called(self, function: str, case: Case) -> Any:
        try:
            return getattr(self.caller, function)(case)
        except CallError as error:
            error.inputs = str(case)
            raise

    def compare(
        self, function: str, inputs: str, actual: Values, answer: Answer, case: Case | None = None, part: str = ""
    ) -> None:
        """Raise :class:`DepartureError` unless a result is within the budget of the exact answer."""
        # Exact biases hold -inf; all other exact values are finite.
        finite, found = np.isfinite(answer.value), np.isfinite(actual)
        faults = {
            "NaN": np.isnan(actual),
            "infinite where it should not be": ~found & finite,
            "finite where it should be minus infinity": found & ~finite,
        }
        remark = next((words for words, where in faults.items() if where.any()), "")
        share = float(excess(actual, answer).max(initial=0))
        if remark or share > 1:
            raise DepartureError(function, inputs, actual, answer, case, part, remark)
        self.share = max(self.share, share)
