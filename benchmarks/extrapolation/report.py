"""The results as tables. Losses are in nats a token; a token is a byte."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import harness
from benchmarks.extrapolation.evaluation import PROTOCOLS
from benchmarks.extrapolation.settings import MULTIPLES


def all_finite(results: dict[str, Any]) -> bool:
    """Return whether no loss overflowed."""
    return all(
        math.isfinite(loss)
        for found in results["methods"].values()
        for losses in (found["training_loss"], found["by_position"], *(found[x].values() for x in PROTOCOLS))
        for loss in losses
    )


def show(results: dict[str, Any], console: Console) -> None:
    """Print one table a protocol, and one of the losses by position."""
    methods, corpus = results["methods"], results["corpus"]
    length, lengths, stride = (results["settings"][name] for name in ("train_length", "lengths", "stride"))
    windows = corpus["windows"]
    console.print(
        f"\nTrained at {length:,} bytes on {corpus['name']}; loss in nats a byte.\n"
        f"change: loss at {MULTIPLES[-1]} times the training length minus loss at the training length\n"
    )
    titles = (
        f"Non-overlapping segments, {corpus['scored']:,} bytes scored",
        f"Sliding windows, stride {stride}, {windows * stride:,} bytes scored",
    )
    for protocol, title in zip(PROTOCOLS, titles, strict=True):
        table = _table(title, *map(str, lengths), "change")
        for method, found in methods.items():
            losses = [found[protocol][str(n)] for n in lengths]
            table.add_row(method, *(f"{loss:.3f}" for loss in losses), f"{losses[-1] - losses[0]:+.3f}")
            table.add_row("  perplexity", *map(_perplexity, losses), style="dim")
        console.print(table)
    columns = "first", f"last trained ({length})", f"last ({lengths[-1]})"
    table = _table(f"Loss by position, mean over {windows:,} windows of {lengths[-1]:,}", *columns)
    for method, found in methods.items():
        table.add_row(method, *(f"{found['by_position'][at]:.3f}" for at in (0, length - 1, -1)))
    console.print(table)


def _table(title: str, *columns: str) -> Table:
    table = harness.table(title, "method", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _perplexity(loss: float) -> str:
    return f"{math.exp(loss):.2f}" if loss < 100 else "inf"
