"""Checks in a process of their own: an adapter that hangs or dies is reported, and the next one is checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from alibi_core.conformance._laws import LAWS
from alibi_core.conformance._report import LawReport, Report

PATIENCE = 30.0  # seconds that Python may stand still, besides what a call may take


@dataclass(frozen=True)
class Settings:
    """How adapters are checked; as for :func:`alibi_core.conformance.check`.

    Attributes:
        profile, seed, time_limit: As for that function.
        laws: Names; none for all.
        dtypes: Of the adapters to check; none for all.
        golden: Directory of golden vectors, if they are to be compared with.

    Example:
        >>> Settings("quick", seed=0, time_limit=10.0, dtypes=("float32",)).laws
        ()
    """

    profile: str
    seed: int
    time_limit: float
    laws: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    golden: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of an adapter.

    Attributes:
        source: Where it is from.
        report: What came of the laws; None if nothing could be checked.
        golden: What came of the golden vectors, as JSON has it.
        missing: Why there is no adapter, if there is none: a module that is not installed, for instance.

    Example:
        >>> from alibi_core.conformance import check, numpy_adapters
        >>> Outcome("package.module:name", check(numpy_adapters()[0], laws=["slopes"])).passed
        True
    """

    source: str
    report: Report | None = None
    golden: dict[str, Any] | None = None
    missing: str = ""

    @property
    def passed(self) -> bool:
        """Whether all is as it should be."""
        golden = self.golden is None or bool(self.golden["passed"])
        return self.report is not None and self.report.passed and golden

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        report = None if self.report is None else self.report.to_dict()
        return {"source": self.source, "passed": self.passed, "report": report, "golden": self.golden}


def supervised(source: str, settings: Settings, console: Console) -> Iterator[Outcome]:
    """Yield what comes of each adapter of a source, ``package.module:name``.

    Args:
        source: Where adapters are from.
        settings: How to check them.
        console: Where to show which law is being tried.

    Example:
        >>> settings = Settings("quick", seed=0, time_limit=10.0, laws=("slopes",), dtypes=("float32",))
        >>> outcomes = supervised("alibi_core.conformance:numpy_adapters", settings, Console(quiet=True))
        >>> [(outcome.report.name, outcome.passed) for outcome in outcomes]
        [('alibi_core', True)]
    """
    first, count, laws = 0, 1, len(settings.laws or LAWS)
    while first < count:
        seen = _Seen()
        with tempfile.TemporaryDirectory() as folder, console.status(escape(f"{source} …")) as status:
            for event in _events(source, settings, first, Path(folder) / "events", seen):
                seen.take(event)
                status.update(escape(f"{seen.words} ({len(seen.laws)} of {laws} laws done)"))
                if "report" in event:
                    yield Outcome(source, Report.from_dict(event["report"]), event["golden"])
                    first += 1
        count = seen.count
        if seen.missing:
            yield Outcome(source, missing=seen.missing)
            return
        if seen.crash:
            yield Outcome(source, seen.report(settings))
            first += 1


@dataclass
class _Seen:
    """What a worker has told so far."""

    count: int = 1
    done: bool = False
    missing: str = ""
    crash: str = ""
    words: str = ""
    about: dict[str, str] | None = None
    law: str = ""
    laws: tuple[LawReport, ...] = ()

    def take(self, event: dict[str, Any]) -> None:
        self.count, self.done = event.get("count", self.count), "done" in event
        self.missing = event.get("missing", self.missing)
        if "about" in event:
            self.about, self.laws = event["about"], ()
        if "law" in event:
            self.law = event["law"]
        if "law_report" in event:
            self.laws += (LawReport.from_dict(event["law_report"]),)
        name = self.about and f"{self.about['name']} ({self.about['dtype']})"
        self.words = f"{name or ''} {self.law} …"

    def report(self, settings: Settings) -> Report:
        """Return what is known of an adapter that ended its process."""
        about = self.about or {"name": "", "dtype": "float32", "contract": "exact"}
        where = f" in law {self.law}" if self.law else ""
        return Report(
            name=about["name"],
            dtype=about["dtype"],
            contract=about["contract"],
            features=(),
            profile=settings.profile,
            seed=settings.seed,
            laws=self.laws,
            crash=self.crash + where,
        )


def _events(source: str, settings: Settings, first: int, path: Path, seen: _Seen) -> Iterator[dict[str, Any]]:
    """Yield what a worker tells until it ends. One that stands still is ended; one that dies is a crash."""
    path.touch()
    request = asdict(settings) | {"source": source, "first": first, "events": str(path)}
    command = [sys.executable, "-m", "alibi_core.conformance._run.worker", json.dumps(request)]
    errors = path.with_name("stderr")
    with errors.open("w") as stderr, path.open(encoding="utf-8") as file:
        storage = os.environ | {"HYPOTHESIS_STORAGE_DIRECTORY": str(path.with_name("hypothesis"))}  # leave no litter
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, env=storage)
        try:
            while True:
                ended = process.poll() is not None
                rest = file.readlines()
                yield from (json.loads(line) for line in rest if line.endswith("\n"))
                if ended:
                    break
                if time.time() - path.stat().st_mtime > settings.time_limit + PATIENCE:
                    seen.crash = f"a call stood still, and Python with it, for {settings.time_limit + PATIENCE:g} s"
                    break
                time.sleep(0.05)
        finally:
            process.kill()
            process.wait()
    if not seen.done and not seen.crash:
        last = errors.read_text(errors="replace").strip().splitlines()[-1:]
        how = f"signal {-process.returncode}" if process.returncode < 0 else f"exit status {process.returncode}"
        seen.crash = f"the process ended with {how}{': ' + last[0] if last else ''}"
