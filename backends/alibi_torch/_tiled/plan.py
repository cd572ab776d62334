"""What to compute of a call: packed sequences and padded texts, told apart, and rectangles of scores.

Each sequence, and each text, is a call of its own, whose bias follows from distance alone. The rectangles follow from
the keys that queries need, by what is measured of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from alibi_core import AttentionCall, KeyRanges, ScoreBounds
from alibi_core.backend import (
    Job,
    KeyNorms,
    entry_of,
    jobs_of_entry,
    measure,
    nearest_keys,
    plain_jobs,
    ranges_on_host,
)
from alibi_torch._tiled import blocks, step
from alibi_torch._tiled.configuration import tiling
from alibi_torch._tiled.short import is_short, of_lengths

LEAST_MEAN_LENGTH = 16  # tokens: of shorter sequences, calls of their own cost more than masks
LEAST_PACKED = 256  # tokens in all: of fewer, likewise
LEAST_PADDED = 512  # tokens: of shorter padded texts, likewise
KEPT_PARTS = 128  # lengths of sequences and texts
LEAST_ROWS = 128  # queries of a job: of fewer, one more costs more than the scores that it leaves out


def jobs(call: AttentionCall, query: Tensor, key: Tensor, tolerance: float, norms: KeyNorms | None) -> Iterator[Job]:
    """Yield the jobs that make up the result of ``call``, whose offset is an int.

    Query and key are ``[batch, heads, length, head_dim]``.
    """
    if step.is_step(call) and not (norms is None and step.is_measured(call)):
        return iter(step.jobs(call, query, key, norms))
    if is_short(call, norms_are_known=norms is not None):
        return iter(blocks.plan(call, query, key).jobs)
    return kernel_jobs(call, query, key, tolerance, norms)


def kernel_jobs(
    call: AttentionCall, query: Tensor, key: Tensor, tolerance: float, norms: KeyNorms | None
) -> Iterator[Job]:
    """Yield jobs as ``kernels`` takes them: their heads share their keys or are ungrouped."""
    sizes = tiling().sizes
    if call.kv_len <= tiling().short:
        least, most = sizes.rows
        if call.is_causal and call.q_len > LEAST_ROWS:  # fewer rows see fewer keys that are hidden
            sizes = replace(sizes, rows=(least, min(most, max(LEAST_ROWS, call.q_len // 4))))
        yield from plain_jobs(call, sizes)
        return
    for index in range(call.batch[0]):
        entry = entry_of(call, index)
        one = slice(index, index + 1)
        known = None if norms is None else norms.of_entries(one)
        ranges = needed_keys(entry, query[one], key[one], tolerance, known)
        yield from jobs_of_entry(entry, ranges, index, sizes)


def needed_keys(
    call: AttentionCall, query: Tensor, key: Tensor, tolerance: float, norms: KeyNorms | None = None
) -> KeyRanges:
    """Return the core's plan for one batch entry, as NumPy arrays ``[num_heads, q_blocks]``."""
    how = tiling().measuring
    if tolerance == 0:  # nothing to measure
        bounds = ScoreBounds.unmeasured(call, q_block=how.q_block_of(call), kv_block=call.kv_len)
    else:
        bounds = measure(call, query, key, how, norms).bounds(call, nearest_keys(call, how.part_elements))
    return ranges_on_host(call, bounds, tolerance, how.part_elements)


def told_apart(call: AttentionCall, *tensors: Tensor) -> Iterator[tuple[AttentionCall, Tensor, Tensor, Tensor]]:
    """Yield the calls of packed sequences or padded texts, but those that see nothing; none of a call that is whole."""
    packed, padded = sequences(call), texts(call)
    if packed is not None:
        yield from itertools.chain(*parts_of(call, packed, *tensors))
    elif padded is not None:
        pieces = itertools.chain(*(pieces_of(call, *text, *tensors) for text in padded))
        yield from (piece for piece in pieces if not sees_nothing(piece[0]))


def sees_nothing(call: AttentionCall) -> bool:
    """Whether all keys are after all queries of a call whose offset is an int."""
    return call.is_causal and call.q_offset + call.q_len <= 0


def sequences(call: AttentionCall) -> list[list[slice]] | None:
    """Return the tokens of each sequence, by batch entry, or None where the call does not fall apart into them.

    It does where queries and keys are the same tokens and those of a segment stand together.
    """
    ids = call.q_segment_ids
    if ids is None or torch.compiler.is_compiling() or ids.device.type != "cpu" or call.mask is not None:
        return None
    if not call.shares_ids or call.q_len != call.kv_len or call.has_offset_array or call.q_offset != 0:
        return None
    if call.q_len < LEAST_PACKED:
        return None
    found = []
    for row in ids.expand(call.batch[0], call.q_len):
        starts = [0, *(1 + (row[1:] != row[:-1]).nonzero()[:, 0]).tolist(), call.q_len]
        runs = [slice(start, stop) for start, stop in itertools.pairwise(starts)]
        if call.q_len < LEAST_MEAN_LENGTH * len(runs) or len(row[starts[:-1]].unique()) < len(runs):
            return None
        found.append(runs)
    return found


