"""A backend of NumPy, as small as one can be: blocks of queries against the keys that they need. docs/backend.md."""

from __future__ import annotations

import functools
from typing import Any

import array_api_compat.numpy as xp
import numpy as np

from alibi_core.backend import AttentionCall, Explanation, dense_attention, horizon
from alibi_core.conformance import BackendAdapter, Library

TILING = horizon.Tiling(q_block=4, kv_block=2, rows=(2, 4))


def attention(query: Any, key: Any, value: Any, slopes: Any = None, **arguments: Any) -> Any:
    """Return ALiBi attention of ``[*batch, heads, length, head_dim]``, without the keys that do not matter."""
    call = AttentionCall.check(query, key, value, slopes, xp=xp, **arguments)
    if call.is_empty or call.dense_only is not None:
        return dense_attention(call, query, key, value)
    call = call.with_one_batch_axis()
    q, k, v = (x.reshape(*call.batch, *x.shape[-3:]) for x in (query, key, value))
    result = np.zeros_like(q)
    for job in horizon.needed_jobs(call, q, k, TILING):
        for shift in range(0, job.tiles * job.rows, job.rows):
            queries, keys = (slice(x.start + shift, x.stop + shift) for x in (job.queries, job.keys))
            tile = call.tile(batch=job.batch, heads=job.heads, queries=queries, keys=keys)
            group = call.num_heads // call.num_kv_heads
            kv_heads = slice(job.heads.start // group, (job.heads.stop - 1) // group + 1)
            tensors = q[job.batch, job.heads, queries], *(x[job.batch, kv_heads, keys] for x in (k, v))
            result[job.batch, job.heads, queries] = dense_attention(tile, *tensors)
    return result.reshape(query.shape)


def explain(query: Any, key: Any, value: Any, slopes: Any = None, **arguments: Any) -> Explanation:
    """Return which keys a call needs."""
    call = AttentionCall.check(query, key, value, slopes, xp=xp, **arguments)
    refusals = {"blocks": call.dense_only, "dense": None}
    chosen = "blocks" if call.dense_only is None else "dense"
    return Explanation.of(call, (query, key, value), chosen, refusals, leaves_out=chosen == "blocks")


def adapters() -> list[BackendAdapter]:
    """Return the backend as the kit sees it; an entry point of the group ``alibi_core.conformance`` names this."""
    library = Library(xp, lambda values, dtype: np.asarray(values, dtype), np.asarray)
    make = functools.partial(BackendAdapter, "toy[blocks]", library, attention, lacks=("points",))
    return [make(dtype=dtype) for dtype in ("float32", "float64")]
