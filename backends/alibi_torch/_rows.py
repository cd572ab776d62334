"""Attention with the bias in memory: for all queries at once ("sdpa"), or one block of queries at a time.

With the caller's own positions, or a law that is not linear, the bias is not Toeplitz, so no single row of distances
serves all queries. Each block builds its bias from its positions and frees it afterwards: memory grows linearly with
the lengths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from alibi_core.backend import AttentionCall, BiasTerms, axis_of
from alibi_core.backend.checks import host_values
from alibi_core.backend.horizon import Tiling, current_tiling, plain_jobs
from alibi_torch._derivatives import RATES, dense_reference, pulled_back
from alibi_torch._internals import fused_backward, fused_forward, in_transform

# Fused kernels take up to 256 queries at a time. The bias of a block has about 4 MiB of float32, to stay in a cache.
TILING = Tiling(q_block=256, kv_block=256, rows=(16, 256), bias_elements=2**20, few=16)
NORMS = {"manhattan": 1.0, "euclidean": 2.0, "chebyshev": math.inf}  # as exponents


def attention(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return attention, computed one block of queries at a time."""
    batch, dtype, shape = call.batch, call.dtype, query.shape
    # Compute in the working dtype: a result rounded to low precision would shift the score gradients of whole rows.
    call = replace(_with_floating_points(call.with_one_batch_axis()), dtype=call.working_dtype)
    tensors = [x.reshape(-1, *x.shape[-3:]).to(call.dtype) for x in (query, key, value)]
    rates = [getattr(call, name) for name in RATES if getattr(call, name) is not None]
    if in_transform():  # torch.func rejects a Function without a vmap rule, and warns of the fused function under vmap
        result = dense_reference(call, *tensors)
    elif torch.compiler.is_compiling():  # a loop would make the number of blocks a constant
        result = sdpa(call, *tensors)
    else:
        result = _Rows.apply(call, *tensors, *rates)
    return (result.reshape(shape) if len(batch) != 1 else result).to(dtype)


def sdpa(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, terms: BiasTerms | None = None) -> Tensor:
    """Return attention by PyTorch's fused function, with the call's bias as its mask."""
    bias, attends = call.bias(terms)
    if query.device.type != "cpu":
        # Only the CPU kernels accept a float32 bias with low-precision tensors; other devices would round the bias.
        query, key, value = (x.to(call.working_dtype) for x in (query, key, value))
    grouped = {"enable_gqa": True} if call.num_kv_heads != call.num_heads else {}
    # The fused CPU kernel requires the mask to have as many axes as the query.
    bias = bias.reshape((1,) * (query.ndim - bias.ndim) + bias.shape)
    result = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=call.scale, **grouped)
    return _zero_where_masked(result, attends).to(call.dtype)


def _zero_where_masked(rows: Tensor, attends: Tensor | None) -> Tensor:
    return rows if attends is None else torch.where(attends, rows, 0.0)


class _Block(NamedTuple):
    """A block of queries of several heads, with the keys that direction and window allow."""

    call: AttentionCall
    terms: BiasTerms  # shared by heads, unless their masks differ
    queries: tuple[slice, slice, slice]  # of [batch, heads, length, ...]
    keys: tuple[slice, slice, slice]


def _blocks(call: AttentionCall) -> Iterator[_Block]:
    """Yield the blocks of a call with as many key/value heads as heads."""
    before = None
    for job in sorted(plain_jobs(call, current_tiling(TILING)), key=lambda job: (job.batch.start, job.q_start)):
        part = call.tile(batch=job.batch, heads=job.heads, queries=job.queries, keys=job.keys)
        has_own_mask = call.mask is not None and axis_of("mask", "heads", call.mask) is not None
        if before != (job.batch, job.queries) or has_own_mask:
            before, terms = (job.batch, job.queries), part.bias_terms(_minus_distances(part))
        yield _Block(part, terms, (job.batch, job.heads, job.queries), (job.batch, job.heads, job.keys))


def _with_floating_points(call: AttentionCall) -> AttentionCall:
    """Return the call with its integer points in space as floating ones, if all their differences are exact there."""
    points = {name: x for name, x in call.arrays.items() if name in ("q_points", "kv_points") and x.shape[-1] > 1}
    for x in points.values():
        values = None if x.is_floating_point() else host_values(x)
        if values is None or np.abs(values).max() > 2**23:
            return call
    return replace(call, **{name: x.to(call.working_dtype) for name, x in points.items()})


def _minus_distances(call: AttentionCall) -> Tensor | None:
    """Return minus the distances between floating points in space, in one pass over memory.

    None for other calls: the core takes a pass for each step, which only a compiler fuses.
    """
    points = call.q_points, call.kv_points
    if call.device.type != "cpu":
        return None
    if not all(x is not None and x.is_floating_point() and x.shape[-1] > 1 for x in points):
        return None
    dtype = torch.promote_types(torch.result_type(*points), call.working_dtype)
    queries, keys = (x.to(dtype) for x in points)
    found = torch.cdist(queries, keys, NORMS[call.distance], compute_mode="donot_use_mm_for_euclid_dist").neg_()
    if call.may_lack_points:
        without = [x.isnan().any(dim=-1) for x in (queries, keys)]
        found.masked_fill_(without[0][..., :, None] | without[1][..., None, :], 0.0)
    return found


