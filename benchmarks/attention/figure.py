"""The picture: how many times faster than attention with no positions, over the length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

from matplotlib import pyplot as plt

from benchmarks.figures import BLUE, DASHES, GREEN, OURS, PURPLE, RED, save, style

LIMIT = "tile limit"
BOUND = {"color": BLUE, "linestyle": DASHES, "linewidth": 1.4, "zorder": 3}
OTHERS = ((RED, "s"), (GREEN, "^"), (PURPLE, "D"))  # colour and marker


def draw(curves: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]], ours: str, subtitle: str, path: Path) -> None:
    """Write the picture of ``curves[pass][name]``: pairs of a length and how many times faster than the baseline."""
    others = dict.fromkeys(name for found in curves.values() for name in found if name not in (ours, LIMIT))
    styles = {ours: OURS, LIMIT: BOUND}
    for name, (color, marker) in zip(others, cycle(OTHERS), strict=False):
        styles[name] = {"color": color, "marker": marker, "linewidth": 1.8, "zorder": 2}
    size = (1.5 + 5 * len(curves), 5)
    figure, axes = plt.subplots(1, len(curves), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for ax, (kind, found) in zip(axes[0], curves.items(), strict=True):
        for name in (name for name in styles if name in found):
            ax.plot(*zip(*found[name], strict=True), label=name, markersize=5, **styles[name])
        lengths = {length for points in found.values() for length, _ in points if _is_named(length)}
        style(ax, kind.capitalize(), "tokens", sorted(lengths))
        ax.set_yscale("log", base=2)
        ax.axhline(1, color="#777777", linewidth=1.4, zorder=1, label="attention with no positions")
        ax.tick_params(axis="x", labelrotation=30)
        ax.margins(x=0.08, y=0.08)
        ax.yaxis.set_major_formatter(lambda ratio, _: f"{ratio:g}x" if ratio >= 1 else f"1/{1 / ratio:g}")
        last = (0, 1.0)
        for length, ratio in found.get(ours, ()):
            if not _is_named(length) or (length <= 2 * last[0] and max(ratio / last[1], last[1] / ratio) < 1.1):
                continue  # where two labels would lie side by side
            last = length, ratio
            bound = dict(found.get(LIMIT, ())).get(length, ratio + 1)
            above = 1 <= ratio < 1.2 or ratio >= bound  # where below is the line at 1, or the limit
            place = {"xytext": (0, 7), "ha": "center"} if above else {"xytext": (4, -13), "ha": "left"}
            ax.annotate(f"{ratio:.2g}x", (length, ratio), textcoords="offset points", color=BLUE, fontsize=8, zorder=5,
                        **place)  # fmt: skip
    axes[0, 0].set_ylabel("times faster than attention with no positions")
    handles = {label: handle for ax in axes[0] for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False)
    save(figure, f"ALiBi attention   |   {subtitle}", path)


def _is_named(length: int) -> bool:
    """Whether there is room for the name of a length: those between powers of two lie too close to them."""
    return length & (length - 1) == 0
