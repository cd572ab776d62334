"""Tiles of attention, computed by PyTorch's own fused CPU kernels.

The kernel takes a float bias, and gives the logarithm of each softmax's denominator beside the result; its backward
takes that logarithm. So the backward pass of a query may see its keys in any pieces: each piece's part of the gradients
follows from the logarithm over all keys.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from alibi_core import AttentionCall
from alibi_core.backend import Job
from alibi_torch._tiled.configuration import tiling

fused_forward = torch._scaled_dot_product_flash_attention_for_cpu  # as an operator of torch.ops it takes longer to call
fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

SMALL = 2**18  # numbers; distances of so few are kept
FEATURES = 8  # a multiple of these suits the kernels
# Larger scores are rounded so much that their log-sum-exp, rounded as well, makes no weights of them whose sum is 1.
LARGE_SCORES = {dtype: 2.0**-14 / torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)}


def forward(
    call: AttentionCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    jobs: Iterable[Job],
    result_dtype: torch.dtype,
    *,
    lowest: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the jobs that make up a call: the result, and the logarithm of each query's softmax denominator.

    That is ``[batch, num_heads, q_len]``, infinite for a query that sees nothing. Keys whose bias is ``lowest`` of a
    head, ``[num_heads]``, below the largest of the row are left out.
    """
    result = query.new_empty(query.shape, dtype=result_dtype)
    logsumexp = query.new_empty(query.shape[:-1], dtype=call.working_dtype)
    # In low precision the kernel would round the weights to it, and is no faster: a part at a time is cast.
    dtype = call.working_dtype
    plain = replace(call, added_key_bias=None)
    for job in jobs:
        bias, attends = _bias_of(plain, job, lowest)
        for part in _parts(job, 3 * job.rows * call.head_dim):  # queries, results, both turned
            tensors = [queries_of(query, part).to(dtype), *(keys_of(x, part, call, dtype) for x in (key, value))]
            whole = bias
            if call.added_key_bias is not None:
                whole, *tensors = _with_key_bias(call, part, bias, *tensors)
            tensors[0] = whole.turned(tensors[0])
            out, lse = fused_forward(*tensors, 0.0, False, attn_mask=whole.values, scale=call.scale)
            out, lse = whole.turned(out)[..., : call.head_dim], whole.turned(lse)
            if attends is not None:
                out = torch.where(attends, out, 0.0)
                lse = torch.where(attends[..., 0], lse, math.inf)
            queries_of(result, part).copy_(out)
            queries_of(logsumexp, part).copy_(lse)
    return result, logsumexp


def queries_of(tensor: Tensor, job: Job) -> Tensor:
    """Return a job's queries, or what is shaped like them: ``[batch entries or tiles, heads, rows, ...]``, a view."""
    if job.tiles == 1:
        return tensor[job.batch, job.heads, job.queries]
    part = tensor[job.batch.start, job.heads]
    return _windows(part, job, job.q_start, job.rows)


def keys_of(tensor: Tensor, job: Job, call: AttentionCall, dtype: torch.dtype) -> Tensor:
    """Return a job's keys, or values: ``[batch entries or tiles, heads, kv_len, ...]``, a view; tiles may overlap."""
    return _by_tile(_span_of(tensor, job, call).to(dtype), job)