def _biases(call: AttentionCall) -> Iterator[tuple[_Block, Tensor, Tensor | None]]:
    """Yield blocks, each with its bias, ``[batch or 1, heads, rows, kv_len]``, and which queries see a key.

    A bias lasts until the next, which takes its memory: memory that is still in the cache.
    """
    bias = None
    for block in _blocks(call):
        part = block.call
        shapes = [(*batch, part.num_heads, part.q_len, part.kv_len) for batch in ((), (1,), part.batch)]
        bias, attends = part.bias(block.terms, bias if bias is not None and bias.shape in shapes else None)
        yield block, bias.reshape((1,) * (4 - bias.ndim) + bias.shape), attends


class _Rows(torch.autograd.Function):
    """Attention by blocks of queries; the backward pass forms each block's bias again, so no bias is saved."""

    @staticmethod
    def forward(ctx: Any, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, *rates: Tensor) -> Tensor:
        ctx.call = replace(call, **dict.fromkeys(RATES))
        result = torch.empty_like(query, memory_format=torch.contiguous_format)
        logsumexp = query.new_empty(query.shape[:-1], dtype=call.working_dtype)
        ctx.save_for_backward(query, key, value, result, logsumexp, *rates)
        call, query, key, value = _ungrouped(call, query, key, value)
        if query.device.type == "cpu":
            for (_, _, queries, keys), bias, attends in _biases(call):
                found, logsumexp[queries] = fused_forward(query[queries], key[keys], value[keys], bias, call.scale)
                result[queries] = _zero_where_masked(found, attends)
        else:
            for part, terms, queries, keys in _blocks(call):
                result[queries] = sdpa(part, query[queries], key[keys], value[keys], terms)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, result, logsumexp, *rates = ctx.saved_tensors
        call, needed = replace(ctx.call, **dict(zip(RATES, rates, strict=False))), ctx.needs_input_grad[4:]
        if torch.is_grad_enabled():  # create_graph=True: differentiate dense attention, with all scores in memory
            inputs = (query, key, value, *rates)
            return None, *pulled_back(lambda *x: dense_reference(call, *x).to(call.dtype), inputs, grad)
        wanted = [x for x, is_needed in zip(RATES, needed, strict=False) if is_needed]
        grad, (call, query, key, value) = grad.contiguous(), _ungrouped(call, query, key, value)
        by_query = torch.empty_like(query)
        by_key, by_value = (torch.zeros_like(x, dtype=call.working_dtype) for x in (key, value))
        by_rates = [torch.zeros_like(getattr(call, name)) for name in wanted]
        if query.device.type == "cpu" and not wanted:
            for (_, _, queries, keys), bias, attends in _biases(call):
                own = query[queries], key[keys], value[keys], result[queries], logsumexp[queries]
                found = fused_backward(_zero_where_masked(grad[queries], attends), *own, bias, call.scale)
                by_query[queries] = found[0]
                by_key[keys] += found[1]
                by_value[keys] += found[2]
        else:  # the fused kernel has no gradients of a bias
            for part, terms, queries, keys in _blocks(call):
                learned = [getattr(part, name) for name in wanted]
                own = [x.detach().requires_grad_() for x in (query[queries], key[keys], value[keys], *learned)]
                with torch.enable_grad():
                    changed = replace(part, **dict(zip(wanted, own[3:], strict=True)))
                    by_query[queries], *found = torch.autograd.grad(sdpa(changed, *own[:3], terms), own, grad[queries])
                by_key[keys] += found[0]
                by_value[keys] += found[1]
                for total, x in zip(by_rates, found[2:], strict=True):
                    at = (queries[0] if total.ndim > 1 and total.shape[0] > 1 else ..., queries[1])
                    total[at] += x.reshape(total[at].shape)
        by_keys = (x.unflatten(1, (ctx.call.num_kv_heads, -1)).sum(dim=2).to(call.dtype) for x in (by_key, by_value))
        found = iter(by_rates)
        return None, by_query, *by_keys, *(next(found) if is_needed else None for is_needed in needed)


def _ungrouped(call: AttentionCall, query: Tensor, *keys: Tensor) -> tuple[AttentionCall, Tensor, Tensor, Tensor]:
    """Return the call and its tensors with the keys and values of each query head, contiguous for the fused kernels."""
    group = call.num_heads // call.num_kv_heads
    key, value = (x.contiguous() if group == 1 else x.repeat_interleave(group, dim=1) for x in keys)
    return replace(call, num_kv_heads=call.num_heads), query.contiguous(), key, value
