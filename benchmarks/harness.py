"""Shared code of the benchmarks: paired times, peak memory in a separate process, the machine, a table, JSON."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import alibi_core

ROOT = Path(__file__).parents[1]
WIDTH = 120  # columns of a table that is written to a file
VECTORS = {"amx_tile": "AMX", "avx512f": "AVX-512", "avx2": "AVX2"}  # by flag of /proc/cpuinfo, widest first
Call = Callable[[], Any]

# --- Time and memory --------------------------------------------------------------------------------------------------


def seconds_of(call: Call) -> float:
    """Return the duration of a call in seconds, without freeing its result."""
    start = time.perf_counter()
    result = call()
    elapsed = time.perf_counter() - start
    del result
    return elapsed


def paired(candidate: Any, baseline: Any, pairs: int, clock: Callable[[Any], float] = seconds_of) -> dict[str, Any]:
    """Time two calls alternately, after one call each to warm up, and return medians and ratios.

    The order within a pair alternates. A temporary slowdown of the machine affects both calls of a pair, so ratios vary
    less than times. A ratio of 2 means that the candidate is twice as fast.
    """
    gc.collect()
    for call in (candidate, baseline):
        clock(call)
    times = []
    for index in range(pairs):
        order = -1 if index % 2 else 1
        times.append([clock(call) for call in (candidate, baseline)[::order]][::order])
    ratios = [theirs / ours for ours, theirs in times]
    values = [statistics.median(column) for column in zip(*times, strict=True)]
    return {"values": values, "ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}


def compared(candidate: float, baseline: float) -> dict[str, Any]:
    """Return both numbers and the ratio baseline / candidate; smaller numbers are better."""
    return {"values": [candidate, baseline], "ratio": baseline / candidate if candidate else None}


def peak_growth(function: str, *arguments: Any) -> int:
    """Return the peak growth of memory, in bytes, during a call in a separate process.

    Args:
        function: ``module:name`` of a function that prepares (imports, warms up) and returns the call to measure.
        *arguments: Its arguments, which must be serializable as JSON.
    """
    code = "import sys, json; from benchmarks import harness; harness._alone(*json.loads(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([function, *arguments])],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, ["", *sys.path]))},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{function} must run in a process of its own, got {done.stderr.strip()[-2000:]}")
    return int(done.stdout.splitlines()[-1])


def _alone(function: str, *arguments: Any) -> None:
    module, name = function.split(":")
    call = getattr(importlib.import_module(module), name)(*arguments)
    gc.collect()
    # Reset the peak, which the imports have raised. If the system does not allow it, the result is an upper bound.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before, _ = _memory()
    call()
    print(_memory()[1] - before)


def _memory() -> tuple[int, int]:
    """Return resident memory and its peak, in bytes; the peak twice on systems without /proc."""
    if status := _proc("self/status"):  # not getrusage: on Linux a process inherits the peak of its parent
        return tuple(1024 * int(status[key].split()[0]) for key in ("VmRSS", "VmHWM"))
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak, peak


def available_memory() -> int:
    """Return the number of bytes that can still be allocated; total memory on systems without /proc."""
    if available := _proc("meminfo").get("MemAvailable"):
        return 1024 * int(available.split()[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# --- The machine ------------------------------------------------------------------------------------------------------


def _proc(name: str) -> dict[str, str]:
    """Return the lines of a file of /proc by name; nothing on systems without it."""
    with contextlib.suppress(OSError):
        lines = Path("/proc", name).read_text(encoding="utf-8").splitlines()
        return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return {}


def machine() -> dict[str, Any]:
    """Return the properties of the machine that determine speed."""
    cpu = _proc("cpuinfo")
    flags = cpu.get("flags", "").split()
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "cpu": cpu.get("model name") or platform.processor(),
        "vectors": next((name for flag, name in VECTORS.items() if flag in flags), None),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def versions(*distributions: str) -> dict[str, str]:
    """Return the versions of Python, of this library and of the distributions that are installed."""
    found = {"python": platform.python_version(), "alibi-core": alibi_core.__version__}
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


# --- Results ----------------------------------------------------------------------------------------------------------


def parser(name: str, doc: str | None, sections: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of a benchmark, with the options that all of them have."""
    raw = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc, formatter_class=raw)
    made.add_argument("--quick", action="store_true", help="small sizes: shows that it runs, and times nothing real")
    made.add_argument("--output", type=Path, default=Path("out"), metavar="DIR", help="default %(default)s")
    made.add_argument("--compare", type=Path, metavar="OLD.json", help="print ratios beside those of an earlier run")
    if sections:
        made.add_argument("--only", nargs="+", choices=sections, default=list(sections), help="default all")
    return made


