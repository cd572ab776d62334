"""The result of a backend's ``explain``: how a call would run, and which keys it needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import array_api_compat.numpy as numpy_namespace
import numpy as np

from alibi_core._arrays import astype, on_host
from alibi_core._call import AttentionCall
from alibi_core._horizon import ENDLESS, KeyRanges, Tiling, entry_of, host_ranges, visible_keys

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TILING = Tiling(q_block=256, kv_block=128, part_elements=2**20, step_queries=16, least_decay=20)


class KeySpans(NamedTuple):
    """The keys that each block of queries sees and needs, as pairs (first, last + 1): NumPy, in tokens.

    Attributes:
        edges: ``[blocks + 1]``: the first query of each block, and the number of queries.
        kv_len: Number of keys.
        visible: ``[batch, blocks, 2]``: keys that causality and the window allow.
        needed: ``[batch, num_heads, blocks, 2]``: keys that can matter.
    """

    edges: Any
    kv_len: int
    visible: Any
    needed: Any


@dataclass(frozen=True)
class Explanation:
    """How a call of a backend's ``attention`` would run. ``print`` shows it as text.

    Attributes:
        implementation: Name of the implementation that would run.
        refusals: The reasons why other implementations cannot run the call, by name.
        tolerance: The share of softmax weight that may be left out.
        error_bound: The most by which that moves an element of the result, beside rounding: ``2 * tolerance *
            max|value|``.
        horizons: ``[batch, num_heads]``, NumPy float64, in tokens: the distance from which on no query of the head
            needs a key before it. Infinite if a query needs every key.
        scores_visible: Number of query-key pairs that causality and the window allow, over batch entries and heads.
        scores_needed: Number of these pairs that can matter. An implementation computes more, in full tiles.
        spans: The keys that blocks of queries see and need, as :class:`KeySpans`; None if there is nothing to compute.

    Example:
        >>> explained = Explanation("tiled", {}, 2.0**-24, 1.2e-7, np.asarray([[35.0, math.inf]]), 2000, 1100)
        >>> print(explained)
        implementation: tiled
        tolerance: 5.96e-08, which moves the result by at most 1.2e-07
        scores: 1,100 needed, 55.0% of the 2,000 visible
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
    scores_needed: int
    spans: KeySpans | None = field(default=None, repr=False)

    @classmethod
    def of_nothing(cls, call: AttentionCall) -> Explanation:
        """Return the explanation of a call without scores, which every implementation can run."""
        return cls("dense", {}, 0.0, 0.0, np.zeros((math.prod(call.batch), call.num_heads)), 0, 0)

    @classmethod
    def of(
        cls,
        call: AttentionCall,
        tensors: tuple[Any, Any, Any],
        implementation: str,
        refusals: dict[str, str | None],
        *,
        leaves_out: bool,
    ) -> Explanation:
        """Return the explanation, from measuring query, key and value on the host and planning as the call would.

        ``tensors`` are ``[*batch, heads, length, head_dim]``. ``leaves_out`` says whether the implementation leaves out
        keys whose weight is within the tolerance. In ``refusals`` None stands for no refusal.

        Raises:
            ValueError: If an array has no values to read, for example because it is traced.
        """
        if not call.is_linear:  # with explicit positions all pairs count as visible
            is_causal = call.is_causal and call.q_points is None
            call = replace(call, q_points=None, kv_points=None, law="linear", is_causal=is_causal)
        flat = (call if leaves_out else replace(call, tolerance=0.0)).with_one_batch_axis()
        query, key, value = (
            _read(call, name, astype(call.xp, x, call.working_dtype)).reshape(-1, *x.shape[-3:])
            for name, x in zip(("query", "key", "value"), tensors, strict=True)
        )
        dtype = query.dtype
        host = flat.map_arrays(lambda array, _: _read(call, "slopes, masks and offsets", array))
        host = replace(host, xp=numpy_namespace, working_dtype=dtype, device=None)
        entries = [entry_of(host, index) for index in range(host.batch[0])]
        ranges = [host_ranges(x, query[i, None], key[i, None], TILING) for i, x in enumerate(entries)]
        pairs = np.stack([_pairs(*each) for each in zip(entries, ranges, strict=True)]).sum(axis=0)
        edges = np.append(np.arange(0, host.q_len, ranges[0].q_block), host.q_len)
        visible = [np.stack(visible_keys(entry, edges[:-1], edges[1:] - 1), axis=-1) for entry in entries]
        needed = np.stack([np.stack([x.first, x.stop], axis=-1) for x in ranges])
        return cls(
            implementation=implementation,
            refusals={name: reason for name, reason in refusals.items() if reason is not None},
            tolerance=flat.tolerance,
            error_bound=2 * flat.tolerance * float(np.abs(value).max()) if flat.tolerance else 0.0,
            # [batch, num_heads]
            horizons=np.stack([_horizons(*each) for each in zip(entries, ranges, strict=True)]),
            scores_visible=int(pairs[0]),
            scores_needed=int(pairs[1]),
            # [batch, blocks, 2] and [batch, num_heads, blocks, 2]
            spans=KeySpans(edges, host.kv_len, np.stack(visible), np.clip(needed, 0, host.kv_len)),
        )

    @property
    def share(self) -> float:
        """The share of the visible scores that is needed, 0 to 1."""
        return self.scores_needed / max(self.scores_visible, 1)

    def figure(self, *, entry: int = 0, heads: Sequence[int] | None = None) -> Figure:
        """Draw the keys that each block of queries needs, by head: see :func:`alibi_core.plot.explanation`."""
        from alibi_core import plot

        return plot.explanation(self, entry=entry, heads=heads)

    def __str__(self) -> str:
        lines = [f"implementation: {self.implementation}"]
        lines += [f"  not {name}: it {reason}" for name, reason in self.refusals.items()]
        lines.append(f"tolerance: {self.tolerance:.3g}, which moves the result by at most {self.error_bound:.3g}")
        lines.append(f"scores: {self.scores_needed:,} needed, {self.share:.1%} of the {self.scores_visible:,} visible")
        horizons = np.asarray(self.horizons)
        farthest = horizons.max(axis=0).tolist() if len(horizons) else []
        shown = [f"{x:.0f}" if math.isfinite(x) else "all" for x in farthest] or ["none"]
        return "\n".join([*lines, f"horizons, in tokens, of the heads: {' '.join(shown)}"])


