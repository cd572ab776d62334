"""What comes of holding a mutant to the laws."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from alibi_core.conformance import check
from benchmarks.mutants import MUTANTS
from benchmarks.mutants._mutant import Mutant

TIME_LIMIT = 10.0  # seconds that one call may take: one of them never returns


@dataclass(frozen=True)
class Outcome:
    """What came of one mutant.

    Attributes:
        mutant: Its name.
        mistake: In one line.
        killed_by: The laws that it breaks.
        diagnoses: What the kit says that it does.
        is_right: Whether a diagnosis names the mistake.
        seconds: That the check took.
    """

    mutant: str
    mistake: str
    killed_by: tuple[str, ...]
    diagnoses: tuple[str, ...]
    is_right: bool
    seconds: float


def tried(mutant: Mutant, *, laws: Iterable[str] | None = None) -> Outcome:
    """Hold a mutant to laws, all by default, in the quick profile."""
    report = check(mutant.adapter(), laws=laws, time_limit=TIME_LIMIT)
    sentences = tuple(x.sentence for x in report.diagnoses)
    # A sentence that says but where results are wrong, and how far, names no mistake, whatever words are in it.
    named = [x.sentence for x in report.diagnoses if x.key != "unexplained"]
    is_right = any(re.search(mutant.expected, x, re.IGNORECASE) for x in named)
    killed_by = tuple(law.name for law in report.failed)
    return Outcome(mutant.name, mutant.mistake, killed_by, sentences, is_right, report.seconds)


def tried_by_name(name: str) -> Outcome:
    """Hold the mutant of this name to all laws: names go from process to process more easily than classes."""
    return tried({mutant.name: mutant for mutant in MUTANTS}[name])


def killed_alone(outcomes: Iterable[Outcome], laws: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return for each law the mutants that no other law kills."""
    found = list(outcomes)
    return {law: tuple(x.mutant for x in found if x.killed_by == (law,)) for law in laws}
