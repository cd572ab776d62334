"""Attention one block of queries at a time, for the caller's own positions and for laws that are not linear.

In these cases the bias is not Toeplitz, so no single row of distances serves all queries. Each block builds its bias
from its positions (distances are shared by all heads) and frees it afterwards: memory grows linearly with the lengths.
The backward pass recomputes each block.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from alibi_core.backend import AttentionCall, axis_of, dense_attention, join_call, split_call

BIAS_ELEMENTS = 2**21  # The bias of one block of queries has about this many elements: 8 MiB of float32.


def attention(call: AttentionCall, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Return attention, ``[*batch, num_heads, q_len, head_dim]``, of heads-first tensors."""
    shape, call = query.shape, call.with_one_batch_axis()
    query, key, value = (x.reshape(*call.batch, *x.shape[-3:]) for x in (query, key, value))
    batch = call.batch[0] if isinstance(call.batch[0], int) else 1  # jax.export with a symbolic batch size
    rows = min(max(16, BIAS_ELEMENTS // (batch * call.num_heads * call.kv_len)), call.q_len)
    return _by_blocks(*split_call(replace(call, q_len=rows)), query, key, value).reshape(shape)


@partial(jax.jit, static_argnums=0)
def _by_blocks(
    static: AttentionCall, arrays: dict[str, jax.Array], query: jax.Array, key: jax.Array, value: jax.Array
) -> jax.Array:
    """Return attention by blocks of ``static.q_len`` queries."""
    rows = static.q_len
    axes = {name: axis_of(name, "queries", array) for name, array in arrays.items()}
    # Arrays with a query axis are cut into blocks; the others are the same for all blocks.
    cut = {name: _blocks(arrays[name], axis, rows) for name, axis in axes.items() if axis is not None}
    fixed = {name: array for name, array in arrays.items() if axes[name] is None}

    @jax.checkpoint
    def block(of_queries: tuple[jax.Array, jax.Array, dict[str, jax.Array]]) -> jax.Array:
        start, query, own = of_queries
        own = {name: jnp.moveaxis(x, 0, axes[name]) for name, x in own.items()}
        call = join_call(static, fixed | own)
        if call.q_points is None:  # the offset is the position of the block's first query
            call = replace(call, q_offset=call.q_offset + start)
        # [batch, num_heads, rows, head_dim] becomes [rows, batch, num_heads, head_dim]
        return jnp.moveaxis(dense_attention(call, query, key, value), 2, 0)

    queries = jnp.moveaxis(_blocks(query, 2, rows), 1, 3)  # [blocks, batch, num_heads, rows, head_dim]
    starts = jnp.arange(len(queries), dtype=jnp.int32) * rows
    result = jax.lax.map(block, (starts, queries, cut))  # [blocks, rows, batch, num_heads, head_dim]
    return jnp.moveaxis(result.reshape(-1, *result.shape[2:])[: query.shape[2]], 0, 2)


def _blocks(array: jax.Array, axis: int, rows: int) -> jax.Array:
    """Return an array as blocks of queries, ``[blocks, rows, ...]``; the last block is padded with the last query."""
    array = jnp.moveaxis(array, axis, 0)
    missing = -array.shape[0] % rows
    array = jnp.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1), mode="edge")
    return array.reshape(-1, rows, *array.shape[1:])