def _read(call: AttentionCall, name: str, array: Any) -> np.ndarray[Any, Any]:
    try:
        return on_host(call.xp, array)
    except Exception as error:
        raise ValueError(
            f"{name} must hold values, which are measured, got {type(array).__name__}; call explain outside of what is "
            "compiled or mapped"
        ) from error


def _pairs(entry: AttentionCall, ranges: KeyRanges) -> tuple[int, int]:
    """Return the numbers of visible and of needed query-key pairs of a batch entry, over its heads."""
    queries = np.arange(entry.q_len, dtype=np.int64)
    positions, block = queries + entry.q_offset, queries // ranges.q_block
    first, stop = visible_keys(entry, queries, queries)  # [q_len]
    lowest = np.maximum(ranges.first[:, block], positions - ranges.past[:, block] + 1)  # [num_heads, q_len]
    highest = np.minimum(ranges.stop[:, block], positions + ranges.future[:, block])
    # The overlap of needed and visible keys, [num_heads, q_len].
    needed = (np.minimum(highest, stop) - np.maximum(lowest, first)).clip(0).sum()
    return entry.num_heads * int((stop - first).clip(0).sum()), int(needed)


def _horizons(entry: AttentionCall, ranges: KeyRanges) -> Any:
    """Return the horizons of the heads of a batch entry, ``[num_heads]``, inf for a head that needs every key."""
    farthest = ranges.past.max(axis=1).astype(np.float64)
    # The last query is q_offset + q_len - 1 tokens from the first key: a horizon beyond that covers every key.
    return np.where(farthest >= min(ENDLESS, entry.q_offset + entry.q_len), math.inf, farthest)
