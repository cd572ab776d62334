"""Every mutant dies by the laws that it breaks, and the correct adapters that they are made from live."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from alibi_core.conformance import check
from alibi_core.conformance._run.run import Profile
from benchmarks.mutants import MUTANTS, Blockwise, Mutant, Reference, tried
from tests.support.full import first_of, in_full

FIRST = {law: mutant for mutant in reversed(MUTANTS) for law in mutant.laws}  # of those that break a law


@pytest.mark.parametrize("dtype", first_of(["float32", "float64", "float16", "bfloat16"]))
@pytest.mark.parametrize("adapter", first_of([Blockwise, Reference]))
def test_what_mutants_are_made_from_passes(adapter: type[Reference], dtype: str) -> None:
    correct = adapter()
    correct.dtype = dtype
    report = check(correct, seed=1)
    assert report.passed, str(report)
    assert {law.status for law in report.laws} == {"passed"}


@pytest.mark.parametrize(
    "mutant", [x if x in FIRST.values() else in_full(x) for x in MUTANTS], ids=lambda mutant: mutant.name
)
def test_a_mutant_dies_by_the_laws_that_it_breaks(mutant: Mutant) -> None:
    # A counterexample need not be the smallest here; and the diagnosis takes its time where it finds nothing.
    profile = Profile("brief", 20, shrinking=0.1, diagnoses=mutant.is_diagnosable)
    outcome = tried(mutant, laws=mutant.laws, profile=profile)
    assert set(mutant.laws) <= set(outcome.killed_by)
    assert not [x for x in outcome.diagnoses if "diagnosis itself failed" in x]
    if mutant.is_diagnosable:
        assert outcome.is_right, f"expected {mutant.key or mutant.expected!r}, got {outcome.diagnoses}"


@pytest.mark.full
def test_the_command_tries_mutants_in_other_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.mutants", "--only", "ListOut", "--json", str(tmp_path / "found")]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], stdout=subprocess.DEVNULL)
    (found,) = json.loads((tmp_path / "found").read_text())["mutants"]
    assert found["mutant"] == "ListOut"
    assert found["is_right"]