class Results:
    """The rows of a benchmark, written as JSON after each of them."""

    def __init__(self, name: str, options: argparse.Namespace, *distributions: str, **about: Any) -> None:
        self.path, self.compare, self.wrong = options.output / f"{name}.json", options.compare, []
        about |= {"machine": machine() | about.get("machine", {}), "versions": versions("numpy", *distributions)}
        self.found: dict[str, Any] = {"benchmark": name, "quick": options.quick, **about}
        self.found |= {"wrong": self.wrong, "numerics": {}, "measurements": []}

    def add(self, group: str, candidate: str, baseline: str, unit: str = "s", note: str = "", **measured: Any) -> None:
        """Add a row: the result of :func:`paired` or :func:`compared`, or a note that says why there is none."""
        row = {"group": group, "candidate": candidate, "baseline": baseline, "unit": unit, **measured, "note": note}
        self.found["measurements"].append(row)
        print(f"{group}: {candidate}: {_number(measured.get('ratio'))} {note}", file=sys.stderr, flush=True)
        write_json(self.path, self.found)

    def check(self, subject: str, error: float, limit: float) -> bool:
        """Record an error, and return whether it is within the limit; an error above its limit fails the benchmark."""
        self.found["numerics"][subject] = error
        is_right = error <= limit  # False for NaN
        if not is_right:
            self.wrong.append(f"{subject}: error {error:.1e}, must be at most {limit:.1e}")
        return is_right

    def finish(self) -> int:
        """Print tables, write all results, and return the exit status: 1 if a number is wrong."""
        from rich.console import Console

        write_json(self.path, self.found)
        old = {}
        if self.compare:
            rows = json.loads(self.compare.read_text(encoding="utf-8"))["measurements"]
            old = {(row["group"], row["candidate"], row["baseline"]): row.get("ratio") for row in rows}
        rows, console = self.found["measurements"], Console(width=None if sys.stdout.isatty() else WIDTH)
        for group in dict.fromkeys(row["group"] for row in rows):
            shown = table(group, "", "beside", "", "", "times better", "range", *(["before"] if old else []), "note")
            for row in (row for row in rows if row["group"] == group):
                values = [_quantity(x, row["unit"]) for x in row.get("values", ("", ""))]
                spread = f"{row['lowest']:.2f}-{row['highest']:.2f}" if "lowest" in row else ""
                before = [_number(old.get((group, row["candidate"], row["baseline"])))] if old else []
                names = row["candidate"], row["baseline"]
                shown.add_row(*names, *values, _number(row.get("ratio")), spread, *before, row["note"])
            console.print(shown)
        print(f"Written to {self.path}; the load of the machine was {self.found['machine']['load']} at the start.")
        for line in self.wrong:
            print(f"wrong: {line}", file=sys.stderr)
        return int(bool(self.wrong))


def write_json(path: Path, results: Any) -> None:
    """Write results: floats with five significant digits, null where they are not finite."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, default=str)
    rounded = json.loads(text, parse_float=lambda x: float(f"{float(x):.5g}"), parse_constant=lambda name: None)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")
    part.replace(path)  # atomic, so that an interrupted run leaves complete files


def table(title: str, *columns: str, **options: Any) -> Any:
    """Return an empty table in the style of all benchmarks."""
    from rich import box
    from rich.table import Table

    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        made.add_column(column, **options)
    return made


def _number(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _quantity(value: Any, unit: str) -> str:
    if value == "" or unit not in ("s", "bytes"):
        return str(value)
    if unit == "bytes":
        return f"{value / 2**20:,.1f} MiB"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.2f} ms" if value >= 1e-3 else f"{value * 1e6:.1f} us"
