"""Which keys the queries need, from what is measured of them, and so which rectangles of scores to compute.

Arrays are measured in MLX; the few numbers that come of it are read, and the plan is made of them in NumPy. Where
nothing can be read, under ``mx.compile``, shapes alone decide: then no horizon is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import array_api_compat.numpy as xp
import mlx.core as mx
import numpy as np

from alibi_core.backend import AttentionCall
from alibi_core.backend.horizon import (
    Job,
    KeyNorms,
    Tiling,
    current_tiling,
    entry_of,
    host_ranges,
    jobs_of_entry,
    plain_jobs,
    tolerance_of,
)
from alibi_core.backend.horizon import norm_bounds as bounds_of

# Numbers in the keys of one batch entry, times those of a short call; measured on a CPU.
SOON_READ = 2**11
SOON_MEASURED = 2**14  # where the keys must first be read for their norms

Norms = Callable[[], KeyNorms]  # measures the keys that a cache has not measured yet


def norm_bounds(keys: mx.array) -> mx.array:
    """Return the core's bounds of norms, ``[...]`` float32 of keys ``[..., head_dim]``. Gradients do not pass."""
    return bounds_of(mx.stop_gradient(keys).astype(mx.float32))


# On the CPU scores are dear, a call is not. A GPU, Metal's or CUDA's, wants large tiles; no GPU has been measured.
MEASURED = {"kv_block": 64, "part_elements": 2**20, "worthwhile": 20, "norm_bounds": norm_bounds}
TILINGS = {
    mx.cpu: Tiling(
        q_block=64, rows=(16, 64), bias_elements=2**20, call_scores=2000, few=16, kernel_elements=2**21, **MEASURED
    ),
    mx.gpu: Tiling(
        q_block=256, rows=(64, 256), bias_elements=2**22, call_scores=100_000, few=8, kernel_elements=2**21, **MEASURED
    ),
}


def tiling() -> Tiling:
    """Return how calls are cut up here and now: as suits MLX's default device."""
    return current_tiling(TILINGS[mx.default_device().type])


def jobs(call: AttentionCall, query: mx.array, key: mx.array, value: mx.array, norms: Norms | None) -> list[Job]:
    """Return the jobs that make up ``call``; query, key and value are ``[batch, heads, length, head_dim]``.

    Values are not measured. But where they cannot be read they are mapped, and mx.vmap does not know the views by which
    tiles overlap.
    """
    sizes, tolerance = tiling(), tolerance_of(call)
    is_plain = call.kv_len <= sizes.short or tolerance == 0 or _is_soon_read(call, norms is not None)
    host = None if is_plain else on_host(call, query=query, key=key, value=value)
    if host is None:
        return list(plain_jobs(call, sizes))
    known, found = None if norms is None else norms(), []
    for index in range(host.batch[0]):
        entry, one = entry_of(host, index), slice(index, index + 1)
        own = None if known is None else known.of_entries(one)
        found += jobs_of_entry(entry, host_ranges(entry, query[one], key[one], tolerance, sizes, own), index, sizes)
    return found


def _is_soon_read(call: AttentionCall, has_norms: bool) -> bool:
    """Whether a few queries may as well read all keys: finding out which they need takes longer."""
    most = SOON_READ if has_norms else SOON_MEASURED
    return call.q_len <= tiling().few and call.num_kv_heads * call.kv_len * call.head_dim < most * tiling().short


def on_host(call: AttentionCall, **tensors: mx.array) -> AttentionCall | None:
    """Return a call with its arrays in NumPy; None under ``mx.compile`` or ``mx.vmap``, where arrays have no value.

    Raises:
        ValueError: If an array, or one of the tensors, is still to be computed by another thread.
    """
    for name, array in (tensors | call.arrays).items():
        try:
            mx.eval(array)
        except ValueError:
            return None
        except RuntimeError as error:
            if "in current thread" not in str(error):
                raise
            raise ValueError(
                f"{name} must be computed on a stream of this thread, got one that another thread has yet to compute; "
                "call mx.eval on it there"
            ) from error
    return replace(call.map_arrays(lambda array, _: np.asarray(array)), xp=xp, working_dtype=np.dtype(np.float32))
