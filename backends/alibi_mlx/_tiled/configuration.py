"""How calls are cut up, and how large keys are at most, which tells how far back a query has to look."""

from __future__ import annotations

import mlx.core as mx

from alibi_core.backend import TileSizes, Tiling, current_tiling
from alibi_core.backend import norm_bounds as bounds_of


def norm_bounds(keys: mx.array) -> mx.array:
    """Return what no norm of keys ``[..., head_dim]`` exceeds, however sums of squares are rounded: float32 ``[...]``.

    It is infinite for a key that holds a NaN, or whose squares overflow. Gradients do not pass.
    """
    return bounds_of(mx.stop_gradient(keys).astype(mx.float32))


# On the CPU scores are dear, a call is not; a GPU wants large tiles. The latter are not measured, but MLX's own.
SIZES = {
    mx.cpu: TileSizes(rows=(16, 64), bias_elements=2**20, call_scores=2000, few=16),
    mx.gpu: TileSizes(rows=(64, 256), bias_elements=2**22, call_scores=100_000, few=8),
}
TILINGS = {
    device: Tiling.of_sizes(sizes, kv_block=64, norm_bounds=norm_bounds, kernel_elements=2**21)
    for device, sizes in SIZES.items()
}


def tiling() -> Tiling:
    """Return how calls are cut up here and now: as suits MLX's default device."""
    return current_tiling(TILINGS[mx.default_device().type])
