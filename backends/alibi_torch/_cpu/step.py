"""Attention of a few queries, as in a decoding step.

All visible keys are computed; for one query, only the last keys, as far back as cached norms prove necessary. Query
heads that share a key/value head become rows of one head, so that keys are not copied. Keys in low precision are cast a
few heads at a time, so that the copy fits into the CPU's cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alibi_core.backend import AttentionCall
from alibi_core.backend.horizon import Job, KeyNorms, score_rounding, visible_keys
from alibi_torch._cpu.bias import Bias, DistanceRow, GatedBias, distance_row
from alibi_torch._cpu.plan import alike, horizons, norm_bounds, tiling, uses_norms
from alibi_torch._internals import fused_forward

LONG_UNMEASURED = 2**23  # Below this many elements in keys of low precision, missing norms are not measured.
NEAR = 128  # Widths are rounded up to multiples of this many keys, so the norms of the last NEAR keys are not needed.
CAST = 2**18  # At most this many elements of keys in low precision are cast at a time.


def is_step(call: AttentionCall) -> bool:
    """Whether a call has so few queries that extra kernel calls cost more than computing masked scores."""
    return call.q_len <= tiling().step_queries


def is_last_query(call: AttentionCall) -> bool:
    """Whether a call has one query, at the position of the last key, and keys that differ in distance alone."""
    is_plain = all(x is None for x in (call.mask, call.q_segment_ids, call.added_key_bias, call.log_gates))
    return call.q_len == 1 and is_plain and not call.has_offset_array and bool(call.q_offset == call.kv_len - 1)


# --- One query at the position of the last key -----------------------------------------------------------------------


@dataclass(frozen=True)
class NextStep:
    """The steps of one query that follow a checked one: the same arguments, other tokens, any number of keys.

    ``arguments`` decide whether a later step is one of them; slopes are among them by value, so that it does not matter
    who changes slopes, and how.
    """

    arguments: tuple[Any, ...]
    call: AttentionCall
    biases: Tensor  # [batch or 1, num_kv_heads, group, kv_len]; the last are those of the query's own key

    @classmethod
    def of(cls, arguments: tuple[Any, ...], call: AttentionCall, most: int) -> NextStep:
        """Return the steps after a call, up to ``most`` keys."""
        return cls(arguments, replace(call, slopes=call.slopes.detach().clone()), last_biases(call, most))


def last_biases(call: AttentionCall, kv_len: int) -> Tensor:
    """Return the biases of ``kv_len`` keys for a query at the last: ``[batch or 1, num_kv_heads, group, kv_len]``."""
    return distance_row(call, kv_len - 1, 1).unflatten(1, (call.num_kv_heads, -1))


def attend_last_query(
    call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, norms: KeyNorms | None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the result, ``[batch, num_heads, 1, head_dim]``, in the working dtype, and the log-sum-exp.

    ``bias`` are ``last_biases`` of as many keys or more; None computes them.
    """
    kv_len, dtype, shape = call.kv_len, call.working_dtype, query.shape
    # A window of w tokens shows w + 1 keys, the query's own included.
    most = kv_len if call.window_size is None else min(kv_len, call.window_size + 1)
    bias = last_biases(call, most) if bias is None else bias[..., bias.shape[-1] - most :]
    if call.num_kv_heads < call.num_heads:
        # The heads of a group become rows: [batch, num_kv_heads, group, head_dim].
        query = query.reshape(shape[0], call.num_kv_heads, -1, shape[3])
    if norms is None and call.dtype == dtype and most == kv_len:  # nothing to leave out or to cast: the shortest way
        result, logsumexp = fused_forward(query, key, value, bias, call.scale)
    else:
        parts = _groups(call, _widths(call, query, key, norms, most))
        # The last `width` keys of these heads; the last `width` biases belong to them.
        result, logsumexp = _joined(
            [
                fused_forward(
                    query[:, heads].to(dtype),
                    key[:, heads, kv_len - width :].to(dtype),
                    value[:, heads, kv_len - width :].to(dtype),
                    bias[:, heads, :, most - width :],
                    call.scale,
                )
                for heads, width in parts
            ]
        )
    if query.shape != shape:
        result, logsumexp = result.reshape(shape), logsumexp.reshape(shape[:3])
    return result, logsumexp


