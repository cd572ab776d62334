"""A few queries, as in a step of decoding: all keys, or the last ones that known norms leave.

Heads that share their keys become rows of one, so that nothing is copied for them. Keys in low precision are cast some
heads at a time: in new memory, which is to be small enough for a cache of the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from alibi_core.backend import AttentionCall
from alibi_core.backend.horizon import Job, KeyNorms, score_rounding, tolerance_of, visible_keys
from alibi_torch._cpu.bias import Bias, DistanceRow
from alibi_torch._cpu.plan import alike, horizons, norm_bounds, tiling, uses_norms
from alibi_torch._internals import fused_forward

LONG_UNMEASURED = 2**23  # numbers in all keys of low precision; of fewer, norms that nobody knows are not measured
NEAR = 128  # keys; widths are multiples of this, so that the norms of so many at the end need not be known
CAST = 2**18  # numbers of keys that are cast at once


def is_step(call: AttentionCall) -> bool:
    """Whether a call has so few queries that kernel calls cost more than hidden scores."""
    return call.q_len <= tiling().few


def jobs(call: AttentionCall, query: Tensor, key: Tensor, norms: KeyNorms | None) -> list[Job]:
    """Return the rectangles of a part of a few queries: of some heads, whole groups, and the keys that they need."""
    first, stop = map(int, visible_keys(call, 0, call.q_len - 1))
    if first >= stop:
        first, stop = 0, 1  # queries that see nothing become zeros all the same
    group = call.num_heads // call.num_kv_heads
    widths = [stop - first] * call.num_kv_heads
    numbers = call.batch[0] * (stop - first) * call.num_kv_heads * call.head_dim  # in the keys
    if norms is None and call.dtype != call.working_dtype and numbers >= LONG_UNMEASURED:
        norms = KeyNorms(norm_bounds(key, key.dtype).amax(dim=-1, keepdim=True), call.kv_len)
    if norms is not None and uses_norms(call):
        widths = _widths(call, query, key, norms, stop - first)
    elif call.dtype == call.working_dtype and call.q_len == 1:
        return [Job(slice(0, call.batch[0]), slice(0, call.num_heads), 0, 1, 1, first, stop - first)]
    is_cast = call.dtype != call.working_dtype
    most = [CAST // (call.batch[0] * call.head_dim), tiling().bias_elements // (call.q_len * group)]
    found = []
    # A thread reads some four numbers of a key in the time of a score.
    for heads in alike(widths, 4 * tiling().call_scores / (call.batch[0] * call.head_dim)):
        width = max(widths[heads])
        count = max(1, min(most[0] if is_cast else most[1], most[1]) // width)  # heads of keys at a time
        for head in range(heads.start, heads.stop, count):
            some = slice(head * group, min(head + count, heads.stop) * group)
            found.append(Job(slice(0, call.batch[0]), some, 0, call.q_len, 1, stop - width, width))
    return found


@np.errstate(all="ignore")  # norms may be NaN or infinite
def _widths(call: AttentionCall, query: Tensor, key: Tensor, norms: KeyNorms, most: int) -> list[int]:
    """Return how many of the last keys, of ``most``, matter to a query at the last of them, by head of keys."""
    if call.q_len != 1 or not call.sees_own_key or call.added_key_bias is not None or tolerance_of(call) == 0:
        return [most] * call.num_kv_heads
    if not call.is_causal and call.q_offset < call.kv_len - 1:
        return [most] * call.num_kv_heads
    # [batch, num_kv_heads, heads of a group or 1, head_dim], float64
    shape = query.shape[0], call.num_kv_heads, -1, call.head_dim
    rows, own = (x.double().numpy() for x in (query.detach().reshape(shape), key[:, :, call.q_offset, None].detach()))
    largest = norms.values.detach().double().numpy().max(axis=-1, keepdims=True)  # [batch or 1, num_kv_heads or 1, 1]
    squares, scores = (np.einsum("...d,...d", rows, x) for x in (rows, own))  # [batch, num_kv_heads, heads of a group]
    # The own key's score is rounded, and so are the others.
    bound = np.sqrt(squares) * largest * (abs(call.scale) * (1 + 2 * score_rounding(call.head_dim)))
    excess = (bound - scores * call.scale).max(axis=0).reshape(-1)
    tokens = np.max([x.max(axis=0) for _, x in horizons(call, excess)], axis=0)
    blocks = np.ceil(np.minimum(tokens, most).reshape(call.num_kv_heads, -1).max(axis=1) / NEAR)
    return [min(most, NEAR * max(1, int(x))) for x in blocks]


def forward(
    call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, rectangles: Sequence[Job], row: DistanceRow
) -> tuple[Tensor, Tensor]:
    """Return the result of a few queries, in the working dtype, and the log-sum-exp of each."""
    found = [_attend(call, job, row.bias_of(job), query, key, value) for job in rectangles]
    return found[0] if len(found) == 1 else tuple(torch.cat(x, dim=1) for x in zip(*found, strict=True))


def _attend(
    call: AttentionCall, job: Job, bias: Bias, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what one call of the kernel makes of a job."""
    group, dtype, values = call.num_heads // call.num_kv_heads, call.working_dtype, bias.in_order(bias.values)
    if job.kv_len < key.shape[2] or job.heads.stop - job.heads.start < query.shape[1]:
        query, keys = query[:, job.heads], slice(job.heads.start // group, job.heads.stop // group)
        key, value = key[:, keys, job.keys], value[:, keys, job.keys]
    key, value = key.to(dtype), value.to(dtype)
    if call.added_key_bias is not None:
        values = values + call.added_key_bias.expand(call.batch[0], -1, -1)[:, job.heads, None, job.keys]
    rows, sizes = query.to(dtype), query.shape
    if group > 1:  # [batch, heads, q_len, n] becomes [batch, heads of keys, group * q_len, n]
        values = values.expand(-1, sizes[1], -1, -1)
        rows, values = (x.reshape(x.shape[0], -1, group * call.q_len, x.shape[-1]) for x in (rows, values))
    out, lse = fused_forward(rows, key, value, values, call.scale)
    out, lse = (out.reshape(sizes), lse.reshape(sizes[:-1])) if group > 1 else (out, lse)
    if bias.attends is not None:
        out = torch.where(bias.attends, out, 0.0)
        lse = torch.where(bias.attends[..., 0], lse, math.inf)
    return out, lse
