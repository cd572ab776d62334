"""What came of a check against golden vectors."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from alibi_core.conformance._report import plain


@dataclass(frozen=True)
class Worst:
    """The element of a case's results that used up most of its budget.

    Attributes:
        tensor: Which result.
        index: Which element.
        expected, actual, budget: Of this element.
        ratio: How far off it is, as a share of the budget; infinite where no distance says it.
    """

    tensor: str
    index: tuple[int, ...]
    expected: float
    actual: float
    budget: float
    ratio: float

    def __str__(self) -> str:
        if math.isinf(self.ratio):
            return f"{self.tensor} at {self.index}: {self.actual!r}, expected {self.expected!r}"
        return (
            f"{self.tensor} at {self.index}: {self.actual!r}, expected {self.expected!r} within {self.budget:.3g}, "
            f"off by {self.ratio:.3g} times that"
        )


@dataclass(frozen=True)
class CaseResult:
    """What came of one case.

    Attributes:
        name: Its id.
        description: What it is, in words.
        status: ``"passed"``, ``"failed"`` or ``"not offered"``.
        worst: The worst element of all results that were offered; None if there is none.
        missing: The results that were not offered.
        remark: What went wrong, where that is no element.
    """

    name: str
    description: str
    status: str
    worst: Worst | None = None
    missing: tuple[str, ...] = ()
    remark: str = ""

    def __str__(self) -> str:
        reason = self.remark or (str(self.worst) if self.status == "failed" else "")
        return f"{self.name}: {self.status}" + (f", {reason}" if reason else "")


@dataclass(frozen=True)
class GoldenReport:
    """What came of all cases.

    Attributes:
        program: What the results say they are from.
        dtype: Whose budgets counted.
        golden_version: Of the golden vectors.
        cases: In their order.

    Example:
        >>> report = GoldenReport("mine", "float32", 1, (CaseResult("slopes/canonical", "all", "passed"),))
        >>> report.passed, report.counts
        (True, {'passed': 1, 'failed': 0, 'not offered': 0})
    """

    program: str
    dtype: str
    golden_version: int
    cases: tuple[CaseResult, ...]

    @property
    def passed(self) -> bool:
        """Whether no case failed, of those that were offered."""
        return self.counts["failed"] == 0

    @property
    def counts(self) -> dict[str, int]:
        """How many cases passed, failed and were not offered."""
        states = [case.status for case in self.cases]
        return {status: states.count(status) for status in ("passed", "failed", "not offered")}

    def __str__(self) -> str:
        counts = ", ".join(f"{n} {status}" for status, n in self.counts.items())
        head = f"{self.program}, {self.dtype}, golden vectors {self.golden_version}: {counts}"
        return "\n".join([head, *(f"  {case}" for case in self.cases if case.status == "failed")])

    def to_dict(self) -> dict[str, Any]:
        """Return the same for JSON, which has no numbers that are not finite: they are strings."""
        known: dict[str, Any] = plain(asdict(self))
        cases = [{"id": case.pop("name"), **case} for case in known["cases"]]
        return known | {"passed": self.passed, "counts": self.counts, "cases": cases}
