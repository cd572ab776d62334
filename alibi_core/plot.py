"""Pictures of biases, and of the keys that a call needs. Requires matplotlib, from the ``plot`` extra.

Each function returns a figure. A notebook shows it; ``figure.savefig("picture.png")`` writes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from alibi_core._arrays import Array, astype, checks, namespace_of, on_host
from alibi_core._bias import bias as bias_of

try:
    from matplotlib.axis import Axis
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"alibi_core.plot needs matplotlib; {checks.install_hint('plot')}") from error

__all__ = ["bias", "explanation"]

# Colours of Okabe and Ito's palette, which colour-blind readers can distinguish.
BLUE, ORANGE, PALE = "#0072B2", "#D55E00", "#DDE3E8"
LEAST_SHOWN = -8.0  # lower biases have the darkest colour: at equal scores a key at -8 weighs 0.0003 of a key at 0
MOST_HEADS, COLUMNS = 8, 4  # heads drawn unless the caller chooses them; panels in a row


class _Picture(Figure):
    """A matplotlib figure that notebooks show, also if ``pyplot`` was not imported."""

    def _repr_png_(self) -> bytes:
        from io import BytesIO

        stream = BytesIO()
        self.savefig(stream, format="png", dpi=100)
        return stream.getvalue()


def bias(
    slopes: int | Array,
    q_len: int,
    kv_len: int | None = None,
    *,
    heads: Sequence[int] | None = None,
    query: int = -1,
    **arguments: Any,
) -> Figure:
    """Draw biases, heads side by side, and under each the weights of one query.

    Above, darker is more negative; white is masked. Below are the weights ``softmax(bias)`` of one query: the weights
    of attention if all scores are equal.

    Args:
        slopes: As in :func:`alibi_core.bias`: one for each head, without a batch axis.
        q_len: Number of queries, in tokens.
        kv_len: Number of keys, in tokens. Default ``q_len``.
        heads: Indices of the heads to draw. Default: all of up to 8 heads, else the first, the last and 6 between.
        query: Index of the query whose weights are drawn below; negative indices count from the end.
        **arguments: As in :func:`alibi_core.bias`: its further keyword arguments.

    Raises:
        TypeError, ValueError: As :func:`alibi_core.bias`; or if there is nothing to draw, slopes have a batch axis, or
            a head or the query does not exist.

    Example:
        >>> figure = bias(4, 12)
        >>> [ax.get_title() for ax in figure.axes[:4]]
        ['head 0', 'head 1', 'head 2', 'head 3']
    """
    biases = bias_of(slopes, q_len, kv_len, **arguments)
    if biases.ndim != 3 or 0 in biases.shape:
        raise ValueError(
            f"slopes and lengths must make a bias [num_heads, q_len, kv_len], none of them 0, got {tuple(biases.shape)}"
        )
    xp = namespace_of(biases)
    values = on_host(xp, astype(xp, biases, xp.float32))
    shown = _chosen(heads, len(values))
    if not -values.shape[1] <= checks.integer("query", query) < values.shape[1]:
        raise ValueError(f"query must be one of {values.shape[1]}, got {query}")
    query %= values.shape[1]
    lowest = values[shown].min(where=np.isfinite(values[shown]), initial=0.0)
    # The colour scale ends at the lowest bias, but not below LEAST_SHOWN.
    least = float(np.clip(lowest, LEAST_SHOWN, -1.0))
    colours = ListedColormap([(0.0, 0.447, 0.698, 0.1 + 0.9 * (1 - x)) for x in np.linspace(0, 1, 256)])
    figure = _Picture(figsize=(1.2 + 2.0 * len(shown), 3.9), layout="constrained")
    axes = figure.subplots(2, len(shown), squeeze=False, sharex=True, sharey="row", height_ratios=[2, 1])
    for (above, below), head in zip(axes.T, shown, strict=True):
        # Masked elements stay white.
        masked = np.ma.masked_where(~np.isfinite(values[head]), values[head])
        image = above.imshow(masked, cmap=colours, vmin=least, vmax=0, aspect="auto", interpolation="nearest")
        above.axhspan(query - 0.5, query + 0.5, fill=False, edgecolor=ORANGE, linewidth=1)
        above.set_title(f"head {head}", fontsize=10)
        # Softmax of one row; a fully masked row gives zeros, not NaN.
        weights = np.exp(values[head, query] - max(values[head, query].max(), np.finfo(np.float32).min))
        below.stairs(weights / max(weights.sum(), 1.0), np.arange(values.shape[2] + 1) - 0.5, fill=True, color=BLUE)
        below.set_xlabel("key")
        _whole_numbers(above.yaxis, below.xaxis)
    axes[0, 0].set_ylabel("query")
    axes[1, 0].set_ylabel(f"weight for\nquery {query}")
    figure.colorbar(image, ax=axes[0], label="bias", extend="min" if lowest < least else "neither")
    return figure


def explanation(explained: Any, *, entry: int = 0, heads: Sequence[int] | None = None) -> Figure:
    r"""Draw the keys that each block of queries needs, by head, with its horizon.

    Visible keys are pale, needed keys blue. An implementation computes the blue area, and more at its edges.
    :meth:`Explanation.figure` is this function.

    Args:
        explained: The result of a backend's ``explain``.
        entry: Index of the batch entry; with several batch axes, the index in the flattened batch.
        heads: Indices of the heads to draw. Default: all of up to 8 heads, else the first, the last and 6 between.

    Raises:
        ValueError: If there is nothing to draw, or the batch entry or a head does not exist.

    Example:
        Eight tokens in two blocks, and two heads, of which the second needs all visible keys:

        >>> from alibi_core.backend import Explanation, KeySpans
        >>> visible = np.asarray([[[0, 4], [0, 8]]])
        >>> spans = KeySpans(np.asarray([0, 4, 8]), 8, visible, np.asarray([[[[0, 4], [4, 8]], visible[0]]]))
        >>> explained = Explanation("tiled", {}, 6e-8, 1e-7, np.asarray([[4.0, math.inf]]), 72, 60, spans)
        >>> [ax.get_title() for ax in explanation(explained).axes]
        ['head 0: 67%\nhorizon 4', 'head 1: 100%\nno horizon']
    """
    spans, horizons = explained.spans, np.asarray(explained.horizons)
    if spans is None:
        raise ValueError("explained must be of a call that has something to compute, got one of an empty call")
    if not 0 <= checks.integer("entry", entry) < len(horizons):
        raise ValueError(f"entry must be one of {len(horizons)}, got {entry}")
    shown = _chosen(heads, horizons.shape[1])
    columns = min(len(shown), COLUMNS)
    rows = -(-len(shown) // columns)
    figure = _Picture(figsize=(0.6 + 2.1 * columns, 0.9 + 2.3 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for ax in axes.flat[len(shown) :]:
        ax.set_visible(False)
    for ax, head in zip(axes.flat, shown, strict=False):
        pairs = []
        # Pale first, so that blue is drawn on top of it.
        for (first, stop), colour in ((spans.visible[entry].T, PALE), (spans.needed[entry, head].T, BLUE)):
            ax.stairs(stop, spans.edges, baseline=first, orientation="horizontal", fill=True, color=colour)
            pairs.append(float((np.diff(spans.edges) * (stop - first)).sum()))
        horizon = horizons[entry, head]
        words = f"horizon {horizon:,.0f}" if math.isfinite(horizon) else "no horizon"
        ax.set_title(f"head {head}: {pairs[1] / max(pairs[0], 1.0):.0%}\n{words}", fontsize=10)
        ax.set_xlim(0, spans.kv_len)
        # The first query is at the top, as in a matrix.
        ax.set_ylim(spans.edges[-1], 0)
        _whole_numbers(ax.xaxis, ax.yaxis)
    figure.supxlabel("key", fontsize=10)
    figure.supylabel("query", fontsize=10)
    figure.suptitle(
        f"{explained.implementation}: {explained.share:.1%} of the visible scores (pale) are needed (blue)",
        fontsize=11,
    )
    return figure


def _chosen(heads: Sequence[int] | None, num_heads: int) -> list[int]:
    """Return the indices of the heads to draw: the given ones, else at most ``MOST_HEADS``, evenly spaced."""
    if heads is None:
        return [int(x) for x in np.linspace(0, num_heads - 1, min(num_heads, MOST_HEADS)).round()]
    if checks.is_int(heads):
        raise TypeError(f"heads must be a sequence of integers, got {heads}; [{heads}] is one head")
    chosen = [checks.integer("heads", head) for head in heads]
    if not chosen or not all(0 <= head < num_heads for head in chosen):
        raise ValueError(f"heads must be some of {num_heads}, from 0, got {chosen}")
    return chosen


def _whole_numbers(*axes: Axis) -> None:
    for axis in axes:
        axis.set_major_locator(MaxNLocator(4, integer=True))
