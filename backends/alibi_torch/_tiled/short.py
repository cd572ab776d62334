"""Short calls whose bias depends on distance alone: block after block of queries, with little but the kernel's time.

All blocks share one bias, that of the last: the block before sees the same keys as far back as there are any, each one
block nearer to the first. A bias that would be large is that of queries in reverse order: one row a head, of which each
query's is a part that begins one key after that of the query before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from alibi_core import AttentionCall
from alibi_core.backend import Job, seen_keys
from alibi_torch._tiled import onednn, step
from alibi_torch._tiled.blocks import (
    Plan,
    has_tiny,
    is_little,
    is_measured,
    limits_of,
    longest,
    lowest_bias,
    plan,
    planned,
    stays_low,
)
from alibi_torch._tiled.configuration import tiling
from alibi_torch._tiled.kernels import (
    Bias,
    Saved,
    fused_backward,
    fused_forward,
    is_last_axis_dense,
    last_axis_dense,
    masked_bias,
    queries_of,
    shifted,
    without_common_part,
)
from alibi_torch._tiled.second import differentiable_kernel, packs_what_is_saved

KEPT = 2**19  # numbers; a bias of so few is kept with its call, which may come again
ROOM = 64  # tokens, of whose multiples a bias has room that grows for longer texts
LONG_DECODING = 2**13  # times the keys of a short call: numbers in the keys of one batch entry
MASKED = 256  # queries and keys of a mask; of more, blocks that leave out hidden keys take less time
MASKED_OF_FEW = 2**15  # keys of a few queries and a mask: finding out which of more are needed takes less time
DIFFERENTIATED = 128  # queries: one block of so few, or of little, is left to PyTorch to differentiate


def is_short(call: AttentionCall, *, norms_are_known: bool = False) -> bool:
    """Whether the functions of this module compute a call.

    A few queries may as well read all keys, until those are so many that finding out what is needed takes less time.
    """
    how = tiling()
    if call.worked_out.get(is_short) is how:
        return True  # as it was before
    if not call.sees_own_key or call.q_segment_ids is not None or call.added_key_bias is not None:
        return False
    if call.kv_len <= how.short or call.q_len > how.sizes.few:
        found = call.kv_len <= how.short * longest(call)
        if found:
            call.worked_out[is_short] = how
        return found
    # Norms that are not known take a pass over the keys; of float32 that is half of what attention reads.
    limit = LONG_DECODING * (4 if call.dtype == call.working_dtype and not norms_are_known else 1)
    return call.num_kv_heads * call.kv_len * call.head_dim < limit * how.short


def prepared(call: AttentionCall, in_general: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of query, key and value that computes a call, again and again, with little beside the kernel.

    Where one call of the kernel does not make up the result, it asks ``in_general``.
    """
    if len(call.batch) != 1 or call.is_empty or call.dense_only is not None:
        return in_general
    how, scale, (bias, attends) = tiling(), call.scale, _only_bias(call)
    is_low = stays_low(call.dtype, call.q_len) and not _has_masks(call)
    dtype, cast = call.dtype, None if is_low or call.dtype == call.working_dtype else call.working_dtype
    hidden = None if attends is None else ~attends
    is_short_call = call.worked_out[prepared] = is_short(call)
    has_blocks = is_short_call and not step.is_step(call)
    if bias is None and not is_short_call:
        return in_general

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if tiling() is how:
            if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
                result = _differentiable(call, query, key, value) if is_short_call else None
                if result is not None:
                    return result
            elif bias is None:
                if has_blocks:
                    return forward(call, *last_axis_dense(query, key, value), dtype)[0]
            elif is_last_axis_dense(query) and is_last_axis_dense(key) and is_last_axis_dense(value):
                if cast is not None:
                    query, key, value = query.to(cast), key.to(cast), value.to(cast)
                result, logsumexp = fused_forward(query, key, value, 0.0, False, attn_mask=bias, scale=scale)
                if hidden is not None:
                    result = result.masked_fill_(hidden, 0.0)
                if cast is not None:
                    return result.to(dtype)
                # Of infinite scores the kernel makes zeros in low precision, where they are to be seen as NaN.
                if not is_low or math.isfinite(logsumexp.sum().item()):
                    return result
        return in_general(query, key, value)

    return attend


