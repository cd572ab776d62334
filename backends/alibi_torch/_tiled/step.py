"""One query, as in a step of decoding: what is not the kernel's time is most of it, so little is done beside.

A query at the last of its keys has a bias that follows from their distance: the end of one row, whatever their number.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from alibi_core import AttentionCall
from alibi_core.backend import LARGEST_TOLERANCE, Job, KeyNorms, namespace_of, reach, score_rounding, tolerance_of
from alibi_torch._tiled.configuration import tiling

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

NEAR = 128  # keys, the last ones, whose norms need not be known
# Numbers in all keys, in units of the keys of a short call, from which on it pays to leave some out where norms are
# known, to find out by scores which matter, and to measure norms. Measured on AVX-512.
LONG, LONG_UNKNOWN, LONG_UNMEASURED = 2**11, 2**12, 2**13
KERNEL = 2**16  # numbers in keys that one thread reads in the time that a call of the kernel takes besides
CAST = 2**18  # numbers that are cast at once: new memory, which is to be small enough to be had at once
KEPT = 2**18  # numbers in a row of bias that is kept with its call


def is_step(call: AttentionCall) -> bool:
    """Whether a call has one query, whose keys differ in nothing but their distance back from it."""
    if call.q_len != 1 or not call.sees_own_key or call.slopes.ndim != 1:
        return False
    is_last = call.is_causal or call.q_offset == call.kv_len - 1
    return is_last and call.q_segment_ids is None and call.added_key_bias is None


def wants_norms(call: AttentionCall, kv_len: int) -> bool:
    """Whether what is known of the norms of so many keys shortens a step."""
    return kv_len > NEAR and _numbers(call, kv_len) >= LONG * tiling().short and tolerance_of(call) > 0


def is_measured(call: AttentionCall) -> bool:
    """Whether norms that nobody knows are better measured: not where scores may be looked at instead."""
    is_low = call.dtype != call.working_dtype
    return is_low and _numbers(call, call.kv_len) >= LONG_UNMEASURED * tiling().short * call.batch[0]


def _numbers(call: AttentionCall, kv_len: int) -> int:
    return math.prod(call.batch) * call.num_kv_heads * kv_len * call.head_dim


def attend(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, norms: KeyNorms | None) -> Tensor:
    """Return the attention, ``[batch, num_heads, 1, head_dim]``, of a query at the last of its keys.

    Args:
        call: A step, whose own number of keys does not count.
        query: ``[batch, num_heads, 1, head_dim]``.
        key: ``[batch, num_kv_heads, kv_len, head_dim]``.
        value: Likewise.
        norms: Bounds of the norms of all keys but perhaps the last ``NEAR``, where they are known.
    """
    if call.window_size is not None and call.window_size < key.shape[2] - 1:
        key, value = (x[:, :, -1 - call.window_size :] for x in (key, value))
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    shape, kv_len = query.shape, key.shape[2]
    query = query.reshape(shape[0], call.num_kv_heads, -1, shape[3])  # the heads that share their keys as rows
    row = _row(call, kv_len)
    if norms is None and call.dtype == call.working_dtype and _numbers(call, kv_len) >= LONG_UNKNOWN * tiling().short:
        if _are_one_axis(key) and _are_one_axis(value):
            return _by_scores(call, query, key, value, row).reshape(shape)
    groups = _groups_of_keys(call, query, key, norms)
    if groups is None:
        return _kernel(query, key, value, 0.0, False, attn_mask=row, scale=call.scale)[0].reshape(shape)
    # In low precision the kernel would round the weights to it.
    query, result = query.to(call.working_dtype), torch.empty(query.shape, dtype=call.dtype)
    for heads, width in groups:
        keys, values = (x[:, heads, -width:].to(call.working_dtype) for x in (key, value))
        bias = row[:, heads, :, -width:]
        result[:, heads] = _kernel(query[:, heads], keys, values, 0.0, False, attn_mask=bias, scale=call.scale)[0]
    return result.reshape(shape)


def jobs(call: AttentionCall, query: Tensor, key: Tensor, norms: KeyNorms | None) -> list[Job]:
    """Return the scores that :func:`attend` computes."""
    seen = min(call.q_offset + 1, call.kv_len if call.window_size is None else call.window_size + 1)
    keys, group = slice(call.q_offset + 1 - seen, call.q_offset + 1), call.num_heads // call.num_kv_heads
    query = query.reshape(query.shape[0], call.num_kv_heads, -1, query.shape[3])
    groups = _groups_of_keys(call, query, key[:, :, keys], norms) or [(slice(0, call.num_kv_heads), seen)]
    return [
        Job(slice(0, query.shape[0]), slice(x.start * group, x.stop * group), 0, 1, 1, keys.stop - width, width)
        for x, width in groups
    ]


def _groups_of_keys(
    call: AttentionCall, query: Tensor, key: Tensor, norms: KeyNorms | None
) -> list[tuple[slice, int]] | None:
    """Return which heads of keys the kernel takes together, and how many of the last keys; None for all at once."""
    if norms is not None and wants_norms(call, key.shape[2]):
        return _groups(call, _widths(call, query, key, norms), query.shape[0])
    if call.dtype != call.working_dtype:
        return _groups(call, [key.shape[2]] * call.num_kv_heads, query.shape[0])
    return None


def _row(call: AttentionCall, kv_len: int) -> Tensor:
    """Return the bias of the last ``kv_len`` keys, ``[1, num_kv_heads, rows, kv_len]``: the end of a row that is kept."""
    row = call.worked_out.get(is_step)
    if row is None or row.shape[-1] < kv_len:
        length = 2 ** math.ceil(math.log2(max(kv_len, NEAR)))
        is_kept = length * call.num_heads <= KEPT
        length = length if is_kept else kv_len
        far = replace(call, is_causal=True, future_slopes=None, window_size=None, kv_len=length, q_offset=length - 1)
        row = far.bias_by_distance.reshape(1, call.num_kv_heads, -1, length)
        if is_kept:
            call.worked_out[is_step] = row
    return row[..., -kv_len:]


def _widths(call: AttentionCall, query: Tensor, key: Tensor, norms: KeyNorms) -> list[int]:
    """Return how many of the last keys each head of keys needs: in no entry do the others weigh more than is allowed."""
    queries, own = (x.detach().double().numpy() for x in (query, key[:, :, -1:]))
    largest = norms.values.amax(dim=-1, keepdim=True).detach().double().numpy()  # [batch or 1, num_kv_heads or 1, 1]
    bound = np.linalg.norm(queries, axis=-1) * abs(call.scale) * largest  # [batch, num_kv_heads, rows]
    # The own score's rounding, and that of others.
    excess = bound * (1 + 2 * score_rounding(call.head_dim)) - (queries * own).sum(axis=-1) * call.scale
    slopes = call.slopes.detach().double().numpy().reshape(call.num_kv_heads, -1)
    excess = np.where(np.isfinite(excess), excess, math.inf)
    tokens = reach(namespace_of(slopes), slopes, excess, min(tolerance_of(call), LARGEST_TOLERANCE))
    return np.clip(tokens, NEAR, key.shape[2]).max(axis=(0, 2)).astype(int).tolist()


def _groups(call: AttentionCall, widths: Sequence[int], entries: int) -> list[tuple[slice, int]]:
    """Return which heads of keys, of so many entries each, are computed together, and how many of the last keys.

    Heads join those before them where more keys take less time than another call.
    """
    threads = torch.get_num_threads()

    def time(group: list[int]) -> int:
        return KERNEL + -(-len(group) * entries // threads) * max(group) * call.head_dim

    groups: list[list[int]] = []
    for width in widths:
        groups.append([width])
        while len(groups) > 1 and time(groups[-2] + groups[-1]) <= time(groups[-2]) + time(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    found = []
    for first, group in zip(itertools.accumulate(map(len, groups), initial=0), groups, strict=False):
        width, step = max(group), len(group)
        if call.dtype != call.working_dtype:
            step = max(1, threads // entries, CAST // (entries * width * call.head_dim))
        for head in range(first, first + len(group), step):
            found.append((slice(head, min(head + step, first + len(group))), width))
    return found


def _are_one_axis(tensor: Tensor) -> bool:
    """Whether batch and heads of ``[batch, heads, length, head_dim]`` can be one axis without a copy."""
    batch, heads = tensor.stride()[:2]
    return tensor.stride(-1) == 1 and (tensor.shape[0] == 1 or batch == heads * tensor.shape[1])


def _by_scores(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, row: Tensor) -> Tensor:
    """Return the attention of a query whose scores tell which values matter: reading keys is half of it."""
    batch, heads, rows, _ = query.shape
    kv_len = key.shape[2]
    bias = row.expand(batch, -1, -1, -1).reshape(-1, rows, kv_len)
    query, key, value = (x.reshape(batch * heads, *x.shape[2:]) for x in (query, key, value))
    # The other way round, with queries first, products take longer.
    scores = torch.baddbmm(bias.mT, key, query.mT, alpha=call.scale).mT.contiguous()
    weights = scores.softmax(dim=-1)  # [batch * heads, rows, kv_len]
    first = kv_len % NEAR
    shares = weights[..., first:].unflatten(-1, (-1, NEAR)).sum(dim=-1).amax(dim=1).double().numpy()
    shares[:, 0] += weights[..., :first].sum(dim=-1).amax(dim=1).numpy()
    # All but the last block may go; nothing does at a tolerance of 0, nor where a share is NaN.
    spared = np.cumsum(shares, axis=-1)[:, :-1] < min(tolerance_of(call), LARGEST_TOLERANCE)
    widths = kv_len - np.where(spared.any(axis=-1), first + NEAR * spared.sum(axis=-1), 0)
    result = torch.empty_like(query)
    for some, width in _groups(call, widths.tolist(), entries=1):
        torch.bmm(weights[some, :, -width:], value[some, -width:], out=result[some])
    return result
