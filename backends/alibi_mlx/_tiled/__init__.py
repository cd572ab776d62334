"""Attention tile by tile, through MLX's fused kernel.

In go a call and its tensors. Out come the plan of tiles, measured from norms, and the results and gradients of each.
"""

from alibi_core.backend import KeyNorms as KeyNorms
from alibi_mlx._tiled.configuration import norm_bounds as norm_bounds
from alibi_mlx._tiled.kernels import backward as backward
from alibi_mlx._tiled.kernels import forward as forward
from alibi_mlx._tiled.plan import jobs as jobs
from alibi_mlx._tiled.plan import on_host as on_host
from alibi_mlx._tiled.plan import plans as plans
