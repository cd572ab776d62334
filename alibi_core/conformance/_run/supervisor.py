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
        # What the worker has told so far, and what it has told of the laws of the adapter that it looks at.
        seen: dict[str, Any] = {"count": 1, "about": {"name": "", "dtype": "float32", "contract": "exact"}, "law": ""}
        done: list[LawReport] = []
        with tempfile.TemporaryDirectory() as folder, console.status(escape(f"{source} …")) as status:
            for event in _events(source, settings, first, Path(folder) / "events"):
                seen |= event
                if "about" in event:
                    done = []
                if "law_report" in event:
                    done.append(LawReport.from_dict(event["law_report"]))
                name = seen["about"]["name"] and f"{seen['about']['name']} ({seen['about']['dtype']})"
                status.update(escape(f"{name} {seen['law']} … ({len(done)} of {laws} laws done)"))
                if "report" in event:
                    yield Outcome(source, Report.from_dict(event["report"]), event["golden"])
                    first += 1
        count = seen["count"]
        if "missing" in seen:
            yield Outcome(source, missing=seen["missing"])
            return
        if "crash" in seen:
            crash = seen["crash"] + (f" in law {seen['law']}" if seen["law"] else "")
            known = {"features": (), "laws": tuple(done), "profile": settings.profile, "seed": settings.seed}
            yield Outcome(source, Report(**seen["about"] | known, crash=crash))
            first += 1


def _events(source: str, settings: Settings, first: int, path: Path) -> Iterator[dict[str, Any]]:
    """Yield what a worker tells until it ends. One that stands still is ended; one that dies is a crash, told last."""
    path.touch()
    request = asdict(settings) | {"source": source, "first": first, "events": str(path)}
    command = [sys.executable, "-m", "alibi_core.conformance._run.worker", json.dumps(request)]
    errors = path.with_name("stderr")
    is_done = False
    with errors.open("w") as stderr, path.open(encoding="utf-8") as file:
        storage = os.environ | {"HYPOTHESIS_STORAGE_DIRECTORY": str(path.with_name("hypothesis"))}  # leave no litter
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, env=storage)
        try:
            while True:
                ended = process.poll() is not None
                for line in file.readlines():
                    if line.endswith("\n"):
                        event = json.loads(line)
                        is_done = "done" in event
                        yield event
                if ended:
                    break
                if time.time() - path.stat().st_mtime > settings.time_limit + PATIENCE:
                    yield {"crash": f"a call stood still, and Python with it, for {settings.time_limit + PATIENCE:g} s"}
                    return
                time.sleep(0.05)
        finally:
            process.kill()
            process.wait()
    if not is_done:
        last = errors.read_text(errors="replace").strip().splitlines()[-1:]
        how = f"signal {-process.returncode}" if process.returncode < 0 else f"exit status {process.returncode}"
        yield {"crash": f"the process ended with {how}{': ' + last[0] if last else ''}"}
