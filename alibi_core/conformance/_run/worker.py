"""The process in which an adapter is checked, so that it can neither hang nor crash who asked.

It appends events to a file, one JSON object a line: how many adapters there are; which one is looked at; the law that
is tried; what came of it; the report. A thread touches the file every second, which tells that Python still runs.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from alibi_core.conformance._adapter import FUNCTIONS, Offer
from alibi_core.conformance._golden import check_golden, golden_results
from alibi_core.conformance._report import LawReport
from alibi_core.conformance._run.run import check

BEAT = 1.0  # seconds


def load(source: str) -> list[Any]:
    """Return the adapters that ``package.module:name`` stands for; without ``:name``, the module itself.

    Raises:
        ModuleNotFoundError: If there is no such module, or one that it needs is not installed.
        AttributeError: If the module has no such name.
        TypeError: If it is no adapter, nor a function that returns some.
    """
    module, _, name = source.partition(":")
    found: Any = importlib.import_module(module)
    for part in filter(None, name.split(".")):
        found = getattr(found, part)
    is_adapter = any(callable(getattr(found, function, None)) for function in FUNCTIONS)
    if isinstance(found, type) or (callable(found) and not is_adapter):
        found = found()
    is_adapter = any(callable(getattr(found, function, None)) for function in FUNCTIONS)
    return [found] if is_adapter or not isinstance(found, Iterable) else list(found)


def main(request: dict[str, Any]) -> None:
    """Check the adapters of one source, from the first that has not been looked at."""
    events = Path(request["events"])
    threading.Thread(target=_beat, args=(events,), daemon=True).start()

    def tell(**event: Any) -> None:
        with events.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    def on_law(name: str, report: LawReport | None) -> None:
        tell(**({"law": name} if report is None else {"law_report": report.to_dict()}))

    sys.path.insert(0, os.getcwd())
    try:
        offers = [Offer.of(adapter) for adapter in load(request["source"])]
    except (Exception, SystemExit) as error:
        tell(missing=f"{type(error).__name__}: {error}", done=True)
        return
    offers = [offer for offer in offers if not request["dtypes"] or offer.dtype in request["dtypes"]]
    tell(count=len(offers))
    chosen = {name: request[name] for name in ("profile", "seed", "time_limit")} | {"laws": request["laws"] or None}
    for index, offer in enumerate(offers):
        if index < request["first"]:
            continue
        tell(adapter=index, about={name: getattr(offer, name) for name in ("name", "dtype", "contract")})
        report = check(offer, **chosen, on_law=on_law)
        golden = None
        if request["golden"] is not None:
            tell(law="golden vectors")
            with tempfile.TemporaryDirectory() as results:
                golden_results(offer, request["golden"], Path(results) / "results", time_limit=request["time_limit"])
                golden = check_golden(request["golden"], Path(results) / "results").to_dict()
        tell(report=report.to_dict(), golden=golden)
    tell(done=True)


def _beat(events: Path) -> None:
    stop = threading.Event()
    while not stop.wait(BEAT):
        os.utime(events)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
