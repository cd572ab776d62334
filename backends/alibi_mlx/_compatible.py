"""What differs between versions of MLX."""

from __future__ import annotations

from functools import cache

import mlx.core as mx


@cache
def has_newer_kernels() -> bool:
    """Whether MLX has fused Metal kernels for head sizes 72 and 96, and can be made to take one (``force_fused``)."""
    return version() >= (0, 32, 4)


def padded(array: mx.array, axis: int, before: int, after: int) -> mx.array:
    """Return ``mx.pad`` along one axis. MLX 0.29 has it, but ``mx.vmap`` there does not know it."""
    if before == after == 0:
        return array
    zeros = [mx.zeros((*array.shape[:axis], n, *array.shape[axis:][1:]), array.dtype) for n in (before, after)]
    pieces = [x for x in (zeros[0], array, zeros[1]) if x.shape[axis] > 0]
    return mx.concatenate(pieces, axis=axis) if len(pieces) > 1 else array


def version() -> tuple[int, ...]:
    """Return MLX's version, without what follows its numbers."""
    return tuple(int(part) for part in mx.__version__.split(".")[:3] if part.isdigit())