def of_lengths(call: AttentionCall, q_len: int, kv_len: int) -> AttentionCall:
    """Return a checked call with other lengths, its last query at the last key; both share what is kept of biases."""
    like = replace(call, q_len=q_len, kv_len=kv_len, q_offset=kv_len - q_len)
    like.worked_out[_whole] = call.worked_out.setdefault(_whole, {})
    return like


def _only_bias(call: AttentionCall) -> tuple[Tensor | None, Tensor | None]:
    """Return the bias with which one call of the kernel makes up the result of a call; None where none does.

    And which queries see anything, None where all do.
    """
    if call.num_kv_heads < call.num_heads:
        return None, None
    if _has_masks(call):
        return _bias_of_masks(call) if _is_at_once(call) else (None, None)
    if step.is_step(call):
        most = min(step.most_keys(call, norms_are_known=False), KEPT // call.num_heads)
        return step.row_of_bias(call, call.kv_len) if call.q_offset + 1 == call.kv_len <= most else None, None
    if not is_short(call) or is_measured(call, differentiates=False) or onednn.suits(call, call.dtype):
        return None, None
    whole = planned(call, ())
    if len(whole.jobs) != 1 or whole.jobs[0].kv_len < call.kv_len:
        return None, None
    is_cast = call.dtype != call.working_dtype and not stays_low(call.dtype, call.q_len)
    if is_cast and len(_heads_at_once(call, call.kv_len)) > 1:
        return None, None
    biases = _biases(call, whole)
    return None if biases[0].is_reversed else biases[0].values, None


def _has_masks(call: AttentionCall) -> bool:
    return call.mask is not None or call.q_segment_ids is not None


def _is_at_once(call: AttentionCall) -> bool:
    """Whether one call of the kernel makes up the result of a call with masks, with a bias that is kept."""
    if not _suits_masks(call, differentiates=False) or has_tiny(call, differentiates=False):
        return False
    sees_all = seen_keys(call, 0, call.q_len) == (0, call.kv_len)
    if call.q_len <= tiling().sizes.few and not (sees_all and len(_heads_at_once(call, call.kv_len)) == 1):
        return False
    return call.batch[0] * call.num_heads * call.q_len * call.kv_len <= KEPT


def forward(
    call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, result_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Compute a short call; returns what ``kernels.forward`` does, without sums that nobody needs."""
    if onednn.suits(call, result_dtype):
        return onednn.forward(call, query, key, value)
    how, dtype, together = plan(call, query, key), call.working_dtype, []
    if call.dtype == result_dtype and stays_low(call.dtype, call.q_len):
        dtype = call.dtype  # weights are rounded to it, as the result is
    elif call.dtype != dtype and call.q_len <= tiling().sizes.few:
        key, value = (x[:, :, how.jobs[0].keys] for x in (key, value))  # so few queries are one job
        together = _heads_at_once(call, key.shape[2])
    if len(together) < 2:
        result, logsumexp = _attend(call, *_in(dtype, call, query, key, value), how)
        if dtype != call.working_dtype and not logsumexp.isfinite().all():
            # Of infinite scores the kernel makes zeros in low precision, where they are to be seen as NaN.
            result, logsumexp = _attend(call, *_in(call.working_dtype, call, query, key, value), how)
        return result.to(result_dtype), logsumexp
    parts = []
    for heads, kv_heads in together:
        tensors = _in(dtype, call, query[:, heads], key[:, kv_heads], value[:, kv_heads])
        parts.append(_attend_at_once(call, *tensors, _biases(call, how)[0].heads(heads)))
    result, logsumexp = (torch.cat(x, dim=1) for x in zip(*parts, strict=True))
    return result.to(result_dtype), logsumexp


def _attend(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, how: Plan) -> tuple[Tensor, Tensor]:
    """Compute a call as planned; keys and values are those of each query head."""
    biases = _biases(call, how)
    if len(how.jobs) == 1:
        return _attend_at_once(call, query, *_keys_of(how.jobs[0], key, value), biases[0])
    result, logsumexp = torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=call.working_dtype)
    for job, bias in zip(how.jobs, biases, strict=True):
        part = _attend_at_once(call, queries_of(query, job), *_keys_of(job, key, value), bias)
        for whole, some in zip((result, logsumexp), part, strict=True):
            queries_of(whole, job).copy_(some)
        del part, some  # so that the next ones take their place: more memory at a time would be new memory each time
    return result, logsumexp


def _attend_at_once(
    call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, bias: Bias
) -> tuple[Tensor, Tensor]:
    """Compute attention in one call of the kernel."""
    tensors = bias.turned(query), key, value
    result, logsumexp = fused_forward(*tensors, 0.0, False, attn_mask=bias.values, scale=call.scale)
    del tensors
    return bias.turned(result), bias.turned(logsumexp)


def _keys_of(job: Job, *tensors: Tensor) -> list[Tensor]:
    """Return a job's part of keys and values, themselves where that is the whole."""
    return [x if job.kv_len == x.shape[2] and _has_all_heads(job, x) else x[:, job.heads, job.keys] for x in tensors]


def _has_all_heads(job: Job, tensor: Tensor) -> bool:
    return job.heads.stop - job.heads.start == tensor.shape[1]


def _biases(call: AttentionCall, how: Plan) -> list[Bias]:
    """Return the bias of each of a plan's jobs: views of one that is in memory, all in the same order."""
    if how.biases is not None:
        return how.biases
    jobs = how.jobs
    backs = [job.back + call.q_offset for job in jobs]
    back, ahead = max(backs), max(job.kv_len - before for job, before in zip(jobs, backs, strict=True))
    with torch.inference_mode(False), torch.no_grad():  # they may take part in a differentiated call
        whole = _whole(call, Extent(jobs[-1].rows, back, ahead), how.levels)
        biases = []
        for job, before in zip(jobs, backs, strict=True):
            if whole.is_reversed:
                start = whole.extent.back - before + whole.extent.rows - job.rows
                part = whole.values[:, job.heads, start : start + job.kv_len + job.rows - 1].unfold(-1, job.kv_len, 1)
            else:
                start = whole.extent.back - before
                part = whole.values[:, job.heads, : job.rows, start : start + job.kv_len]
            biases.append(Bias(part, whole.is_reversed))
    how.biases = biases
    return biases


class Extent(NamedTuple):
    """How large a bias is that depends on distance alone."""

    rows: int  # queries
    back: int  # keys before the first query's own
    ahead: int  # keys from there on

    @property
    def scores(self) -> int:
        return self.rows * (self.back + self.ahead)


class Whole(NamedTuple):
    """A bias of which others are parts."""

    extent: Extent
    is_reversed: bool
    values: Tensor  # [batch or 1, heads, rows, back + ahead]; if reversed, the row of which those are parts


def _whole(call: AttentionCall, needed: Extent, levels: tuple[int, ...]) -> Whole:
    """Return a bias of at least the extent needed: without levels, one that calls of other lengths share."""
    kept = call.worked_out.setdefault(_whole, {})
    most = KEPT // max(x.numel() for x in (call.slopes, call.future_slopes) if x is not None)
    is_large = needed.scores > most
    kind = is_large, needed.back > 0
    known: Whole | None = None if levels else kept.get(kind)
    if known is not None and all(has >= n for has, n in zip(known.extent, needed, strict=True)):
        return known
    extent = needed
    if known is not None:  # texts of other lengths come: room for longer ones
        roomy = Extent(*(-(-n // ROOM) * ROOM for n in map(max, needed, known.extent)))
        extent = roomy if is_large or roomy.scores <= most else needed
    rows, back, ahead = extent
    row = replace(call, q_len=rows, kv_len=back + ahead, q_offset=back).bias_by_distance
    if levels:
        distance = (torch.arange(row.shape[-1], device="cpu") - (back + rows - 1)).abs()
        limits = torch.tensor(limits_of(call, levels), device="cpu")
        row = row.masked_fill(distance >= limits[:, None], -math.inf)
    row = row if row.ndim == 3 else row[None]  # [batch or 1, heads, rows + back + ahead - 1]
    whole = Whole(extent, is_large, row if is_large else shifted(row, rows))
    if not levels:
        kept[kind] = whole
    return whole


def _heads_at_once(call: AttentionCall, kv_len: int) -> list[tuple[slice, slice]]:
    """Return the query heads, and the heads of their keys, that are computed together where so many keys are cast.

    It takes new memory, which is to be small enough to be had at once.
    """
    count, group = call.num_kv_heads, call.num_heads // call.num_kv_heads
    together = step.groups(call, (kv_len,) * count, call.batch[0])
    return [(slice(some.start * group, some.stop * group), some) for some, _ in together]


def differentiable(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
    """Return the result of a short call of few queries, for PyTorch to differentiate by query, key and value.

    None for others, and where gradients take the care of :func:`backward`.
    """
    was_tried = call.worked_out.get(prepared, False)  # by the function prepared, which then asks in general
    return None if was_tried else _differentiable(call, query, key, value)


def masked(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, *, differentiates: bool) -> Tensor | None:
    """Return the result of a short call with a mask or segments, or of one of a few queries; None for others.

    It is for PyTorch to differentiate by query, key and value.
    """
    if not _has_masks(call):
        return None
    are_few = not differentiates and call.q_len <= tiling().sizes.few
    if are_few:
        call, key, value = _seen(call, key, value)
    if not _suits_masks(call, differentiates=differentiates):
        return None
    if differentiates and (call.batch[0] * call.num_heads < torch.get_num_threads() or packs_what_is_saved()):
        return None
    if lowest_bias(call, query, key, differentiates=differentiates) is not None:
        return None  # there biases end where no key matters
    bias, attends = _bias_of_masks(call)
    query, key, value = last_axis_dense(query, key, value)
    together = _heads_at_once(call, call.kv_len) if are_few else []
    if len(together) > 1 or (are_few and call.num_kv_heads < call.num_heads):
        result = _of_few(call, query, key, value, bias, together)
    else:
        query, key, value = _in(call.working_dtype, call, query, key, value)
        result, logsumexp = fused_forward(query, key, value, 0.0, False, attn_mask=bias, scale=call.scale)
    if differentiates:
        centred = without_common_part(query, key, logsumexp, call.scale)
        if centred is None or centred[0] is not key:  # gradients take care, for which the result need not be another
            return None
        result.grad_fn.register_hook(differentiable_kernel)
    if attends is not None:
        result = result.masked_fill(~attends, 0.0)
    return result.to(call.dtype)


def _suits_masks(call: AttentionCall, *, differentiates: bool) -> bool:
    """Whether a call with masks is so small that the whole bias, and a kernel that computes all scores, take least."""
    if call.has_offset_array or call.future_slopes is not None or call.added_key_bias is not None:
        return False
    # What is saved for gradients is the bias, too: no larger than query, key, value and result.
    most = min(4 * call.head_dim, MASKED) if differentiates else MASKED
    are_few = not differentiates and call.q_len <= tiling().sizes.few
    if call.q_len > most or call.kv_len > (MASKED_OF_FEW if are_few else most):
        return False
    scores = call.batch[0] * call.num_heads * call.q_len * call.kv_len
    return scores <= tiling().sizes.bias_elements and _all_rise(call)


def _all_rise(call: AttentionCall) -> bool:
    """Whether all slopes are above 0."""
    known: bool | None = call.worked_out.get(_all_rise)
    if known is None:
        known = call.worked_out[_all_rise] = bool((call.slopes > 0).all())
    return known


def _bias_of_masks(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Return ``masked_bias``, which a call that comes again keeps."""
    found: tuple[Tensor, Tensor | None] | None = call.worked_out.get(masked_bias)
    if found is None:
        with torch.inference_mode(False), torch.no_grad():  # it may take part in a differentiated call
            found = masked_bias(call)
        if found[0].numel() <= KEPT:
            call.worked_out[masked_bias] = found
    return found


def _seen(call: AttentionCall, key: Tensor, value: Tensor) -> tuple[AttentionCall, Tensor, Tensor]:
    """Return a call and its keys and values without keys that position hides from all queries, if any are left."""
    keys = slice(*seen_keys(call, 0, call.q_len))
    if keys.start >= keys.stop or keys == slice(0, call.kv_len):
        return call, key, value
    whole = slice(0, call.batch[0]), slice(0, call.num_heads), slice(0, call.q_len)
    call = call.tile(batch=whole[0], heads=whole[1], queries=whole[2], keys=keys)
    return call, key[:, :, keys], value[:, :, keys]


def _of_few(
    call: AttentionCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    together: list[tuple[slice, slice]],
) -> Tensor:
    """Return the result of a few queries and a bias ``[batch or 1, num_heads, q_len, kv_len]``, some heads at a time.

    Heads that share their keys become rows.
    """
    rows, parts = call.num_heads // call.num_kv_heads * call.q_len, []
    for heads, kv_heads in together:
        of_heads = query[:, heads], bias[:, heads].expand(-1, heads.stop - heads.start, -1, -1)
        queries, biases = (x.reshape(x.shape[0], -1, rows, x.shape[3]) for x in of_heads)
        tensors = (x.to(call.working_dtype) for x in (queries, key[:, kv_heads], value[:, kv_heads]))
        part, _ = fused_forward(*tensors, 0.0, False, attn_mask=biases, scale=call.scale)
        parts.append(part.reshape(of_heads[0].shape))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _differentiable(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
    if call.q_len > DIFFERENTIATED and (not is_little(call) or is_measured(call, differentiates=True)):
        return None
    if call.batch[0] * call.num_heads < torch.get_num_threads():
        return None
    how = planned(call, ())
    if len(how.jobs) > 1 or packs_what_is_saved():
        return None
    query, key, value = _in(call.working_dtype, call, *last_axis_dense(query, key, value))
    result, logsumexp = _attend(call, query, key, value, how)
    centred = without_common_part(query, key, logsumexp, call.scale)
    if centred is None:
        return None
    if centred[0] is not key:
        result, _ = _attend(call, query, centred[0], value, how)
    node = result.grad_fn.next_functions[0][0] if _biases(call, how)[0].is_reversed else result.grad_fn
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
    how = plan(call, saved.query, saved.key, differentiates=True)
    key, logsumexp = centred
    by_query, totals = torch.empty_like(query), []
    for job, bias in reversed(list(zip(how.jobs, _biases(call, how), strict=True))):  # the one of all keys first
        of_queries = [bias.turned(queries_of(x, job)) for x in (grad, query, result, logsumexp)]
        tensors = *of_queries[:2], *_keys_of(job, key, value), *of_queries[2:]
        of_query, *of_keys = fused_backward(*tensors, 0.0, False, attn_mask=bias.values, scale=call.scale)
        queries_of(by_query, job).copy_(bias.turned(of_query))
        if not totals and of_keys[0].shape == key.shape:
            totals = of_keys
            continue
        totals = totals or [torch.zeros_like(x) for x in (key, value)]
        for total, part in zip(totals, of_keys, strict=True):
            total[:, job.heads, job.keys].add_(part)
    if call.num_kv_heads < call.num_heads:
        totals = [x.unflatten(1, (call.num_kv_heads, -1)).sum(dim=2) for x in totals]
    by_key, by_value = totals
    return by_query.to(call.dtype), by_key.to(call.dtype), by_value.to(call.dtype)


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
