"""Whether attention is right on this machine, how fast it is, and which of MLX's fused kernels run it.

``python -m alibi_mlx.check`` makes a call for each head size that Metal's kernels take. It compares the result with the
exact one, within the error budget of the conformance kit; times it beside MLX's attention with the whole bias as its
mask; and asks MLX, from version 0.32.4 on, whether a fused kernel takes the tensors that the implementation hands to
it, and if none does, why. Where there is no Metal device, it says so and makes the same calls on the CPU, shorter ones.

Its exit status is 1 if a result is wrong or a call fails. What it prints is a table to paste into an issue.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

import mlx.core as mx
import numpy as np

import alibi_core
from alibi_core.backend import positive_int
from alibi_mlx._compatible import has_newer_kernels
from alibi_mlx._metal import Kernels
from alibi_mlx.check._calls import Outcome, calls, outcome

COLUMNS = ("dtype", "queries", "keys", "features", "runs as", "fused", "error", "of budget", "ms", "dense ms", "")
WIDTHS = (8, 7, 5, 8, 10, 8, 8, 9, 9, 9, 7)


def main(arguments: Sequence[str] | None = None, *, kernels: Kernels | None = None) -> int:
    """Check, print and return the exit status.

    Args:
        arguments: Of the command line; default, those of the process.
        kernels: What there is to check; default, what this machine has.
    """
    parser = argparse.ArgumentParser(prog="python -m alibi_mlx.check", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="one dtype a row, shorter sequences, fewer repetitions")
    parser.add_argument("--longest", metavar="KEYS", type=int, default=8192, help="keys of a call, at most")
    parser.add_argument("--json", metavar="FILE", help="write what was found to this file, too")
    options = parser.parse_args(arguments)
    device = mx.gpu if mx.metal.is_available() else mx.cpu
    kernels = kernels or Kernels(device, has_newer_kernels())
    about = environment(kernels.device)
    print(", ".join(f"{name} {version}" for name, version in about.items()), _remark(kernels), sep="\n\n", end="\n\n")
    print(_row(COLUMNS), _row(["-" * width for width in WIDTHS]), sep="\n", flush=True)
    found = []
    repeats = (3 if options.quick else 7) if kernels.device == mx.gpu else (1 if options.quick else 3)
    with _default_device(kernels.device):
        for call in calls(kernels, quick=options.quick, longest=positive_int("longest", options.longest)):
            found.append(outcome(call, kernels, repeats))
            print(_row(_cells(found[-1])), flush=True)
    wrong = sum(not x.is_right for x in found)
    print("", *_notes(found), sep="\n")
    print(f"{wrong} of {len(found)} calls are WRONG." if wrong else f"All {len(found)} calls are as they should be.")
    if options.json is not None:
        report = {"environment": about, "metal": kernels.device == mx.gpu, "right": not wrong}
        report["calls"] = [asdict(x) | {"right": x.is_right} for x in found]
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1, allow_nan=False)
    return 1 if wrong else 0


def environment(device: mx.DeviceType) -> dict[str, str]:
    """Return the versions and names of what the calls run on."""
    if hasattr(mx, "device_info"):
        details = mx.device_info(mx.Device(device))
    else:  # before MLX 0.31
        details = mx.metal.device_info() if device == mx.gpu else {}
    macos = platform.mac_ver()[0]
    return {
        "alibi-core": alibi_core.__version__,
        "MLX": mx.__version__,
        "NumPy": np.__version__,
        "Python": platform.python_version(),
        "system": f"macOS {macos}" if macos else f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "device": str(details.get("device_name", "GPU" if device == mx.gpu else "CPU")),
        "architecture": str(details.get("architecture", "not told")),
    }


def _remark(kernels: Kernels) -> str:
    if kernels.device != mx.gpu:
        return (
            "There is no Metal device here, so fused kernels were not tried, and times say nothing of a GPU:\n"
            "the calls run on the CPU, and are short."
        )
    if not kernels.newer:
        return "This MLX cannot be asked for its fused kernels: that needs 0.32.4 or later."
    return "fused: for how many of MLX's attention calls a fused kernel exists."


@contextmanager
def _default_device(device: mx.DeviceType) -> Iterator[None]:
    before = mx.default_device()
    mx.set_default_device(mx.Device(device))
    try:
        yield
    finally:
        mx.set_default_device(before)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)) + " |"


def _cells(outcome: Outcome) -> list[str]:
    fused, numbers = "-", ["-"] * 4
    if outcome.tried is not None and outcome.unfused is not None:
        missing = sum(outcome.unfused.values())
        fused = "yes" if missing == 0 else f"{outcome.tried - missing} of {outcome.tried}"
    if outcome.error is not None and outcome.share is not None:
        milliseconds = [1e3 * (x or 0.0) for x in (outcome.seconds, outcome.dense_seconds)]
        numbers = [f"{outcome.error:.1e}", f"{outcome.share:.2%}", *(f"{x:.3f}" for x in milliseconds)]
    verdict = "refused" if outcome.refused is not None else "right" if outcome.is_right else "WRONG"
    sizes = [str(x) for x in (outcome.q_len, outcome.kv_len, outcome.head_dim)]
    return [outcome.dtype, *sizes, f"{outcome.implementation} {outcome.padded}", fused, *numbers, verdict]


def _notes(found: list[Outcome]) -> list[str]:
    """Return what the table has no room for: why there are no fused kernels, refusals and errors."""
    notes = []
    for x in found:
        call = f"{x.dtype}, {x.q_len} queries, {x.kv_len} keys, {x.implementation} {x.padded}"
        notes += [f"{call}: no fused kernel for {n} of {x.tried}: {why}" for why, n in (x.unfused or {}).items()]
        notes += [f"{call}: not run, it {x.refused}"] if x.refused is not None else []
        notes += [f"{call}: raised {x.raised}"] if x.raised is not None else []
        notes += [f"{call}: gave NaN or infinities"] if x.seconds is not None and x.error is None else []
    return [*notes, ""] if notes else []


if __name__ == "__main__":
    sys.exit(main())
