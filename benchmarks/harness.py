"""What the benchmarks share: times in pairs, peak memory, the machine, and results as a table and as JSON.

In go functions to compare. Out come medians, spreads and ratios, with versions and machine.
"""

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

import alibi_core

MET, MISSED, NOT_MEASURED, NOT_JUDGED = "met", "missed", "not measured", "not judged"
WIDTH = 120  # of tables that go to a file
_STYLES = {MET: "green", MISSED: "bold red", NOT_MEASURED: "red"}


@dataclass(frozen=True)
class Measurement:
    """A candidate beside a baseline: seconds, bytes or errors of both, and their ratio."""

    group: str  # the question this is part of the answer to
    candidate: str
    baseline: str
    unit: str
    bar: float | None = None  # what the ratio has to be below; None where it is there for information
    values: tuple[float, float] | None = None  # medians; None if not measured
    ratio: float | None = None
    lowest: float | None = None  # of the pairs' ratios, as the next
    highest: float | None = None
    note: str = ""  # what is special about it, or why it was not measured
    faster: bool = False  # the ratio is how many times faster the candidate is, and the bar what it has to be at least

    @property
    def name(self) -> str:
        """What was measured, in a line."""
        ratio = "" if self.ratio is None else f", ratio {self.ratio:.2f}"
        return f"{self.group}: {self.candidate} against {self.baseline}{ratio}"

    def verdict(self, judged: bool) -> str:
        """Return whether the bar is met, or why that cannot be said; nothing where there is no bar."""
        if self.bar is None:
            return ""
        if self.ratio is None:
            return NOT_MEASURED
        if not judged:
            return NOT_JUDGED
        return MET if (self.ratio >= self.bar if self.faster else self.ratio < self.bar) else MISSED

    def timed(
        self,
        candidate: Callable[[], Any],
        baseline: Callable[[], Any],
        pairs: int,
        *,
        clock: Callable[[Callable[[], Any]], float] | None = None,
        warm_up: bool = True,
    ) -> Measurement:
        """Return this with both timed: one call each to warm up, then pairs whose order alternates.

        A machine that is slower for a while is so for both of a pair, so that the ratios tell more than the times.
        The time to free a result is not counted. ``clock`` returns the seconds of a call; ``warm_up`` is False where
        both are known to be warm.
        """
        seconds = clock or seconds_of
        gc.collect()
        for function in (candidate, baseline) if warm_up else ():
            seconds(function)
        times = []
        for index in range(pairs):
            order = -1 if index % 2 else 1
            times.append([seconds(each) for each in (candidate, baseline)[::order]][::order])
        ratios = [theirs / ours if self.faster else ours / theirs for ours, theirs in times]
        ours, theirs = (statistics.median(column) for column in zip(*times, strict=True))
        ratio, lowest, highest = statistics.median(ratios), min(ratios), max(ratios)
        return replace(self, values=(ours, theirs), ratio=ratio, lowest=lowest, highest=highest)

    def weighed(self, peak: float, result: float) -> Measurement:
        """Return this with a peak of memory beside the size of what was made, in bytes; or an error beside another."""
        ratio = peak / result
        return replace(self, values=(peak, result), ratio=ratio, lowest=ratio, highest=ratio)


def seconds_of(function: Callable[[], Any]) -> float:
    """Return how long a call takes, without freeing its result."""
    start = time.perf_counter()
    result = function()
    elapsed = time.perf_counter() - start
    del result
    return elapsed


def peak_growth(function: str, *arguments: Any) -> int:
    """Return by how many bytes memory grows, at its peak, during a call of :func:`run_alone`."""
    return int(run_alone(function, *arguments)["peak"])


