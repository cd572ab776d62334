"""Runs the benchmark from the command line; see the package's docstring."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

import benchmarks.research.scaling
from benchmarks import harness
from benchmarks.research.scaling import validation
from benchmarks.research.scaling.figure import draw
from benchmarks.research.scaling.inputs import Chip, Layer, chips, table
from benchmarks.research.scaling.model import held, ring, step

SECTIONS = {"programs": validation.compiled, "blocks": validation.visited, "time": validation.timed}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit status: 1 if the model is off by more than it may."""
    parser = harness.parser("research.scaling", benchmarks.research.scaling.__doc__, SECTIONS)
    options = parser.parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # what plans here; programs are compiled in processes of their own
    machine = harness.machine()
    layer = Layer()
    all_chips = chips(layer.head_dim)
    told = list(table(layer, all_chips))
    shown = harness.table("What the model is told", "", *(chip.name for chip in all_chips), "source")
    for name, values, source in told:
        shown.add_row(name, *values, *[""] * (len(all_chips) - len(values)), source)
    rows = [row for chip in all_chips for row in modelled(chip, layer)]
    costs = harness.table("One layer: modelled, not run. In seconds and bytes", *rows[0])
    for row in rows:
        costs.add_row(*(f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values()))
    Console().print(shown, costs)
    cases = validation.QUICK if options.quick else validation.FULL
    output = harness.folder(options, options.only == list(SECTIONS))
    status = harness.conclude(
        output / "scaling.json",
        [each for name in options.only for each in SECTIONS[name](layer, cases)],
        not options.quick,
        benchmark="scaling",
        sections=options.only,
        machine=machine,
        versions=harness.versions("jax", "libtpu", "torch", "numpy"),
        layer=asdict(layer),
        inputs=[{"input": name, "values": values, "source": source} for name, values, source in told],
        modelled=rows,
    )
    draw(rows, f"one attention layer, {layer.length:,} tokens, {layer.heads} heads of {layer.head_dim}",
         output / "scaling.png")  # fmt: skip
    return status


def modelled(chip: Chip, layer: Layer) -> list[dict[str, Any]]:
    """Return the table of a chip: seconds of forward and backward together, and bytes that a chip sends forward."""
    found = []
    for count in layer.chips:
        plan = layer.plan(count)
        ahead = step(chip, layer, plan, gradient=False)
        both = ahead + step(chip, layer, plan, gradient=True)
        rings = [ring(chip, layer, count, gradient=gradient) for gradient in (False, True)]
        whole = held(layer, count, gradient=True)
        found.append(
            {
                "chip": chip.name,
                "chips": count,
                "tokens": plan.shards.chunk_len,
                "hops": len(plan.hops),
                "forward_seconds": ahead.seconds,
                "seconds": both.seconds,
                "compute": both.compute,
                "passes": both.passes,
                "exchange": both.exchange,
                "sent": ahead.sent,
                "held": whole,
                "fits": whole <= chip.capacity,
                "ring_forward_seconds": rings[0].seconds_overlapped,
                "ring_seconds": sum(each.seconds_overlapped for each in rings),
                "ring_sent": rings[0].sent,
            }
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
