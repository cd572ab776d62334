"""Rectangles of attention, computed by PyTorch's own fused CPU kernels.

The kernel takes a float bias, and gives the logarithm of each softmax's denominator beside the result; its backward
takes that logarithm. So the gradients of a query may be summed over rectangles: each one's part follows from the
logarithm over all keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from alibi_core.backend import AttentionCall
from alibi_core.backend.horizon import Job
from alibi_torch._cpu.bias import Bias, DistanceRow
from alibi_torch._cpu.plan import is_short, tiling
from alibi_torch._internals import fused_backward, fused_forward, multiplies_bfloat16

# Larger scores are rounded so much that their log-sum-exp, rounded as well, makes no weights of them whose sum is 1.
LARGE_SCORES = {dtype: 2.0**-14 / torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)}


def forward(
    call: AttentionCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    jobs: Sequence[Job],
    row: DistanceRow,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Compute the rectangles that make up a part of a call: its result, in ``dtype``, and the log-sum-exp of queries.

    That is ``[batch, num_heads, q_len]``, infinite for a query that sees nothing.
    """
    of_kernel = dtype if _takes_bfloat16(call, dtype, query, key) else call.working_dtype
    if len(jobs) == 1 and jobs[0].tiles == 1:
        return _attend(call, jobs[0], row.bias_of(jobs[0]), query, key, value, of_kernel)
    result = torch.empty_like(query, dtype=dtype)
    logsumexp = query.new_empty(query.shape[:-1], dtype=call.working_dtype)
    for job in jobs:
        bias = row.bias_of(job)
        for part in _parts(job, 3 * job.rows * call.head_dim):  # queries, results, and both in the order of the bias
            out, lse = _attend(call, part, bias, _queries_of(query, part), key, value, of_kernel)
            _queries_of(result, part).copy_(out)
            _queries_of(logsumexp, part).copy_(lse)
    return result, logsumexp


def _takes_bfloat16(call: AttentionCall, dtype: torch.dtype, query: Tensor, key: Tensor) -> bool:
    """Whether the kernel is to compute a short call's result in bfloat16, which some CPUs do in half the time.

    Weights are rounded then, by which the result changes no more than by its own rounding. Where factors are large,
    infinite scores would become zeros, not NaN, and denormal numbers in the other factor would be lost.
    """
    if dtype != torch.bfloat16 or not is_short(call) or not multiplies_bfloat16():
        return False
    if abs(call.scale) * call.head_dim > 2**20:
        return False
    return all(bool(torch.linalg.vector_norm(x, dtype=call.working_dtype) < 2**50) for x in (query, key))