def parts_of(
    call: AttentionCall, entries: list[list[slice]], *tensors: Tensor
) -> Iterator[list[tuple[AttentionCall, Tensor, Tensor, Tensor]]]:
    """Yield the calls of the ``sequences`` of each batch entry, with what of query, key and value is theirs."""
    whole = with_masks(call, None, None)
    for index, runs in enumerate(entries):
        entry = slice(index, index + 1)
        query, key, value = (x[entry] for x in tensors)
        alone = [_alone(whole, entry, run) for run in runs]
        yield [(one, query[:, :, s], key[:, :, s], value[:, :, s]) for one, s in zip(alone, runs, strict=True)]


def with_masks(call: AttentionCall, mask: Tensor | None, segment_ids: Tensor | None) -> AttentionCall:
    """Return a checked call with another mask and other segments; both share what is kept of their parts."""
    shares_ids = segment_ids is not None and call.shares_ids
    like = replace(call, mask=mask, q_segment_ids=segment_ids, kv_segment_ids=segment_ids, shares_ids=shares_ids)
    like.worked_out[_alone] = call.worked_out.setdefault(_alone, {})
    return like


def _alone(call: AttentionCall, entries: slice, tokens: slice) -> AttentionCall:
    """Return the call of some tokens of some batch entries, which see one another alone.

    Those of as many tokens are one call, where nothing else tells them apart, and all share what is kept of biases.
    """
    varies = call.added_key_bias is not None or any(len(x) > 1 for x in call.arrays.values() if x.ndim > 1)
    kept: dict[Any, AttentionCall] = {} if varies else call.worked_out.setdefault(_alone, {})
    count, length = entries.stop - entries.start, tokens.stop - tokens.start
    part = kept.get((count, length))
    if part is None:
        if len(kept) > KEPT_PARTS:
            kept.clear()
        like = kept.get(count)
        if like is None:
            whole = slice(0, call.num_heads)
            like = kept[count] = call.tile(batch=entries, heads=whole, queries=tokens, keys=tokens)
        part = kept[count, length] = of_lengths(like, length, length)
    return part


def texts(call: AttentionCall) -> list[tuple[slice, slice]] | None:
    """Return which keys a mask shows to all queries and heads: neighbouring batch entries, and a stretch of keys each.

    None where there is another mask or none, where queries and keys are not the same tokens, or an entry shows nothing
    or keys that do not stand together.
    """
    mask, length = call.mask, call.kv_len
    if mask is None or torch.compiler.is_compiling() or mask.device.type != "cpu" or call.q_segment_ids is not None:
        return None
    if call.q_len != length or length < LEAST_PADDED or call.has_offset_array or call.q_offset != 0:
        return None
    mask = mask[(None,) * (4 - mask.ndim)]  # axes in front may be missing
    if mask.shape[1] > 1 or mask.shape[2] > 1:
        return None
    shown = mask[:, 0, 0].expand(-1, length)
    starts = shown.clone()
    starts[:, 1:] &= ~shown[:, :-1]
    if (starts.sum(dim=1) != 1).any():
        return None
    first, count = starts.int().argmax(dim=1), shown.sum(dim=1)
    entries = itertools.groupby(zip(first.tolist(), count.tolist(), strict=True))
    found, entry, each = [], 0, call.batch[0] // len(shown)  # a mask may be one for all entries
    for (start, width), alike in entries:
        stop = entry + each * len(list(alike))
        found.append((slice(entry, stop), slice(start, start + width)))
        entry = stop
    return found


def pieces_of(
    call: AttentionCall, entries: slice, shown: slice, *tensors: Tensor
) -> Iterator[tuple[AttentionCall, Tensor, Tensor, Tensor]]:
    """Yield the calls that make up one of ``texts``: queries before the keys shown, among them and behind them."""
    query, key, value = (x[entries] for x in tensors)
    whole, heads = with_masks(call, None, None), slice(0, call.num_heads)
    for queries in (slice(0, shown.start), shown, slice(shown.stop, call.q_len)):
        if queries.start == queries.stop:
            continue
        if queries == shown:
            part = _alone(whole, entries, shown)
        else:
            part = whole.tile(batch=entries, heads=heads, queries=queries, keys=shown)
        yield part, query[:, :, queries], key[:, :, shown], value[:, :, shown]
