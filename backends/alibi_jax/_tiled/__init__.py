"""Attention tile by tile, in plain XLA, on any device.

In go rules and operands. Out come results and gradients, in memory that grows with the lengths alone, and no work is
done on keys that are too far to matter.
"""

from alibi_jax._tiled.backward_loop import backward as backward
from alibi_jax._tiled.forward_loop import forward as forward
from alibi_jax._tiled.materialised import materialised as materialised
from alibi_jax._tiled.tiles import Tiling as Tiling
from alibi_jax._tiled.tiles import jobs_of as jobs_of
from alibi_jax._tiled.tiles import sizes_of as sizes_of
