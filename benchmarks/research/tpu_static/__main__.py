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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from benchmarks import harness
from benchmarks.harness import Measurement
from benchmarks.research.tpu_static.compile import TOPOLOGIES, Program
from benchmarks.research.tpu_static.figures import PASSES, is_forward, loops, scheduled, weighed
from benchmarks.research.tpu_static.subjects import BATCH, BLOCK, HEADS
from benchmarks.research.tpu_static.visits import visits

VERSIONS = ("jax", "jaxlib", "libtpu", "numpy")


def at_most(bar: float) -> float:
    """Return a bar that is met by a ratio of ``bar`` too, as a Measurement's ratio has to be below it."""
    return math.nextafter(bar, math.inf)


MEMORY_BAR, GROWTH_BAR = at_most(1.0), at_most(2.1)
BLOCKS_BAR = at_most(1.1)
SCHEDULE_BARS = {False: at_most(1.05), True: at_most(1.10)}


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


def programs(sizes: Sizes, section: str) -> Iterator[tuple[str, Program, Program, Program]]:
    """Yield ours at the shorter length, with what it is and with splash's, apart and fused, in the tables' order."""
    for topology, gradient, head_dim in itertools.product(sizes.topologies, PASSES, sizes.head_dims):
        subject = f"{topology}, {PASSES[gradient]}, {HEADS} heads of {head_dim}"
        harness.report(f"{section}: {subject}")
        ours = Program(topology, "alibi", sizes.length, head_dim, gradient)
        yield subject, ours, *(replace(ours, name="splash", options=(fused,)) for fused in (False, True))


def memory(sizes: Sizes) -> Iterator[Measurement]:
    """Temporaries: ours against splash attention, at twice the length against once, and against a dense bias."""
    for subject, ours, separate, fused in programs(sizes, "memory"):
        length = f"{ours.length:,} tokens"
        empty = Measurement(f"Temporaries at {length}", subject, "splash", "bytes", MEMORY_BAR)
        yield weighed(empty, ours, separate)
        if ours.gradient:
            yield weighed(replace(empty, baseline="splash, fused", bar=None), ours, fused)
        yield weighed(replace(empty, baseline="dense bias", bar=None), ours, replace(ours, name="dense"))
        for shorter, bar in ((sizes.length, None), (sizes.long, GROWTH_BAR)):
            group = f"Growth of temporaries, ours, from {shorter:,} to {2 * shorter:,} tokens"
            longer = replace(ours, length=2 * shorter)
            growth = Measurement(group, subject, "half the tokens", "bytes", bar)
            yield weighed(growth, longer, replace(ours, length=shorter))


def schedule(sizes: Sizes) -> Iterator[Measurement]:
    """Bundles for a key block: ours against splash attention."""
    for subject, ours, separate, fused in programs(sizes, "schedule"):
        group = f"Bundles for a key block of {BLOCK} x {BLOCK}, {'backward' if ours.gradient else 'forward'}"
        empty = Measurement(group, subject, "splash", "bundles", SCHEDULE_BARS[ours.gradient])
        least = fused if ours.gradient else separate
        yield scheduled(empty, ours, separate, least)
        if ours.gradient:
            yield scheduled(replace(empty, baseline="splash, fused", bar=None), ours, fused, least)


def blocks(sizes: Sizes) -> Iterator[Measurement]:
    """Blocks of keys: those that are visited against those that the horizon requires."""
    for length, head_dim in itertools.product((sizes.length, 4 * sizes.length), sizes.head_dims):
        subject = f"{HEADS} heads of {head_dim}, {length:,} tokens"
        harness.report(f"blocks: {subject}")
        group = f"Key blocks of {BLOCK}, forward, bfloat16, normal data"
        yield Measurement(group, subject, "the horizon", "blocks", BLOCKS_BAR).weighed(*visits(length, head_dim))


SECTIONS = {"memory": memory, "schedule": schedule, "blocks": blocks}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit status."""
    parser = harness.parser("research.tpu_static", __doc__, SECTIONS)
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("libtpu") is None:
        parser.error("libtpu must be installed (pip install libtpu, on Linux), got none")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # what plans here; programs are compiled in processes of their own
    machine = harness.machine()
    sizes = QUICK if options.quick else FULL
    measurements = [measured for name in options.only for measured in SECTIONS[name](sizes)]
    return harness.conclude(
        harness.folder(options, options.only == list(SECTIONS)) / "tpu-static.json",
        measurements,
        not options.quick,
        benchmark="tpu-static",
        ours="alibi_jax",
        sections=options.only,
        sizes=asdict(sizes) | {"batch": BATCH, "heads": HEADS, "block": BLOCK, "dtype": "bfloat16"},
        machine=machine,
        versions=harness.versions(*VERSIONS),
        loops=_loops(sizes) if "schedule" in options.only else [],
    )


def _loops(sizes: Sizes) -> list[dict[str, object]]:
    found = []
    for _, ours, separate, fused in programs(sizes, "loops"):
        for program in (ours, separate, fused) if ours.gradient else (ours, separate):
            found += [loop for loop in loops(program) if not (ours.gradient and is_forward(str(loop["kernel"])))]
    return found


if __name__ == "__main__":
    sys.exit(main())
