"""Runs the benchmark from the command line; see the package's docstring."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

import benchmarks.research.scaling
from benchmarks import harness
from benchmarks.harness import Measurement
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
    inputs = list(table(layer, all_chips))
    names = [chip.name for chip in all_chips]
    told = [(name, *values, *[""] * (len(names) - len(values)), source) for name, values, source in inputs]
    _show("What the model is told", [("", *names, "source"), *told])
    rows = [row for chip in all_chips for row in modelled(chip, layer)]
    shown = [[f"{x:.4g}" if isinstance(x, float) else x for x in row.values()] for row in rows]
    _show("One layer: modelled, not run. In seconds and bytes", [list(rows[0]), *shown])
    output = harness.folder(options, options.only == list(SECTIONS))
    status = harness.conclude(
        output / "scaling.json",
        list(_validated(layer, options)),
        not options.quick,
        benchmark="scaling",
        sections=options.only,
        machine=machine,
        versions=harness.versions("jax", "libtpu", "torch", "numpy"),
        layer=asdict(layer),
        inputs=[{"input": name, "values": values, "source": source} for name, values, source in inputs],
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


def _validated(layer: Layer, options: argparse.Namespace) -> Iterator[Measurement]:
    cases = validation.QUICK if options.quick else validation.FULL
    for name in options.only:
        harness.report(f"validating {name}")
        yield from SECTIONS[name](layer, cases)


def _show(title: str, rows: Sequence[Sequence[Any]]) -> None:
    """Print a table, whose first row is its head."""
    shown = harness.table(title, *rows[0])
    for row in rows[1:]:
        shown.add_row(*map(str, row))
    Console().print(shown)


if __name__ == "__main__":
    sys.exit(main())
