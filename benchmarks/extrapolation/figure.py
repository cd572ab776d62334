"""The picture: loss against length under both protocols, and against the position in the longest window."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.extrapolation.report import PROTOCOLS, Results
from benchmarks.extrapolation.settings import MULTIPLES

# Okabe and Ito's palette, which colour-blind readers can tell apart; markers tell the lines apart in print.
STYLES = {
    "alibi": {"label": "ALiBi", "color": "#0072B2", "marker": "o", "linewidth": 2.8, "zorder": 4},
    "sinusoidal": {"label": "sinusoidal", "color": "#D55E00", "marker": "s"},
    "rotary": {"label": "rotary", "color": "#009E73", "marker": "^"},
    "none": {"label": "no positions", "color": "#666666", "marker": "D"},
}
BINS_AN_OCTAVE = 2


def draw(results: Results, path: Path) -> None:
    """Write the picture as PNG."""
    length, lengths = results.settings["train_length"], results.settings["lengths"]
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.8), sharey=True, layout="constrained")
    titles = [
        "Non-overlapping segments\nall tokens count",
        f"Sliding windows\nthe last {results.settings['stride']} tokens of each count",
        f"By position in windows of {lengths[-1]:,}\nmean over {results.corpus['windows']:,} windows",
    ]
    for ax, title in zip(axes, titles, strict=True):
        ax.set_title(title, loc="left", fontsize=10.5)
        ax.set_xscale("log", base=2)
        ax.grid(axis="y", color="#dddddd")
        ax.spines[["top", "right"]].set_visible(False)
        ax.axvline(length, color="#999999", linestyle=(0, (4, 3)), linewidth=1, zorder=1)
    for method, found in results.methods.items():
        style = {"markersize": 5, "linewidth": 1.8} | STYLES[method]
        for ax, protocol in zip(axes, PROTOCOLS, strict=False):
            ax.plot(lengths, [found[protocol][str(n)] for n in lengths], **style)
        axes[2].plot(*_by_octave(found["by_position"]), **style | {"markersize": 3.5})
    for ax in axes[:2]:
        ax.set_xticks(lengths, [f"{multiple}x\n{n:,}" for multiple, n in zip(MULTIPLES, lengths, strict=True)])
        ax.set_xticks([], minor=True)
        ax.set_xlabel("length of the input: times the training length, and bytes")
    _label_positions(axes[2], length, lengths[-1])
    axes[0].set_ylabel("loss, nats a byte (lower is better)")
    axes[0].annotate("trained\nlength", (length, 0.99), xycoords=("data", "axes fraction"), xytext=(5, 0),
                     textcoords="offset points", va="top", color="#666666", fontsize=9)  # fmt: skip
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=len(results.methods), frameon=False
    )
    figure.suptitle(
        f"Trained at {length:,} bytes, tested at up to {lengths[-1]:,}   |   {results.corpus['name']:.32}",
        x=0.01, ha="left", fontsize=12.5, fontweight="bold",
    )  # fmt: skip
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _label_positions(ax: Axes, length: int, longest: int) -> None:
    ticks = [1, *(2**power for power in range(2, longest.bit_length(), 2))]
    ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    ax.set_xticks([], minor=True)
    ax.set_xlabel("position of the token in the window")


def _by_octave(losses: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return positions, from 1, and mean losses in bins of equal width on a log scale: single losses are noisy."""
    edges = np.unique(np.ceil(2 ** np.arange(0, np.log2(len(losses)) + 1, 1 / BINS_AN_OCTAVE)).astype(int))
    edges = np.append(edges[edges < len(losses)], len(losses) + 1)
    values = np.array([np.nan if loss is None else loss for loss in losses])
    spans = [(first, last) for first, last in pairwise(edges) if first < last]
    centres = np.array([np.sqrt(first * (last - 1)) for first, last in spans])
    return centres, np.array([values[first - 1 : last - 1].mean() for first, last in spans])
