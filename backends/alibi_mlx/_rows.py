"""Attention one block of queries at a time, for the caller's own positions and for laws that are not linear.

In these cases the bias is not Toeplitz, so no single row of distances serves all queries. Each block builds its bias
from its positions (distances are shared by all heads) and frees it afterwards. The backward pass recomputes each block;
MLX allocates ahead of its kernels there, so that it may hold the biases of all blocks (mlx 0.32, on a CPU).
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from alibi_core.backend import AttentionCall, join_call, split_call

BIAS_ELEMENTS = 2**21  # The bias of one block of queries has about this many elements: 8 MiB of float32.
RATES = ("slopes", "future_slopes")


def attention(call: AttentionCall, query: mx.array, key: mx.array, value: mx.array) -> mx.array:
    """Return attention, ``[*batch, num_heads, q_len, head_dim]``."""
    shape, call = query.shape, call.with_one_batch_axis()
    query, key, value = (x.reshape(*call.batch, *x.shape[-3:]).astype(mx.float32) for x in (query, key, value))
    blocks: list[mx.array] = []
    for queries, part in call.blocks(call.rows_of_block(BIAS_ELEMENTS)):
        static, arrays = split_call(part)
        inputs = [query[:, :, queries], key, value, *arrays.values()]
        if blocks:  # one block after the other, or all biases would be in memory at once
            inputs = mx.depends(inputs, blocks[-1:])
        own, arrays = inputs[:3], dict(zip(arrays, inputs[3:], strict=True))
        blocks.append(_block(join_call(static, arrays), *own))
    return mx.concatenate(blocks, axis=2).reshape(shape).astype(call.dtype)


def _block(call: AttentionCall, query: mx.array, key: mx.array, value: mx.array) -> mx.array:
    """Return the attention of a block of queries; ``mx.checkpoint`` recomputes it in the backward pass."""
    names = [name for name in RATES if getattr(call, name) is not None]

    def compute(query: mx.array, key: mx.array, value: mx.array, *rates: mx.array) -> mx.array:
        bias, attends = replace(call, **dict(zip(names, rates, strict=True))).bias()
        result = mx.fast.scaled_dot_product_attention(query, key, value, scale=call.scale, mask=bias)
        return result if attends is None else mx.where(attends, result, 0)

    return mx.checkpoint(compute)(query, key, value, *(getattr(call, name) for name in names))
