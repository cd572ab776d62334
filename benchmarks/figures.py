"""What the pictures have in common."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind readers can tell apart; markers tell the lines apart in print.
BLUE, RED, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
OURS = {"color": BLUE, "marker": "o", "linewidth": 2.8, "zorder": 4}
DASHES = (0, (4, 3))


def style(ax: Axes, title: str, xlabel: str, ticks: Sequence[int], labels: Sequence[str] | None = None) -> None:
    """Give a panel its title and, along x, powers of two."""
    ax.set_title(title, loc="left", fontsize=10.5)
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, labels or [f"{tick:,}" for tick in ticks])
    ax.set_xticks([], minor=True)
    ax.set_xlabel(xlabel)
    ax.grid(axis="y", color="#dddddd")
    ax.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, title: str, path: Path) -> None:
    """Write a picture as PNG."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=12.5, fontweight="bold")
    figure.savefig(path, dpi=150)
    plt.close(figure)
