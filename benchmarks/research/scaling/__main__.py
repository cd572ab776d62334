"""Runs the benchmark from the command line; see the package's docstring."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

import alibi_core
import benchmarks.research.scaling
from benchmarks import harness
from benchmarks.harness import MET, Measurement
from benchmarks.research.scaling import validation
from benchmarks.research.scaling.figure import draw
from benchmarks.research.scaling.inputs import Chip, Layer, chips, table
from benchmarks.research.scaling.model import backward, forward, held, ring, ring_seconds

SECTIONS = ("programs", "blocks", "time")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit status: 1 if the model is off by more than it may."""
    options = _parser().parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # what plans here; programs are compiled in processes of their own
    machine = harness.machine()
    layer = Layer()
    all_chips = chips(layer.head_dim)
    console = harness.console() or Console()
    inputs = list(table(layer, all_chips))
    _show_inputs(console, inputs, all_chips)
    rows = [row for chip in all_chips for row in modelled(chip, layer)]
    _show_model(console, rows)
    measurements = list(_validated(layer, options))
    harness.show(console, measurements, not options.quick)
    missed = [each.name for each in measurements if not options.quick and each.verdict(True) != MET]
    is_whole = not options.quick and options.only == list(SECTIONS)
    output = options.output or (Path(__file__).parents[2] / "results" if is_whole else Path("out"))
    output.mkdir(parents=True, exist_ok=True)
    harness.write_json(
        output / "scaling.json",
        {
            "benchmark": "scaling",
            "quick": options.quick,
            "passed": not missed,
            "sections": options.only,
            "machine": machine,
            "versions": {"alibi-core": alibi_core.__version__} | harness.versions("jax", "libtpu", "torch", "numpy"),
            "layer": asdict(layer),
            "inputs": [{"input": name, "values": values, "source": source} for name, values, source in inputs],
            "modelled": rows,
            "validation": harness.as_json(measurements, not options.quick),
        },
    )
    draw(rows, f"one attention layer, {layer.length:,} tokens, {layer.heads} heads of {layer.head_dim}",
         output / "scaling.png")  # fmt: skip
    print(f"Written to {output}/: scaling.json, scaling.png.")
    for line in missed:
        print(f"off: {line}", file=sys.stderr)
    return 1 if missed else 0


def modelled(chip: Chip, layer: Layer) -> list[dict[str, Any]]:
    """Return the table of a chip: seconds of forward and backward together, and bytes that a chip sends forward."""
    found = []
    for count in layer.chips:
        plan = layer.plan(count)
        ahead, back = forward(chip, layer, plan), backward(chip, layer, plan)
        rings = [ring(chip, layer, count, gradient=gradient) for gradient in (False, True)]
        both = ahead + back
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
                "held": held(layer, count, gradient=True),
                "fits": held(layer, count, gradient=True) <= chip.capacity,
                "ring_forward_seconds": ring_seconds(rings[0]),
                "ring_seconds": sum(ring_seconds(each) for each in rings),
                "ring_sent": rings[0].sent,
            }
        )
    return found


def _validated(layer: Layer, options: argparse.Namespace) -> list[Measurement]:
    cases = validation.QUICK if options.quick else validation.FULL
    sections = {
        "programs": lambda: validation.compiled(layer, cases),
        "blocks": lambda: validation.visited(cases),
        "time": lambda: validation.timed(cases),
    }
    found = []
    for name in options.only:
        print(f"validating {name}", file=sys.stderr, flush=True)
        found.extend(sections[name]())
    return found


def _show_inputs(
    console: Console, inputs: Sequence[tuple[str, tuple[str, ...], str]], all_chips: Sequence[Chip]
) -> None:
    shown = _table("What the model is told")
    for column in ("", *(chip.name for chip in all_chips), "source"):
        shown.add_column(column)
    for name, values, source in inputs:
        shown.add_row(name, *values, *[""] * (len(all_chips) - len(values)), source)
    console.print(shown)


def _show_model(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    for name in dict.fromkeys(row["chip"] for row in rows):
        shown = _table(f"TPU {name}, one layer, forward and backward: modelled, not run. In ms, MB and GB")
        for column in ("chips", "tokens", "hops", "forward", "both", "kernels", "passes", "exchange", "sent", "held",
                       "ring", "sent", "faster", "kept"):  # fmt: skip
            shown.add_column(column, justify="right", no_wrap=True)
        found = [row for row in rows if row["chip"] == name]
        for row in found:
            kept = found[0]["seconds"] * found[0]["chips"] / (row["seconds"] * row["chips"])
            times = [f"{1e3 * row[key]:.2f}" for key in ("forward_seconds", "seconds", "compute", "passes", "exchange")]
            memory = f"{row['held'] / 1e9:.1f}" + ("" if row["fits"] else "!")
            shown.add_row(str(row["chips"]), f"{row['tokens']:,}", str(row["hops"]), *times, f"{row['sent'] / 1e6:.0f}",
                          memory, f"{1e3 * row['ring_seconds']:,.0f}", f"{row['ring_sent'] / 1e9:.1f}",
                          f"{row['ring_seconds'] / row['seconds']:.0f}x", f"{kept:.0%}")  # fmt: skip
        console.print(shown)
    console.print(
        "  sent: by a chip, forward. held: by a chip; ! is more than it has. ring: the full ring, and what its chips\n"
        "  send, in GB. faster: than the ring. kept: of the speed that as many times more chips than 8 would give.",
        style="dim", highlight=False,
    )  # fmt: skip


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.research.scaling",
        description=benchmarks.research.scaling.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="small cases to hold the model against: judges nothing")
    parser.add_argument("--only", choices=SECTIONS, nargs="*", default=list(SECTIONS), help="what to hold it against")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where scaling.json and scaling.png go (default "
                        "benchmarks/results, with other options out)")  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
