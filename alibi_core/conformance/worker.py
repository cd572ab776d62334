"""Checks in a separate process, so that a hang or crash of an adapter does not take the caller down.

Run as a program, this file is that process: before each law it writes the report so far to its standard output, pickled
with the number of adapters and whether the report is complete.
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
from dataclasses import replace
from typing import Any

from alibi_core.conformance.adapter import FUNCTIONS, Offer
from alibi_core.conformance.check import check
from alibi_core.conformance.report import Report


def supervised(source: str, *, time_limit: float, **asked: Any) -> Iterator[Report | str]:
    """Check each adapter of ``package.module:name`` in a separate process, and yield the reports.

    ``asked`` are ``profile``, ``seed`` and ``laws``, as for :func:`check`, and the ``dtypes`` of the adapters to check;
    empty laws and dtypes stand for all. A call may take ``time_limit`` seconds.

    A string is yielded in place of reports if there is no adapter: it says why. After a crash, a new process starts at
    the next adapter.
    """
    first, count = 0, 1
    # runpy warns that the package has imported this module already.
    command = [sys.executable, "-u", "-W", "ignore::RuntimeWarning:runpy", "-m", "alibi_core.conformance.worker"]
    while first < count:
        report: Any = Report(source, "float32", "exact", (), asked["profile"], asked["seed"], ())
        request = json.dumps(asked | {"source": source, "first": first, "time_limit": time_limit})
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            with subprocess.Popen([*command, request], stdout=subprocess.PIPE, stderr=errors) as process:
                assert process.stdout is not None
                try:
                    with contextlib.suppress(EOFError, pickle.UnpicklingError):  # raised when the process has ended
                        while True:
                            count, report, is_complete = pickle.load(process.stdout)
                            if is_complete:
                                yield report
                                first += 1
                    process.wait()
                finally:
                    process.kill()
            errors.seek(0)
            printed = errors.read()
        print(printed, end="", file=sys.stderr)  # what the adapter printed, and where it hung or crashed
        if first < count:
            yield replace(report, crash=_how_it_ended(process.returncode, printed, time_limit) + report.crash)
            first += 1


def _how_it_ended(code: int, printed: str, time_limit: float) -> str:
    said = printed.strip().splitlines()
    if any(line.startswith("Timeout (") for line in said):  # printed by faulthandler
        return f"a call did not return within {time_limit:g} s"
    how = f"signal {-code}" if code < 0 else f"exit status {code}"
    return f"the process ended with {how}{': ' + said[-1] if said else ''}"


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
    # Keep a copy of standard output for reports only.
    reports = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # send prints of the adapter to standard error, away from the reports

    def tell(*told: Any) -> None:
        pickle.dump(told, reports)
        reports.flush()

    sys.path.insert(0, os.getcwd())
    try:
        offers = [limited(Offer.of(adapter), request["time_limit"]) for adapter in load(request["source"])]
    except (Exception, SystemExit) as error:
        tell(1, f"{type(error).__name__}: {error}", True)
        return
    # Filter before indexing: "first" counts the chosen adapters.
    offers = [offer for offer in offers if not request["dtypes"] or offer.dtype in request["dtypes"]]
    chosen = {"profile": request["profile"], "seed": request["seed"], "laws": request["laws"] or None}
    for offer in offers[request["first"] :]:

        def on_law(law: str, so_far: Report) -> None:
            tell(len(offers), replace(so_far, crash=f" in law {law}"), False)

        tell(len(offers), check(offer, **chosen, on_law=on_law), True)
    tell(len(offers), None, False)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
