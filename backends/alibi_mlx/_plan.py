"""The plan of a call: the rectangles of scores to compute, from measured norms of queries and keys.

MLX measures the arrays; the few resulting numbers are read, and NumPy makes the plan. Under ``mx.compile`` values
cannot be read, so the plan follows from shapes alone, without horizons.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import array_api_compat.numpy as xp
import mlx.core as mx
import numpy as np

from alibi_core.backend import AttentionCall
from alibi_core.backend.horizon import (
    Job,
    KeyNorms,
    Tiling,
    current_tiling,
    needed_jobs,
    plain_jobs,
)
from alibi_core.backend.horizon import norm_bounds as bounds_of

# Few queries read all keys without a plan if a batch entry has fewer elements of keys than this times `Tiling.short`;
# keys in low precision, which must be cast, half as many. Measured on a CPU.
SOON_READ = 2**12
SOON_MEASURED = 2**14  # The same if norms are not cached, so that all keys must be read to measure them.

Norms = Callable[[], KeyNorms]  # measures the keys that a cache has not measured yet


def norm_bounds(keys: mx.array) -> mx.array:
    """Return upper bounds of the norms of vectors ``[..., head_dim]``: ``[...]``, float32, without gradients."""
    return bounds_of(mx.stop_gradient(keys).astype(mx.float32))


# On the CPU, scores are expensive and calls are cheap. GPUs (Metal, CUDA) need large tiles; their sizes are guesses.
ALIKE: dict[str, Any] = {"kv_block": 64, "part_elements": 2**20, "least_decay": 20, "kernel_elements": 2**21}
ALIKE["norm_bounds"] = norm_bounds
TILINGS = {
    mx.cpu: Tiling(64, rows=(16, 64), bias_elements=2**20, call_scores=2000, step_queries=16, **ALIKE),
    mx.gpu: Tiling(256, rows=(64, 256), bias_elements=2**22, call_scores=10**5, step_queries=8, **ALIKE),
}


def on_gpu() -> bool:
    """Whether MLX's default device is a GPU, which a read by the host would leave idle."""
    return bool(mx.default_device().type == mx.gpu)


def tiling() -> Tiling:
    """Return the block sizes in use: the table's for MLX's default device, unless ``tiled_as`` overrides them."""
    return current_tiling(TILINGS[mx.gpu if on_gpu() else mx.cpu])


def jobs(call: AttentionCall, query: mx.array, key: mx.array, value: mx.array, norms: Norms | None) -> list[Job]:
    """Return the jobs that make up ``call``; query, key and value are ``[batch, heads, length, head_dim]``.

    ``value`` is evaluated, too: where that fails, ``mx.vmap`` may be mapping it, and the overlapping views of tiles
    (``mx.as_strided``) have no vmap rule, so the plan is made from shapes.
    """
    sizes = tiling()
    is_plain = reads_all(call, call.kv_len, has_norms=norms is not None)
    host = None if is_plain else on_host(call, query=query, key=key, value=value)
    if host is None:
        return list(plain_jobs(call, sizes))
    # Measure, or read the cache's norms, only now that they are needed.
    return list(needed_jobs(host, query, key, sizes, None if norms is None else norms()))


def reads_all(call: AttentionCall, kv_len: int, *, has_norms: bool = True) -> bool:
    """Whether all keys are read, if there are ``kv_len``.

    So it is where nothing may be left out, where measuring takes longer, and where a step of decoding stays lazy.
    """
    if kv_len <= tiling().short or call.tolerance == 0:
        return True
    elements = call.num_kv_heads * kv_len * call.head_dim * (1 if call.dtype == mx.float32 else 2)
    is_quick = elements < (SOON_READ if has_norms else SOON_MEASURED) * tiling().short
    return call.q_len <= tiling().step_queries and (is_quick or on_gpu())


def on_host(call: AttentionCall, **tensors: mx.array) -> AttentionCall | None:
    """Return a call with its arrays in NumPy; None under ``mx.compile`` or ``mx.vmap``, where arrays have no values.

    Raises:
        ValueError: If an array or tensor is lazy and belongs to a stream of another thread.
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
