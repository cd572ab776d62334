"""What a call would do, and why."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import array_api_compat.torch as xp
import numpy as np
import torch
from torch import Tensor

from alibi_core import AttentionCall, KeyRanges
from alibi_core.backend import (
    ENDLESS,
    Explanation,
    KeySpans,
    check_keywords,
    entry_of,
    one_of,
    tolerance_of,
    visible_pairs,
)
from alibi_torch._attention import attention, norms_of
from alibi_torch._dispatch import IMPLEMENTATIONS, choose, refusal
from alibi_torch._tiled import KeyNorms, jobs, needed_keys, told_apart


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: int | Tensor | None = None,
    *,
    implementation: str | None = None,
    **arguments: Any,
) -> Explanation:
    """Say which implementation a call of :func:`alibi_torch.attention` would use, and what it would compute.

    It measures the tensors as the call would, but attends to nothing.

    Args:
        query: As for :func:`alibi_torch.attention`, like all arguments.
        key: Likewise.
        value: Likewise.
        slopes: Likewise.
        implementation: Likewise.
        **arguments: Likewise.

    Returns:
        The explanation, its horizons in NumPy.

    Raises:
        TypeError, ValueError, NotImplementedError: As the call would.
        ValueError: If the tensors hold no values to measure, on the ``meta`` device.

    Example:
        >>> query, key, value = torch.zeros(3, 1, 2, 8, 4).unbind()
        >>> print(explain(query, key, value, tolerance=0.0))
        implementation: tiled
        tolerance: 0, which moves the result by at most 0
        scores: 128 computed, 177.8% of the 72 visible
        horizons, in tokens, of the heads: all all
    """
    if implementation is not None:
        one_of("implementation", implementation, IMPLEMENTATIONS)
    check_keywords(attention, arguments)
    max_key_norm = arguments.pop("max_key_norm", None)
    call = AttentionCall.check(query, key, value, slopes, xp=xp, **arguments)
    known = None if max_key_norm is None else norms_of(call, max_key_norm)
    # Nothing to compute needs no implementation that is able to.
    chosen = "dense" if call.is_empty else choose(call, query, key, value, implementation)
    if query.is_meta:
        raise ValueError("query, key and value must hold values, which are measured; got tensors on meta")
    reasons = {name: refusal(name, call, query, key, value) for name in IMPLEMENTATIONS}
    tolerance = tolerance_of(call) if chosen in ("tiled", "flex") else 0.0
    if chosen == "flex":
        from alibi_torch._flex import are_few  # not before it is used: it brings the compiler with it

        tolerance = 0.0 if are_few(call) else tolerance
    flat = call.with_one_batch_axis()
    entries = []
    largest, computed = 0.0, 0
    if not call.is_empty:
        with torch.no_grad():
            tensors = [x.detach().reshape(*flat.batch, *x.shape[len(call.batch) :]) for x in (query, key)]
            entries = [_entry(flat, index, *tensors, tolerance, known) for index in range(flat.batch[0])]
            if chosen == "tiled":
                computed = _in_tiles(flat, *tensors, tolerance, known)
            elif chosen == "flex":
                computed = _in_blocks(replace(flat, tolerance=tolerance), *tensors, known)
            else:
                computed = math.prod(call.batch) * call.num_heads * call.q_len * call.kv_len
            largest = max(abs(x.item()) for x in torch.aminmax(value.detach()))
    none = np.zeros((math.prod(call.batch), call.num_heads))
    return Explanation(
        implementation=chosen,
        refusals={name: reason for name, reason in reasons.items() if reason is not None},
        tolerance=tolerance,
        error_bound=2 * tolerance * largest,
        horizons=np.stack([x[0] for x in entries]) if entries else none,
        scores_visible=sum(x[1] for x in entries),
        scores_computed=computed,
        spans=KeySpans.of([entry_of(flat, x) for x in range(len(entries))], [x[2] for x in entries])
        if entries
        else None,
    )


def _entry(
    flat: AttentionCall,
    index: int,
    query: Tensor,
    key: Tensor,
    tolerance: float,
    known: KeyNorms | None,
) -> tuple[np.ndarray, int, KeyRanges]:
    """Return the horizons ``[num_heads]`` of one batch entry, the number of its visible scores, and its plan."""
    call = entry_of(flat, index)
    tensors = query[index : index + 1], key[index : index + 1]
    norms = None if known is None else known.of_entries(slice(index, index + 1))
    ranges = needed_keys(call, *tensors, tolerance, norms)
    reach = ranges.past.max(axis=1).astype(np.float64)
    # No key is further back than the first is from the last query.
    horizons = np.where(reach >= min(ENDLESS, call.q_offset + call.q_len), math.inf, reach)
    return horizons, call.num_heads * visible_pairs(call), ranges


def _in_tiles(call: AttentionCall, query: Tensor, key: Tensor, tolerance: float, norms: KeyNorms | None) -> int:
    """Return how many scores ``tiled_attention`` computes."""
    if norms is None:
        parts = [part[:3] for part in told_apart(call, query, key, key)]
        if parts:
            return sum(_in_tiles(*part, tolerance, None) for part in parts)
    if call.has_offset_array:
        entries = [slice(index, index + 1) for index in range(call.batch[0])]
        known = [None if norms is None else norms.of_entries(one) for one in entries]
        calls = [entry_of(call, one.start) for one in entries]
        each = zip(calls, entries, known, strict=True)
        return sum(_in_tiles(some, query[one], key[one], tolerance, bounds) for some, one, bounds in each)
    planned = list(jobs(call, query, key, tolerance, norms))
    times = [(x.batch.stop - x.batch.start) * (x.heads.stop - x.heads.start) * x.tiles for x in planned]
    return sum(n * x.rows * x.kv_len for n, x in zip(times, planned, strict=True))


def _in_blocks(call: AttentionCall, query: Tensor, key: Tensor, norms: KeyNorms | None) -> int:
    from alibi_torch._flex import BLOCK, needed_blocks

    first, stop = needed_blocks(call, query, key, norms)
    blocks = (stop - first).expand(call.batch[0], call.num_heads, -1)
    return int(blocks.sum()) * BLOCK * BLOCK
