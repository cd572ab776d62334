"""Attention with the bias in memory: for all queries at once ("sdpa"), or one block of queries at a time.

With the caller's own positions, or a law that is not linear, the bias is not Toeplitz, so no single row of distances
serves all queries. Each block builds its bias from its positions (distances are shared by all heads) and frees it
afterwards: memory grows linearly with the lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from alibi_core.backend import AttentionCall
from alibi_torch._derivatives import RATES, dense_reference, pulled_back
from alibi_torch._internals import in_transform

BIAS_ELEMENTS = 2**21  # The bias of one block of queries has about this many elements: 8 MiB of float32.
COMPILED_BLOCKS = 8  # Under a compiler, which unrolls the loop over blocks, there are at most this many.


def attention(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return attention, computed one block of queries at a time."""
    batch = call.batch
    call, shape = call.with_one_batch_axis(), query.shape
    tensors = [x.reshape(-1, *x.shape[-3:]) for x in (query, key, value)]
    rates = [getattr(call, name) for name in RATES if getattr(call, name) is not None]
    if in_transform():  # torch.func rejects a Function without a vmap rule, and warns of the fused function under vmap
        result = dense_reference(call, *tensors).to(call.dtype)
    elif torch.compiler.is_exporting():  # for any length: a loop would make the number of blocks a constant
        result = sdpa(call, *tensors)
    else:
        result = _Rows.apply(call, *tensors, *rates)
    return result.reshape(shape) if len(batch) != 1 else result


def sdpa(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return attention by PyTorch's fused function, with the call's bias as its mask."""
    bias, attends = call.bias()
    if query.device.type != "cpu":
        # Only the CPU kernels accept a float32 bias with low-precision tensors; other devices would round the bias.
        query, key, value = (x.to(call.working_dtype) for x in (query, key, value))
    # The fused CPU kernel requires the mask to have as many axes as the query.
    bias = bias.reshape((1,) * (query.ndim - bias.ndim) + bias.shape)
    grouped = {"enable_gqa": True} if call.num_kv_heads != call.num_heads else {}
    result = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=call.scale, **grouped)
    if attends is not None:
        result = torch.where(attends, result, 0.0)
    return result.to(call.dtype)


def _blocks(call: AttentionCall) -> Iterator[tuple[slice, AttentionCall]]:
    """Yield blocks of queries, each with the call restricted to them."""
    rows = call.rows_of_block(BIAS_ELEMENTS)
    if torch.compiler.is_compiling():  # fewer, larger blocks
        rows = max(rows, -(-call.q_len // COMPILED_BLOCKS))
    return call.blocks(rows)


def _by_blocks(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    # One array for all results: small ones, allocated where the last bias was, would leave no room for the next.
    result = torch.empty_like(query, memory_format=torch.contiguous_format)
    for rows, part in _blocks(call):
        result[:, :, rows] = sdpa(part, query[:, :, rows], key, value)
    return result


class _Rows(torch.autograd.Function):
    """Attention by blocks of queries; the backward pass recomputes each block, so no bias is saved."""

    @staticmethod
    def forward(ctx: Any, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, *rates: Tensor) -> Tensor:
        ctx.call = replace(call, **dict.fromkeys(RATES))
        ctx.save_for_backward(query, key, value, *rates)
        return _by_blocks(call, query, key, value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *rates = ctx.saved_tensors
        call = replace(ctx.call, **dict(zip(RATES, rates, strict=False)))
        if torch.is_grad_enabled():  # create_graph=True: differentiate dense attention, with all scores in memory
            inputs = (query, key, value, *rates)
            return None, *pulled_back(lambda *x: dense_reference(call, *x).to(call.dtype), inputs, grad)
        wanted = [x for x, needed in zip(RATES, ctx.needs_input_grad[4:], strict=False) if needed]
        by_query = torch.empty_like(query)
        sums = [torch.zeros_like(x, dtype=call.working_dtype) for x in (key, value)]
        sums += [torch.zeros_like(getattr(call, name)) for name in wanted]
        for rows, part in _blocks(call):
            with torch.enable_grad():
                own = [x.detach().requires_grad_() for x in (query[:, :, rows], key, value)]
                learned = [getattr(part, name).detach().requires_grad_() for name in wanted]
                result = sdpa(replace(part, **dict(zip(wanted, learned, strict=True))), *own)
            by_query[:, :, rows], *found = torch.autograd.grad(result, own + learned, grad[:, :, rows])
            for total, x in zip(sums, found, strict=True):
                total += x.reshape(total.shape)  # the tile of a call may have one more axis, of length 1
        by_rates = iter(sums[2:])
        needed = ctx.needs_input_grad[4:]
        return (
            None,
            by_query,
            *(x.to(call.dtype) for x in sums[:2]),
            *(next(by_rates) if is_needed else None for is_needed in needed),
        )
