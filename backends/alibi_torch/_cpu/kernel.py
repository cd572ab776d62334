"""Rectangles of attention, computed by PyTorch's fused CPU kernels.

The forward kernel takes a float bias and returns the log-sum-exp of each row beside the result; the backward kernel
takes that log-sum-exp. Given the log-sum-exp over all keys, each rectangle's share of the gradients can be computed
alone and summed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from alibi_core.backend import AttentionCall
from alibi_core.backend.horizon import Job
from alibi_torch._cpu.bias import Bias, DistanceRow, GatedBias
from alibi_torch._cpu.plan import is_short, tiling
from alibi_torch._internals import fused_backward, fused_forward, multiplies_bfloat16

# Above this magnitude, scores and log-sum-exp are rounded so coarsely that the weights no longer sum to 1.
LARGE_SCORES = {dtype: 2.0**-14 / torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)}


def forward(
    call: AttentionCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    jobs: Sequence[Job],
    row: DistanceRow | GatedBias,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the result of a part of a call, in ``dtype``, and the log-sum-exp, computed rectangle by rectangle.

    The log-sum-exp is ``[batch, num_heads, q_len]``, inf for a query that sees no key.
    """
    of_kernel = dtype if _takes_bfloat16(call, dtype, query, key) else call.working_dtype
    # One job covers the call: return the kernel's result without a copy.
    if len(jobs) == 1 and jobs[0].tiles == 1:
        return _attend(call, jobs[0], row.bias_of(jobs[0]), query, key, value, of_kernel)
    result = torch.empty_like(query, dtype=dtype)
    logsumexp = query.new_empty(query.shape[:-1], dtype=call.working_dtype)
    for job in jobs:
        bias = row.bias_of(job)
        for part in _parts(job, 3 * job.rows * call.head_dim):  # queries, results, and a flipped copy
            out, lse = _attend(call, part, bias, _queries_of(query, part), key, value, of_kernel)
            _queries_of(result, part).copy_(out)
            _queries_of(logsumexp, part).copy_(lse)
    return result, logsumexp


def _takes_bfloat16(call: AttentionCall, dtype: torch.dtype, query: Tensor, key: Tensor) -> bool:
    """Whether to compute a short call in bfloat16, which takes half the time on CPUs with bfloat16 products.

    The weights are rounded too, which changes the result no more than its own rounding does. Large queries or keys are
    excluded: infinite scores would give zeros, not NaN, and denormals in the other factor would be flushed.
    """
    if dtype != torch.bfloat16 or not is_short(call) or not multiplies_bfloat16():
        return False
    # With queries and keys below 2**50 and this limit, scores stay finite in float32.
    if abs(call.scale) * call.head_dim > 2**20:
        return False
    return all(bool(torch.linalg.vector_norm(x, dtype=call.working_dtype) < 2**50) for x in (query, key))


