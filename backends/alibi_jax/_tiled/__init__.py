"""Attention tile by tile, in plain XLA, on any device.

In go rules and operands. Out come results and gradients, in memory that grows with the lengths alone, and no work is
done on keys that are too far to matter.
"""

from alibi_jax._tiled.backward_loop import backward
from alibi_jax._tiled.forward_loop import forward
from alibi_jax._tiled.materialised import materialised
from alibi_jax._tiled.tiles import Tiling, jobs_of, sizes_of

__all__ = ["Tiling", "backward", "forward", "jobs_of", "materialised", "sizes_of"]
