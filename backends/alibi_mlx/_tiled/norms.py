"""How large keys are at most, which tells how far back a query has to look."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

EPS, TINY = 2.0**-23, 2.0**-126  # of float32: the spacing at 1, and the least normal number


@dataclass(frozen=True)
class KeyNorms:
    """Bounds of the norms of keys that somebody already knows: ``[batch or 1, num_kv_heads or 1, blocks]``, float32."""

    values: mx.array
    block: int  # keys that each column bounds


def norm_bounds(keys: mx.array) -> mx.array:
    """Return what no norm of keys ``[..., head_dim]`` exceeds, however sums of squares are rounded: float32 ``[...]``.

    It is infinite for a key that holds a NaN, or whose squares overflow. Gradients do not pass.
    """
    squares = mx.square(mx.stop_gradient(keys).astype(mx.float32))
    head_dim = keys.shape[-1]
    # Each addition may round down, so may the root (of a GPU, by some units); the square of what is tiny may vanish.
    measured = mx.sqrt(squares.sum(axis=-1)) * (1 + (head_dim + 8) * EPS) + (head_dim * TINY) ** 0.5
    return mx.where(measured < mx.inf, measured, mx.inf)
