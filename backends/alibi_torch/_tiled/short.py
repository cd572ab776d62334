"""Short calls whose bias depends on distance alone: block after block of queries, with little but the kernel's time.

All blocks share one bias, that of the last: the block before sees the same keys as far back as there are any, each one
block nearer to the first. A single block whose bias would be large is computed with its queries in reverse order: that
bias is one row a head, of which each query's is a part that begins one key after that of the query before.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from alibi_core import AttentionCall
from alibi_core.backend import Job, seen_keys
from alibi_torch._tiled import onednn, step
from alibi_torch._tiled.configuration import tiling
from alibi_torch._tiled.kernels import (
    Bias,
    Saved,
    fused_backward,
    fused_forward,
    last_axis_dense,
    shifted,
    without_common_part,
)
from alibi_torch._tiled.second import differentiable_kernel, packs_what_is_saved

KEPT = 2**18  # numbers; a bias of so few is kept with its call, which may come again
LONG_DECODING = 2**13  # times the keys of a short call: numbers in the keys of one batch entry
# Queries in a block, by the number of keys: more of them waste scores on keys that only the last ones see, fewer take
# more calls. Measured on AVX-512.
BLOCKS = ((512, 64), (1024, 128), (math.inf, 256))
BLOCKS_OF_BFLOAT16 = ((128, 128), (512, 64), (math.inf, 256))  # in whose products the kernel packs keys anew each time
DIFFERENTIATED_AT_ONCE = 128  # queries: of so few, one block that PyTorch differentiates itself takes less time


def is_short(call: AttentionCall, *, norms_are_known: bool = False) -> bool:
    """Whether the functions of this module compute a call.

    A few queries may as well read all keys, until those are so many that finding out what is needed takes less time.
    """
    how = tiling()
    if call.kv_len <= how.short and call.worked_out.get(short_jobs, (None,))[0] is how:
        return True  # as it was before
    if not call.sees_own_key or call.q_segment_ids is not None or call.added_key_bias is not None:
        return False
    rows = _rows(call)
    if (call.is_causal or rows < call.q_len) and _bias_elements(call, rows) > how.sizes.bias_elements:
        return False
    if call.kv_len <= how.short or call.q_len > how.sizes.few:
        return call.kv_len <= how.short
    # Norms that are not known take a pass over the keys; of float32 that is half of what attention reads.
    limit = LONG_DECODING * (4 if call.dtype == call.working_dtype and not norms_are_known else 1)
    return call.num_kv_heads * call.kv_len * call.head_dim < limit * how.short


def _rows(call: AttentionCall) -> int:
    """Return how many queries a block has: all that see all keys, fewer where a bias of many heads would be large."""
    if not call.is_causal and call.window_size is None:
        return call.q_len
    blocks = BLOCKS_OF_BFLOAT16 if _stays_low(call) else BLOCKS
    rows = min(call.q_len, next(rows for keys, rows in blocks if call.kv_len <= keys))
    while rows > tiling().sizes.few and _bias_elements(call, rows) > tiling().sizes.bias_elements:
        rows = -(-rows // 2)
    return rows


def _bias_elements(call: AttentionCall, rows: int) -> int:
    """Return how large the bias of a block is, at most."""
    entries = max(1 if x is None or x.ndim == 1 else x.shape[0] for x in (call.slopes, call.future_slopes))
    return entries * call.num_heads * rows * (call.kv_len + rows)


def short_jobs(call: AttentionCall) -> list[Job]:
    """Return blocks of queries, with the keys that the call's direction and window let them see."""
    how = tiling()
    known = call.worked_out.get(short_jobs)
    if known is not None and known[0] is how:
        return known[1]
    jobs = _blocks(call, _rows(call))
    call.worked_out[short_jobs] = how, jobs
    return jobs


def _blocks(call: AttentionCall, rows: int) -> list[Job]:
    """Return blocks of so many queries, the first of which may be smaller."""
    batch, heads = slice(0, call.batch[0]), slice(0, call.num_heads)
    jobs = []
    for start in range(call.q_len % rows - rows if call.q_len % rows else 0, call.q_len, rows):
        count = rows + min(start, 0)
        start = max(start, 0)
        first, stop = seen_keys(call, start, count)
        jobs.append(Job(batch, heads, start, count, 1, first, stop - first))
    return jobs


