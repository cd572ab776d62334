"""Attention tile by tile, in plain XLA, on any device, in memory linear in the lengths."""

from alibi_jax._tiled.backward import backward as backward
from alibi_jax._tiled.forward import forward as forward
