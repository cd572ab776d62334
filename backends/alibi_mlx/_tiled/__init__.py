"""Attention tile by tile, through MLX's fused kernel.

In go a call and its tensors. Out come the plan of tiles, measured from norms, and the results and gradients of each.
"""

from alibi_core.backend import KeyNorms
from alibi_mlx._tiled.configuration import norm_bounds
from alibi_mlx._tiled.kernels import backward, forward
from alibi_mlx._tiled.plan import jobs, on_host, plans

__all__ = ["KeyNorms", "backward", "forward", "jobs", "norm_bounds", "on_host", "plans"]
