"""Checks in a separate process, so that a hang or crash of an adapter does not take the caller down.

Run as a program, this file is that process: it writes pickled events (dictionaries) to its standard output.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from alibi_core.conformance.adapter import FUNCTIONS, Offer
from alibi_core.conformance.check import check
from alibi_core.conformance.report import LawReport, Report


@dataclass(frozen=True)
class Settings:
    """Arguments of ``check``, the seconds that one call may take, and ``dtypes`` to check; () for all."""

    profile: str
    seed: int
    time_limit: float
    laws: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()


def supervised(source: str, settings: Settings) -> Iterator[Report | str]:
    """Check each adapter of ``package.module:name`` in a separate process, and yield the reports.

    A string is yielded in their place if there is no adapter: it says why. After a crash, a new process starts at the
    next adapter.
    """
    first, count = 0, 1
    while first < count:
        about: dict[str, Any] = {"name": source, "dtype": "float32", "contract": "exact"}
        law, done = "", list[LawReport]()
        for event in _events(source, settings, first):
            if "missing" in event:
                yield event["missing"]
                return
            count, law = event.get("count", count), event.get("law", law)
            if "about" in event:
                about, law, done = event["about"], "", []
            done += [event["law_report"]] if "law_report" in event else []
            if "report" in event:
                yield event["report"]
                first += 1
            if "crash" in event:
                crash = event["crash"] + (f" in law {law}" if law else "")
                known = {"features": (), "profile": settings.profile, "seed": settings.seed, "laws": tuple(done)}
                yield Report(**about | known, crash=crash)
                first += 1


def _events(source: str, settings: Settings, first: int) -> Iterator[dict[str, Any]]:
    """Yield the events of a worker until it ends; if it dies or hangs, the last event is a crash."""
    request = json.dumps(asdict(settings) | {"source": source, "first": first})
    # runpy warns that the package has imported this module already.
    quiet = "ignore::RuntimeWarning:runpy"
    command = [sys.executable, "-u", "-W", quiet, "-m", "alibi_core.conformance.worker", request]
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
        printed = errors.read()
    print(printed, end="", file=sys.stderr)  # what the adapter printed, and where it hung or crashed
    said = printed.strip().splitlines()
    if "done" in event:
        return
    if any(line.startswith("Timeout (") for line in said):  # printed by faulthandler
        yield {"crash": f"a call did not return within {settings.time_limit:g} s"}
        return
    code = process.returncode
    how = f"signal {-code}" if code < 0 else f"exit status {code}"
    yield {"crash": f"the process ended with {how}{': ' + said[-1] if said else ''}"}


def load(source: str) -> list[Any]:
    """Return the adapters of ``package.module:name``; without ``:name``, the module itself is the adapter."""
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


def limited(offer: Offer, seconds: float) -> Offer:
    """Return the offer with functions that end the process if a call takes longer."""

    def limit(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arrays: Any, **options: Any) -> Any:
            faulthandler.dump_traceback_later(seconds, exit=True)
            try:
                return function(*arrays, **options)
            finally:
                faulthandler.cancel_dump_traceback_later()

        return call

    return replace(offer, functions={name: limit(function) for name, function in offer.functions.items()})


def main(request: dict[str, Any]) -> None:
    """Check the adapters of one source, from index ``request["first"]`` on."""
    # Keep a copy of standard output for events only.
    events = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # send prints of the adapter to standard error, away from the events

    def tell(**event: Any) -> None:
        pickle.dump(event, events)
        events.flush()

    def on_law(name: str, report: LawReport | None) -> None:
        tell(**({"law": name} if report is None else {"law_report": report}))

    sys.path.insert(0, os.getcwd())
    try:
        offers = [limited(Offer.of(adapter), request["time_limit"]) for adapter in load(request["source"])]
    except (Exception, SystemExit) as error:
        tell(missing=f"{type(error).__name__}: {error}", done=True)
        return
    # Filter before indexing: "first" counts the chosen adapters.
    offers = [offer for offer in offers if not request["dtypes"] or offer.dtype in request["dtypes"]]
    tell(count=len(offers))
    chosen = {"profile": request["profile"], "seed": request["seed"], "laws": request["laws"] or None}
    for offer in offers[request["first"] :]:
        tell(about={name: getattr(offer, name) for name in ("name", "dtype", "contract")})
        tell(report=check(offer, **chosen, on_law=on_law))
    tell(done=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
