"""Which keys the queries need, from what is measured of them, and so which rectangles of scores to compute.

Arrays are measured lazily, in MLX; the few numbers that come of it are read, and the plan is made of them in NumPy.
Where nothing can be read, under ``mx.compile``, shapes alone decide: then no horizon is known.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import array_api_compat.numpy as xp
import mlx.core as mx
import numpy as np

from alibi_core import AttentionCall, KeyRanges, ScoreBounds, key_ranges
from alibi_core.backend import (
    FIELDS,
    Job,
    TileSizes,
    by_block,
    entry_of,
    jobs_of_entry,
    log_sum_exp_of_mean,
    namespace_of,
    nearest_keys,
    parts_of,
    plain_jobs,
)
from alibi_mlx._tiled.norms import KeyNorms, norm_bounds

SHORT = 1024  # keys; so few are attended to whole, for all batch entries and heads at once, and nothing is read
# On the CPU scores are dear, a call is not; a GPU wants large tiles. The latter are not measured, but MLX's own.
SIZES = {
    mx.cpu: TileSizes(rows=(16, 64), bias_elements=2**20, call_scores=2000, few=16),
    mx.gpu: TileSizes(rows=(64, 256), bias_elements=2**22, call_scores=100_000, few=8),
}
KV_BLOCK = 64  # keys, at least, that one bound of their norms is held for
BLOCKS = 512  # of queries or of keys, that score bounds are held for, at most
PART_ELEMENTS = 2**20  # of queries or keys measured at a time
WORTHWHILE = 20  # what slope times distance must be, at least, for keys to be left out, about

Measured = dict[str, mx.array]
MX = namespace_of(xp=mx)  # MLX as the core sees it


def jobs(
    call: AttentionCall,
    query: mx.array,
    key: mx.array,
    value: mx.array,
    tolerance: float,
    norms: KeyNorms | None,
) -> list[Job]:
    """Return the jobs that make up ``call``.

    Query, key and value are ``[batch, heads, length, head_dim]``. Of values nothing is measured; but where they cannot
    be read, they are mapped, and mx.vmap does not know the views by which tiles overlap.
    """
    sizes = SIZES[mx.default_device().type]
    host = None if call.kv_len <= SHORT or tolerance == 0 else on_host(call, query=query, key=key, value=value)
    if host is None:
        return list(plain_jobs(call, sizes))
    entries = [entry_of(host, index) for index in range(host.batch[0])]
    planned = [
        jobs_of_entry(entry, ranges, index, sizes)
        for index, (entry, ranges) in enumerate(zip(entries, plans(entries, query, key, tolerance, norms), strict=True))
    ]
    return list(itertools.chain.from_iterable(planned))


def on_host(call: AttentionCall, **tensors: mx.array) -> AttentionCall | None:
    """Return the call with its arrays in NumPy; None if they, or the tensors, cannot be read for now.

    Raises:
        ValueError: If one is still to be computed by another thread.
    """
    names = ("slopes", "future_slopes", "q_offset", "q_segment_ids", "kv_segment_ids", "mask")
    arrays = {name: getattr(call, name) for name in names if isinstance(getattr(call, name), mx.array)}
    for name, array in (tensors | arrays).items():
        if not _evaluated(name, array):
            return None
    read = {name: np.asarray(array) for name, array in arrays.items()}
    if call.kv_segment_ids is call.q_segment_ids and call.q_segment_ids is not None:
        read["kv_segment_ids"] = read["q_segment_ids"]  # one array for both tells that each query sees its own key
    return replace(call, xp=xp, working_dtype=np.dtype(np.float32), **read)


def _evaluated(name: str, array: mx.array) -> bool:
    """Evaluate an array and return True; False if it has no value, under ``mx.compile`` or ``mx.vmap``."""
    try:
        mx.eval(array)
    except ValueError:
        return False
    except RuntimeError as error:
        if "in current thread" not in str(error):
            raise
        raise ValueError(
            f"{name} must be computed on a stream of this thread, got one that another thread has yet to compute; call "
            "mx.eval on it there"
        ) from error
    return True


def plans(
    entries: list[AttentionCall], query: mx.array, key: mx.array, tolerance: float, norms: KeyNorms | None = None
) -> list[KeyRanges]:
    """Return the core's plan for each batch entry, of arrays ``[num_heads, q_blocks]``."""
    most = SIZES[mx.default_device().type].rows[1]
    q_block = most * -(-entries[0].q_len // (BLOCKS * most))
    if tolerance == 0:  # nothing to measure
        return [_plan(entry, _no_bounds(entry, q_block), 0.0) for entry in entries]
    kv_block = norms.block if norms is not None else KV_BLOCK * -(-entries[0].kv_len // (BLOCKS * KV_BLOCK))
    measured = [
        _measure(
            entry, _at(query, index), _at(key, index), None if norms is None else _of_entry(norms, index), kv_block
        )
        for index, entry in enumerate(entries)
    ]
    mx.eval(measured)
    read = [{name: np.asarray(x)[None] for name, x in each.items()} for each in measured]
    # Where the sums are infinite, and NumPy would say so, all keys are needed: comparisons see to that.
    with np.errstate(all="ignore"):
        bounds = [_bounds(entry, each, q_block, kv_block) for entry, each in zip(entries, read, strict=True)]
        return [_plan(entry, each, tolerance) for entry, each in zip(entries, bounds, strict=True)]


def _of_entry(norms: KeyNorms, index: int) -> mx.array:
    """Return what is known of one batch entry, ``[num_kv_heads or 1, blocks]``."""
    values = norms.values
    return _at(values, index if values.shape[0] > 1 else 0)


def _at(array: mx.array, index: int) -> mx.array:
    """Return ``array[index]``, as a view, which MLX would make a copy."""
    return mx.squeeze(array[index : index + 1], axis=0)


def _no_bounds(call: AttentionCall, q_block: int) -> ScoreBounds:
    blocks = np.zeros((1, call.num_heads, -(-call.q_len // q_block)), np.float32)
    return ScoreBounds(q_block, call.kv_len, blocks, blocks, blocks, blocks, blocks[..., :1])


def _bounds(call: AttentionCall, measured: dict[str, Any], q_block: int, kv_block: int) -> ScoreBounds:
    key_norms = np.broadcast_to(measured["key_norms"], (1, call.num_kv_heads, measured["key_norms"].shape[-1]))
    return ScoreBounds.of_tokens(
        call,
        measured["q_norms"],
        measured["own_scores"],
        np.repeat(key_norms, call.num_heads // call.num_kv_heads, axis=1),
        nearest_keys(call, PART_ELEMENTS),
        measured.get("lower"),
        q_block=q_block,
        kv_block=kv_block,
    )


def _plan(call: AttentionCall, bounds: ScoreBounds, tolerance: float) -> KeyRanges:
    # A few heads at a time: the plan of all could take more memory than the attention itself.
    step = max(1, PART_ELEMENTS // (bounds.excess.shape[-1] * bounds.key_norm.shape[-1]))
    parts = [_ranges_of_heads(call, bounds, some, tolerance) for some in parts_of(call.num_heads, 1, step)]
    shape = (call.num_heads, bounds.excess.shape[-1])
    whole = {
        name: np.concatenate([np.broadcast_to(getattr(x, name), (1, *x.past.shape[1:]))[0] for x in parts])
        for name in FIELDS
    }
    return KeyRanges(bounds.q_block, **{name: np.broadcast_to(x, shape) for name, x in whole.items()})


def _ranges_of_heads(call: AttentionCall, bounds: ScoreBounds, heads: slice, tolerance: float) -> KeyRanges:
    part = call.tile(batch=slice(0, 1), heads=heads, queries=slice(0, call.q_len), keys=slice(0, call.kv_len))
    names = ("excess", "anchor", "q_least", "q_most", "key_norm")
    return key_ranges(part, replace(bounds, **{name: getattr(bounds, name)[:, heads] for name in names}), tolerance)


# --- What is measured, of one batch entry -------------------------------------------------------------------------


def _measure(call: AttentionCall, query: mx.array, key: mx.array, norms: mx.array | None, kv_block: int) -> Measured:
    """Measure ``[heads, length, head_dim]``, a part at a time, so that no copy of either is ever whole."""
    group = call.num_heads // call.num_kv_heads
    # Softmax does not notice a vector taken from every key; without their mean they are smaller. For a few queries,
    # or norms that are known already, it is not worth a pass over all keys.
    centre = None
    if norms is None:
        if call.q_len > SIZES[mx.default_device().type].few:
            centre = mx.mean(key.astype(mx.float32), axis=1, keepdims=True)  # [num_kv_heads, 1, head_dim]
        parts = [
            norm_bounds(_centred(key[:, part], centre))
            for part in parts_of(call.kv_len, call.num_kv_heads * call.head_dim, PART_ELEMENTS)
        ]
        norms = mx.max(by_block(MX, mx.concatenate(parts, axis=-1), kv_block), axis=-1)
    q_norms, own_scores = [], []
    for part in parts_of(call.q_len, call.num_heads * call.head_dim, PART_ELEMENTS):
        queries = query[:, part].astype(mx.float32)
        q_norms.append(norm_bounds(queries))
        # The queries whose positions are those of keys: from `start` on, up to `stop`.
        start, stop = (min(max(n, part.start), part.stop) for n in (-call.q_offset, call.kv_len - call.q_offset))
        own = _centred(key[:, start + call.q_offset : stop + call.q_offset], centre)
        same = mx.unflatten(queries[:, start - part.start : stop - part.start], 0, (call.num_kv_heads, group))
        scores = mx.sum(same * own[:, None], axis=-1).reshape(call.num_heads, stop - start)
        own_scores.append(mx.pad(scores, [(0, 0), (start - part.start, part.stop - stop)]))
    measured = {
        "q_norms": mx.concatenate(q_norms, axis=-1) * abs(call.scale),
        "own_scores": mx.concatenate(own_scores, axis=-1) * call.scale,
        "key_norms": norms,
    }
    lower = _lower_bounds(call, query, key, centre)
    return measured if lower is None else measured | {"lower": lower}


def _centred(keys: mx.array, centre: mx.array | None) -> mx.array:
    keys = keys.astype(mx.float32)
    return keys if centre is None else keys - centre


def _lower_bounds(call: AttentionCall, query: mx.array, key: mx.array, centre: mx.array | None) -> mx.array | None:
    """Return lower bounds of log-sum-exps, ``[num_heads, q_len]``, each from the mean of the keys some way back."""
    if call.mask is not None or call.q_segment_ids is not None or call.q_len <= SIZES[mx.default_device().type].few:
        return None  # not known to be visible, or not worth it
    if call.q_offset < 0 or call.q_offset + call.q_len > call.kv_len or call.slopes.min() < 0:
        return None
    group = call.num_heads // call.num_kv_heads
    bounds = []
    for head, slope in enumerate(np.broadcast_to(call.slopes, (1, call.num_heads))[0].tolist()):
        # Their number grows with count, their weight falls with slope * distance: the best is between.
        count = 2 ** round(math.log2(min(max(0.7 / max(slope, 1e-6), 1), 512)))
        visible = call.window_size is None or 2 * count <= call.window_size
        # Of steep heads it would shorten little, of those that reach farther than the sequence nothing.
        if count < 16 or slope * call.kv_len < WORTHWHILE or not visible:
            bounds.append(mx.full((call.q_len,), -mx.inf))
            continue
        middle = 0.0 if centre is None else _at(centre, head // group)
        bounds.append(_bound_by_means(call, _at(query, head), _at(key, head // group), middle, slope, count))
    return mx.stack(bounds)


def _bound_by_means(
    call: AttentionCall, query: mx.array, key: mx.array, middle: mx.array | float, slope: float, count: int
) -> mx.array:
    """Return one head's bounds, each from the ``count`` keys that end where the query's block of as many begins."""
    before, shift = divmod(call.q_offset, count)  # blocks of keys that end at or before the first query
    skipped = min(count, call.q_len) if before == 0 else 0  # queries without such a block
    bounds = [mx.full((skipped,), -mx.inf)]
    for part in parts_of(-(-(call.q_len - skipped) // count), count * call.head_dim, PART_ELEMENTS):  # of blocks
        start, stop = skipped + part.start * count, min(skipped + part.stop * count, call.q_len)
        kv_start = shift + (start // count + before - 1) * count
        blocks = part.stop - part.start
        keys = key[kv_start : kv_start + blocks * count].astype(mx.float32)
        means = mx.mean(keys.reshape(blocks, count, -1), axis=1) - middle  # [blocks, head_dim]
        queries = mx.pad(query[start:stop].astype(mx.float32), [(0, blocks * count - (stop - start)), (0, 0)])
        scores = (queries.reshape(blocks, count, -1) @ means[..., None]).reshape(-1)[: stop - start]
        distance = mx.arange(stop - start) % count + (count + 1) / 2
        bounds.append(log_sum_exp_of_mean(slope, scores * call.scale, distance, count))
    return mx.concatenate(bounds)
