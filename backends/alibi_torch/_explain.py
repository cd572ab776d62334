"""What a call would do, and why."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor

from alibi_core import AttentionCall
from alibi_core.backend import Explanation, check_keywords, entry_of, one_of, tolerance_of
from alibi_torch._attention import attention, norms_of
from alibi_torch._cpu import KeyNorms, needed_keys, rectangles
from alibi_torch._dispatch import IMPLEMENTATIONS, choose, refusal


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
    if call.is_empty:
        return Explanation.of_nothing(call)
    chosen = choose(call, query, key, value, implementation)
    if query.is_meta:
        raise ValueError("query, key and value must hold values, which are measured; got tensors on meta")
    refusals = {name: refusal(name, call, query, key, value) for name in IMPLEMENTATIONS}
    tolerance = tolerance_of(call) if chosen in ("tiled", "flex") else 0.0
    if chosen == "flex":
        from alibi_torch._flex import are_few  # not before it is used: it brings the compiler with it

        tolerance = 0.0 if are_few(call) else tolerance
    flat = call.with_one_batch_axis()
    flat = replace(flat, tolerance=tolerance)
    entries = [entry_of(flat, index) for index in range(flat.batch[0])]
    with torch.no_grad():
        tensors = [x.detach().reshape(*flat.batch, *x.shape[len(call.batch) :]) for x in (query, key)]
        ranges = []
        for index, entry in enumerate(entries):
            one = slice(index, index + 1)
            norms = None if known is None else known.of_entries(one)
            ranges.append(needed_keys(entry, *(x[one] for x in tensors), norms))
        if chosen == "tiled":
            computed = sum(
                (x.batch.stop - x.batch.start) * (x.heads.stop - x.heads.start) * x.tiles * x.rows * x.kv_len
                for x in rectangles(flat, *tensors, known)
            )
        elif chosen == "flex":
            computed = _in_blocks(flat, *tensors, known)
        else:
            computed = math.prod(call.batch) * call.num_heads * call.q_len * call.kv_len
        largest = max(abs(x.item()) for x in torch.aminmax(value.detach()))
    return Explanation.of(chosen, refusals, tolerance, largest, computed, entries, ranges)


def _in_blocks(call: AttentionCall, query: Tensor, key: Tensor, norms: KeyNorms | None) -> int:
    from alibi_torch._flex import BLOCK, needed_blocks

    first, stop = needed_blocks(call, query, key, norms)
    blocks = (stop - first).expand(call.batch[0], call.num_heads, -1)
    return int(blocks.sum()) * BLOCK * BLOCK
