"""Programs of the benchmarks, run in small as from a command line, and what all of them promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def quick_run(name: str, output: Path, *options: str) -> dict[str, Any]:
    """Return the results of a benchmark with ``--quick``: nothing wrong, and each measurement made or told why not."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--output", str(output), *options]
    # Processes in which memory is measured compile much of what the first one did. One thread: more of them, on a
    # machine that is busy with other tests, wait for each other.
    settings = {"JAX_COMPILATION_CACHE_DIR": str(output / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    settings |= {"PYTHONPATH": os.pathsep.join(filter(None, ["", *sys.path])), "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=os.environ | settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (written,) = output.glob("*.json")
    results: dict[str, Any] = json.loads(written.read_text(encoding="utf-8"))
    assert (results["benchmark"], results["quick"], results["passed"]) == (name, True, True)
    assert "alibi-core" in results["versions"]
    for measured in results["measurements"]:
        if measured["ratio"] is None:
            assert measured["note"]  # why not
        else:
            assert measured["lowest"] <= measured["ratio"] <= measured["highest"]
            assert measured["verdict"] == ("" if measured["bar"] is None else "not judged")
    return results
