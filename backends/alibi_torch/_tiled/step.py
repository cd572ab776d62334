"""One query, as in a step of decoding: what is not the kernel's time is most of it, so little is done beside.

A query at the last of its keys has a bias that follows from their distance: the end of one row, whatever their number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

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
# that are known, or by scores; by the former in low precision; by norms that are yet to be measured, there.
LONG, LONG_LOW, LONG_LOW_UNMEASURED = 2**12, 2**11, 2**13  # measured on AVX-512
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
    least = LONG if call.dtype == call.working_dtype else LONG_LOW
    return _are_many(call, kv_len, least) and tolerance_of(call) > 0


def is_measured(call: AttentionCall) -> bool:
    """Whether norms that nobody knows are better measured: not where scores may be looked at instead."""
    return call.dtype != call.working_dtype and _are_many(call, call.kv_len, LONG_LOW_UNMEASURED * call.batch[0])


def most_keys(call: AttentionCall) -> int:
    """Return how many keys a call of one query reads all of, whatever is known of them; 0 for other calls."""
    how = tiling()
    known = call.worked_out.get(most_keys, (None,))
    if known[0] is not how:
        most = 0
        if is_step(call) and not call.is_empty and call.dtype == call.working_dtype:
            most = max(NEAR, LONG * how.short // _numbers(call, 1) - 1)
            most = most if call.window_size is None else min(most, call.window_size + 1)
        known = call.worked_out[most_keys] = how, most
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
    if kv_len <= most_keys(call):
        bias = row_of_bias(call, kv_len)
        result = fused_forward(rows, key, value, 0.0, False, attn_mask=bias, scale=call.scale)[0]
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
        whole = groups(call, [seen] * call.num_kv_heads, query.shape[0])
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
    row, is_low = row_of_bias(call, max([job.kv_len for job in planned])), call.dtype != call.working_dtype
    if is_low:
        query = query.to(call.working_dtype)  # in low precision the kernel would round the weights to it
    if len(planned) == 1:
        kv_len = planned[0].kv_len
        if kv_len < key.shape[2]:
            key, value = (x[:, :, -kv_len:] for x in (key, value))
        if is_low:
            key, value = (x.to(call.working_dtype) for x in (key, value))
        elif may_leave_out and _scores_tell(call, key, value):
            return _by_scores(call, query, key, value, row)
        return fused_forward(query, key, value, 0.0, False, attn_mask=row, scale=call.scale)[0].to(call.dtype)
    result = query.new_empty(query.shape, dtype=call.dtype)  # whatever the default device is
    size = call.num_heads // call.num_kv_heads
    for job in planned:
        heads, width = slice(job.heads.start // size, job.heads.stop // size), job.kv_len
        keys, values = (x[:, heads, -width:].to(call.working_dtype) for x in (key, value))
        bias = row[:, heads, :, -width:]
        result[:, heads] = fused_forward(query[:, heads], keys, values, 0.0, False, attn_mask=bias, scale=call.scale)[0]
    return result


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


def _widths(call: AttentionCall, query: Tensor, key: Tensor, norms: KeyNorms, most: int) -> list[int]:
    """Return how many of the last keys, of ``most``, the queries of each head of keys need in all entries."""
    queries, own = (x.detach().double().numpy() for x in (query, key[:, :, -1:]))
    largest = norms.values.detach().amax(dim=-1, keepdim=True).double().numpy()  # [batch or 1, num_kv_heads or 1, 1]
    with np.errstate(all="ignore"):  # numbers that are none need all keys
        # [batch, num_kv_heads, rows]
        bound = np.sqrt(np.einsum("...d,...d", queries, queries)) * largest * abs(call.scale)
        # The own score's rounding, and that of others.
        excess = bound * (1 + 2 * score_rounding(call.head_dim)) - np.einsum("...d,...d", queries, own) * call.scale
        excess = np.where(excess < ENDLESS, excess, ENDLESS)
        if _widths not in call.worked_out:
            slopes = call.slopes.detach().double().numpy().reshape(call.num_kv_heads, -1)
            base = reach(namespace_of(slopes), slopes, np.zeros(()), min(tolerance_of(call), LARGEST_TOLERANCE))
            tokens = np.divide(1 + 2.0**-20, slopes, out=np.zeros_like(slopes), where=slopes > 0)
            call.worked_out[_widths] = base, tokens
        base, tokens = call.worked_out[_widths]
        needed = base + excess * tokens  # at an excess of 0, and what the rest adds
    needed = np.where(needed <= most, needed, most).max(axis=(0, 2))
    return np.ceil(np.maximum(needed, min(NEAR, most))).astype(int).tolist()


def groups(call: AttentionCall, widths: Sequence[int], entries: int) -> list[tuple[slice, int]]:
    """Return which heads of keys, of so many entries each, are computed together, and how many of the last keys.

    Heads join those before them where more keys take less time than another call, in numbers that one thread reads:
    about 4 in the time of a score.
    """
    threads = torch.get_num_threads()

    def time(group: list[int]) -> int:
        return 4 * tiling().sizes.call_scores + -(-len(group) * entries // threads) * max(group) * call.head_dim

    joined: list[list[int]] = []
    for width in widths:
        joined.append([width])
        while len(joined) > 1 and time(joined[-2] + joined[-1]) <= time(joined[-2]) + time(joined[-1]):
            joined[-2:] = [joined[-2] + joined[-1]]
    first, found = 0, []
    for group in joined:
        width, step, stop = max(group), len(group), first + len(group)
        if call.dtype != call.working_dtype:
            parts = -(-step * entries * width * call.head_dim // CAST)
            even = max(1, threads // entries)  # heads that occupy all threads
            step = -(-step // (parts * even)) * even
        found += [(slice(head, min(head + step, stop)), width) for head in range(first, stop, step)]
        first = stop
    return found


def _scores_tell(call: AttentionCall, key: Tensor, value: Tensor) -> bool:
    """Whether :func:`_by_scores` takes less time, which reads heads of all entries one after the other."""
    if key.shape[2] < 2 * tiling().short or not _are_many(call, key.shape[2], LONG):
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
    for some, width in groups(call, widths.tolist(), entries=1):
        torch.bmm(weights[some, :, -width:], value[some, -width:], out=result[some])
    return result.unflatten(0, (batch, heads))
