"""What differs between versions of MLX."""

from __future__ import annotations

import mlx.core as mx


def padded(array: mx.array, axis: int, before: int, after: int) -> mx.array:
    """Return ``mx.pad`` along one axis. MLX 0.29 has it, but ``mx.vmap`` there does not know it."""
    if before == after == 0:
        return array
    zeros = [mx.zeros((*array.shape[:axis], n, *array.shape[axis:][1:]), array.dtype) for n in (before, after)]
    pieces = [x for x in (zeros[0], array, zeros[1]) if x.shape[axis] > 0]
    return mx.concatenate(pieces, axis=axis) if len(pieces) > 1 else array
