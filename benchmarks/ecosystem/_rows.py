"""One row an implementation and precision: what the kit says of it, and how far it is off."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from alibi_core import conformance
from benchmarks.ecosystem._magnitude import HEADS, Magnitude, measure
from benchmarks.ecosystem._subjects import Subject

NOT_INSTALLED = "not installed"


@dataclass(frozen=True)
class Verdict:
    """What the kit says of one adapter under one contract.

    Attributes:
        contract: The one it was held to.
        passed: Whether no law is broken.
        held: How many laws applied.
        failed: The laws that are broken.
        departures: What is done instead, in words; of what has none, how far off it is.
    """

    contract: str
    passed: bool
    held: int
    failed: tuple[str, ...]
    departures: tuple[str, ...]

    def __str__(self) -> str:
        if self.passed:
            return "yes"
        return (
            f"no: {', '.join(self.failed)}" if len(self.failed) < 4 else f"no, {len(self.failed)} of {self.held} laws"
        )

    @classmethod
    def of(cls, report: conformance.Report) -> Verdict:
        """Return what a report comes to."""
        held = sum(law.status in ("passed", "failed") for law in report.laws)
        failed = [law for law in report.laws if law.status == "failed"]
        sentences = [x.sentence for law in failed for x in law.diagnoses]
        sentences += [f"{law.name}: {law.counterexample.problem}" for law in failed if not law.diagnoses]
        departures = tuple(dict.fromkeys(sentences))
        return cls(report.contract, report.passed, held, tuple(law.name for law in failed), departures)


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        name, package, version, dtype, note: Of the implementation.
        exact: Whether it is the paper's ALiBi.
        own: Whether it is what its contract says; None if that is the paper's.
        magnitudes: How far off, by number of heads.
        problem: Why there is nothing to tell.
    """

    name: str
    package: str
    version: str | None
    dtype: str
    note: str = ""
    exact: Verdict | None = None
    own: Verdict | None = None
    magnitudes: tuple[Magnitude, ...] = field(default=())
    problem: str = ""

    @property
    def departures(self) -> tuple[str, ...]:
        """What it does instead of the paper and of its contract, in the kit's words; without the kit, in ours."""
        verdicts = [x for x in (self.exact, self.own) if x is not None]
        if not verdicts:
            return (self.note,) if self.note else ()
        return tuple(dict.fromkeys(sentence for x in verdicts for sentence in x.departures))


def rows_of(subject: Subject, *, profile: str | None = "quick") -> Iterator[Row]:
    """Yield the rows of one implementation, in a profile of the kit; None leaves the kit out."""
    base = {"name": subject.name, "package": subject.package, "note": subject.note}
    if subject.version is None:
        yield Row(**base, version=None, dtype="", problem=NOT_INSTALLED)
        return
    for dtype in subject.dtypes:
        known: dict[str, Any] = base | {"version": subject.version, "dtype": dtype}
        try:
            yield Row(**known, **_found(subject, dtype, profile))
        except ImportError as error:  # it needs something else that is missing
            yield Row(**known, problem=f"{NOT_INSTALLED}: {error}")
        except Exception as error:  # of a version that its adapter was not written for: the others shall be told of
            yield Row(**known, problem=f"raised {type(error).__name__}: {error}")


def _found(subject: Subject, dtype: str, profile: str | None) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other people's
        exact, own = (subject.make(dtype, contract) for contract in ("exact", subject.contract))
        found: dict[str, Any] = {
            "magnitudes": tuple(measure(exact, n, contract=subject.contract, bias_max=subject.bias_max) for n in HEADS)
        }
        if profile is not None and subject.bias_max == 8:  # the kit knows no other
            found["exact"] = Verdict.of(conformance.check(exact, profile=profile))
            if subject.contract != "exact":
                found["own"] = Verdict.of(conformance.check(own, profile=profile))
    return found
