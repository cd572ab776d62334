"""Which of Metal's kernels takes which call, and ALiBi folded into query and key for those without a bias.

In goes a call. Out comes a route, or the reason for a refusal.
"""

from alibi_mlx._metal.folded import folded_attention as folded_attention
from alibi_mlx._metal.routes import FEW as FEW
from alibi_mlx._metal.routes import FOLDED_FEATURES as FOLDED_FEATURES
from alibi_mlx._metal.routes import IMPLEMENTATIONS as IMPLEMENTATIONS
from alibi_mlx._metal.routes import LOW as LOW
from alibi_mlx._metal.routes import Kernels as Kernels
from alibi_mlx._metal.routes import choose as choose
from alibi_mlx._metal.routes import refusal as refusal
