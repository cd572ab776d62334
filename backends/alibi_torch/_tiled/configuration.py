"""How calls are cut up on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from alibi_core.backend import TileSizes, Tiling, current_tiling

SIZES = TileSizes(rows=(64, 256), bias_elements=2**22, call_scores=15_000, few=16)


def norm_bounds(key: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return what no norm of keys ``[..., head_dim]`` exceeds, however sums of squares are rounded: float32 or float64.

    Args:
        key: Keys.
        dtype: What to measure them in. Default float32 or more; in a low precision of their own it is far faster.
    """
    statistics = torch.promote_types(key.dtype, torch.float32)
    dtype = statistics if dtype is None else dtype
    head_dim = key.shape[-1]
    # Each addition may round down, the result too, and the square of what is tiny may vanish.
    rounding = (head_dim + 2) * torch.finfo(statistics).eps + 2 * torch.finfo(dtype).eps
    vanishing = (head_dim * torch.finfo(statistics).tiny) ** 0.5 + torch.finfo(dtype).tiny
    return torch.linalg.vector_norm(key, dim=-1, dtype=dtype).to(statistics) * (1 + rounding) + vanishing


def _fast_norm_bounds(vectors: Tensor) -> Tensor:
    return norm_bounds(vectors, vectors.dtype)


# Copies of larger parts are new memory each time, whose pages take longer to come by than to fill.
DEFAULT = Tiling.of_sizes(
    SIZES, kv_block=128, norm_bounds=_fast_norm_bounds, kernel_elements=2**20, part_elements=2**18
)


def tiling() -> Tiling:
    """Return how calls are cut up here and now."""
    return current_tiling(DEFAULT)
