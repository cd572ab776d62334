"""The picture: time of a layer, and bytes that a chip sends, over the number of chips."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.figures import BLUE, DASHES, OURS, RED, save, style

ALIBI = OURS | {"label": "ALiBi, as far as horizons reach"}
RING = {"color": RED, "marker": "s", "linewidth": 1.8, "label": "full ring, no positions"}
IDEAL = {"color": "#777777", "linestyle": DASHES, "linewidth": 1.2, "label": "half the time on twice the chips"}


def draw(rows: Sequence[dict[str, Any]], subtitle: str, path: Path) -> None:
    """Write the picture of the table's rows, one for a chip and a number of them."""
    names = list(dict.fromkeys(row["chip"] for row in rows))
    figure, axes = plt.subplots(1, len(names) + 1, figsize=(1 + 4.3 * (len(names) + 1), 4.8), layout="constrained")
    for ax, name in zip(axes, names, strict=False):
        found = [row for row in rows if row["chip"] == name]
        counts = [row["chips"] for row in found]
        ours, theirs = ([1e3 * row[key] for row in found] for key in ("seconds", "ring_seconds"))
        ax.plot(counts, [ours[0] * counts[0] / count for count in counts], **IDEAL)
        ax.plot(counts, theirs, **RING)
        ax.plot(counts, ours, **ALIBI)
        for count, mine, other in zip(counts, ours, theirs, strict=True):
            ax.annotate(f"{other / mine:.0f}x", (count, mine), xytext=(0, -16), textcoords="offset points",
                        ha="center", color=BLUE, fontsize=9)  # fmt: skip
        _label(ax, counts, f"TPU {name}: forward and backward", "milliseconds")
    found = [row for row in rows if row["chip"] == names[0]]
    counts = [row["chips"] for row in found]
    for key, line in (("ring_sent", RING), ("sent", ALIBI)):
        axes[-1].plot(counts, [row[key] / 1e6 for row in found], **line)
    _label(axes[-1], counts, "What a chip sends, forward", "megabytes")
    limits = [ax.get_ylim() for ax in axes[:-1]]
    for ax in axes[:-1]:
        ax.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=3, frameon=False)
    save(figure, f"Modelled, not run   |   {subtitle}", path)


def _label(ax: Axes, counts: Sequence[int], title: str, ylabel: str) -> None:
    style(ax, title, "chips", counts)
    ax.set_yscale("log")
    ax.set_ylabel(ylabel)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    ax.margins(x=0.07, y=0.12)
