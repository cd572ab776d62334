"""What does ALiBi attention cost on an NVIDIA GPU, as far as compilers can tell without one?

FlexAttention's kernels for a call of this library are compiled by Triton and PTX's assembler, for A100 (sm_80) and
H100 (sm_90), in bfloat16, causal: forward, backward and for one query, and beside each the same kernel over the same
blocks with no positions. The table has registers, bytes of spilled registers (and, in brackets, instructions that
spill in a loop), shared memory, the tensor core's instruction, and instructions a thread executes for a score in
blocks that need no mask (backward: those of both loops). Blocks that are left out do not show in it, nor does waiting.

The exit status is 1 if a loop of ours spills registers, or a kernel leaves the tensor cores unused. Needs triton (pip
install triton; it needs no GPU). About five minutes on two cores.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks import harness
from benchmarks.research.cuda_static.compile import DEVICES, PASSES, Subject, compiled

HEADS = ((32, 128), (8, 64))
COLUMNS = ("", "blocks", "warps, stages", "registers", "spilled", "shared KiB", "tensor core", "instructions a score")


def subjects(is_quick: bool) -> Iterator[Subject]:
    """Yield what is compiled."""
    for architecture, (heads, head_dim), kind in itertools.product(DEVICES, HEADS, PASSES):
        if is_quick and (architecture, head_dim, kind) != (90, 64, "forward"):
            continue
        for has_bias, varies in ((True, False), (False, False), (True, True)):
            if not varies or (architecture == 90 and not is_quick):
                yield Subject(architecture, kind, heads, head_dim, has_bias, varies=varies)


def instructions(kernel: dict[str, Any]) -> float:
    """Return the instructions for a score where no mask is needed: loops with a mask and without one alternate."""
    return sum(loop["instructions"] / loop["scores"] for loop in kernel["loops"][1::2])


def problems(subject: str, kernel: dict[str, Any]) -> list[str]:
    """Return what is wrong with a kernel."""
    spills = sum(loop["spills"] for loop in kernel["loops"])
    found = [f"{subject}: {spills} instructions of its loops spill registers"] if spills else []
    if not kernel["loops"] or any(loop["product"] == "none" for loop in kernel["loops"]):
        found.append(f"{subject}: a loop does without the tensor cores")
    return found


def row(subject: str, kernel: dict[str, Any]) -> str:
    """Return a kernel's row of the table."""
    spills = sum(loop["spills"] for loop in kernel["loops"])
    blocks = " ".join(f"{name.removeprefix('BLOCK_')} {size}" for name, size in kernel["blocks"].items())
    cells = [subject, blocks, f"{kernel['warps']}, {kernel['stages']}", str(kernel["registers"])]
    cells += [f"{kernel['spilled']} ({spills})", f"{kernel['shared'] / 1024:.0f}"]
    cells += [" ".join(dict.fromkeys(loop["product"] for loop in kernel["loops"])), f"{instructions(kernel):.1f}"]
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile everything, print the table, and return the exit status."""
    parser = harness.parser("research.cuda_static", __doc__)
    options = parser.parse_args(arguments)
    try:
        import triton  # noqa: F401
    except ModuleNotFoundError:
        parser.error("triton must be installed (pip install triton, on Linux), got none")
    machine = harness.machine()
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
    wrong: list[str] = []
    found = []
    for subject in subjects(options.quick):
        form = "ALiBi" if subject.has_bias else "no positions"
        name = f"sm_{subject.architecture}, {subject.num_heads} heads of {subject.head_dim}, {subject.kind}, {form}"
        name += ", any length" if subject.varies else ""
        for kernel in compiled(subject):
            print(row(name, kernel), flush=True)
            found.append(asdict(subject) | kernel | {"instructions_a_score": instructions(kernel)})
            wrong += problems(name, kernel) if subject.has_bias else []
    return harness.conclude(
        harness.folder(options, True) / "cuda-static.json",
        [],
        not options.quick,
        wrong,
        benchmark="cuda-static",
        machine=machine,
        versions=harness.versions("torch", "triton"),
        kernels=found,
    )


if __name__ == "__main__":
    sys.exit(main())
