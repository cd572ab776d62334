"""The picture: loss against length under both protocols, and against the position in the longest window."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt

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


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the picture as PNG."""
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
    edges = np.append(edges[edges < len(losses)], len(losses) + 1)
    values = np.array([np.nan if loss is None else loss for loss in losses])
    spans = [(first, last) for first, last in pairwise(edges) if first < last]
    centres = np.array([np.sqrt(first * (last - 1)) for first, last in spans])
    return centres, np.array([values[first - 1 : last - 1].mean() for first, last in spans])
