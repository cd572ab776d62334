"""What does it cost to divide one sequence among devices, and does it pay?

    python -m benchmarks.parallel --backend jax

  bytes   what devices send each other, against a full ring, in which each device's keys and values visit all others: at
          least 5 times less; and against what the heads' horizons strictly require: at most 1.1 times that. Counted
          twice: as planned, and in the compiled program;
  work    pairs of queries and keys on the device that has most, against the mean of all, contiguous: at most 1.3 times;
  memory  temporaries of a device, at a fixed length, when there are twice as many devices: at most 0.55 times.

The sequence is 65,536 tokens long, on 8 devices, with 8 heads of 64 (memory: 262,144 tokens, so that little of it fits
the fast memory on a chip). Scores exceed that of a query's own key by 14 at most, which is about what normal data and
trained models do, and a share of 2**-24 of the softmax weight may be left out. Numbers are not checked here: the tests
do.

    python -m benchmarks.parallel --backend torch

times 4 processes that share the cores against 1 that has them all, at 32,768 tokens: no slower. Here numbers are
checked first.

The exit status is 1 if, at full size, a bar is not met or could not be measured.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import alibi_core
from benchmarks import harness
from benchmarks.harness import Measurement
from benchmarks.parallel import jax, torch

PLACEMENTS = ("contiguous", "zigzag")
RING_BAR = 5.0
WORK_BAR, REQUIRED_BAR, HALVING_BAR = (math.nextafter(bar, math.inf) for bar in (1.3, 1.1, 0.55))


@dataclass(frozen=True)
class Sizes:
    """What is measured. Lengths are in tokens."""

    length: int = 65_536
    devices: int = 8
    heads: int = 8
    head_dim: int = 64
    item_bytes: int = 2
    score_bound: float = 14.0
    tolerance: float = 2.0**-24
    memory_length: int = 262_144
    memory_devices: tuple[int, ...] = (4, 8, 16)

    def plan(self, placement: str = "contiguous") -> alibi_core.ShardPlan:
        """Return what is to be sent."""
        shards = alibi_core.Shards.of_length(self.length, self.devices, placement)
        return alibi_core.shard_plan(self.heads, shards, score_bound=self.score_bound, tolerance=self.tolerance)

    def program(self, devices: int, length: int, gradient: bool) -> dict[str, Any]:
        """Return what the compiler says of a program."""
        harness.report(f"compiling for {devices} devices{', gradients' * gradient}")
        return jax.program(devices, length, self.heads, self.head_dim, self.score_bound, self.tolerance, gradient)


FULL = Sizes()
QUICK = Sizes(length=8192, devices=4, heads=4, memory_length=8192, memory_devices=(4, 8))


def bytes_sent(sizes: Sizes) -> Iterator[Measurement]:
    """Measure what devices send each other, as planned and in the compiled program."""
    size, found = (sizes.head_dim, sizes.item_bytes), []
    for placement in PLACEMENTS:
        plan = sizes.plan(placement)
        found.append((f"{placement}, as planned", plan, 1, plan.bytes_exchanged(*size), ""))
    for gradient in (False, True):
        operations = sizes.program(sizes.devices, sizes.length, gradient)["collectives"]
        others = sorted({x["kind"] for x in operations} - {"collective-permute", "all-reduce"})
        note = f"and there are {', '.join(others)}" if others else "nothing is gathered"
        sent = sum(x["bytes"] for x in operations if not x["is_fallback"])
        # With gradients keys and values go twice, and what they get comes back as float32.
        times = 1 + gradient * (1 + 4 // sizes.item_bytes)
        found.append((f"contiguous, compiled{', with gradients' * gradient}", sizes.plan(), times, sent, note))
    for name, plan, times, sent, note in found:
        fewer = Measurement("Bytes that devices send", "full ring", name, "bytes", RING_BAR, note=note, faster=True)
        yield fewer.weighed(plan.bytes_of_ring(*size) * times, sent)
        least = Measurement("Bytes that devices send", name, "horizons require", "bytes", REQUIRED_BAR)
        yield least.weighed(sent, plan.bytes_required(*size) * times)


def work(sizes: Sizes) -> Iterator[Measurement]:
    """Measure how evenly the work is divided."""
    for placement in PLACEMENTS:
        pairs = sizes.plan(placement).work()
        empty = Measurement("Pairs that a device computes", f"most, {placement}", "mean", "pairs", WORK_BAR)
        yield empty.weighed(int(pairs.max()), float(pairs.mean()))


def memory(sizes: Sizes) -> Iterator[Measurement]:
    """Measure how memory shrinks as devices double."""
    for gradient in (False, True):
        counts = sizes.memory_devices
        found = [sizes.program(devices, sizes.memory_length, gradient)["temporaries"] for devices in counts]
        for devices, (before, after) in zip(counts, pairwise(found), strict=False):
            name = f"{2 * devices} devices{', with gradients' * gradient}"
            empty = Measurement("Temporaries of a device", name, f"{devices} devices", "bytes", HALVING_BAR)
            yield empty.weighed(after, before)


SECTIONS: dict[str, Callable[[Sizes], Iterator[Measurement]]] = {"bytes": bytes_sent, "work": work, "memory": memory}


def main(arguments: list[str] | None = None) -> int:
    parser = harness.parser("parallel", __doc__, SECTIONS)
    parser.add_argument("--backend", choices=("jax", "torch"), default="jax", help="whose attention (default jax)")
    options = parser.parse_args(arguments)
    machine, is_whole = harness.machine(), options.only == list(SECTIONS)
    if options.backend == "torch":  # processes, no compiler to ask
        if not is_whole:
            parser.error("--only must be left out with --backend torch, which has no sections")
        sizes, versions = torch.QUICK if options.quick else torch.FULL, torch.VERSIONS
        measurements = list(torch.measurements(sizes))
    else:
        sizes, versions = QUICK if options.quick else FULL, jax.VERSIONS
        measurements = [measured for name in options.only for measured in SECTIONS[name](sizes)]
    return harness.conclude(
        harness.folder(options, is_whole) / f"parallel-{options.backend}.json",
        measurements,
        not options.quick,
        benchmark="parallel",
        backend=f"alibi_{options.backend}",
        sections=options.only,
        sizes=asdict(sizes),
        machine=machine,
        versions=harness.versions(*versions),
    )


if __name__ == "__main__":
    sys.exit(main())
