"""The picture: time of a layer, and bytes that a chip sends, over the number of chips."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

# Okabe and Ito's palette, which colour-blind readers can tell apart; markers tell the lines apart in print.
OURS = {"color": "#0072B2", "marker": "o", "linewidth": 2.8, "label": "ALiBi, as far as horizons reach"}
RING = {"color": "#D55E00", "marker": "s", "linewidth": 1.8, "label": "full ring, no positions"}
IDEAL = {"color": "#777777", "linestyle": (0, (4, 3)), "linewidth": 1.2, "label": "half the time on twice the chips"}


def draw(rows: Sequence[dict[str, Any]], subtitle: str, path: Path) -> None:
    """Write the picture as PNG.

    Args:
        rows: Of the table, one for a chip and a number of them.
        subtitle: What was modelled.
        path: Where it goes.
    """
    names = list(dict.fromkeys(row["chip"] for row in rows))
    figure, axes = plt.subplots(1, len(names) + 1, figsize=(1 + 4.3 * (len(names) + 1), 4.8), layout="constrained")
    for ax, name in zip(axes, names, strict=False):
        found = [row for row in rows if row["chip"] == name]
        counts = [row["chips"] for row in found]
        ours, theirs = ([1e3 * row[key] for row in found] for key in ("seconds", "ring_seconds"))
        ax.plot(counts, [ours[0] * counts[0] / count for count in counts], **IDEAL)
        ax.plot(counts, theirs, **RING)
        ax.plot(counts, ours, **OURS)
        for count, mine, other in zip(counts, ours, theirs, strict=True):
            ax.annotate(f"{other / mine:.0f}x", (count, mine), xytext=(0, -16), textcoords="offset points",
                        ha="center", color=OURS["color"], fontsize=9)  # fmt: skip
        ax.set_ylabel("milliseconds")
        _label(ax, counts, f"TPU {name}: forward and backward")
    found = [row for row in rows if row["chip"] == names[0]]
    counts = [row["chips"] for row in found]
    for key, style in (("ring_sent", RING), ("sent", OURS)):
        axes[-1].plot(counts, [row[key] / 1e6 for row in found], **style)
    axes[-1].set_ylabel("megabytes")
    _label(axes[-1], counts, "What a chip sends, forward")
    timed = axes[: len(names)]
    limits = [ax.get_ylim() for ax in timed]
    for ax in timed:
        ax.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"Modelled, not run   |   {subtitle}", x=0.01, ha="left", fontsize=12.5, fontweight="bold")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _label(ax: Axes, counts: Sequence[int], title: str) -> None:
    ax.set_title(title, loc="left", fontsize=10.5)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(counts, [str(count) for count in counts])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    ax.grid(axis="y", color="#dddddd")
    ax.spines[["top", "right"]].set_visible(False)
    ax.margins(x=0.07, y=0.12)
    ax.set_xlabel("chips")
