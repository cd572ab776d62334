"""One query, as in a step of decoding: what is not the kernel's time is most of it, so little is done beside.

A query at the last of its keys has a bias that follows from their distance: the end of one row, whatever their number.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alibi_core import AttentionCall
from alibi_core.backend import (
    ENDLESS,
    LARGEST_TOLERANCE,
    Job,
    KeyNorms,
    namespace_of,
    reach,
    score_rounding,
    tolerance_of,
)
from alibi_torch._tiled.configuration import tiling
from alibi_torch._tiled.kernels import fused_forward, last_axis_dense

NEAR = 128  # keys, the last ones, whose norms need not be known
# Numbers in all keys, in units of the keys of a short call, from which on it pays to find out which matter: by norms
# that are known; by them in low precision; by norms that are yet to be measured, there; by scores.
LONG, LONG_LOW, LONG_LOW_UNMEASURED, LONG_SCORES = 2**11, 2**11, 2**13, 2**12  # measured on AVX-512
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
    is_low = call.dtype != call.working_dtype
    return (
        (is_low or kv_len >= tiling().short)
        and _are_many(call, kv_len, LONG_LOW if is_low else LONG)
        and tolerance_of(call) > 0
    )


def is_measured(call: AttentionCall) -> bool:
    """Whether norms that nobody knows are better measured: not where scores may be looked at instead."""
    return call.dtype != call.working_dtype and _are_many(call, call.kv_len, LONG_LOW_UNMEASURED * call.batch[0])


def most_keys(call: AttentionCall, *, norms_are_known: bool) -> int:
    """Return how many keys a call of one query reads all of; 0 for other calls."""
    how, kind = tiling(), (most_keys, norms_are_known)
    known = call.worked_out.get(kind, (None,))
    if known[0] is not how:
        most = 0
        if is_step(call) and len(call.batch) == 1 and not call.is_empty and call.dense_only is None:
            least, keys = (LONG, how.short) if norms_are_known else (LONG_SCORES, 2 * how.short)
            most = max(keys - 1, least * how.short // _numbers(call, 1) - 1)
            if call.dtype != call.working_dtype:
                most = CAST // _numbers(call, 1)
            most = most if call.window_size is None else min(most, call.window_size + 1)
        known = call.worked_out[kind] = how, most
    return known[1]


def _are_many(call: AttentionCall, kv_len: int, least: int) -> bool:
    """Whether so many keys hold at least ``least`` numbers for each key of a short call."""
    return kv_len > NEAR and _numbers(call, kv_len) >= least * tiling().short


def _numbers(call: AttentionCall, kv_len: int) -> int:
    return call.batch[0] * call.num_kv_heads * kv_len * call.head_dim


def attend(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, norms: KeyNorms | None) -> Tensor:
    """Return the attention, ``[batch, num_heads, 1, head_dim]``, of a query at the last of its keys.

    The number of keys is their own, not the call's. Norms may bound all but the last ``NEAR``.
    """
    rows, key, value = last_axis_dense(query, key, value)
    if call.num_kv_heads < call.num_heads:  # heads that share their keys become rows
        rows = rows.reshape(query.shape[0], call.num_kv_heads, -1, query.shape[3])
    kv_len = key.shape[2]
    if kv_len <= most_keys(call, norms_are_known=norms is not None):
        result = _of_all_keys(call, rows, key, value, row_of_bias(call, kv_len))
    else:
        result = forward(call, rows, key, value, _jobs(call, rows, key, norms), norms is None)
    return result if rows is query else result.reshape(query.shape)


def jobs(call: AttentionCall, query: Tensor, key: Tensor, norms: KeyNorms | None) -> list[Job]:
    """Return the scores that are computed of a call."""
    rows = query.reshape(query.shape[0], call.num_kv_heads, -1, query.shape[3])
    return _jobs(call, rows, key[:, :, : call.q_offset + 1], norms)


def _jobs(call: AttentionCall, query: Tensor, key: Tensor, norms: KeyNorms | None) -> list[Job]:
    """Return the rectangles of scores to compute: of some heads and the last keys each."""
    kv_len = key.shape[2]
    seen = kv_len if call.window_size is None else min(kv_len, call.window_size + 1)
    batch, whole = slice(0, query.shape[0]), [(slice(0, call.num_kv_heads), seen)]
    if norms is not None and wants_norms(call, seen):
        whole = groups(call, _widths(call, query, key, norms, seen), query.shape[0])
    elif call.dtype != call.working_dtype and _numbers(call, seen) > CAST:
        whole = groups(call, (seen,) * call.num_kv_heads, query.shape[0])
    size = call.num_heads // call.num_kv_heads
    return [
        Job(batch, slice(heads.start * size, heads.stop * size), 0, 1, 1, kv_len - width, width)
        for heads, width in whole
    ]


def forward(
    call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, planned: Sequence[Job], may_leave_out: bool
) -> Tensor:
    """Compute the jobs of a step, its heads as rows, ``[batch, num_kv_heads, rows, head_dim]``.

    ``may_leave_out`` lets scores tell which values matter.
    """
    row = row_of_bias(call, max([job.kv_len for job in planned]))
    if len(planned) == 1:
        kv_len = planned[0].kv_len
        if kv_len < key.shape[2]:
            key, value = (x[:, :, -kv_len:] for x in (key, value))
        if call.dtype == call.working_dtype and may_leave_out and _scores_tell(call, key, value):
            return _by_scores(call, query, key, value, row)
        return _of_all_keys(call, query, key, value, row)
    size, parts = call.num_heads // call.num_kv_heads, []
    for job in planned:
        first, count, start = job.heads.start // size, (job.heads.stop - job.heads.start) // size, job.kv_start
        rows = query.narrow(1, first, count)
        keys, values = (x.narrow(1, first, count).narrow(2, start, job.kv_len) for x in (key, value))
        bias = row.narrow(1, first, count).narrow(3, row.shape[3] - job.kv_len, job.kv_len)
        parts.append(_of_all_keys(call, rows, keys, values, bias))
    return torch.cat(parts, dim=1)


def _of_all_keys(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """Return the attention in one call of the kernel, which would round the weights in low precision."""
    dtype = call.working_dtype
    if call.dtype == dtype:
        return fused_forward(query, key, value, 0.0, False, attn_mask=bias, scale=call.scale)[0]
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return fused_forward(query, key, value, 0.0, False, attn_mask=bias, scale=call.scale)[0].to(call.dtype)


def row_of_bias(call: AttentionCall, kv_len: int) -> Tensor:
    """Return the bias of the last ``kv_len`` keys, ``[1, num_kv_heads, rows, kv_len]``: the end of a row kept."""
    last = call.worked_out.get(row_of_bias)
    if last is not None and last.shape[-1] == kv_len:
        return last
    row = call.worked_out.get(is_step)
    if row is None or row.shape[-1] < kv_len:
        length = 2 ** math.ceil(math.log2(max(kv_len, NEAR)))
        is_kept = length * call.num_heads <= KEPT
        length = length if is_kept else kv_len
        far = replace(call, is_causal=True, future_slopes=None, window_size=None, kv_len=length, q_offset=length - 1)
        row = far.bias_by_distance.reshape(1, call.num_kv_heads, -1, length)
        if is_kept:
            call.worked_out[is_step] = row
    last = row.narrow(-1, row.shape[-1] - kv_len, kv_len)
    if row.shape[-1] * call.num_heads <= KEPT:
        call.worked_out[row_of_bias] = last  # layers ask for the same
    return last


def _widths(call: AttentionCall, query: Tensor, key: Tensor, norms: KeyNorms, most: int) -> tuple[int, ...]:
    """Return how many of the last keys, of ``most``, the queries of each head of keys need in all entries.

    They are multiples of ``NEAR``, so that they stay the same for many steps.
    """
    queries, own = _in_numpy(query), _in_numpy(key.narrow(2, key.shape[2] - 1, 1))
    largest = _in_numpy(norms.values).max(axis=-1, keepdims=True)  # [batch or 1, num_kv_heads or 1, 1]
    with np.errstate(all="ignore"):  # numbers that are none need all keys
        # [batch, num_kv_heads, rows]
        squares, scores = (np.einsum("...d,...d", queries, x, dtype=np.float64) for x in (queries, own))
        bound = np.sqrt(squares) * largest * abs(call.scale)
        # The own score's rounding, and that of others.
        excess = bound * (1 + 2 * score_rounding(call.head_dim)) - scores * call.scale
        if _widths not in call.worked_out:
            slopes = call.slopes.detach().double().numpy().reshape(call.num_kv_heads, -1)
            base = reach(namespace_of(slopes), slopes, np.zeros(()), min(tolerance_of(call), LARGEST_TOLERANCE))
            tokens = np.divide(1 + 2.0**-20, slopes, out=np.zeros_like(slopes), where=slopes > 0)
            call.worked_out[_widths] = base, tokens
        base, tokens = call.worked_out[_widths]
        needed = base + np.fmin(excess, ENDLESS) * tokens  # at an excess of 0, and what the rest adds
    blocks = np.ceil(np.fmin(needed, most).max(axis=(0, 2)) / NEAR).tolist()
    return tuple([min(most, NEAR * max(int(x), 1)) for x in blocks])


def _in_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    return (tensor.float() if tensor.dtype.itemsize < 4 else tensor).numpy(force=True)


def groups(call: AttentionCall, widths: tuple[int, ...], entries: int) -> list[tuple[slice, int]]:
    """Return which heads of keys, of so many entries each, are computed together, and how many of the last keys."""
    return _groups(widths, entries, call.head_dim, is_cast=call.dtype != call.working_dtype)


def cast_together(key: Tensor) -> list[slice]:
    """Return which heads of keys, ``[batch, num_kv_heads, kv_len, head_dim]``, are cast at once."""
    batch, heads, kv_len, head_dim = key.shape
    return [some for some, _ in _groups((kv_len,) * heads, batch, head_dim, is_cast=True)]


def _groups(widths: tuple[int, ...], entries: int, head_dim: int, *, is_cast: bool) -> list[tuple[slice, int]]:
    most = CAST // head_dim if is_cast else math.inf
    of_call = 4 * tiling().sizes.call_scores  # numbers that a thread reads in its time, about 4 in that of a score
    return grouped(widths, entries, head_dim, most, of_call, torch.get_num_threads())


@functools.lru_cache(maxsize=256)
def grouped(
    widths: tuple[int, ...], entries: int, of_key: int, most: float, of_call: int, threads: int
) -> list[tuple[slice, int]]:
    """Return groups of heads, of at most so many keys in all where that is possible.

    Heads join those before them where more keys take less time than another call: ``of_key`` a key and entry for one
    thread, ``of_call`` a call.
    """
    if most == math.inf and min(widths) == max(widths):
        return [(slice(0, len(widths)), widths[0])]

    def time(group: list[int]) -> int:
        return of_call + -(-len(group) * entries // threads) * max(group) * of_key

    joined: list[list[int]] = []
    for width in widths:
        joined.append([width])
        while len(joined) > 1 and time(joined[-2] + joined[-1]) <= time(joined[-2]) + time(joined[-1]):
            joined[-2:] = [joined[-2] + joined[-1]]
    first, found = 0, []
    for group in joined:
        width, step, stop = max(group), len(group), first + len(group)
        if most < math.inf:
            parts = math.ceil(step * entries * width / most)
            even = max(1, threads // entries)  # heads that occupy all threads
            step = -(-step // (parts * even)) * even
        found += [(slice(head, min(head + step, stop)), width) for head in range(first, stop, step)]
        first = stop
    return found


def _scores_tell(call: AttentionCall, key: Tensor, value: Tensor) -> bool:
    """Whether :func:`_by_scores` takes less time, which reads heads of all entries one after the other."""
    if key.shape[2] < 2 * tiling().short or not _are_many(call, key.shape[2], LONG_SCORES):
        return False
    for x in (key, value):
        batch, heads = x.stride()[:2]
        if x.shape[0] > 1 and batch != heads * x.shape[1]:
            return False
    return True


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
    for some, width in groups(call, tuple(widths.tolist()), entries=1):
        torch.bmm(weights[some, :, -width:], value[some, -width:], out=result[some])
    return result.unflatten(0, (batch, heads))