def run_alone(function: str, *arguments: Any) -> dict[str, Any]:
    """Return what a call in a process of its own costs, and what it found.

    Args:
        function: ``module:name`` of a function that prepares (imports, warms up) and returns the call to be measured;
            or that and a function that, afterwards, takes the call's result and returns what there is to say of it.
        *arguments: Its arguments, as JSON can carry them.

    Returns:
        ``peak``: by how many bytes memory grew; ``seconds``; and ``found``, as JSON can carry it.
    """
    code = "import sys, json; from benchmarks import harness; harness._alone(*json.loads(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([function, *arguments])],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, ["", *sys.path]))},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{function} must run in a process of its own, got {done.stderr.strip()[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _alone(function: str, *arguments: Any) -> None:
    module, name = function.split(":")
    prepared = getattr(importlib.import_module(module), name)(*arguments)
    call, examine = prepared if isinstance(prepared, tuple) else (prepared, lambda result: None)
    gc.collect()
    # Forget the peak of the imports. Where this is not allowed that peak counts too: an overestimate.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before, _ = _memory()
    start = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    _, peak = _memory()
    print(json.dumps({"peak": peak - before, "seconds": seconds, "found": examine(result)}))


def _proc(name: str) -> dict[str, str]:
    """Return what a file of /proc says, by name; nothing on systems without it."""
    with contextlib.suppress(OSError):
        lines = Path("/proc", name).read_text(encoding="utf-8").splitlines()
        pairs = (line.partition(":") for line in lines)
        return {key.strip(): value.strip() for key, _, value in pairs}
    return {}


def _memory() -> tuple[int, int]:
    """Return resident memory and its peak, in bytes; both are the peak on systems without /proc."""
    if status := _proc("self/status"):  # not getrusage: on Linux its peak is inherited from the parent process
        now, peak = (1024 * int(status[key].split()[0]) for key in ("VmRSS", "VmHWM"))
        return now, peak
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak *= 1 if sys.platform == "darwin" else 1024
    return peak, peak


