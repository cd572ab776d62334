"""What a call would do, and why."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx

from alibi_core import AttentionCall
from alibi_core.backend import Explanation, check_keywords, entry_of, one_of, tolerance_of
from alibi_mlx import _tiled
from alibi_mlx._attention import attention
from alibi_mlx._dispatch import IMPLEMENTATIONS, choose, refusal


def explain(
    query: mx.array,
    key: mx.array,
    value: mx.array,
    slopes: int | mx.array | None = None,
    *,
    implementation: str | None = None,
    **arguments: Any,
) -> Explanation:
    """Say which implementation a call of :func:`alibi_mlx.attention` would use, and what it would compute.

    It evaluates the tensors and measures them, also where they are so short that the call would not, but attends to
    nothing. It answers for MLX's default device.

    Args:
        query, key, value, slopes, implementation: As for :func:`alibi_mlx.attention`.
        **arguments: Likewise.

    Returns:
        The explanation, its horizons in NumPy.

    Raises:
        TypeError, ValueError, NotImplementedError: As the call would.
        ValueError: Under ``mx.compile`` and ``mx.vmap``, where there are no values to measure.

    Example:
        >>> query, key, value = mx.zeros((3, 1, 2, 8, 4))
        >>> print(explain(query, key, value, tolerance=0.0, implementation="tiled"))
        implementation: tiled
        tolerance: 0, which moves the result by at most 0
        scores: 128 computed, 177.8% of the 72 visible
        horizons, in tokens, of the heads: all all
    """
    if implementation is not None:
        one_of("implementation", implementation, IMPLEMENTATIONS)
    check_keywords(attention, arguments)
    arguments.pop("dropout_key", None)
    call = AttentionCall.check(query, key, value, slopes, xp=mx, **arguments)
    if call.is_empty:
        return Explanation.of_nothing(call)
    chosen = choose(call, implementation)
    refusals = {name: refusal(name, call) for name in IMPLEMENTATIONS}
    tolerance = tolerance_of(call) if chosen == "tiled" else 0.0
    flat = call.with_one_batch_axis()
    query, key, value = (x.reshape(*flat.batch, *x.shape[-3:]) for x in (query, key, value))
    host = _tiled.on_host(flat, query=query, key=key)
    if host is None:
        raise ValueError("query and key must hold values, which are measured; got traced arrays")
    entries = [entry_of(host, index) for index in range(host.batch[0])]
    planned = _tiled.plans(entries, query, key, tolerance)
    computed = math.prod(flat.batch) * call.num_heads * call.q_len * call.kv_len
    if chosen == "tiled":
        jobs = _tiled.jobs(flat, query, key, value, tolerance, None)
        sizes = ((len(range(flat.batch[0])[x.batch]), x.heads.stop - x.heads.start, x) for x in jobs)
        computed = sum(entries * heads * x.tiles * x.rows * x.kv_len for entries, heads, x in sizes)
    largest = mx.abs(value).max().item() if tolerance else 0.0
    return Explanation.of(chosen, refusals, tolerance, largest, computed, entries, planned)
