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
from alibi_torch._tiled import KeyNorms, jobs, needed_keys


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
    largest = 0.0
    if not call.is_empty:
        with torch.no_grad():
            tensors = [x.detach().reshape(*flat.batch, *x.shape[len(call.batch) :]) for x in (query, key)]
            entries = [_entry(flat, index, *tensors, tolerance, chosen, known) for index in range(flat.batch[0])]
            largest = max(abs(x.item()) for x in torch.aminmax(value.detach()))
    none = np.zeros((math.prod(call.batch), call.num_heads))
    return Explanation(
        implementation=chosen,
        refusals={name: reason for name, reason in reasons.items() if reason is not None},
        tolerance=tolerance,
        error_bound=2 * tolerance * largest,
        horizons=np.stack([x[0] for x in entries]) if entries else none,
        scores_visible=sum(x[1] for x in entries),
        scores_computed=sum(x[2] for x in entries),
        spans=KeySpans.of([entry_of(flat, x) for x in range(len(entries))], [x[3] for x in entries])
        if entries
        else None,
    )


def _entry(
    flat: AttentionCall,
    index: int,
    query: Tensor,
    key: Tensor,
    tolerance: float,
    chosen: str,
    known: KeyNorms | None,
) -> tuple[np.ndarray, int, int, KeyRanges]:
    """Return the horizons ``[num_heads]`` of one batch entry, its visible and its computed scores, and its plan."""
    call = entry_of(flat, index)
    tensors = query[index : index + 1], key[index : index + 1]
    norms = None if known is None else known.of_entries(slice(index, index + 1))
    ranges = needed_keys(call, *tensors, tolerance, norms)
    reach = ranges.past.max(axis=1).astype(np.float64)
    # No key is further back than the first is from the last query.
    horizons = np.where(reach >= min(ENDLESS, call.q_offset + call.q_len), math.inf, reach)
    if chosen == "tiled":
        planned = jobs(call, *tensors, tolerance, norms)
        computed = sum((x.heads.stop - x.heads.start) * x.tiles * x.rows * x.kv_len for x in planned)
    elif chosen == "flex":
        computed = _in_blocks(replace(call, tolerance=tolerance), *tensors, norms)
    else:
        computed = call.num_heads * call.q_len * call.kv_len
    return horizons, call.num_heads * visible_pairs(call), computed, ranges


def _in_blocks(call: AttentionCall, query: Tensor, key: Tensor, norms: KeyNorms | None) -> int:
    from alibi_torch._flex import BLOCK, needed_blocks

    first, stop = needed_blocks(call, query, key, norms)
    blocks = (stop - first).expand(1, call.num_heads, -1)
    return int(blocks.sum()) * BLOCK * BLOCK
