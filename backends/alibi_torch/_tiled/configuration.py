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
    factor, addend = _rounding(key, dtype)
    return torch.linalg.vector_norm(key, dim=-1, dtype=dtype).to(statistics) * factor + addend


def largest_norms(vectors: Tensor) -> list[float]:
    """Return what no norm of ``[batch, heads, length, head_dim]`` exceeds, for each head; NaN where there is one."""
    factor, addend = _rounding(vectors, vectors.dtype)
    return [x * factor + addend for x in torch.linalg.vector_norm(vectors, dim=-1).amax(dim=(0, 2)).tolist()]


def _rounding(vectors: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """Return by what a norm that is measured in ``dtype`` is multiplied, and what is added, to bound the exact one."""
    head_dim, statistics = vectors.shape[-1], torch.finfo(torch.promote_types(vectors.dtype, torch.float32))
    # Each addition may round down, the result too, and the square of what is tiny may vanish.
    rounding = (head_dim + 2) * statistics.eps + 2 * torch.finfo(dtype).eps
    return 1 + rounding, (head_dim * statistics.tiny) ** 0.5 + torch.finfo(dtype).tiny


def _fast_norm_bounds(vectors: Tensor) -> Tensor:
    return norm_bounds(vectors, vectors.dtype)


# Copies of larger parts are new memory each time, whose pages take longer to come by than to fill.
DEFAULT = Tiling.of_sizes(
    SIZES, kv_block=128, norm_bounds=_fast_norm_bounds, kernel_elements=2**20, part_elements=2**18
)


def tiling() -> Tiling:
    """Return how calls are cut up here and now."""
    return current_tiling(DEFAULT)