def _attend(
    call: AttentionCall, job: Job, bias: Bias, query: Tensor, key: Tensor, value: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return result and log-sum-exp of one kernel call, in ``dtype``, for the job's queries and keys."""
    keys, values = _keys_of(call, job, dtype, key, value)
    out, lse = fused_forward(bias.in_order(query.to(dtype)), keys, values, bias.values, call.scale)
    # out: [entries or tiles, heads, rows, head_dim]; lse: [entries or tiles, heads, rows]
    return bias.without_blind(bias.in_order(out), bias.in_order(lse))


def backward(
    call: AttentionCall,
    saved: Sequence[Tensor],
    jobs: Sequence[Job],
    row: DistanceRow | GatedBias,
    totals: Sequence[Tensor],
    by_slopes: Tensor | None,
    by_gates: Tensor | None = None,
) -> None:
    """Add the gradients of ``sum(result * grad)`` with respect to query, key and value to ``totals``, and of slopes.

    ``saved`` are query, key, value, grad and result, ``[batch, heads, length, head_dim]``, and the log-sum-exp.
    Gradients of key and value are in the working dtype: summed over rectangles, rounded at the end. ``by_slopes``,
    ``[2, batch, num_heads]`` float64, is for keys before and after the query; None if not needed. ``by_gates``,
    ``[batch, num_heads, kv_len]`` float64, is the sum of score gradients of each key minus that of the query there.
    """
    query, key, value, grad, result, logsumexp = saved
    total_query, total_key, total_value = totals
    dtype, head_dim = call.working_dtype, total_query.shape[-1]
    centre, shift = _common_part(call, query, key)
    # inf marks queries without keys, whose gradients are 0.
    kept = None if call.sinks is None else 1 - torch.exp(call.sinks - logsumexp)
    is_small = (logsumexp.abs() <= LARGE_SCORES[dtype]) | (logsumexp == math.inf)
    if shift is not None:
        is_small &= shift.abs() <= LARGE_SCORES[dtype]
    are_small = bool(is_small.all())
    sides = row.sides() if by_slopes is not None and isinstance(row, DistanceRow) else []
    for job in jobs:
        bias, biases = row.bias_of(job), [(side.bias_of(job), sign) for side, sign in sides]
        for part in _parts(job, 2 * job.kv_len * call.head_dim):
            keys, values = _keys_of(call, part, dtype, key, value)  # [entries or tiles, heads, kv_len, head_dim]
            lse = _queries_of(logsumexp, part)
            if centre is not None and shift is not None:
                # Centred keys lower every score of a row by `shift`, and so the log-sum-exp.
                (common,) = _keys_of(call, replace(part, kv_start=0, kv_len=1, tiles=1), dtype, centre)
                keys, lse = keys - common, lse - _queries_of(shift, part)
            inputs = (_queries_of(x, part).to(dtype) for x in (grad, query, result))
            tile = Tile(*inputs, lse, keys, values, bias, call.scale, None if kept is None else _queries_of(kept, part))
            # The fused kernel derives weights from the log-sum-exp, which is too coarse for large scores.
            has_large_scores = not (are_small or _queries_of(is_small, part).all())
            if by_slopes is not None:
                # The bias is -slope * distance, hence the minus sign.
                found, by_distance = _with_slopes(call, part, tile, biases, has_large_scores)
                by_slopes[:, part.batch, part.heads] -= torch.stack(by_distance)
            elif by_gates is not None:
                found, of_queries, of_keys = _with_gates(tile, has_large_scores)
                by_gates[part.batch, part.heads, part.keys] += of_keys
                start = part.q_start + call.q_offset
                own = slice(min(max(start, 0), call.kv_len), min(max(start + part.rows, 0), call.kv_len))
                by_gates[part.batch, part.heads, own] -= of_queries[..., own.start - start : own.stop - start]
            elif has_large_scores:
                found = tile.from_scores(*tile.score_gradients())
            else:
                found = tile.gradients()
            by_query, by_key, by_value = (x[..., :head_dim] for x in found)  # without the features of a key bias
            _queries_of(total_query, part).copy_(by_query)
            _add_to_keys(total_key, part, by_key, call)
            _add_to_keys(total_value, part, by_value, call)


def _common_part(call: AttentionCall, query: Tensor, key: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the mean key of each head, and the score of each query with it; None, None if keys need no centring.

    A vector that is subtracted from all keys cancels in softmax. The score gradients of a row sum to 0 except for
    rounding errors, and a large mean key would multiply those errors in the gradient of the query. A mean that comes
    from a few large keys is not subtracted: queries that do not see those keys would get large scores and lose digits.
    """
    keys = key.to(call.working_dtype)
    total = keys.sum(dim=2, keepdim=True)
    common, whole = (x.norm(dim=-1).norm(dim=-1) for x in (total, keys))  # [batch, num_kv_heads]; dim=(2, 3) is slower
    # For equal keys, |sum| = sqrt(kv_len) * Frobenius norm; centre from 0.9 of that on. A single score has no gradient.
    most = (0.8 * call.kv_len) ** 0.5 if call.kv_len > 1 else math.inf
    is_common = common > whole * most  # False where keys or their sum are not finite
    if call.sinks is not None or not is_common.any():  # a sink is among the scores that sum to 0
        return None, None
    centre = torch.where(is_common[..., None, None], total / call.kv_len, 0.0)  # [batch, num_kv_heads, 1, head_dim]
    # [batch, num_kv_heads, heads of a group, q_len, head_dim]
    queries = query.to(call.working_dtype).unflatten(1, (call.num_kv_heads, -1))
    return centre, (queries @ centre.mT[:, :, None])[..., 0].flatten(1, 2) * call.scale


@dataclass(frozen=True)
class Tile:
    """The inputs of one backward kernel call: ``[batch entries or tiles, heads, rows or kv_len, ...]``."""

    grad: Tensor
    query: Tensor
    result: Tensor
    logsumexp: Tensor
    key: Tensor
    value: Tensor
    bias: Bias
    scale: float
    kept: Tensor | None = None  # [..., rows], the share of weight that sinks leave to keys

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients with respect to query, key and value, by the fused kernel."""
        of_queries = self.grad, self.query, self.result, self.logsumexp
        grad, query, result, logsumexp = (self.bias.in_order(x) for x in of_queries)
        # Rows in the order of the bias: the bias is a view, and cheaper to keep than to flip.
        tensors = grad, query, self.key, self.value, result, logsumexp
        by_query, by_key, by_value = fused_backward(*tensors, self.bias.values, self.scale)
        return self.bias.in_order(by_query), by_key, by_value

    def score_gradients(self) -> tuple[Tensor, Tensor]:
        """Return weights and score gradients, ``[..., rows, kv_len]``, for rows with large scores.

        The weights are normalized over this rectangle, which has all keys that matter, not by the log-sum-exp.
        """
        scores = self.query @ self.key.mT * self.scale + self.bias.in_order(self.bias.values)
        weights = torch.where(self.logsumexp[..., None] == math.inf, 0.0, torch.softmax(scores, dim=-1))
        weights = weights if self.kept is None else weights * self.kept[..., None]
        by_weight = self.grad @ self.value.mT
        return weights, weights * (by_weight - (weights * by_weight).sum(dim=-1, keepdim=True))

    def from_scores(self, weights: Tensor, by_score: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients with respect to query, key and value, from weights and score gradients."""
        return by_score @ self.key * self.scale, by_score.mT @ self.query * self.scale, weights.mT @ self.grad


def _with_slopes(
    call: AttentionCall, job: Job, tile: Tile, biases: Sequence[tuple[Bias, int]], has_large_scores: bool
) -> tuple[tuple[Tensor, Tensor, Tensor], list[Tensor]]:
    """Return the gradients with respect to query, key and value, and ``sum(distance * score gradient)`` for each side.

    The gradient of a query is the sum of score gradients times keys. Two extra features of the keys, 1 and the key's
    position, make the fused kernel compute ``sum(score gradient)`` and ``sum(score gradient * position)`` as well. On
    one side of a query, distance is linear in the position, so these two sums suffice.
    """
    lowest = job.back + call.q_offset  # position of the first query, relative to the first key of the rectangle
    places = torch.arange(job.kv_len, device=call.device)
    q_places = torch.arange(job.rows, device=call.device) + lowest
    if call.sinks is None:  # Clamp into the keys' range: a constant distance per row cancels in softmax.
        q_places = q_places.clamp(0, job.kv_len - 1)
    if has_large_scores:  # weights must be normalized over all keys of the row
        weights, by_score = tile.score_gradients()
        distance = (q_places[:, None] - places).double()
        totals = [(by_score * (sign * distance).clamp(min=0)).sum(dim=-1) for sign in (1, -1)]
        return tile.from_scores(weights, by_score), [_by_head(job, x) for x in totals]
    # Scale the query instead of the scores, so that the gradients of the extra features are not scaled.
    wide = replace(tile, query=tile.query * tile.scale, scale=1.0)
    by_query = torch.zeros_like(wide.query)
    by_key, by_value = torch.zeros_like(wide.key), torch.zeros_like(wide.value)
    totals = [wide.query.new_zeros(wide.query.shape[:-1], dtype=torch.float64) for _ in range(2)]
    # Keys that are at or before at least one query; keys that are after at least one query.
    edges = min(max(lowest + job.rows, 0), job.kv_len), min(max(lowest + 1, 0), job.kv_len)
    spans = slice(0, edges[0] if len(biases) > 1 else job.kv_len), slice(edges[1], job.kv_len)
    for (bias, sign), some, total in zip(biases, spans, totals, strict=False):
        if some.start == some.stop:
            continue
        # Count positions from the middle, so that the float32 sums stay small.
        middle = (some.start + some.stop) // 2
        own = (places[some] - middle).to(call.working_dtype)  # [keys of the side]
        features = torch.stack([own, torch.ones_like(own)], dim=-1).expand(*wide.key.shape[:2], -1, -1)
        values = bias.values[..., some]
        side = replace(wide, key=wide.key[:, :, some], value=wide.value[:, :, some], bias=bias._replace(values=values))
        # Pad with zeros: the extra key features meet query features of 0, so scores do not change.
        padded = {name: F.pad(getattr(side, name), (0, 2)) for name in ("grad", "query", "result", "value")}
        found = replace(side, **padded, key=torch.cat([side.key, features], dim=-1)).gradients()
        by_query += found[0][..., :-2]
        by_key[:, :, some] += found[1][..., :-2]
        by_value[:, :, some] += found[2][..., :-2]
        # sum(gradient * (q - k)) = q * sum(gradient) - sum(gradient * k). Both products are rounded alike for the
        # query's own key, so its distance stays exactly 0.
        total += sign * ((q_places - middle) * found[0][..., -1] - found[0][..., -2])
    return (by_query * tile.scale, by_key, by_value), [_by_head(job, x) for x in totals]


def _with_gates(tile: Tile, has_large_scores: bool) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
    """Return the gradients with respect to query, key and value, and sums of score gradients by query and by key.

    A key feature of 1 makes the fused kernel sum a query's score gradients, a query feature of 1 those of a key. Each
    meets a feature of 0, so scores do not change.
    """
    if has_large_scores:
        weights, by_score = tile.score_gradients()
        return tile.from_scores(weights, by_score), by_score.sum(dim=-1), by_score.sum(dim=-2)
    query = F.pad(F.pad(tile.query * tile.scale, (0, 1)), (0, 1), value=1.0)
    key = F.pad(F.pad(tile.key, (0, 1), value=1.0), (0, 1))
    padded = {name: F.pad(getattr(tile, name), (0, 2)) for name in ("grad", "result", "value")}
    by_query, by_key, by_value = replace(tile, query=query, key=key, **padded, scale=1.0).gradients()
    found = by_query[..., :-2] * tile.scale, by_key[..., :-2], by_value[..., :-2]
    return found, by_query[..., -2], by_key[..., -1]


def _by_head(job: Job, totals: Tensor) -> Tensor:
    """Return the sums over rows, and over tiles if all belong to one sequence: ``[batch entries, heads]``."""
    return totals.sum(dim=-1) if job.tiles == 1 else totals.sum(dim=(0, -1))[None]


# --- Views of rectangles ---------------------------------------------------------------------------------------------


def _queries_of(tensor: Tensor, job: Job) -> Tensor:
    """Return a view of the job's rows of a query-shaped tensor: ``[batch entries or tiles, heads, rows, ...]``."""
    if job.tiles == 1:
        return tensor[job.batch, job.heads, job.queries]
    return _windows(tensor[job.batch.start, job.heads], job, job.q_start, job.rows)


def _keys_of(call: AttentionCall, job: Job, dtype: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    """Return a job's keys or values in ``dtype``: ``[batch entries or tiles, heads, kv_len, ...]``.

    Tiles are overlapping views. If all heads share one key/value head, it is expanded without a copy.
    """
    found, count, heads = [], job.heads.stop - job.heads.start, _kv_heads(call, job)
    for tensor in tensors:
        keys = tensor[job.batch, heads, job.kv_start : job.kv_start + (job.tiles - 1) * job.rows + job.kv_len]
        keys = keys.to(dtype)
        if job.tiles > 1:
            keys = _windows(keys[0], job, 0, job.kv_len)
        shared = keys.shape[1]
        found.append(
            keys.expand(-1, count, -1, -1) if shared in (1, count) else keys.repeat_interleave(count // shared, 1)
        )
    return found


def _kv_heads(call: AttentionCall, job: Job) -> slice:
    group = call.num_heads // call.num_kv_heads
    return slice(job.heads.start // group, (job.heads.stop - 1) // group + 1)


def _windows(tensor: Tensor, job: Job, start: int, length: int) -> Tensor:
    """Return ``[tiles, heads, length, ...]``, a view of ``[heads, tokens, ...]``: tile i begins ``i * rows`` later."""
    # Overlapping windows need as_strided; unfold would put the window axis last.
    (head, token), rest = tensor.stride()[:2], tensor.stride()[2:]
    size = (job.tiles, tensor.shape[0], length, *tensor.shape[2:])
    return tensor.as_strided(size, (job.rows * token, head, token, *rest), tensor.storage_offset() + start * token)


def _parts(job: Job, elements: int) -> Iterator[Job]:
    """Yield the job in chunks of tiles, so that temporaries of ``elements`` per tile and head stay small."""
    if job.tiles == 1:
        yield job
        return
    heads, threads = job.heads.stop - job.heads.start, torch.get_num_threads()
    step = max(1, tiling().kernel_elements // (elements * heads))
    step = max(step - step % threads, -(-threads // heads))  # a multiple of the threads, so that none idles
    for tile in range(0, job.tiles, step):
        starts = {"q_start": job.q_start + tile * job.rows, "kv_start": job.kv_start + tile * job.rows}
        yield replace(job, **starts, tiles=min(step, job.tiles - tile))


def _add_to_keys(total: Tensor, job: Job, addend: Tensor, call: AttentionCall) -> None:
    """Add a job's key gradients, ``[batch entries or tiles, heads, kv_len, head_dim]``, to ``total``."""
    heads = _kv_heads(call, job)
    if call.num_heads > call.num_kv_heads:  # sum over each group: [entries or tiles, kv heads, kv_len, head_dim]
        addend = addend.unflatten(1, (heads.stop - heads.start, -1)).sum(dim=2)
    if job.tiles == 1:
        total[job.batch, heads, job.keys] += addend
        return
    # Tiles overlap, so add them in slices of `rows` keys: the same slice of all tiles has no overlap.
    for start in range(0, job.kv_len, job.rows):
        some = addend[:, :, start : start + job.rows]
        windows = _windows(total[job.batch.start, heads], job, job.kv_start + start, some.shape[2])
        windows += some