def _span_of(tensor: Tensor, job: Job, call: AttentionCall) -> Tensor:
    """Return the keys, or values, of all tiles of a job: ``[batch entries, kv heads, length, ...]``, a view."""
    group = call.num_heads // call.num_kv_heads
    heads = slice(job.heads.start // group, (job.heads.stop - 1) // group + 1)
    return tensor[job.batch, heads, job.kv_start : job.kv_start + (job.tiles - 1) * job.rows + job.kv_len]


def _by_tile(keys: Tensor, job: Job) -> Tensor:
    """Return what :func:`_span_of` gives as ``[batch entries or tiles, heads, kv_len, ...]``, a view."""
    if job.tiles > 1:
        keys = _windows(keys[0], job, 0, job.kv_len)
    return keys.expand(-1, job.heads.stop - job.heads.start, -1, -1)


def _windows(tensor: Tensor, job: Job, start: int, length: int) -> Tensor:
    """Return ``tiles`` stretches of ``[heads, length, ...]``, each ``rows`` after the one before."""
    (head, token), rest = tensor.stride()[:2], tensor.stride()[2:]
    size = (job.tiles, tensor.shape[0], length, *tensor.shape[2:])
    return tensor.as_strided(size, (job.rows * token, head, token, *rest), tensor.storage_offset() + start * token)


def _parts(job: Job, elements: int) -> Iterator[Job]:
    """Yield a job as jobs of so few tiles that results of ``elements`` a tile and head stay small."""
    heads, threads = job.heads.stop - job.heads.start, torch.get_num_threads()
    step = max(1, tiling().kernel_elements // (elements * heads))
    step = max(step - step % threads, -(-threads // heads))  # no thread is to wait for others
    for tile in range(0, job.tiles, step):
        yield replace(
            job,
            q_start=job.q_start + tile * job.rows,
            kv_start=job.kv_start + tile * job.rows,
            tiles=min(step, job.tiles - tile),
        )


class Saved(NamedTuple):
    """What gradients follow from, ``[batch, heads, length, head_dim]``."""

    grad: Tensor  # by the result
    query: Tensor
    key: Tensor
    value: Tensor
    result: Tensor
    logsumexp: Tensor  # [batch, num_heads, q_len]


def backward(
    call: AttentionCall, saved: Saved, jobs: Iterable[Job], *, by_slopes: bool, lowest: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of ``sum(result * grad)`` by query, key, value, slopes and future slopes.

    Those by slopes are ``[batch, num_heads]``, for the keys on one side of the query each, and zeros unless asked for.
    """
    grad, query, key, value, result, logsumexp = saved
    query_grad = query.new_empty(query.shape)
    key_grad, value_grad = (key.new_zeros(key.shape) for _ in range(2))
    # Two tensors, not one: what an operator returns must not share memory.
    slope_grads = [query.new_zeros((call.batch[0], call.num_heads), dtype=torch.float64) for _ in range(2)]
    # In low precision the kernel would round the gradients of scores to it, which large keys multiply.
    dtype = call.working_dtype
    plain = replace(call, added_key_bias=None)
    for entries, some_jobs in itertools.groupby(jobs, lambda job: (job.batch.start, job.batch.stop)):
        batch = slice(*entries)
        # A key's gradient is a sum over tiles, to be rounded once, at the end.
        in_place = key.dtype == call.working_dtype
        sums = [x[batch] if in_place else x[batch].to(call.working_dtype) for x in (key_grad, value_grad)]
        for job in some_jobs:
            bias, _ = _bias_of(plain, job, lowest)
            for part in _parts(job, 2 * job.kv_len * call.head_dim):
                tile = Tile(
                    *(queries_of(x, part).to(dtype) for x in (grad, query, result)),
                    queries_of(logsumexp, part),
                    *(keys_of(x, part, call, dtype) for x in (key, value)),
                    bias,
                    call.scale,
                )
                tile = tile.centred(_span_of(key, part, call).to(dtype), part)
                if call.added_key_bias is not None:
                    tile = tile.with_key_bias(call, part)
                if by_slopes:
                    by_query, by_key, by_value = _with_slopes(call, part, tile, slope_grads)
                else:
                    by_query, by_key, by_value = tile.gradients()
                by_query, by_key, by_value = (x[..., : call.head_dim] for x in (by_query, by_key, by_value))
                queries_of(query_grad, part).copy_(by_query)
                local = replace(part, batch=slice(part.batch.start - batch.start, part.batch.stop - batch.start))
                for total, addend in zip(sums, (by_key, by_value), strict=True):
                    _add_to_keys(total, local, addend, call)
        if not in_place:
            key_grad[batch], value_grad[batch] = sums
    return query_grad, key_grad, value_grad, *slope_grads


@dataclass(frozen=True)
class Tile:
    """What the gradients of tiles follow from: tensors ``[batch entries or tiles, heads, rows or kv_len, ...]``."""

    grad: Tensor
    query: Tensor
    result: Tensor
    logsumexp: Tensor
    key: Tensor
    value: Tensor
    bias: Bias
    scale: float
    has_large_scores: bool = False

    def centred(self, keys: Tensor, job: Job) -> Tile:
        """Return the tile without what the ``keys`` of all tiles of the job, of :func:`_span_of`, have in common."""
        parts = without_common_part(self.query, keys, self.logsumexp, self.scale)
        if parts is None:
            return replace(self, has_large_scores=True)
        return self if parts[0] is keys else replace(self, key=_by_tile(parts[0], job), logsumexp=parts[1])

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients by query, key and value."""
        if self.has_large_scores:
            weights, by_score = self._score_gradients()
            return by_score @ self.key * self.scale, by_score.mT @ self.query * self.scale, weights.mT @ self.grad
        pieces = torch.get_num_threads()
        length = self.key.shape[2] // pieces
        # The kernel works on different entries and heads in parallel, and on nothing else.
        if self.query.shape[0] > 1 or self.query.shape[1] >= pieces or length < 64:
            return self._kernel()
        even = pieces * length
        by_query, by_key, by_value = self._in_pieces(pieces, length)._kernel()
        by_query = by_query.sum(dim=0, keepdim=True, dtype=self.logsumexp.dtype)
        by_key, by_value = (x.transpose(0, 1).flatten(1, 2)[None] for x in (by_key, by_value))
        if even < self.key.shape[2]:
            more = self.keys(slice(even, self.key.shape[2]))._kernel()
            by_query = by_query + more[0]
            by_key, by_value = (torch.cat(x, dim=2) for x in ((by_key, more[1]), (by_value, more[2])))
        return by_query, by_key, by_value

    def keys(self, some: slice) -> Tile:
        """Return the tile of these of its keys."""
        return replace(self, key=self.key[:, :, some], value=self.value[:, :, some], bias=self.bias.keys(some))

    def with_key_bias(self, call: AttentionCall, job: Job) -> Tile:
        """Return the tile with what a job's keys have added to their bias."""
        bias, query, key, value = _with_key_bias(call, job, self.bias, self.query, self.key, self.value)
        wider = query.shape[-1] - self.query.shape[-1]
        grad, result = (F.pad(x, (0, wider)) for x in (self.grad, self.result))
        return replace(self, grad=grad, query=query, result=result, key=key, value=value, bias=bias)

    def _with_features(self, features: Tensor) -> Tile:
        """Return the tile with further features ``[kv_len, n]`` of the keys, that no score takes part in."""
        n = features.shape[-1]
        tensors = {x: F.pad(getattr(self, x), (0, n)) for x in ("grad", "query", "result", "value")}
        more = features.expand(*self.key.shape[:2], -1, -1)
        return replace(self, **tensors, key=torch.cat([self.key, more], dim=-1))

    def _score_gradients(self) -> tuple[Tensor, Tensor]:
        """Return the weight of each key and the gradient by each score, ``[..., rows, kv_len]``."""
        scores = self.query @ self.key.mT * self.scale + self.bias.turned(self.bias.values)
        by_weight = self.grad @ self.value.mT
        if self.has_large_scores:
            weights = torch.where(self.logsumexp[..., None] == math.inf, 0.0, torch.softmax(scores, dim=-1))
            mean = (weights * by_weight).sum(dim=-1, keepdim=True)
        else:
            weights = torch.exp(scores - self.logsumexp[..., None])
            mean = (self.grad * self.result).sum(dim=-1, keepdim=True)
        return weights, weights * (by_weight - mean)

    def _in_pieces(self, pieces: int, length: int) -> Tile:
        """Return the same queries several times, each with its own stretch of the keys."""

        def stretches(x: Tensor, axis: int) -> Tensor:
            return x[0].narrow(axis, 0, pieces * length).unflatten(axis, (pieces, length)).movedim(axis, 0)

        def repeated(x: Tensor) -> Tensor:
            return x.expand(pieces, *x.shape[1:])

        return Tile(
            *(repeated(x) for x in (self.grad, self.query, self.result, self.logsumexp)),
            *(stretches(x, 1) for x in (self.key, self.value)),
            self.bias._replace(values=stretches(self.bias.values, 2)),
            self.scale,
        )

    def _kernel(self) -> tuple[Tensor, Tensor, Tensor]:
        of_queries = self.grad, self.query, self.result, self.logsumexp
        grad, query, result, logsumexp = (self.bias.turned(x) for x in of_queries)
        tensors = grad, query, self.key, self.value, result, logsumexp
        by_query, *by_keys = fused_backward(*tensors, 0.0, False, attn_mask=self.bias.values, scale=self.scale)
        return self.bias.turned(by_query), *by_keys


def without_common_part(query: Tensor, key: Tensor, logsumexp: Tensor, scale: float) -> tuple[Tensor, Tensor] | None:
    """Return keys without what all of them have in common, which softmax does not notice, and what is left of the sums.

    The gradients of a row's scores have the sum 0, but for rounding, which a mean that all keys have in common would
    multiply in the gradient of the query. A mean that a few large keys make is left where it is: queries that cannot
    see those would have large scores for it, and fewer digits. None if scores are large. Keys are
    ``[..., heads or 1, kv_len, head_dim]``.
    """
    query, keys, large = query.detach(), key.detach(), LARGE_SCORES[logsumexp.dtype]
    total = keys.sum(dim=-2, keepdim=True)
    # Lists of Python's, as each operation between two large kernels takes far longer than these.
    common, whole = (torch.linalg.vector_norm(x.flatten(-2), dim=-1).flatten().tolist() for x in (total, keys))
    most = (0.8 * key.shape[-2]) ** 0.5 if key.shape[-2] > 1 else math.inf  # a single score has no gradient
    # False where the keys, or their sum, are not finite.
    is_common = [of_sum > of_keys * most for of_sum, of_keys in zip(common, whole, strict=True)]
    lowest, highest = (x.item() for x in logsumexp.aminmax())
    if not any(is_common) and -large <= lowest and highest <= large:
        return key, logsumexp
    where = torch.tensor(is_common, device=key.device).view(*total.shape[:-2], 1, 1)
    centre = torch.where(where, total / key.shape[-2], 0.0)
    shift = (query @ centre.mT)[..., 0] * scale
    sums = torch.where(logsumexp == math.inf, 0.0, logsumexp)
    if torch.maximum(sums.abs(), shift.abs()).max() > large:
        return None
    return key - centre, logsumexp - shift


def _with_key_bias(
    call: AttentionCall, job: Job, bias: Bias, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Bias, Tensor, Tensor, Tensor]:
    """Return a bias, queries, keys and values that make of a job the scores with what its keys have added.

    Of a few queries it is added to the bias. Else it becomes a feature of the keys, so that the bias stays one that
    depends on distance alone, which many tiles share.
    """
    span = slice(job.kv_start, job.kv_start + (job.tiles - 1) * job.rows + job.kv_len)
    added = call.added_key_bias.expand(call.batch[0], -1, -1)[job.batch, job.heads, span]
    if job.tiles > 1:
        added = _windows(added[0], job, 0, job.kv_len)  # [tiles, heads, kv_len]
    if job.rows <= tiling().sizes.few or call.scale == 0:
        return bias._replace(values=bias.values + added[:, :, None, :]), query, key, value
    more = FEATURES - query.shape[-1] % FEATURES
    query, key, value = (F.pad(x, (0, more)) for x in (query, key, value))
    query[..., call.head_dim] = 1.0
    key[..., call.head_dim] = added / call.scale
    return bias, query, key, value


def _with_slopes(call: AttentionCall, job: Job, tile: Tile, slope_grads: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the gradients by query, key and value, and add those by slopes.

    A slope's gradient is minus the sum of distance times the score's gradient. A gradient by a query is the sum over
    keys of the score's gradient times the key: of two more features of the keys, 1 and their distance from a given
    position, it makes the sums that are needed. Among the keys between the tile's first and last query, where distance
    is no linear function, scores are spelt out.
    """
    wide = replace(tile, query=tile.query * call.scale, scale=1.0)
    lowest = job.q_start + call.q_offset
    edges = [min(max(n, 0), job.kv_len) for n in (lowest - job.kv_start, lowest + job.rows - job.kv_start)]
    if tile.has_large_scores:  # which are to be seen together
        edges = [0, job.kv_len]
    positions = torch.arange(job.kv_start, job.kv_start + job.kv_len, device=call.device)
    q_positions = torch.arange(lowest, lowest + job.rows, device=call.device)
    by_query = torch.zeros_like(wide.query)
    by_key, by_value = (x.new_zeros(x.shape) for x in (wide.key, wide.value))
    past, future = (wide.query.new_zeros(wide.query.shape[:-1], dtype=torch.float64) for _ in range(2))
    sides = [(slice(0, edges[0]), past, 1), (slice(edges[1], job.kv_len), future, -1)]
    for some, total, sign in sides:
        if some.start == some.stop:
            continue
        origin = int(positions[some][-1 if sign > 0 else 0])  # the key of this side that is nearest to the queries
        away = sign * (origin - positions[some]).to(call.working_dtype)
        features = torch.stack([away, torch.ones_like(away)], dim=-1)
        parts = wide.keys(some)._with_features(features).gradients()
        by_query += parts[0][..., :-2]
        by_key[:, :, some], by_value[:, :, some] = (x[..., :-2] for x in parts[1:])
        total += parts[0][..., -2]
        if some.stop - some.start < job.kv_len:  # or the sum of the score's gradients is zero
            total += sign * (q_positions - origin) * parts[0][..., -1].double()
    some = slice(*edges)
    if some.start < some.stop:
        parts = wide.keys(some).gradients()
        by_query += parts[0]
        by_key[:, :, some], by_value[:, :, some] = parts[1:]
        _, by_score = wide.keys(some)._score_gradients()
        ahead = (positions[some] - q_positions[:, None]).to(by_score.dtype)
        past += (by_score * (-ahead).clamp(min=0)).sum(dim=-1)
        future += (by_score * ahead.clamp(min=0)).sum(dim=-1)
    # Tiles of one sequence, or one of each batch entry: [tiles or entries, heads, rows].
    entries = slice(None) if job.tiles == 1 else slice(0, 1)
    for total, gradient in zip((past, future), slope_grads, strict=True):
        by_entry = total.sum(dim=-1) if job.tiles == 1 else total.sum(dim=(0, -1))[None]
        gradient[job.batch, job.heads] -= by_entry[entries]
    return by_query * call.scale, by_key, by_value


def _add_to_keys(total: Tensor, job: Job, addend: Tensor, call: AttentionCall) -> None:
    """Add a job's part of the gradients by keys, ``[batch entries or tiles, heads, kv_len, head_dim]``."""
    if call.num_heads > call.num_kv_heads:
        addend = addend.sum(dim=1, keepdim=True, dtype=total.dtype)  # these heads share their keys
    group = call.num_heads // call.num_kv_heads
    heads = slice(job.heads.start // group, (job.heads.stop - 1) // group + 1)
    if job.tiles == 1:
        total[job.batch, heads, job.keys] += addend
        return
    # Neighbouring tiles overlap, but the keys at one place in each, `rows` long, do not.
    for start in range(0, job.kv_len, job.rows):
        some = addend[:, :, start : start + job.rows]
        windows = _windows(total[job.batch.start, heads], job, job.kv_start + start, some.shape[2])
        windows += some


class Bias(NamedTuple):
    """The bias of a job's queries, ``[batch entries or 1, heads, rows, kv_len]``."""

    values: Tensor
    is_reversed: bool = False  # whether it is that of the queries from the last to the first

    def turned(self, tensor: Tensor) -> Tensor:
        """Return ``[..., rows]`` or ``[..., rows, n]`` with queries in the order of the bias, or back in their own."""
        return tensor.flip(2) if self.is_reversed else tensor

    def heads(self, some: slice) -> Bias:
        return self._replace(values=self.values[:, some])

    def keys(self, some: slice) -> Bias:
        return self._replace(values=self.values[..., some])


def _bias_of(call: AttentionCall, job: Job, lowest: Tensor | None) -> tuple[Bias, Tensor | None]:
    """Return a job's bias, and where its queries see something, ``[..., rows, 1]``: None for everywhere.

    A bias that depends on distance alone takes no memory but one row: each query's part of it begins one key after that
    of the query behind.
    """
    back = job.back + call.q_offset
    # Each query's own key is to be among the job's, to count distances from.
    if call.mask is None and call.q_segment_ids is None and back >= 0 and back + job.rows <= job.kv_len:
        row = call.bias_by_distance
        # Slopes of a part of a call have a batch axis even where they are the same for all of it.
        row = row[None] if row.ndim == 2 else row
        row = row[job.batch if len(row) > 1 else slice(None), job.heads]
        first = call.q_offset + call.q_len - back - job.rows  # the distance farthest back, of the last query
        row = row[..., first : first + job.kv_len + job.rows - 1]
        if lowest is not None:  # the largest is 0
            row = row.masked_fill(row < lowest[job.heads, None], -math.inf)
        return Bias(row.unfold(-1, job.kv_len, 1), is_reversed=job.rows > 1), None
    part = call.tile(batch=job.batch, heads=job.heads, queries=job.queries, keys=job.keys)
    if call.mask is None and call.q_segment_ids is None and call.window_size is None and back >= job.kv_len - 1:
        # To queries behind all keys, these are as far from one another as from one at the last key.
        last = replace(part, q_len=1, q_offset=job.kv_len - 1).bias_by_distance
        return Bias(_four_axes(last[..., None, :]).expand(-1, -1, job.rows, -1)), None
    is_positive = all(x is None or bool((x > 0).all()) for x in (part.slopes, part.future_slopes))
    if is_positive and part.future_slopes is None:
        bias, attends = masked_bias(part)
    else:
        bias, attends = part.bias(is_positive=is_positive)
        bias, attends = _four_axes(bias), None if attends is None or bool(attends.all()) else _four_axes(attends)
    if lowest is not None:
        bias = bias.masked_fill(bias - bias.amax(dim=-1, keepdim=True) < lowest[job.heads, None, None], -math.inf)
    return Bias(bias), attends


def masked_bias(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Return what ``AttentionCall.bias`` does, with four axes, of slopes above 0 that are the same on both sides.

    In fewer operations, which take most of the time of a short call: distances are floating, and infinite where a query
    may not look, from the start.
    """
    visible = call.mask
    if call.q_segment_ids is not None and call.kv_segment_ids is not None:
        alike = (call.q_segment_ids[..., :, None] == call.kv_segment_ids[..., None, :])[..., None, :, :]
        visible = alike if visible is None else visible & alike
    known = call.q_offset, call.q_len, call.kv_len, call.is_causal, call.window_size, call.working_dtype
    is_small = call.q_len * call.kv_len <= SMALL
    distance = (_distances if is_small else _distances.__wrapped__)(*known)
    if visible is not None:
        distance = torch.where(visible, distance, math.inf)
    nearest = distance.amin(dim=-1, keepdim=True)
    farthest, attends = nearest.max().item(), None
    if farthest == math.inf:
        attends = nearest < math.inf
        distance, nearest = (torch.where(attends, x, 0.0) for x in (distance, nearest))
    if farthest > 0:
        distance = distance - nearest
    return _four_axes(distance * -call.slopes[..., None, None]), None if attends is None else _four_axes(attends)


@functools.lru_cache(maxsize=16)
def _distances(
    q_offset: int, q_len: int, kv_len: int, is_causal: bool, window_size: int | None, dtype: torch.dtype
) -> Tensor:
    """Return how much farther each key is from each query than the nearest, ``[q_len, kv_len]``.

    It is infinite where the key's position hides it.
    """
    with torch.inference_mode(False):  # it may take part in a differentiated call
        relative = torch.arange(kv_len, device="cpu") - torch.arange(q_offset, q_offset + q_len, device="cpu")[:, None]
        distance = relative.abs()
        distance = (distance - distance.amin(dim=-1, keepdim=True)).to(dtype)  # exact, however far all keys are
        if is_causal:
            distance = distance.masked_fill(relative > 0, math.inf)
        return distance if window_size is None else distance.masked_fill(relative.abs() > window_size, math.inf)


def shifted(row: Tensor, rows: int) -> Tensor:
    """Return ``[batch or 1, heads, rows, n]``, dense, of the last row, ``[batch or 1, heads, n + rows - 1]``.

    Each row is the one before, shifted to the right by one.
    """
    backwards = row.unfold(-1, row.shape[-1] - rows + 1, 1)
    return backwards.contiguous().flip(-2)  # of what is not contiguous, flip may put the rows last


def last_axis_dense(*tensors: Tensor) -> list[Tensor]:
    """Return tensors whose last axis the kernel can read, copied where theirs is not."""
    return [x if is_last_axis_dense(x) else x.contiguous() for x in tensors]


def is_last_axis_dense(tensor: Tensor) -> bool:
    """Whether the last axis of a tensor, and of what PyTorch makes of its strides for a result, is dense in memory.

    Of axes that both step by one, as those of overlapping windows do, PyTorch may put another one last.
    """
    strides = tensor.stride()
    return strides[-1] == 1 and strides.count(1) == 1


def _four_axes(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim == 4 else tensor.reshape((1,) * (4 - tensor.ndim) + tensor.shape)
