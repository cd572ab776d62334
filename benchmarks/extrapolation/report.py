"""The results as tables and as a picture. Losses are in nats a token; a token is a byte."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from rich.console import Console
from rich.table import Table

from benchmarks import harness
from benchmarks.extrapolation.evaluation import PROTOCOLS
from benchmarks.extrapolation.settings import MULTIPLES
from benchmarks.figures import DASHES, GREEN, OURS, RED, save, style

STYLES = {
    "alibi": {"label": "ALiBi", **OURS},
    "sinusoidal": {"label": "sinusoidal", "color": RED, "marker": "s"},
    "rotary": {"label": "rotary", "color": GREEN, "marker": "^"},
    "none": {"label": "no positions", "color": "#666666", "marker": "D"},
}
BINS_AN_OCTAVE = 2


def all_finite(results: dict[str, Any]) -> bool:
    """Return whether no loss overflowed."""
    found = results["methods"].values()
    losses = [[each["training_loss"], each["by_position"], *(each[x].values() for x in PROTOCOLS)] for each in found]
    return all(np.isfinite(list(each)).all() for of_method in losses for each in of_method)


def show(results: dict[str, Any]) -> None:
    """Print one table a protocol, and one of the losses by position."""
    methods, corpus, console = results["methods"], results["corpus"], Console()
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
            losses = np.array([found[protocol][str(n)] for n in lengths])
            table.add_row(method, *(f"{loss:.3f}" for loss in losses), f"{losses[-1] - losses[0]:+.3f}")
            with np.errstate(over="ignore"):
                table.add_row("  perplexity", *(f"{x:.2f}" for x in np.exp(losses)), style="dim")
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


def draw(results: dict[str, Any], path: Path) -> None:
    """Write a picture: loss against length under both protocols, and against the position in the longest window."""
    settings, corpus = results["settings"], results["corpus"]
    length, lengths = settings["train_length"], settings["lengths"]
    times = [f"{multiple}x\n{n:,}" for multiple, n in zip(MULTIPLES, lengths, strict=True)]
    by_length = "length of the input: times the training length, and bytes"
    positions = [1, *(2**power for power in range(2, lengths[-1].bit_length(), 2))]
    sliding = f"Sliding windows\nthe last {settings['stride']} tokens of each count"
    by_position = f"By position in windows of {lengths[-1]:,}\nmean over {corpus['windows']:,} windows"

    figure, axes = plt.subplots(1, 3, figsize=(13, 4.8), sharey=True, layout="constrained")
    for ax in axes:
        ax.axvline(length, color="#999999", linestyle=DASHES, linewidth=1, zorder=1)
    for method, found in results["methods"].items():
        line = {"markersize": 5, "linewidth": 1.8} | STYLES[method]
        for ax, protocol in zip(axes, PROTOCOLS, strict=False):
            ax.plot(lengths, [found[protocol][str(n)] for n in lengths], **line)
        axes[2].plot(*_by_octave(found["by_position"]), **line | {"markersize": 3.5})
    style(axes[0], "Non-overlapping segments\nall tokens count", by_length, lengths, times)
    style(axes[1], sliding, by_length, lengths, times)
    style(axes[2], by_position, "position of the token in the window", positions)
    axes[0].set_ylabel("loss, nats a byte (lower is better)")
    axes[0].annotate("trained\nlength", (length, 0.99), xycoords=("data", "axes fraction"), xytext=(5, 0),
                     textcoords="offset points", va="top", color="#666666", fontsize=9)  # fmt: skip
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper right", ncols=len(results["methods"]), frameon=False)
    save(figure, f"Trained at {length:,} bytes, tested at up to {lengths[-1]:,}   |   {corpus['name']:.32}", path)


def _by_octave(losses: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return positions, from 1, and mean losses in bins of equal width on a log scale: single losses are noisy."""
    edges = np.unique(np.ceil(2 ** np.arange(0, np.log2(len(losses)) + 1, 1 / BINS_AN_OCTAVE)).astype(int))
    spans = list(pairwise(np.append(edges[edges < len(losses)], len(losses) + 1)))
    centres = np.array([np.sqrt(first * (last - 1)) for first, last in spans])
    return centres, np.array([np.mean(losses[first - 1 : last - 1]) for first, last in spans])
