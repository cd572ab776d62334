"""Attention with the bias in memory: for all queries at once ("sdpa"), or one block of queries at a time.

With the caller's own positions the bias is not Toeplitz, so no single row of distances serves all queries. Each block
builds its bias from its positions and frees it afterwards: memory grows linearly with the lengths. Other laws than the
linear one come here off CPUs, and for gradients of slopes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from alibi_core.backend import AttentionCall, BiasTerms, axis_of, with_sinks
from alibi_core.backend.checks import host_values
from alibi_core.backend.horizon import Tiling, current_tiling, plain_jobs
from alibi_torch._derivatives import RATES
from alibi_torch._internals import fused_backward, fused_forward

# Fused kernels take up to 256 queries at a time. The bias of a block has about 4 MiB of float32, to stay in a cache.
TILING = Tiling(q_block=256, kv_block=256, rows=(16, 256), bias_elements=2**20, step_queries=16)
NORMS = {"manhattan": 1.0, "euclidean": 2.0, "chebyshev": math.inf}  # as exponents


def sdpa(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, terms: BiasTerms | None = None) -> Tensor:
    """Return attention by PyTorch's fused function, with the call's bias as its mask."""
    bias, attends = call.bias(terms)
    if query.device.type != "cpu" or torch.compiler.is_exporting():
        # Only PyTorch's CPU kernels accept a float32 bias with low-precision tensors; others would round the bias, and
        # ONNX refuses it.
        query, key, value = (x.to(call.working_dtype) for x in (query, key, value))
    grouped = {"enable_gqa": True} if call.num_kv_heads != call.num_heads else {}
    if call.sinks is not None:  # a key of zeros, whose bias is the sink
        bias = with_sinks(call.xp, bias, call.sinks[..., None])
        key, value = (F.pad(x, (0, 0, 0, 1)) for x in (key, value))
    # The fused CPU kernel requires the mask to have as many axes as the query.
    bias = bias.reshape((1,) * (query.ndim - bias.ndim) + bias.shape)
    result = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=call.scale, **grouped)
    if torch.compiler.is_exporting():  # PyTorch 2.13 decomposes the function into one with other strides
        result = result.clone(memory_format=torch.contiguous_format)
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
    # Without a key at distance 0, what tells keys apart may be a small part of their distances.
    least = call.working_dtype if call.sees_own_key else torch.float64
    dtype = torch.promote_types(torch.result_type(*points), least)
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


def forward(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result, ``[batch, num_heads, q_len, head_dim]`` in the working dtype, and the log-sum-exp.

    The log-sum-exp, ``[batch, num_heads, q_len]``, is computed on CPUs alone; elsewhere it is 0.
    """
    call, query, key, value = _ungrouped(*_in_working_dtype(call, query, key, value))
    result, logsumexp = torch.empty_like(query), query.new_zeros(query.shape[:-1])
    if query.device.type == "cpu":
        for (_, _, queries, keys), bias, attends in _biases(call):
            found, logsumexp[queries] = fused_forward(query[queries], key[keys], value[keys], bias, call.scale)
            result[queries] = _zero_where_masked(found, attends)
    else:
        for part, terms, queries, keys in _blocks(call):
            result[queries] = sdpa(part, query[queries], key[keys], value[keys], terms)
    return result, logsumexp


def backward(
    call: AttentionCall,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    result: Tensor,
    logsumexp: Tensor,
    by_slopes: bool,
) -> tuple[Tensor, ...]:
    """Return the gradients for query, key, value, slopes and future slopes (zeros if ``by_slopes`` is False).

    Each block's bias is formed again, so that none is saved. ``result`` and ``logsumexp`` are those of
    :func:`forward`, in the working dtype as ``grad``.
    """
    dtype, num_kv_heads, grad, result = call.dtype, call.num_kv_heads, grad.contiguous(), result.contiguous()
    call, query, key, value = _ungrouped(*_in_working_dtype(call, query, key, value))
    rates = [name for name in RATES[:2] if getattr(call, name) is not None]
    by_query, by_rates = torch.empty_like(query), [torch.zeros_like(getattr(call, name)) for name in rates]
    by_key, by_value = torch.zeros_like(key), torch.zeros_like(value)
    if query.device.type == "cpu" and not by_slopes:
        for (_, _, queries, keys), bias, attends in _biases(call):
            own = query[queries], key[keys], value[keys], result[queries], logsumexp[queries]
            found = fused_backward(_zero_where_masked(grad[queries], attends), *own, bias, call.scale)
            by_query[queries] = found[0]
            by_key[keys] += found[1]
            by_value[keys] += found[2]
    else:  # the fused kernel has no gradients of a bias
        for part, terms, queries, keys in _blocks(call):
            learned = [getattr(part, name) for name in rates]
            own = [x.detach().requires_grad_() for x in (query[queries], key[keys], value[keys], *learned)]
            with torch.enable_grad():
                changed = replace(part, **dict(zip(rates, own[3:], strict=True)))
                by_query[queries], *found = torch.autograd.grad(sdpa(changed, *own[:3], terms), own, grad[queries])
            by_key[keys] += found[0]
            by_value[keys] += found[1]
            for total, x in zip(by_rates, found[2:], strict=True):
                at = (queries[0] if total.ndim > 1 and total.shape[0] > 1 else ..., queries[1])
                total[at] += x.reshape(total[at].shape)
    of_keys = (x.unflatten(1, (num_kv_heads, -1)).sum(dim=2) for x in (by_key, by_value))
    future = by_rates[1] if len(rates) > 1 else torch.zeros_like(by_rates[0])
    return *(x.to(dtype) for x in (by_query, *of_keys)), by_rates[0], future


def _in_working_dtype(
    call: AttentionCall, query: Tensor, key: Tensor, value: Tensor
) -> tuple[AttentionCall, Tensor, Tensor, Tensor]:
    """Return call and tensors in the working dtype: a rounded result would shift the gradients of whole rows."""
    call = replace(_with_floating_points(call), dtype=call.working_dtype)
    return call, query.to(call.dtype), key.to(call.dtype), value.to(call.dtype)


def _ungrouped(call: AttentionCall, query: Tensor, *keys: Tensor) -> tuple[AttentionCall, Tensor, Tensor, Tensor]:
    """Return the call and its tensors with the keys and values of each query head, contiguous for the fused kernels."""
    group = call.num_heads // call.num_kv_heads
    key, value = (x.contiguous() if group == 1 else x.repeat_interleave(group, dim=1) for x in keys)
    return replace(call, num_kv_heads=call.num_heads), query.contiguous(), key, value
