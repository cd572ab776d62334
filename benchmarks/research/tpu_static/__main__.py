"""What does ALiBi attention cost on a TPU, as far as the compiler can tell without one?

libtpu's compiler compiles for TPUs that are described to it. It says how much memory a program takes beside arguments
and results, and writes down each kernel's schedule, whose bundles of instructions are issued one a cycle. Compared with
splash attention, JAX's kernel for attention without positions (causal, blocks of 512 x 512, inputs transposed for it):

  memory    temporaries at 16,384 tokens, forward and with gradients, no more than splash's with two backward kernels;
            and 131,072 tokens may take 2.1 times what 65,536 take. For information: splash's fused backward kernel, a
            dense bias in JAX's own attention, and growth from 16,384 to 32,768, where the compiler still has room for
            some arrays on the chip, so that what is left of them grows faster (splash's by 2.4 to 3.0);
  schedule  bundles for a key block that needs no mask, at most 1.05 times splash's forward, and 1.10 times backward,
            where all backward kernels are added up. bundles.py says how they are counted. Waiting for
            memory does not show in them, nor key blocks that are left out;
  blocks    blocks of keys that are visited, beside those that the horizon requires, at 16,384 and 65,536 tokens: at
            most 1.1 times as many.

Numbers are not checked here, as nothing runs: the tests do, with the kernels interpreted. The exit status is 1 if, at
full size, a bar is not met or could not be measured. About eight minutes on two cores.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from benchmarks import harness
from benchmarks.harness import Measurement
from benchmarks.research.tpu_static.compile import TOPOLOGIES, Compiled, Program, compiled
from benchmarks.research.tpu_static.figures import PASSES, loops, scheduled, weighed
from benchmarks.research.tpu_static.subjects import BATCH, BLOCK, HEADS
from benchmarks.research.tpu_static.visits import visits

# Ratios have to be below; these are met by the figures themselves, too.
MEMORY_BAR, GROWTH_BAR, BLOCKS_BAR = (math.nextafter(bar, math.inf) for bar in (1.0, 2.1, 1.1))
SCHEDULE_BARS = {False: math.nextafter(1.05, math.inf), True: math.nextafter(1.10, math.inf)}


@dataclass(frozen=True)
class Sizes:
    """What is compiled: for which TPUs, of which head sizes, and over how many tokens.

    Growth is measured from ``length`` to twice that, and judged from ``long`` to twice that.
    """

    topologies: tuple[str, ...] = tuple(TOPOLOGIES)
    head_dims: tuple[int, ...] = (64, 128)
    length: int = 16_384
    long: int = 65_536


FULL = Sizes()
QUICK = Sizes(topologies=("v5e:2x2",), head_dims=(64,), length=4096, long=8192)


@dataclass
class Run:
    """A run in progress, who is asked, and what was found of loops."""

    sizes: Sizes
    compile: Callable[[Program], Compiled] = compiled
    visits: Callable[[int, int], tuple[int, int]] = visits
    loops: list[dict[str, Any]] = field(default_factory=list)

    def programs(self, section: str) -> Iterator[tuple[str, Program, Program, Program]]:
        """Yield what it is, ours at the shorter length, and splash's, apart and fused, in the tables' order."""
        sizes = self.sizes
        for topology, gradient, head_dim in itertools.product(sizes.topologies, PASSES, sizes.head_dims):
            subject = f"{topology}, {PASSES[gradient]}, {HEADS} heads of {head_dim}"
            harness.report(f"{section}: {subject}")
            ours = Program(topology, "alibi", sizes.length, head_dim, gradient)
            yield subject, ours, *(replace(ours, name="splash", options=(fused,)) for fused in (False, True))


def memory(run: Run) -> Iterator[Measurement]:
    """Temporaries: ours against splash attention, at twice the length against once, and against a dense bias."""
    for subject, ours, separate, fused in run.programs("memory"):
        group = f"Temporaries at {ours.length:,} tokens"
        others = [("splash", separate, MEMORY_BAR), ("splash, fused", fused, None)][: 1 + ours.gradient]
        for name, program, bar in (*others, ("dense bias", replace(ours, name="dense"), None)):
            both = run.compile(ours), run.compile(program)
            yield weighed(Measurement(group, subject, name, "bytes", bar), *both)
        for shorter, bar in ((run.sizes.length, None), (run.sizes.long, GROWTH_BAR)):
            group = f"Growth of temporaries, ours, from {shorter:,} to {2 * shorter:,} tokens"
            both = (run.compile(replace(ours, length=times * shorter)) for times in (2, 1))
            yield weighed(Measurement(group, subject, "half the tokens", "bytes", bar), *both)


def schedule(run: Run) -> Iterator[Measurement]:
    """Bundles for a key block: ours against splash attention."""
    for subject, ours, separate, fused in run.programs("schedule"):
        gradient = ours.gradient
        programs = (ours, separate, fused) if gradient else (ours, separate)
        found = [run.compile(program) for program in programs]
        group = f"Bundles for a key block of {BLOCK} x {BLOCK}, {'backward' if gradient else 'forward'}"
        for name, theirs, bar in zip(
            ("splash", "splash, fused"), found[1:], (SCHEDULE_BARS[gradient], None), strict=False
        ):
            empty = Measurement(group, subject, name, "bundles", bar)
            yield scheduled(empty, gradient, found[0], theirs, found[-1])
        for program, each in zip(programs, found, strict=True):
            run.loops += loops(program, each)


def blocks(run: Run) -> Iterator[Measurement]:
    """Blocks of keys: those that are visited against those that the horizon requires."""
    for length, head_dim in itertools.product((run.sizes.length, 4 * run.sizes.length), run.sizes.head_dims):
        subject = f"{HEADS} heads of {head_dim}, {length:,} tokens"
        harness.report(f"blocks: {subject}")
        group = f"Key blocks of {BLOCK}, forward, bfloat16, normal data"
        empty = Measurement(group, subject, "the horizon", "blocks", BLOCKS_BAR)
        yield empty.weighed(*run.visits(length, head_dim))


SECTIONS = {"memory": memory, "schedule": schedule, "blocks": blocks}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit status."""
    parser = harness.parser("research.tpu_static", __doc__, SECTIONS)
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("libtpu") is None:
        parser.error("libtpu must be installed (pip install libtpu, on Linux), got none")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # what plans here; programs are compiled in processes of their own
    machine = harness.machine()
    run = Run(QUICK if options.quick else FULL)
    measurements = [measured for name in options.only for measured in SECTIONS[name](run)]
    return harness.conclude(
        harness.folder(options, options.only == list(SECTIONS)) / "tpu-static.json",
        measurements,
        not options.quick,
        benchmark="tpu-static",
        ours="alibi_jax",
        sections=options.only,
        sizes=asdict(run.sizes) | {"batch": BATCH, "heads": HEADS, "block": BLOCK, "dtype": "bfloat16"},
        machine=machine,
        versions=harness.versions("jax", "jaxlib", "libtpu", "numpy"),
        loops=run.loops,
    )


if __name__ == "__main__":
    sys.exit(main())