def available_memory() -> int:
    """Return how much memory a process can still take, in bytes; all there is, on systems without /proc."""
    if available := _proc("meminfo").get("MemAvailable"):
        return 1024 * int(available.split()[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


VECTORS = {"amx_tile": "AMX", "avx512f": "AVX-512", "avx2": "AVX2"}  # by the flag of /proc/cpuinfo
# By these PyTorch, and the libraries below it, leave a machine's widest instructions alone.
LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")


def machine() -> dict[str, Any]:
    """Describe the machine by what matters for speed, and by nothing that tells whose it is."""
    cpu = _proc("cpuinfo")
    flags = cpu.get("flags", "").split()
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "cpu": cpu.get("model name") or platform.processor(),
        # What products of matrices take, the widest first: it makes a difference of two.
        "vectors": next((name for flag, name in VECTORS.items() if flag in flags), None),
        "limits": {name: os.environ[name] for name in LIMITS if name in os.environ},
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def versions(*distributions: str) -> dict[str, str]:
    """Return the versions of Python, of this library and of those distributions that are installed."""
    found = {"python": platform.python_version(), "alibi-core": alibi_core.__version__}
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def write_json(path: Path, results: dict[str, Any]) -> None:
    """Write results, floats to five significant digits or null, and make the folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rounded = json.loads(
        json.dumps(results), parse_float=lambda text: float(f"{float(text):.5g}"), parse_constant=lambda name: None
    )
    path.write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")


def table(title: str, *columns: str, **options: Any) -> Table:
    """Return an empty table in the style of all benchmarks, with columns of such options."""
    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        made.add_column(column, **options)
    return made


def show(measurements: Sequence[Measurement], judged: bool) -> None:
    """Print one table a group, and the notes under it."""
    out = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    for group in dict.fromkeys(each.group for each in measurements):
        shown = table(group, "candidate", "baseline")
        for column in ("1st", "2nd", "ratio", "range", "bar", ""):
            shown.add_column(column, justify="right", no_wrap=True)
        members = [each for each in measurements if each.group == group]
        for each in members:
            verdict = each.verdict(judged).replace(NOT_JUDGED, "")
            shown.add_row(each.candidate, each.baseline, *_cells(each), f"[{_STYLES.get(verdict, 'none')}]{verdict}[/]")
        out.print(shown)
        for note in _notes(members):
            out.print(f"  {note}", style="dim", highlight=False, soft_wrap=True)
    if not judged:
        out.print("Bars are judged at full size only.")


def _notes(members: Sequence[Measurement]) -> list[str]:
    # What is special is the other: the baseline, except where others are candidates too, and where it is no contestant.
    noted = [each for each in members if each.note]
    subjects = (
        (each.candidate if each.faster or each.unit != "seconds" else each.baseline, each.note) for each in noted
    )
    return list(dict.fromkeys(f"{subject}: {note}" for subject, note in subjects))


def _cells(measured: Measurement) -> list[str]:
    bar = "" if measured.bar is None else f"{'>=' if measured.faster else '<'} {measured.bar:g}"
    if measured.values is None or measured.ratio is None:
        return ["", "", "", "", bar]
    spread = f"{measured.lowest:.2f}-{measured.highest:.2f}" if measured.lowest != measured.highest else ""
    return [*(_quantity(value, measured.unit) for value in measured.values), f"{measured.ratio:.2f}", spread, bar]


def _quantity(value: float, unit: str) -> str:
    if unit == "bytes":
        return f"{value / 2**20:,.0f} MiB"
    if unit == "error":
        return f"{value:.1e}"
    if unit in ("pairs", "blocks"):
        return f"{value:,.0f}"
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.0f} ms" if value >= 1e-2 else f"{value * 1e6:.0f} us"


# --- The program of a benchmark ---------------------------------------------------------------------------------------


def report(line: str) -> None:
    """Say what happens now."""
    print(line, file=sys.stderr, flush=True)


def parser(name: str, doc: str | None, sections: Iterable[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of a benchmark: ``--quick``, ``--output`` and, where it has sections, ``--only``."""
    names = list(sections)

    def chosen(text: str) -> list[str]:
        asked = text.split(",")
        if unknown := [each for each in asked if each not in names]:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(names)}, got {', '.join(unknown)}")
        return [each for each in names if each in asked]

    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--quick", action="store_true", help="small shapes: checks numbers, judges no speed")
    where = "where results go (default benchmarks/results, with --quick or --only out)"
    made.add_argument("--output", type=Path, metavar="DIR", help=where)
    if names:
        options = {"type": chosen, "default": names, "metavar": "SECTION,..."}
        made.add_argument("--only", help=f"of {', '.join(names)} (default all)", **options)
    return made


def folder(options: argparse.Namespace, is_whole: bool) -> Path:
    """Return where results go: of a whole run, to those that are kept."""
    is_kept = is_whole and not options.quick
    return options.output or (Path(__file__).parent / "results" if is_kept else Path("out"))


def conclude(
    path: Path, measurements: Sequence[Measurement], judged: bool, wrong: Sequence[str] = (), **results: Any
) -> int:
    """Print tables, write all results as JSON, tell what is wrong or was missed, and return the exit status.

    ``judged`` is whether bars count; ``wrong`` has a line for each number that is wrong.
    """
    failed = [each for each in measurements if judged and each.verdict(judged) in (MISSED, NOT_MEASURED)]
    missed = [f"{each.verdict(judged)}: {each.name}" for each in failed]
    show(measurements, judged)
    found = {"quick": not judged, "passed": not wrong and not missed, **results}
    verdicts = [asdict(each) | {"verdict": each.verdict(judged)} for each in measurements]
    write_json(path, found | {"measurements": verdicts})
    print(f"Written to {path}; the load of the machine was {results['machine']['load']} at the start.")
    slower = [f"{each.name}: {each.ratio:.2f}" for each in measurements if each.faster and (each.ratio or 1) < 1]
    if slower:
        print("Slower than what they are beside:", *slower, sep="\n  ")
    for line in [*(f"wrong: {line}" for line in wrong), *missed]:
        print(line, file=sys.stderr)
    return 1 if wrong or missed else 0