def _groups(call: AttentionCall, widths: Sequence[int]) -> Iterator[tuple[slice, int]]:
    """Yield runs of key/value heads to compute in one call, and their number of keys, from ``widths`` by head."""
    # Equal widths and no cast: one kernel call for all heads.
    if call.dtype == call.working_dtype and call.q_len == 1 and min(widths) == max(widths):
        yield slice(0, len(widths)), widths[0]
        return
    group = call.num_heads // call.num_kv_heads
    most = tiling().bias_elements // (call.q_len * group)  # keys of all heads at a time
    if call.dtype != call.working_dtype:
        most = min(most, CAST // (call.batch[0] * call.head_dim))
    # In the time of one score of a short call, a thread reads about four elements of keys.
    for heads in alike(widths, 4 * tiling().call_scores / (call.batch[0] * call.head_dim)):
        width = max(widths[heads])
        count = max(1, most // width)
        for head in range(heads.start, heads.stop, count):
            yield slice(head, min(head + count, heads.stop)), width


def _widths(call: AttentionCall, query: Tensor, key: Tensor, norms: KeyNorms | None, most: int) -> list[int]:
    """Return, for each key/value head, how many of the last ``most`` keys the query needs."""
    numbers = call.batch[0] * most * call.num_kv_heads * call.head_dim  # elements of all keys
    if norms is None and call.dtype != call.working_dtype and numbers >= LONG_UNMEASURED:
        norms = KeyNorms(norm_bounds(key, key.dtype).amax(dim=-1, keepdim=True), call.kv_len)
    # Without norms nothing can be proved: read all keys.
    if norms is None or not uses_norms(call) or call.tolerance == 0:
        return [most] * call.num_kv_heads
    # [batch, num_kv_heads, heads of a group or 1, head_dim]
    tensors = query.reshape(*key.shape[:2], -1, call.head_dim), key[:, :, -1:], norms.values
    rows, own, bounds = (x.detach().double().numpy() for x in tensors)
    with np.errstate(all="ignore"):  # norms may be NaN or infinite
        squares, scores = (np.einsum("...d,...d", rows, x) for x in (rows, own))
        # The scores of the own key and of all others are rounded, hence twice the rounding error.
        scale = abs(call.scale) * (1 + 2 * score_rounding(call.head_dim))
        excess = np.sqrt(squares) * bounds.max(axis=-1, keepdims=True) * scale - scores * call.scale
    # excess: [batch, num_kv_heads, group] -> [num_heads], the largest over the batch
    far = horizons(call, excess.max(axis=0).reshape(-1))
    tokens = np.minimum(np.max([x.max(axis=0) for _, x in far], axis=0), most).reshape(call.num_kv_heads, -1)
    return [min(most, NEAR * max(1, int(x))) for x in np.ceil(tokens.max(axis=1) / NEAR)]


def _joined(found: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Concatenate results and log-sum-exps along the heads."""
    if len(found) == 1:
        return found[0]
    results, logsumexps = zip(*found, strict=True)
    return torch.cat(results, dim=1), torch.cat(logsumexps, dim=1)


# --- A few queries ---------------------------------------------------------------------------------------------------


def jobs(call: AttentionCall) -> list[Job]:
    """Return the rectangles of a part with few queries: runs of whole head groups, each with all visible keys."""
    first, stop = map(int, visible_keys(call, 0, call.q_len - 1))
    if first >= stop:
        first, stop = 0, 1  # no key is visible: a masked key gives zeros
    group, width = call.num_heads // call.num_kv_heads, stop - first
    return [
        Job(slice(0, call.batch[0]), slice(some.start * group, some.stop * group), 0, call.q_len, 1, first, width)
        for some, _ in _groups(call, [width] * call.num_kv_heads)
    ]


def forward(
    call: AttentionCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rectangles: Sequence[Job],
    row: DistanceRow | GatedBias,
) -> tuple[Tensor, Tensor]:
    """Return the result of a few queries, in the working dtype, and the log-sum-exp of each."""
    return _joined([_attend(call, job, row.bias_of(job), query, key, value) for job in rectangles])


def _attend(
    call: AttentionCall, job: Job, bias: Bias, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """Return result and log-sum-exp of one kernel call for a job."""
    group, dtype, values = call.num_heads // call.num_kv_heads, call.working_dtype, bias.in_order(bias.values)
    query, keys = query[:, job.heads], slice(job.heads.start // group, job.heads.stop // group)
    key, value = (x[:, keys, job.keys].to(dtype) for x in (key, value))
    if call.added_key_bias is not None:
        values = values + call.added_key_bias.expand(call.batch[0], -1, -1)[:, job.heads, None, job.keys]
    rows, sizes = query.to(dtype), query.shape
    if group > 1:  # [batch, heads, q_len, n] becomes [batch, key/value heads, group * q_len, n]
        values = values.expand(-1, sizes[1], -1, -1)
        rows, values = (x.reshape(x.shape[0], -1, group * call.q_len, x.shape[-1]) for x in (rows, values))
    out, lse = fused_forward(rows, key, value, values, call.scale)
    return bias.without_blind(out.reshape(sizes), lse.reshape(sizes[:-1]))