def prepared(call: AttentionCall, in_general: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of query, key and value that computes a call, again and again, with little beside the kernel.

    Where one call of the kernel does not make up the result, it asks ``in_general``.
    """
    if len(call.batch) != 1 or call.is_empty or call.dense_only is not None:
        return in_general
    how, scale, bias, stays_low = tiling(), call.scale, _only_bias(call), _stays_low(call)
    dtype, cast = call.dtype, None if stays_low or call.dtype == call.working_dtype else call.working_dtype
    is_short_call = call.worked_out[prepared] = is_short(call)
    jobs = short_jobs(call) if is_short_call and not step.is_step(call) else []
    if bias is None and not is_short_call:
        return in_general

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if tiling() is how:
            if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
                result = _differentiable(call, query, key, value) if is_short_call else None
                if result is not None:
                    return result
            elif bias is None:
                if jobs:
                    return forward(call, *last_axis_dense(query, key, value), jobs, dtype)[0]
            elif query.stride(-1) == key.stride(-1) == value.stride(-1) == 1:
                if cast is not None:
                    query, key, value = query.to(cast), key.to(cast), value.to(cast)
                result, logsumexp = fused_forward(query, key, value, 0.0, False, attn_mask=bias, scale=scale)
                if cast is not None:
                    return result.to(dtype)
                # Of infinite scores the kernel makes zeros in low precision, where they are to be seen as NaN.
                if not stays_low or math.isfinite(logsumexp.sum().item()):
                    return result
        return in_general(query, key, value)

    return attend


def _only_bias(call: AttentionCall) -> Tensor | None:
    """Return the bias with which one call of the kernel makes up the result of a call; None where none does."""
    if call.num_kv_heads < call.num_heads:
        return None
    if step.is_step(call):
        most = min(step.most_keys(call, norms_are_known=False), KEPT // call.num_heads)
        return step.row_of_bias(call, call.kv_len) if call.q_offset + 1 == call.kv_len <= most else None
    jobs = short_jobs(call) if is_short(call) else []
    if len(jobs) != 1 or jobs[0].kv_len < call.kv_len or onednn.suits(call, call.dtype):
        return None
    if call.dtype != call.working_dtype and not _stays_low(call) and len(_heads_at_once(call)) > 1:
        return None
    biases = _biases(call, jobs)
    return None if biases[0].is_reversed else biases[0].values


def forward(
    call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, jobs: list[Job], result_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Compute a short call; takes and returns what ``kernels.forward`` does, without sums that nobody needs."""
    if onednn.suits(call, result_dtype):
        return onednn.forward(call, query, key, value)
    biases, dtype, together = _biases(call, jobs), call.working_dtype, []
    if call.dtype == result_dtype and _stays_low(call):
        dtype = call.dtype  # weights are rounded to it, as the result is
    elif call.dtype != dtype and call.q_len <= tiling().sizes.few:
        together = _heads_at_once(call)
    if len(together) < 2:
        tensors = _in(dtype, call, query, key, value)
        result, logsumexp = _attend(call, *tensors, jobs, biases)
        if dtype != call.working_dtype and not logsumexp.isfinite().all():
            # Of infinite scores the kernel makes zeros in low precision, where they are to be seen as NaN.
            result, logsumexp = _attend(call, *_in(call.working_dtype, call, query, key, value), jobs, biases)
        return result.to(result_dtype), logsumexp
    by_heads = []
    for heads, kv_heads in together:
        tensors = _in(dtype, call, query[:, heads], key[:, kv_heads], value[:, kv_heads])
        of_heads = [x._replace(values=x.values[:, heads]) for x in biases]
        by_heads.append(_attend(call, *tensors, jobs, of_heads))
    result, logsumexp = (torch.cat(x, dim=1) for x in zip(*by_heads, strict=True))
    return result.to(result_dtype), logsumexp


def _stays_low(call: AttentionCall) -> bool:
    """Whether the kernel takes a call's low precision: one query reads its keys faster when they are cast."""
    return call.dtype == torch.bfloat16 and call.q_len > 1 and _multiplies_bfloat16()


@functools.cache
def _multiplies_bfloat16() -> bool:
    """Whether products of this CPU take bfloat16, so that a cast takes longer than it saves."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _attend(
    call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, jobs: list[Job], biases: list[Bias]
) -> tuple[Tensor, Tensor]:
    """Compute the jobs of some heads, each with its keys and values, in the working dtype."""
    if len(jobs) == 1 and not biases[0].is_reversed:
        some = _cut(jobs[0], query, key, value)
        return fused_forward(*some, 0.0, False, attn_mask=biases[0].values, scale=call.scale)
    parts = []
    for job, bias in zip(jobs, biases, strict=True):
        rows, *of_keys = _cut(job, query, key, value)
        part = fused_forward(bias.turned(rows), *of_keys, 0.0, False, attn_mask=bias.values, scale=call.scale)
        parts.append([bias.turned(x) for x in part])
    result, logsumexp = (_joined(x, 2) for x in zip(*parts, strict=True))
    return result, logsumexp


def _cut(job: Job, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a job's part of tensors, themselves where that is the whole."""
    if job.rows < query.shape[2]:
        query = query[:, :, job.queries]
    if job.kv_len < key.shape[2]:
        key, value = key[:, :, job.keys], value[:, :, job.keys]
    return query, key, value


def _biases(call: AttentionCall, jobs: list[Job]) -> list[Bias]:
    """Return the bias of each of a short call's jobs: views of one that is in memory, all in the same order."""
    kind = _biases, jobs[-1].rows
    known = call.worked_out.get(kind)
    if known is not None and known[0] is jobs:
        return known[1]
    with torch.inference_mode(False), torch.no_grad():  # they may take part in a differentiated call
        row = call.bias_by_distance
        row = row[:, :, None] if row.ndim == 3 else row[None, :, None]  # [batch or 1, heads, 1, q_len + kv_len - 1]
        backs = [job.back + call.q_offset for job in jobs]
        back, ahead = max(backs), max(job.kv_len - before for job, before in zip(jobs, backs, strict=True))
        rows, biases = jobs[-1].rows, []
        first = call.q_offset + call.q_len - back - rows  # the distance farthest back, of the last query
        row = row[..., first : first + back + ahead + rows - 1]
        is_large = _bias_elements(call, rows) > KEPT
        whole = row[:, :, 0] if is_large else shifted(row, rows)
        for job, before in zip(jobs, backs, strict=True):
            if is_large:
                start = back - before + rows - job.rows
                part = whole[:, :, start : start + job.kv_len + job.rows - 1].unfold(-1, job.kv_len, 1)
            else:
                part = whole[:, :, : job.rows, back - before : back - before + job.kv_len]
            biases.append(Bias(part, is_reversed=is_large))
    call.worked_out[kind] = jobs, biases
    return biases


def _heads_at_once(call: AttentionCall) -> list[tuple[slice, slice]]:
    """Return the query heads, and the heads of their keys, that are computed together where keys are to be cast.

    It takes new memory, which is to be small enough to be had at once.
    """
    count, group = call.num_kv_heads, call.num_heads // call.num_kv_heads
    together = step.groups(call, (call.kv_len,) * count, call.batch[0])
    return [(slice(some.start * group, some.stop * group), some) for some, _ in together]


def differentiable(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
    """Return the result of a short call of few queries, for PyTorch to differentiate by query, key and value.

    None for others, and where gradients take the care of :func:`backward`.
    """
    was_tried = call.worked_out.get(prepared, False)  # by the function prepared, which then asks in general
    return None if was_tried else _differentiable(call, query, key, value)


def _differentiable(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
    if call.q_len > DIFFERENTIATED_AT_ONCE or call.batch[0] * call.num_heads < torch.get_num_threads():
        return None
    if packs_what_is_saved():
        return None
    jobs = short_jobs(call)
    if len(jobs) > 1:
        jobs = call.worked_out.setdefault(differentiable, _blocks(call, call.q_len))
    query, key, value = _in(call.working_dtype, call, *last_axis_dense(query, key, value))
    biases = _biases(call, jobs)
    result, logsumexp = _attend(call, query, key, value, jobs, biases)
    centred = without_common_part(query, key, logsumexp, call.scale)
    if centred is None:
        return None
    if centred[0] is not key:
        result, _ = _attend(call, query, centred[0], value, jobs, biases)
    node = result.grad_fn.next_functions[0][0] if biases[0].is_reversed else result.grad_fn
    node.register_hook(differentiable_kernel)
    return result.to(call.dtype)


def backward(call: AttentionCall, saved: Saved) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the gradients of ``sum(result * grad)`` by query, key and value, each in the dtype of its own.

    None where it takes the care of ``kernels.backward``: scores are large, or heads too few to occupy all threads.
    """
    if call.batch[0] * call.num_heads < torch.get_num_threads():
        return None
    # In low precision the kernel would round the gradients of scores to it.
    grad, result = (x.to(call.working_dtype) for x in (saved.grad, saved.result))
    query, key, value = _in(call.working_dtype, call, saved.query, saved.key, saved.value)
    centred = without_common_part(query, key, saved.logsumexp, call.scale)
    if centred is None:
        return None
    key, logsumexp = centred
    by_query: list[Tensor] = []
    by_keys: list[Tensor] = []
    jobs = short_jobs(call)
    biases = _biases(call, jobs)
    for job, bias in reversed(list(zip(jobs, biases, strict=True))):
        queries = slice(None), slice(None), job.queries
        some = [bias.turned(x[queries]) for x in (grad, query, result, logsumexp)]
        of_keys = _cut(job, query, key, value)[1:]
        parts = fused_backward(*some[:2], *of_keys, *some[2:], 0.0, False, attn_mask=bias.values, scale=call.scale)
        by_query.insert(0, bias.turned(parts[0]))
        if not by_keys and job.kv_len == call.kv_len:
            by_keys = list(parts[1:])
            continue
        by_keys = by_keys or [x.new_zeros(x.shape) for x in (key, value)]
        for total, part in zip(by_keys, parts[1:], strict=True):
            total[:, :, job.keys] += part
    if call.num_kv_heads < call.num_heads:
        by_keys = [x.unflatten(1, (call.num_kv_heads, -1)).sum(dim=2) for x in by_keys]
    by_key, by_value = (x.to(call.dtype) for x in by_keys)
    return _joined(by_query, 2).to(call.dtype), by_key, by_value


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)


def _in(
    dtype: torch.dtype, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors in a dtype, with keys and values for each query head."""
    if query.dtype != dtype:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    group = call.num_heads // call.num_kv_heads
    if group > 1:
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    return query, key, value
