"""Which keys the queries need, from what is measured of them, and so which rectangles of scores to compute."""

from __future__ import annotations

from collections.abc import Iterator

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
from alibi_torch._tiled import step
from alibi_torch._tiled.configuration import tiling
from alibi_torch._tiled.short import is_short, short_jobs


def jobs(call: AttentionCall, query: Tensor, key: Tensor, tolerance: float, norms: KeyNorms | None) -> Iterator[Job]:
    """Yield the jobs that make up the result of ``call``, whose offset is an int.

    Query and key are ``[batch, heads, length, head_dim]``.
    """
    if step.is_step(call) and not (norms is None and step.is_measured(call)):
        return iter(step.jobs(call, query, key, norms))
    if is_short(call, norms_are_known=norms is not None):
        return iter(short_jobs(call))
    return kernel_jobs(call, query, key, tolerance, norms)


def kernel_jobs(
    call: AttentionCall, query: Tensor, key: Tensor, tolerance: float, norms: KeyNorms | None
) -> Iterator[Job]:
    """Yield jobs as ``kernels`` takes them: their heads share their keys or are ungrouped."""
    sizes = tiling().sizes
    if call.kv_len <= tiling().short:
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
