"""Attention tile by tile, in plain XLA, on any device.

In go rules and operands. Out come results and gradients, in memory that grows with the lengths alone.
"""

from alibi_jax._tiled.backward_loop import backward_in_tiles
from alibi_jax._tiled.forward_loop import forward_in_tiles
from alibi_jax._tiled.materialised import materialised
from alibi_jax._tiled.passes import backward, forward, full_precision
from alibi_jax._tiled.scores import Tensors
from alibi_jax._tiled.tiles import jobs_of, sizes_of

__all__ = [
    "Tensors",
    "backward",
    "backward_in_tiles",
    "forward",
    "forward_in_tiles",
    "full_precision",
    "jobs_of",
    "materialised",
    "sizes_of",
]
