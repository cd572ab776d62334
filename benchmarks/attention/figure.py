"""The picture: how many times faster than attention with no positions, over the length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

LIMIT = "tile limit"
# Okabe and Ito's palette, which colour-blind readers can tell apart; markers tell the lines apart in print.
OURS = {"color": "#0072B2", "marker": "o", "linewidth": 2.8, "zorder": 4}
BOUND = {"color": "#0072B2", "linestyle": (0, (4, 3)), "linewidth": 1.4, "zorder": 3}
OTHERS = (
    {"color": "#D55E00", "marker": "s"},
    {"color": "#009E73", "marker": "^"},
    {"color": "#CC79A7", "marker": "D"},
)
TITLES = {"forward": "Forward", "forward and backward": "Forward and backward"}

Curves = Mapping[str, Mapping[str, Sequence[tuple[int, float]]]]


def draw(curves: Curves, ours: str, subtitle: str, path: Path) -> None:
    """Write the picture as PNG.

    Args:
        curves: ``[pass][name]``: pairs of a length and how many times faster than the baseline.
        ours: Whose curve is in front.
        subtitle: What was measured, and on what.
        path: Where it goes.
    """
    names = list(dict.fromkeys(name for found in curves.values() for name in found))
    others = [name for name in names if name not in (ours, LIMIT)]
    styles = {ours: OURS, LIMIT: BOUND} | {
        name: {"linewidth": 1.8, "zorder": 2} | OTHERS[index % len(OTHERS)] for index, name in enumerate(others)
    }
    figure, axes = plt.subplots(
        1, len(curves), figsize=(1.5 + 5 * len(curves), 5), sharey=True, squeeze=False, layout="constrained"
    )
    for ax, (kind, found) in zip(axes[0], curves.items(), strict=True):
        ax.set_title(TITLES.get(kind, kind), loc="left", fontsize=10.5)
        for name in (ours, LIMIT, *others):
            if name in found:
                ax.plot(*zip(*found[name], strict=True), label=name, markersize=5, **styles[name])
        _label(ax, sorted({length for points in found.values() for length, _ in points}))
        for length, ratio in found.get(ours, ()):
            text = f"{ratio:.2f}x" if ratio < 2 else f"{ratio:.1f}x"
            bound = dict(found.get(LIMIT, ())).get(length, ratio + 1)
            above = 1 <= ratio < 2 or ratio >= bound  # where below is the line at 1, or the limit
            ax.annotate(text, (length, ratio), xytext=(0, 7 if above else -15), textcoords="offset points", ha="center",
                        color=OURS["color"], fontsize=9, zorder=5)  # fmt: skip
    axes[0, 0].set_ylabel("times faster than attention with no positions")
    handles = {label: handle for ax in axes[0] for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle(f"ALiBi attention   |   {subtitle}", x=0.01, ha="left", fontsize=12.5, fontweight="bold")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _label(ax: Axes, lengths: Sequence[int]) -> None:
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.grid(axis="y", color="#dddddd")
    ax.spines[["top", "right"]].set_visible(False)
    ax.axhline(1, color="#777777", linewidth=1.4, zorder=1, label="attention with no positions")
    ax.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=30)
    ax.set_xticks([], minor=True)
    ax.margins(x=0.06, y=0.08)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}x" if ratio >= 1 else f"1/{1 / ratio:g}"))
    ax.set_xlabel("tokens")
