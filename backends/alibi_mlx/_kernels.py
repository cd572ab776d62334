"""Tiles of attention and their gradients, by MLX's own operations.

In the forward pass several tiles, as a batch, are one call of ``mx.fast.scaled_dot_product_attention``. A tile has all
keys that its queries need, so the backward pass can recompute its softmax, and nothing is saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx

from alibi_core.backend import AttentionCall
from alibi_core.backend.horizon import Job
from alibi_mlx._biases import Biases
from alibi_mlx._plan import on_gpu, tiling

COPIED_FOR = 8  # From this many queries on, keys are copied into the layout that is fastest for the product.


def forward(call: AttentionCall, query: mx.array, key: mx.array, value: mx.array, jobs: Iterable[Job]) -> mx.array:
    """Return the result of a call with one batch axis, with the shape and dtype of ``query``, from its jobs."""
    result = mx.zeros(query.shape, query.dtype)
    biases = Biases(call)
    before: list[mx.array] = []
    for job in jobs:
        bias, attends = biases.of(job)
        bias = biases.with_sinks(job, bias)
        for part in _parts(job, call.head_dim):
            tensors = (queries_of(query, part), keys_of(key, part, call), keys_of(value, part, call))
            # MLX rounds the bias to the dtype of the tensors, so cast them to float32.
            wide = [float32(x) for x in tensors]
            if call.sinks is not None:  # a key of zeros, whose bias is the sink
                wide[1:] = [mx.pad(x, [(0, 0), (0, 0), (0, 1), (0, 0)]) for x in wide[1:]]
            wide[0], wide[1] = _after(wide[0], before), for_scores(wide[1], part)
            out = mx.fast.scaled_dot_product_attention(*wide, scale=call.scale, mask=bias)
            if attends is not None:  # fully masked queries give zeros
                out = mx.where(attends, out, 0.0)
            out = out.astype(query.dtype)
            if out.shape == query.shape and part.tiles == 1:  # a single tile covers the call
                return out
            put_queries(result, part, out)
            before = [out]
    return result


def backward(
    call: AttentionCall,
    tensors: tuple[mx.array, mx.array, mx.array],
    grad: mx.array,
    jobs: Iterable[Job],
) -> tuple[mx.array, ...]:
    """Return the gradients of ``sum(attention * grad)`` for query, key, value, slopes, future slopes, gates and sinks.

    The gradients of slopes are ``[batch, num_heads]``, of gates ``[batch, num_heads, kv_len]``, of sinks ``[batch,
    num_heads, 1]``. Those of future slopes are zeros if there are none; those of gates and sinks are left out.
    """
    query, key, value = tensors
    by_query = mx.zeros(query.shape, query.dtype)
    by_key, by_value = mx.zeros(key.shape), mx.zeros(value.shape)  # float32 sums, cast at the end
    by_slopes = [mx.zeros((*call.batch, call.num_heads)) for _ in range(2)]
    by_gates = [] if call.log_gates is None else [mx.zeros((*call.batch, call.num_heads, call.kv_len))]
    by_sinks = [] if call.sinks is None else [mx.zeros((*call.batch, call.num_heads))]
    biases = Biases(call)
    before: list[mx.array] = []
    for job in jobs:
        bias, attends = biases.of(job)
        distances = biases.distances(job)
        for part in _parts(job, 2 * call.head_dim):
            queries, grads = (float32(queries_of(x, part)) for x in (query, grad))
            keys, values = (float32(keys_of(x, part, call)) for x in (key, value))
            if attends is not None:  # results that were set to zero pass no gradient
                grads = mx.where(attends, grads, 0.0)
            queries, grads = (_after(x, before) for x in (queries * call.scale, grads))
            # [batch entries or tiles, heads, rows, kv_len]; the heads of a job share their keys or are ungrouped
            scores = queries @ for_scores(keys, part).swapaxes(-1, -2) + bias
            weights = _softmax(biases.with_sinks(part, scores))
            by_weight = grads @ for_scores(values, part).swapaxes(-1, -2)
            if call.sinks is not None:
                by_weight = mx.pad(by_weight, [(0, 0), (0, 0), (0, 0), (0, 1)])
            # Recompute the mean rather than take it from the result, whose rounding would spoil the slopes' gradients.
            mean = mx.sum(weights * by_weight, axis=-1, keepdims=True)
            by_score = weights * (by_weight - mean)
            # In exact arithmetic a row's score gradients sum to 0. Remove the rounding error of the sum: a common part
            # of keys or distances would multiply it.
            by_score = by_score - weights * mx.sum(by_score, axis=-1, keepdims=True)
            count = part.kv_len  # behind the keys there may be a sink
            by_sink, by_score, weights = by_score[..., count:], by_score[..., :count], weights[..., :count]
            by_queries = ((by_score @ keys) * call.scale).astype(query.dtype)
            put_queries(by_query, part, by_queries)
            before = [
                by_queries,
                _add_keys(by_key, part, call, by_score.swapaxes(-1, -2) @ queries),
                _add_keys(by_value, part, call, weights.swapaxes(-1, -2) @ grads),
                *(_add_by_head(x, part, by_score * y) for x, y in zip(by_slopes, distances, strict=False)),
                *(_add_gates(x, part, biases.with_own_key(part, by_score, by_sink)) for x in by_gates),
                *(_add_by_head(x, part, -by_sink) for x in by_sinks),
            ]
    sums = *by_slopes, *by_gates, *(x[..., None] for x in by_sinks)
    return by_query, by_key.astype(key.dtype), by_value.astype(value.dtype), *sums


def _softmax(scores: mx.array) -> mx.array:
    """Return the softmax of float32 scores along the last axis."""
    if on_gpu():  # one fused kernel there
        return mx.softmax(scores, axis=-1)
    # On the CPU, MLX's power is three times as fast as its exponential.
    weights = mx.power(2.0, (scores - mx.max(scores, axis=-1, keepdims=True)) * math.log2(math.e))
    return weights / mx.sum(weights, axis=-1, keepdims=True)


def _after(array: mx.array, before: list[mx.array]) -> mx.array:
    """Return ``array`` with a dependency on all arrays in ``before``.

    Without it, MLX might compute the scores of all tiles first and hold all of them in memory. (``mx.depends`` does the
    same, but has no vmap rule.)
    """
    return _first(array, *before) if before else array


@mx.custom_function
def _first(array: mx.array, *others: mx.array) -> mx.array:
    return array


@_first.vmap
def _(operands: Any, axes: Any) -> Any:
    if axes[0] is not None:
        return operands[0], axes[0]
    # Work-around: if the result is declared not mapped, MLX unflattens it along the wrong axis. Broadcast it instead.
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    return mx.broadcast_to(operands[0], (size, *operands[0].shape)), 0


def _parts(job: Job, head_dim: int) -> Iterator[Job]:
    """Yield the job in chunks of tiles, so that temporaries stay small."""
    heads = job.heads.stop - job.heads.start
    elements = heads * max(job.rows * job.kv_len, (job.rows + job.kv_len) * head_dim)
    step = max(1, tiling().kernel_elements // elements)
    if step >= job.tiles:
        yield job
        return
    for tile in range(0, job.tiles, step):
        shift = tile * job.rows
        tiles = min(step, job.tiles - tile)
        yield replace(job, q_start=job.q_start + shift, kv_start=job.kv_start + shift, tiles=tiles)


def float32(array: mx.array) -> mx.array:
    """Return an array in float32."""
    return array.astype(mx.float32)


# --- Slices of tensors --------------------------------------------------------------------------------------------


def queries_of(tensor: mx.array, job: Job) -> mx.array:
    """Return a job's queries: ``[batch entries or tiles, heads, rows, head_dim]``."""
    if job.tiles == 1:
        return _cut(tensor, job.batch, job.heads, job.queries)
    stretch = tensor[job.batch, job.heads, job.q_start : job.q_start + job.tiles * job.rows]
    # [1, heads, tiles * rows, head_dim] -> [tiles, heads, rows, head_dim]
    return mx.squeeze(mx.unflatten(stretch, 2, (job.tiles, job.rows)), axis=0).swapaxes(0, 1)


