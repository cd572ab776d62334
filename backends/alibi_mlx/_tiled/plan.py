"""Which keys the queries need, from what is measured of them, and so which rectangles of scores to compute.

Arrays are measured lazily, in MLX; the few numbers that come of it are read, and the plan is made of them in NumPy.
Where nothing can be read, under ``mx.compile``, shapes alone decide: then no horizon is known.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import array_api_compat.numpy as xp
import mlx.core as mx
import numpy as np

from alibi_core.backend import (
    AttentionCall,
    Job,
    KeyNorms,
    KeyRanges,
    ScoreBounds,
    entry_of,
    jobs_of_entry,
    measure,
    nearest_keys,
    plain_jobs,
    ranges_on_host,
)
from alibi_mlx._tiled.configuration import tiling

# Numbers in the keys of one batch entry, times those of a short call; measured on a CPU.
SOON_READ = 2**11
SOON_MEASURED = 2**14  # where the keys must first be read for their norms


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
    sizes = tiling().sizes
    is_planned = not (call.kv_len <= tiling().short or tolerance == 0 or _is_soon_read(call, norms))
    host = on_host(call, query=query, key=key, value=value) if is_planned else None
    if host is None:
        return list(plain_jobs(call, sizes))
    entries = [entry_of(host, index) for index in range(host.batch[0])]
    planned = [
        jobs_of_entry(entry, ranges, index, sizes)
        for index, (entry, ranges) in enumerate(zip(entries, plans(entries, query, key, tolerance, norms), strict=True))
    ]
    return list(itertools.chain.from_iterable(planned))


def _is_soon_read(call: AttentionCall, norms: KeyNorms | None) -> bool:
    """Whether a few queries may as well read all keys: finding out which they need takes longer."""
    most = SOON_READ if norms is not None else SOON_MEASURED
    return call.q_len <= tiling().sizes.few and call.num_kv_heads * call.kv_len * call.head_dim < most * tiling().short


def on_host(call: AttentionCall, **tensors: mx.array) -> AttentionCall | None:
    """Return a call with its arrays in NumPy; None if they, or the tensors, cannot be read for now.

    Raises:
        ValueError: If one is still to be computed by another thread.
    """
    for name, array in (tensors | call.arrays).items():
        if not _evaluated(name, array):
            return None
    read = call.map_arrays(lambda array, _: np.asarray(array))
    return replace(read, xp=xp, working_dtype=np.dtype(np.float32))


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
    how = tiling().measuring
    if tolerance == 0:  # nothing to measure
        q_block = how.q_block_of(entries[0])
        bounds = [ScoreBounds.unmeasured(entry, q_block=q_block, kv_block=entry.kv_len) for entry in entries]
    else:
        bounds = _bounds(entries, query, key, norms)
    with np.errstate(all="ignore"):  # as below
        return [
            ranges_on_host(entry, each, tolerance, how.part_elements)
            for entry, each in zip(entries, bounds, strict=True)
        ]


def _bounds(entries: list[AttentionCall], query: mx.array, key: mx.array, norms: KeyNorms | None) -> list[ScoreBounds]:
    """Return the score bounds of each batch entry, in NumPy."""
    how, measured = tiling().measuring, []
    known = None if norms is None else KeyNorms(norms.values, norms.block)  # what a cache measures only now
    for index, entry in enumerate(entries):
        one = slice(index, index + 1)
        measured.append(measure(entry, query[one], key[one], how, None if known is None else known.of_entries(one)))
    mx.eval([each.arrays for each in measured])
    read = [replace(each, **{name: np.asarray(x) for name, x in each.arrays.items()}) for each in measured]
    # Where the sums are infinite, and NumPy would say so, all keys are needed: comparisons see to that.
    with np.errstate(all="ignore"):
        return [
            each.bounds(entry, nearest_keys(entry, how.part_elements))
            for entry, each in zip(entries, read, strict=True)
        ]
