"""What a backend's ``explain`` says of a call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from alibi_core._call import AttentionCall
from alibi_core._horizon.ranges import ENDLESS, KeyRanges

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class KeySpans(NamedTuple):
    """Which keys each block of queries sees and needs, as the first and the one after the last: NumPy, in tokens.

    Attributes:
        edges: ``[blocks + 1]``: the first query of each block, and the number of queries.
        kv_len: Number of keys.
        visible: ``[batch, blocks, 2]``: what causality and the window leave.
        needed: ``[batch, num_heads, blocks, 2]``: what can matter of it.
    """

    edges: Any
    kv_len: int
    visible: Any
    needed: Any

    @classmethod
    def of(cls, entries: Sequence[AttentionCall], ranges: Sequence[KeyRanges]) -> KeySpans:
        """Take them from the plans of batch entries, whose offsets are ints."""
        call = entries[0]
        edges = np.append(np.arange(0, call.q_len, ranges[0].q_block), call.q_len)
        visible = [np.stack(visible_keys(entry, edges[:-1], edges[1:] - 1), axis=-1) for entry in entries]
        needed = [np.stack([np.asarray(x.first), np.asarray(x.stop)], axis=-1) for x in ranges]
        return cls(edges, call.kv_len, np.stack(visible), np.clip(np.stack(needed), 0, call.kv_len))


@dataclass(frozen=True)
class Explanation:
    """What a call of a backend's ``attention`` would do. Printed, it is a few lines of text.

    Attributes:
        implementation: The one that would run.
        refusals: Why others cannot run the call, by name.
        tolerance: The share of softmax weight that may be left out.
        error_bound: How far that can move an element of the result, beside rounding: ``2 * tolerance * max|value|``.
        horizons: ``[batch, num_heads]``, NumPy's float64, tokens: the distance from which on no query of the head needs
            a key behind it. Infinite where one needs every key.
        scores_visible: Pairs of queries and keys that causality and the window leave, over batch entries and heads.
        scores_computed: Pairs that the implementation computes; more than are visible where tiles straddle an edge.
        spans: Which keys blocks of queries see and need, as :class:`KeySpans`; None where there is nothing to compute.

    Example:
        What ``explain`` of a backend returns, here written down by hand, says so:

        >>> explained = Explanation("tiled", {}, 2.0**-24, 1.2e-7, np.asarray([[35.0, math.inf]]), 2000, 1100)
        >>> print(explained)
        implementation: tiled
        tolerance: 5.96e-08, which moves the result by at most 1.2e-07
        scores: 1,100 computed, 55.0% of the 2,000 visible
        horizons, in tokens, of the heads: 35 all
        >>> explained.share
        0.55
    """

    implementation: str
    refusals: dict[str, str]
    tolerance: float
    error_bound: float
    horizons: Any
    scores_visible: int
    scores_computed: int
    spans: KeySpans | None = field(default=None, repr=False)

    @classmethod
    def of_nothing(cls, call: AttentionCall) -> Explanation:
        """Return that of a call without scores, which every implementation can run."""
        return cls("dense", {}, 0.0, 0.0, np.zeros((math.prod(call.batch), call.num_heads)), 0, 0)

    @classmethod
    def of(
        cls,
        implementation: str,
        refusals: dict[str, str | None],
        tolerance: float,
        largest_value: float,
        scores_computed: int,
        entries: Sequence[AttentionCall],
        ranges: Sequence[KeyRanges],
    ) -> Explanation:
        """Take it from the plans of batch entries, whose offsets are ints; None stands for no refusal."""
        return cls(
            implementation=implementation,
            refusals={name: reason for name, reason in refusals.items() if reason is not None},
            tolerance=tolerance,
            error_bound=2 * tolerance * largest_value,
            horizons=np.stack([_horizons(*each) for each in zip(entries, ranges, strict=True)]),
            scores_visible=sum(entry.num_heads * visible_pairs(entry) for entry in entries),
            scores_computed=scores_computed,
            spans=KeySpans.of(entries, ranges),
        )

    @property
    def share(self) -> float:
        """Scores computed, as a part of those visible."""
        return self.scores_computed / max(self.scores_visible, 1)

    def figure(self, *, entry: int = 0, heads: Sequence[int] | None = None) -> Figure:
        """Draw the keys that each block of queries needs, by head, with the horizons beside.

        Needs matplotlib, of the ``plot`` extra. A notebook shows the figure, ``figure.savefig("keys.png")`` writes it.

        Args:
            entry: Which batch entry, where there are several batch axes, counted over all of them.
            heads: Which to draw. Default all, or of more than 8 the first, the last and 6 between.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed; the message says how to install it.
            ValueError: If there is nothing to draw, or the batch entry or a head is not there.
        """
        from alibi_core import plot

        return plot.explanation(self, entry=entry, heads=heads)

    def __str__(self) -> str:
        lines = [f"implementation: {self.implementation}"]
        lines += [f"  not {name}: it {reason}" for name, reason in self.refusals.items()]
        lines.append(f"tolerance: {self.tolerance:.3g}, which moves the result by at most {self.error_bound:.3g}")
        lines.append(
            f"scores: {self.scores_computed:,} computed, {self.share:.1%} of the {self.scores_visible:,} visible"
        )
        horizons = np.asarray(self.horizons)
        farthest = horizons.max(axis=0).tolist() if len(horizons) else []
        shown = [f"{x:.0f}" if math.isfinite(x) else "all" for x in farthest] or ["none"]
        return "\n".join([*lines, f"horizons, in tokens, of the heads: {' '.join(shown)}"])


def _horizons(entry: AttentionCall, ranges: KeyRanges) -> Any:
    """Return how far back the heads of a batch entry look, ``[num_heads]``."""
    reach = np.asarray(ranges.past).max(axis=1).astype(np.float64)
    # No key is further back than the first is from the last query.
    return np.where(reach >= min(ENDLESS, entry.q_offset + entry.q_len), math.inf, reach)


def visible_pairs(call: AttentionCall) -> int:
    """Return how many pairs of a query and a key causality and the window leave, a head, the offset being an int."""
    queries = np.arange(call.q_len, dtype=np.int64)
    first, stop = visible_keys(call, queries, queries)
    return int((stop - first).clip(0).sum())


def visible_keys(call: AttentionCall, lowest: Any, highest: Any) -> tuple[Any, Any]:
    """Return which keys causality and the window let queries ``lowest`` to ``highest`` see: first, and last + 1."""
    window = 2**40 if call.window_size is None else call.window_size
    first = lowest + int(call.q_offset) - window
    stop = highest + int(call.q_offset) + (1 if call.is_causal else window + 1)
    return np.clip(first, 0, call.kv_len), np.clip(stop, 0, call.kv_len)