def _cut(tensor: mx.array, batch: slice, heads: slice, tokens: slice) -> mx.array:
    """Return a slice of a tensor, or the tensor itself if the slice is all of it."""
    sizes = batch.stop - batch.start, heads.stop - heads.start, tokens.stop - tokens.start
    return tensor if sizes == tensor.shape[:3] else tensor[batch, heads, tokens]


def put_queries(tensor: mx.array, job: Job, values: mx.array) -> None:
    """Write ``values``, shaped as a job's queries, to the job's rows of ``tensor``."""
    if job.tiles > 1:  # [tiles, heads, rows, head_dim] -> [1, heads, tiles * rows, head_dim]
        values = values.swapaxes(0, 1).reshape(1, values.shape[1], job.tiles * job.rows, -1)
    tensor[job.batch, job.heads, job.q_start : job.q_start + job.tiles * job.rows] = values


def kv_heads_of(job: Job, call: AttentionCall) -> slice:
    """Return the key/value heads that a job's heads read."""
    group = call.num_heads // call.num_kv_heads
    return slice(job.heads.start // group, (job.heads.stop - 1) // group + 1)


def keys_of(tensor: mx.array, job: Job, call: AttentionCall) -> mx.array:
    """Return a job's keys, or values: ``[batch entries or tiles, kv heads, kv_len, head_dim]``; tiles may overlap."""
    heads = kv_heads_of(job, call)
    if job.tiles == 1:
        return _cut(tensor, job.batch, heads, job.keys)
    stretch = mx.contiguous(tensor[job.batch, heads, job.kv_start : _kv_stop(job)])
    _, count, length, head_dim = stretch.shape
    # Overlapping views: tile i begins i * rows tokens later.
    strides = (job.rows * head_dim, length * head_dim, head_dim, 1)
    return mx.as_strided(stretch, (job.tiles, count, job.kv_len, head_dim), strides)


def for_scores(keys: mx.array, job: Job) -> mx.array:
    """Return the keys in the memory layout that is fastest for the product with a job's queries.

    On the CPU this is feature-major: MLX's BLAS takes a third longer for a transposed factor.
    """
    if on_gpu() or job.rows < COPIED_FOR:
        return keys
    return mx.contiguous(keys.swapaxes(-1, -2)).swapaxes(-1, -2)


def _kv_stop(job: Job) -> int:
    """Return the end of the last tile's keys."""
    return job.kv_start + (job.tiles - 1) * job.rows + job.kv_len


def _add_keys(total: mx.array, job: Job, call: AttentionCall, addend: mx.array) -> mx.array:
    """Add ``[batch entries or tiles, heads, kv_len, head_dim]`` to the key gradient, and return the updated slice."""
    heads = kv_heads_of(job, call)
    if addend.shape[1] > heads.stop - heads.start:  # the job's heads share one key/value head
        addend = mx.sum(addend, axis=1, keepdims=True)
    if job.tiles > 1:
        addend = _overlapped(addend, job)
    where = job.batch, heads, slice(job.kv_start, _kv_stop(job))
    total[where] = summed = total[where] + addend
    return summed


def _overlapped(addend: mx.array, job: Job) -> mx.array:
    """Sum overlapping tiles ``[tiles, heads, kv_len, head_dim]``, tile i shifted by ``i * rows``, to one tensor."""
    tiles, heads, length, head_dim = addend.shape
    whole = mx.zeros((1, heads, (tiles - 1) * job.rows + length, head_dim))
    for start in range(0, length, job.rows):  # slices of `rows` keys at the same place in all tiles do not overlap
        count = min(job.rows, length - start)
        part = addend[:, :, start : start + count]  # [tiles, heads, count, head_dim]
        if count < job.rows:
            part = mx.concatenate([part, mx.zeros((tiles, heads, job.rows - count, head_dim))], axis=2)
        part = part.swapaxes(0, 1).reshape(1, heads, tiles * job.rows, head_dim)
        stop = min(start + tiles * job.rows, whole.shape[2])
        whole[:, :, start:stop] = whole[:, :, start:stop] + part[:, :, : stop - start]
    return whole


def _add_by_head(total: mx.array, job: Job, products: mx.array) -> mx.array:
    """Add a job's gradient of slopes, ``-sum(distance * score gradient)``, and return the updated slice.

    The returned slice becomes a dependency of the next job. Without it, ``mx.compile`` would fuse the chain of sums and
    compile a kernel for each number of jobs.
    """
    by_head = mx.sum(products, axis=(-2, -1))  # [batch entries or tiles, heads]
    if job.tiles > 1:
        by_head = mx.sum(by_head, axis=0, keepdims=True)
    total[job.batch, job.heads] = summed = total[job.batch, job.heads] - by_head
    return summed


def _add_gates(total: mx.array, job: Job, by_score: mx.array) -> mx.array:
    """Add a job's gradient of gates, and return the updated slice.

    A gate lowers the scores of earlier keys by later queries. The score gradients of earlier queries sum to 0, so those
    of all earlier keys are summed, tile by tile: a sum over all tiles would collect the rounding of the whole text.
    """
    where = job.batch, job.heads, job.keys
    total[where] = summed = total[where] + mx.cumsum(mx.sum(by_score, axis=-2), axis=-1, inclusive=False)
    return summed
