"""The report on a check: for each law passed, failed or not offered, with a counterexample and diagnoses."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from alibi_core.conformance.caller import CallError, DepartureError
from alibi_core.conformance.oracle import Answer, excess
from alibi_core.conformance.reference import Values


@dataclass(frozen=True)
class Diagnosis:
    """A mistake that explains wrong results: its short, stable name, and its description, with the fix."""

    key: str
    sentence: str


@dataclass(frozen=True)
class Counterexample:
    """The first, smallest case that breaks a law, and the element that is farthest off, relative to its budget."""

    function: str
    inputs: str  # sizes, arguments, and the seed of the values
    problem: str  # description of the error
    at: tuple[int, ...] | None = None
    expected: float | None = None
    actual: float | None = None
    budget: float | None = None  # the largest error that rounding can cause

    @classmethod
    def worst(cls, function: str, inputs: str, actual: Values, answer: Answer, remark: str = "") -> Counterexample:
        """Return the counterexample of the element that is farthest off, relative to its budget."""
        shares = excess(actual, answer)
        worst = np.unravel_index(int(shares.argmax()), shares.shape)
        problem = remark or f"off by {shares[worst]:.3g} times what rounding explains"
        numbers = (float(x[worst]) for x in (answer.value, actual, answer.budget))
        return cls(function, inputs, problem, tuple(int(x) for x in worst), *numbers)

    @classmethod
    def of(cls, error: DepartureError | CallError) -> Counterexample:
        """Return the counterexample of an error."""
        if isinstance(error, CallError):
            return cls(str(error).partition(" ")[0], error.inputs, str(error))
        name = f"{error.function}, {error.part}" if error.part else error.function
        return cls.worst(name, error.inputs, error.actual, error.expected, error.remark)

    def __str__(self) -> str:
        where = "" if self.at is None else f" at {list(self.at)}: {self.actual:.8g}, expected {self.expected:.8g}"
        within = "" if self.budget is None else f" within {self.budget:.2g}"
        return f"{self.problem}{where}{within}{'; ' if self.inputs else ''}{self.inputs}"


@dataclass(frozen=True)
class LawReport:
    """The report on one law, or on one case of golden vectors."""

    name: str
    statement: str
    status: Literal["passed", "failed", "not offered"]
    reason: str = ""  # why it was not offered
    calls: int = 0
    share: float = 0.0  # the largest error of a passing case, as a share of its budget
    seconds: float = 0.0
    counterexample: Counterexample | None = None
    diagnoses: tuple[Diagnosis, ...] = ()


@dataclass(frozen=True)
class Report:
    """The report on an adapter.

    Attributes:
        name, dtype, contract: Attributes of the adapter.
        features: Its declared or detected features.
        profile, seed: Arguments of the check.
        laws: One report for each law.
        seconds: Time that the check took.
        crash: How the process of the check ended, if it crashed; else empty.

    Example:
        >>> from alibi_core.conformance import check, numpy_adapters
        >>> report = check(numpy_adapters()[0], laws=["slopes"])
        >>> print(report)
        alibi_core, float32, contract exact: passed
          passed      slopes: Slopes are those of the contract, for 1 to 128 heads
        >>> report.passed, report.exit_status
        (True, 0)
    """

    name: str
    dtype: str
    contract: str
    features: tuple[str, ...]
    profile: str
    seed: int
    laws: tuple[LawReport, ...]
    seconds: float = 0.0
    crash: str = ""

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of laws that passed, failed and were not offered."""
        statuses = [law.status for law in self.laws]
        return {status: statuses.count(status) for status in ("passed", "failed", "not offered")}

    @property
    def passed(self) -> bool:
        """Whether at least one law passed, none failed, and nothing crashed."""
        return self.exit_status == 0

    @property
    def exit_status(self) -> int:
        """Exit status of a command: 0 if it passed, 1 if not, 2 if there was nothing to check."""
        if self.crash or self.counts["failed"]:
            return 1
        return 0 if self.counts["passed"] else 2

    @property
    def failed(self) -> tuple[LawReport, ...]:
        """The laws that are broken."""
        return tuple(law for law in self.laws if law.status == "failed")

    @property
    def diagnoses(self) -> tuple[Diagnosis, ...]:
        """The diagnoses of all laws, without duplicates."""
        return tuple(dict.fromkeys(x for law in self.laws for x in law.diagnoses))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary for JSON."""
        return {"passed": self.passed, **plain(asdict(self))}

    def to_json(self) -> str:
        """Return the report as a JSON string."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def __str__(self) -> str:
        verdict = ("passed", "FAILED", "nothing to check")[self.exit_status]
        lines = [f"{self.name}, {self.dtype}, contract {self.contract}: {verdict}"]
        lines += [f"  crashed: {self.crash}"] if self.crash else []
        lines += [f"  diagnosis: {x.sentence}" for x in self.diagnoses]
        missing: dict[str, list[str]] = {}  # laws that are not offered, by reason
        for law in sorted(self.laws, key=lambda law: law.status != "failed"):
            if law.status == "not offered":
                missing.setdefault(law.reason, []).append(law.name)
                continue
            more = f" ({law.reason})" if law.reason else ""
            lines.append(f"  {law.status:<12}{law.name}: {law.statement}{more}")
            lines += [f"    {law.counterexample}"] if law.counterexample is not None else []
        names = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in missing.items())
        return "\n".join([*lines, *([f"  not offered: {names}"] if names else [])])


def plain(value: Any) -> Any:
    """Return the value with infinite and NaN numbers as strings, and tuples as lists, for JSON."""
    if isinstance(value, dict):
        return {name: plain(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [plain(x) for x in value]
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value