def _attend(
    call: AttentionCall, job: Job, bias: Bias, query: Tensor, key: Tensor, value: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return what one call of the kernel, in ``dtype``, makes of a job's queries and of its part of the keys."""
    keys, values = _keys_of(call, job, dtype, key, value)
    out, lse = fused_forward(bias.in_order(query.to(dtype)), keys, values, bias.values, call.scale)
    out, lse = bias.in_order(out), bias.in_order(lse)
    if bias.attends is not None:
        out = torch.where(bias.attends, out, 0.0)
        lse = torch.where(bias.attends[..., 0], lse, math.inf)
    return out, lse


class Saved(NamedTuple):
    """What gradients follow from, ``[batch, heads, length, head_dim]``."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor  # by the result
    result: Tensor
    logsumexp: Tensor  # [batch, num_heads, q_len]


class Totals(NamedTuple):
    """Where gradients are added up."""

    query: Tensor  # of the shape of the query, like the next two
    key: Tensor  # a sum over rectangles, in the working dtype, to be rounded once, at the end
    value: Tensor
    slopes: Tensor | None  # [2, batch, num_heads], float64, for the keys on each side of the query; None for neither


def backward(call: AttentionCall, saved: Saved, jobs: Sequence[Job], row: DistanceRow, totals: Totals) -> None:
    """Add the gradients of ``sum(result * grad)`` by query, key, value and slopes to ``totals``."""
    query, key, value, grad, result, logsumexp = saved
    dtype, head_dim = call.working_dtype, totals.query.shape[-1]
    centre, shift = _common_part(call, query, key)
    is_small = (logsumexp.abs() <= LARGE_SCORES[dtype]) | (logsumexp == math.inf)
    if shift is not None:
        is_small &= shift.abs() <= LARGE_SCORES[dtype]
    are_small = bool(is_small.all())
    sides = [] if totals.slopes is None else row.sides()
    for job in jobs:
        bias, biases = row.bias_of(job), [(side.bias_of(job), sign) for side, sign in sides]
        for part in _parts(job, 2 * job.kv_len * call.head_dim):
            keys, values = _keys_of(call, part, dtype, key, value)
            lse = _queries_of(logsumexp, part)
            if centre is not None and shift is not None:
                (common,) = _keys_of(call, replace(part, kv_start=0, kv_len=1, tiles=1), dtype, centre)
                keys, lse = keys - common, lse - _queries_of(shift, part)
            of_queries = (_queries_of(x, part).to(dtype) for x in (grad, query, result))
            tile = Tile(*of_queries, lse, keys, values, bias, call.scale)
            has_large_scores = not (are_small or _queries_of(is_small, part).all())
            if totals.slopes is not None:
                found, by_distance = _with_slopes(call, part, tile, biases, has_large_scores)
                totals.slopes[:, part.batch, part.heads] -= torch.stack(by_distance)
            elif has_large_scores:
                found = tile.from_scores(*tile.score_gradients())
            else:
                found = tile.gradients()
            by_query, by_key, by_value = (x[..., :head_dim] for x in found)
            _queries_of(totals.query, part).copy_(by_query)
            _add_to_keys(totals.key, part, by_key, call)
            _add_to_keys(totals.value, part, by_value, call)


def _common_part(call: AttentionCall, query: Tensor, key: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return what all keys of a head have in common, and what it adds to the scores of each query; None for nothing.

    Softmax does not notice it. The gradients of a row's scores have the sum 0, but for rounding, which a common part
    would multiply in the gradient of the query. A mean that a few large keys make is left where it is: queries that
    cannot see those would have large scores for it, and fewer digits.
    """
    keys = key.to(call.working_dtype)
    total = keys.sum(dim=2, keepdim=True)
    common, whole = (torch.linalg.vector_norm(x.flatten(2), dim=-1) for x in (total, keys))  # [batch, num_kv_heads]
    most = (0.8 * call.kv_len) ** 0.5 if call.kv_len > 1 else math.inf  # a single score has no gradient
    is_common = common > whole * most  # False where keys, or their sum, are not finite
    if not is_common.any():
        return None, None
    centre = torch.where(is_common[..., None, None], total / call.kv_len, 0.0)  # [batch, num_kv_heads, 1, head_dim]
    queries = query.to(call.working_dtype).unflatten(1, (call.num_kv_heads, -1))
    return centre, (queries @ centre.mT[:, :, None])[..., 0].flatten(1, 2) * call.scale


@dataclass(frozen=True)
class Tile:
    """What the gradients of rectangles follow from: ``[batch entries or tiles, heads, rows or kv_len, ...]``."""

    grad: Tensor
    query: Tensor
    result: Tensor
    logsumexp: Tensor
    key: Tensor
    value: Tensor
    bias: Bias
    scale: float

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients by query, key and value."""
        of_queries = self.grad, self.query, self.result, self.logsumexp
        grad, query, result, logsumexp = (self.bias.in_order(x) for x in of_queries)
        tensors = grad, query, self.key, self.value, result, logsumexp
        by_query, by_key, by_value = fused_backward(*tensors, self.bias.values, self.scale)
        return self.bias.in_order(by_query), by_key, by_value

    def keys(self, some: slice) -> Tile:
        """Return the tile of these of its keys."""
        bias = self.bias._replace(values=self.bias.values[..., some])
        return replace(self, key=self.key[:, :, some], value=self.value[:, :, some], bias=bias)

    def score_gradients(self) -> tuple[Tensor, Tensor]:
        """Return weights and the gradients by scores, ``[..., rows, kv_len]``, where scores are large.

        The weights are normalized anew: the rectangle has all keys that matter.
        """
        scores = self.query @ self.key.mT * self.scale + self.bias.in_order(self.bias.values)
        weights = torch.where(self.logsumexp[..., None] == math.inf, 0.0, torch.softmax(scores, dim=-1))
        by_weight = self.grad @ self.value.mT
        return weights, weights * (by_weight - (weights * by_weight).sum(dim=-1, keepdim=True))

    def from_scores(self, weights: Tensor, by_score: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients by query, key and value that follow from those by scores."""
        return by_score @ self.key * self.scale, by_score.mT @ self.query * self.scale, weights.mT @ self.grad


def _with_slopes(
    call: AttentionCall, job: Job, tile: Tile, biases: Sequence[tuple[Bias, int]], has_large_scores: bool
) -> tuple[tuple[Tensor, Tensor, Tensor], list[Tensor]]:
    """Return the gradients by query, key and value, and sums of distance times the gradient by scores for both sides.

    A gradient by a query is the sum over keys of the score's gradient times the key. Of two more features of the keys,
    1 and their place, it makes the sums that are needed; distance is linear among the keys on one side of a query.
    """
    lowest = job.back + call.q_offset  # the place of the first query, counted from the first key
    places = torch.arange(job.kv_len, device=call.device)
    # Counted from a place among the keys: where all are far, the constant that a row loses is not noticed by softmax.
    q_places = (torch.arange(job.rows, device=call.device) + lowest).clamp(0, job.kv_len - 1)
    if has_large_scores:  # whose weights are to be seen together
        weights, by_score = tile.score_gradients()
        distance = (q_places[:, None] - places).double()
        totals = [(by_score * (sign * distance).clamp(min=0)).sum(dim=-1) for sign in (1, -1)]
        return tile.from_scores(weights, by_score), [_by_head(job, x) for x in totals]
    wide = replace(tile, query=tile.query * tile.scale, scale=1.0)
    by_query = torch.zeros_like(wide.query)
    by_key, by_value = torch.zeros_like(wide.key), torch.zeros_like(wide.value)
    totals = [wide.query.new_zeros(wide.query.shape[:-1], dtype=torch.float64) for _ in range(2)]
    # Keys up to some query, and keys behind some query.
    edges = min(max(lowest + job.rows, 0), job.kv_len), min(max(lowest + 1, 0), job.kv_len)
    spans = slice(0, edges[0] if len(biases) > 1 else job.kv_len), slice(edges[1], job.kv_len)
    for (bias, sign), some, total in zip(biases, spans, totals, strict=False):
        if some.start == some.stop:
            continue
        # Places from the middle: as small as can be, for float32 adds them up.
        middle = (some.start + some.stop) // 2
        own = (places[some] - middle).to(call.working_dtype)
        features = torch.stack([own, torch.ones_like(own)], dim=-1).expand(*wide.key.shape[:2], -1, -1)
        side = replace(wide, bias=bias).keys(some)
        padded = {name: F.pad(getattr(side, name), (0, 2)) for name in ("grad", "query", "result", "value")}
        found = replace(side, **padded, key=torch.cat([side.key, features], dim=-1)).gradients()
        by_query += found[0][..., :-2]
        by_key[:, :, some] += found[1][..., :-2]
        by_value[:, :, some] += found[2][..., :-2]
        # Rounded alike, the two products of a query's own key are equal, which is at no distance.
        total += sign * ((q_places - middle) * found[0][..., -1] - found[0][..., -2])
    return (by_query * tile.scale, by_key, by_value), [_by_head(job, x) for x in totals]


def _by_head(job: Job, totals: Tensor) -> Tensor:
    """Return the sums over the rows of tiles of one sequence, or of one of each batch entry: ``[entries, heads]``."""
    return totals.sum(dim=-1) if job.tiles == 1 else totals.sum(dim=(0, -1))[None]


# --- Views of rectangles ---------------------------------------------------------------------------------------------


def _queries_of(tensor: Tensor, job: Job) -> Tensor:
    """Return a job's queries, or what is shaped like them: ``[batch entries or tiles, heads, rows, ...]``, a view."""
    if job.tiles == 1:
        return tensor[job.batch, job.heads, job.queries]
    return _windows(tensor[job.batch.start, job.heads], job, job.q_start, job.rows)


def _keys_of(call: AttentionCall, job: Job, dtype: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    """Return a job's keys, or values, in ``dtype``: ``[batch entries or tiles, heads, kv_len, ...]``.

    Tiles overlap in memory, and heads that share their keys are one.
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
    """Return ``tiles`` runs of ``[heads, length, ...]``, each ``rows`` after the one before."""
    (head, token), rest = tensor.stride()[:2], tensor.stride()[2:]
    size = (job.tiles, tensor.shape[0], length, *tensor.shape[2:])
    return tensor.as_strided(size, (job.rows * token, head, token, *rest), tensor.storage_offset() + start * token)


def _parts(job: Job, elements: int) -> Iterator[Job]:
    """Yield a job as jobs of so few tiles that results of ``elements`` a tile and head stay small."""
    if job.tiles == 1:
        yield job
        return
    heads, threads = job.heads.stop - job.heads.start, torch.get_num_threads()
    step = max(1, tiling().kernel_elements // (elements * heads))
    step = max(step - step % threads, -(-threads // heads))  # no thread is to wait for others
    for tile in range(0, job.tiles, step):
        starts = {"q_start": job.q_start + tile * job.rows, "kv_start": job.kv_start + tile * job.rows}
        yield replace(job, **starts, tiles=min(step, job.tiles - tile))


def _add_to_keys(total: Tensor, job: Job, addend: Tensor, call: AttentionCall) -> None:
    """Add a job's part of the gradients by keys, ``[batch entries or tiles, heads, kv_len, head_dim]``."""
    heads = _kv_heads(call, job)
    if call.num_heads > call.num_kv_heads:
        addend = addend.unflatten(1, (heads.stop - heads.start, -1)).sum(dim=2)
    if job.tiles == 1:
        total[job.batch, heads, job.keys] += addend
        return
    # Neighbouring tiles overlap, but the keys at one place in each, `rows` long, do not.
    for start in range(0, job.kv_len, job.rows):
        some = addend[:, :, start : start + job.rows]
        windows = _windows(total[job.batch.start, heads], job, job.kv_start + start, some.shape[2])
        windows += some
