"""What a backend's ``explain`` says of a call."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from alibi_core._call import AttentionCall


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
    """

    implementation: str
    refusals: dict[str, str]
    tolerance: float
    error_bound: float
    horizons: Any
    scores_visible: int
    scores_computed: int

    @property
    def share(self) -> float:
        """Scores computed, as a part of those visible."""
        return self.scores_computed / max(self.scores_visible, 1)

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


def visible_pairs(call: AttentionCall) -> int:
    """Return how many pairs of a query and a key causality and the window leave, a head, the offset being an int."""
    window = 2**40 if call.window_size is None else call.window_size
    positions = np.arange(call.q_len, dtype=np.int64) + int(call.q_offset)
    first = np.clip(positions - window, 0, call.kv_len)
    stop = np.clip(positions + (1 if call.is_causal else window + 1), 0, call.kv_len)
    return int((stop - first).clip(0).sum())
