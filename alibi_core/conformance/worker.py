"""Checks in a separate process, so that a hang or crash of an adapter does not take the caller down.

Run as a program, this file is that process: it writes pickled events (dictionaries) to its standard output.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from alibi_core.conformance.adapter import FUNCTIONS, Offer
from alibi_core.conformance.check import check
from alibi_core.conformance.report import LawReport, Report

PATIENCE = 30.0  # seconds beyond the time limit of a call after which a process without progress is ended


@dataclass(frozen=True)
class Settings:
    """Arguments of ``check``, and ``dtypes``: only adapters with these dtypes are checked; () for all."""

    profile: str
    seed: int
    time_limit: float
    laws: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The result for one adapter: its source, and its report, or the reason why it could not be loaded."""

    source: str
    report: Report | None = None
    missing: str = ""

    @property
    def passed(self) -> bool:
        """Whether there is a report and it passed."""
        return self.report is not None and self.report.passed

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as a dictionary for JSON."""
        report = None if self.report is None else self.report.to_dict()
        return {"source": self.source, "passed": self.passed, "report": report}


def supervised(source: str, settings: Settings, show: Callable[[str], None] = lambda words: None) -> Iterator[Outcome]:
    """Check each adapter of a source in a separate process, and yield the outcomes.

    Args:
        source: ``package.module:name`` of an adapter, or of a function that returns one or several.
        settings: Arguments of the check.
        show: Called with a progress message.
    """
    first, count = 0, 1
    while first < count:
        # All events of the worker, merged, and the finished laws of the current adapter.
        seen: dict[str, Any] = {"about": {"name": "", "dtype": "float32", "contract": "exact"}, "law": ""}
        done: list[LawReport] = []
        for event in _events(source, settings, first):
            seen |= event
            done = [] if "about" in event else done
            if "law_report" in event:
                done.append(event["law_report"])
            about = seen["about"]
            show(f"{about['name'] or source} ({about['dtype']}) {seen['law']} … ({len(done)} laws done)")
            if "report" in event:
                yield Outcome(source, event["report"])
                first += 1
        count = seen.get("count", 1)
        if "missing" in seen:
            yield Outcome(source, missing=seen["missing"])
            return
        # Report the crash, then start a new worker at the next adapter.
        if "crash" in seen:
            crash = seen["crash"] + (f" in law {seen['law']}" if seen["law"] else "")
            known = {"features": (), "laws": tuple(done), "profile": settings.profile, "seed": settings.seed}
            yield Outcome(source, Report(**seen["about"] | known, crash=crash))
            first += 1


def _events(source: str, settings: Settings, first: int) -> Iterator[dict[str, Any]]:
    """Yield the events of a worker until it ends; if it dies or hangs, the last event is a crash."""
    request = json.dumps(asdict(settings) | {"source": source, "first": first})
    command = [sys.executable, "-m", "alibi_core.conformance.worker", request]
    event: dict[str, Any] = {}
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
        assert process.stdout is not None
        try:
            with contextlib.suppress(EOFError, pickle.UnpicklingError):  # raised when the process has ended
                while True:
                    event = pickle.load(process.stdout)
                    yield event
            process.wait()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        errors.seek(0)
        said = errors.read().strip().splitlines()
    if "done" in event:
        return
    if any(line.startswith("Timeout (") for line in said):  # printed by faulthandler
        yield {"crash": f"a call stood still, and Python with it, for {settings.time_limit + PATIENCE:g} s"}
        return
    code = process.returncode
    how = f"signal {-code}" if code < 0 else f"exit status {code}"
    yield {"crash": f"the process ended with {how}{': ' + said[-1] if said else ''}"}


def load(source: str) -> list[Any]:
    """Return the adapters of ``package.module:name``; without ``:name``, the module itself is the adapter.

    Raises:
        ModuleNotFoundError: If the module does not exist, or a module that it imports is not installed.
        AttributeError: If the module has no such name.
        TypeError: If the object is neither an adapter nor a function that returns adapters.
    """
    module, _, name = source.partition(":")
    found: Any = importlib.import_module(module)
    for part in filter(None, name.split(".")):
        found = getattr(found, part)

    def is_adapter() -> bool:
        return any(callable(getattr(found, function, None)) for function in FUNCTIONS)

    # A class, or a function that returns adapters: call it.
    if isinstance(found, type) or (callable(found) and not is_adapter()):
        found = found()
    return [found] if is_adapter() or not isinstance(found, Iterable) else list(found)


def main(request: dict[str, Any]) -> None:
    """Check the adapters of one source, from index ``request["first"]`` on."""
    # Keep a copy of standard output for events only.
    events = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # send prints of the adapter to standard error, away from the events
    threading.Thread(target=_watch, args=(request["time_limit"] + PATIENCE,), daemon=True).start()

    def tell(**event: Any) -> None:
        pickle.dump(event, events)
        events.flush()

    def on_law(name: str, report: LawReport | None) -> None:
        tell(**({"law": name} if report is None else {"law_report": report}))

    sys.path.insert(0, os.getcwd())
    try:
        offers = [Offer.of(adapter) for adapter in load(request["source"])]
    except (Exception, SystemExit) as error:
        tell(missing=f"{type(error).__name__}: {error}", done=True)
        return
    # Filter before indexing: "first" counts the chosen adapters.
    offers = [offer for offer in offers if not request["dtypes"] or offer.dtype in request["dtypes"]]
    tell(count=len(offers))
    chosen = {name: request[name] for name in ("profile", "seed", "time_limit")} | {"laws": request["laws"] or None}
    for offer in offers[request["first"] :]:
        tell(about={name: getattr(offer, name) for name in ("name", "dtype", "contract")})
        tell(report=check(offer, **chosen, on_law=on_law))
    tell(done=True)


def _watch(patience: float) -> None:
    """Postpone the end of the process every second; if Python hangs for ``patience`` seconds, the process ends."""
    stop = threading.Event()
    while True:
        faulthandler.dump_traceback_later(patience, exit=True)
        stop.wait(1.0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
