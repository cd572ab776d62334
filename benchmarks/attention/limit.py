"""The tile limit: how much faster attention could be at best by leaving out the keys that need not be read.

It is the number of pairs of a query and a key that attention without positions computes (the causal half, or all where
it is dense), over the number within the key ranges that the core proves to be needed, block by block of queries,
for the same data. A kernel that computed just those pairs, as fast each, and planned for free, would reach it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import alibi_core
from alibi_core._horizon import UNIT_ROUNDOFF

FINEST_BLOCK, MOST_BLOCKS = 64, 1024  # tokens; blocks of one head, since planning takes their square


def tile_limit(
    tensors: Sequence[Any], dtype: str, as_float64: Callable[[Any], np.ndarray], is_dense: bool = False
) -> float:
    """Return the tile limit of the default tolerance.

    Args:
        tensors: Query, key and value, ``[batch, num_heads, length, head_dim]``; the queries are the last tokens.
        dtype: Theirs, by name.
        as_float64: Makes a NumPy array of a piece of a tensor.
        is_dense: Whether attention without positions computes the scores of keys after the query, too.
    """
    shapes = [tuple(x.shape) for x in tensors]
    # A call reads the shapes of tensors alone, and these take no memory.
    call = alibi_core.AttentionCall.check(*(np.broadcast_to(np.float32(0), shape) for shape in shapes))
    batch, num_heads, q_len, _ = shapes[0]
    block = max(FINEST_BLOCK, 2 ** (call.kv_len // MOST_BLOCKS - 1).bit_length())
    needed = 0
    for entry, head in np.ndindex(batch, num_heads):  # one by one: the plan of all heads at once takes much memory
        query, key = (as_float64(x[entry, head]) for x in tensors[:2])
        own = np.sum(query * key[-q_len:], axis=-1)
        part = replace(call, batch=(1,), num_heads=1, num_kv_heads=1, slopes=call.slopes[head : head + 1])
        needed += _pairs(part, query, own, key, block, UNIT_ROUNDOFF[dtype])
    causal = int(np.sum(np.arange(call.kv_len - q_len + 1, call.kv_len + 1)))
    return batch * num_heads * (q_len * call.kv_len if is_dense else causal) / needed


def _pairs(
    call: alibi_core.AttentionCall, query: np.ndarray, own: np.ndarray, key: np.ndarray, block: int, tolerance: float
) -> int:
    """Count the pairs of one head that the key ranges hold."""
    sizes = (call.scale * np.linalg.norm(query, axis=-1), call.scale * own, np.linalg.norm(key, axis=-1))
    sizes = tuple(x.astype(np.float32)[None, None] for x in sizes)
    bounds = alibi_core.ScoreBounds.of_tokens(call, *sizes, call.nearest_keys(), q_block=block, kv_block=block)
    ranges = alibi_core.key_ranges(call, bounds, tolerance)
    first, stop, past = (
        np.repeat(np.asarray(x, np.int64).ravel(), block)[: call.q_len]
        for x in (ranges.first, ranges.stop, ranges.past)
    )
    positions = np.arange(call.q_len) + call.q_offset
    return int(np.sum(np.maximum(np.minimum(stop, positions + 1) - np.maximum(first, positions - past + 1), 0)))
