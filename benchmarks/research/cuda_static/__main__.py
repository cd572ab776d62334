"""What does ALiBi attention cost on an NVIDIA GPU, as far as compilers can tell without one?

FlexAttention's kernels for a call of this library are compiled by Triton and PTX's assembler, for A100 (sm_80) and
H100 (sm_90): forward, backward and for one query; in bfloat16 and causal where nothing else is said, and beside some
the same kernel over the same blocks with no positions. The table has registers, bytes of spilled registers (and, in
brackets, instructions that spill in a loop), shared memory, the tensor core's instruction, and instructions a thread
executes for a score in blocks that need no mask (backward: those of both loops; one query: those of the only loop).
Last come the kernels of the plan, which find the blocks that are needed.
Blocks that are left out do not show in it, nor does waiting.

The exit status is 1 if a loop of ours spills registers, or a kernel in 16 bits leaves the tensor cores unused (float32
is computed as float32). Needs triton (pip install triton; it needs no GPU). About ten minutes on two cores.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks import harness
from benchmarks.research.cuda_static.compile import DEVICES, PASSES, Subject, compiled

HEADS = ((32, 128), (8, 64))
# All blocks of whole tiles spill there (wgmma takes 64 rows), and those that do not take 1.6 times the instructions.
UNDECIDED = (90, "backward", 256)  # architecture, pass and head size: a GPU has to say
COLUMNS = ("", "blocks", "warps, stages", "registers", "spilled", "shared KiB", "tensor core", "instructions a score")


def subjects(is_quick: bool) -> Iterator[Subject]:
    """Yield what is compiled."""
    if is_quick:
        yield from (Subject(90, "forward", 8, 64, has_bias) for has_bias in (True, False))
        return
    for architecture, kind in itertools.product(DEVICES, PASSES):
        for sizes in HEADS:
            subject = Subject(architecture, kind, *sizes)
            yield subject
            yield replace(subject, has_bias=False)
            yield replace(subject, dtype="float32")
            if architecture == 90:
                yield replace(subject, varies=True)
                yield replace(subject, is_causal=False)
        for head_dim in (96, 256):
            yield Subject(architecture, kind, 8, head_dim)
    for kind, varies in itertools.product(PASSES, (False, True)):
        yield Subject(90, kind, *HEADS[0], varies=varies, is_plan=True)


def named(subject: Subject) -> str:
    """Return a subject in words."""
    parts = [f"sm_{subject.architecture}, {subject.num_heads} heads of {subject.head_dim}, {subject.kind}"]
    parts += ["ALiBi" if subject.has_bias else "no positions"]
    parts += ["any length"] * subject.varies + ["symmetric"] * (not subject.is_causal)
    parts += ["its plan"] * subject.is_plan
    return ", ".join(parts + [subject.dtype] * (subject.dtype != "bfloat16"))


def instructions(kernel: dict[str, Any]) -> float:
    """Return the instructions for a score where no mask is needed: loops with a mask and without one alternate."""
    loops = kernel["loops"][1::2] or kernel["loops"]  # of few queries, all blocks are masked
    return sum(loop["instructions"] / loop["scores"] for loop in loops)


def problems(subject: Subject, kernel: dict[str, Any]) -> list[str]:
    """Return what is wrong with a kernel."""
    if subject.is_plan:
        return [f"{named(subject)}: {kernel['kernel']} spills registers"] if kernel["spilled"] else []
    spills = sum(loop["spills"] for loop in kernel["loops"])
    found = [f"{named(subject)}: {spills} instructions of its loops spill registers"] if spills else []
    is_idle = not kernel["loops"] or any(loop["product"] == "none" for loop in kernel["loops"])
    if is_idle and subject.dtype != "float32":
        found.append(f"{named(subject)}: a loop does without the tensor cores")
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
        for kernel in compiled(subject):
            print(row(named(subject), kernel), flush=True)
            found.append(asdict(subject) | kernel | {"instructions_a_score": instructions(kernel)})
            if subject.has_bias and (subject.architecture, subject.kind, subject.head_dim) != UNDECIDED:
                wrong += problems(subject, kernel)
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
