"""Which of Metal's kernels takes which call, and ALiBi folded into query and key for those without a bias.

In goes a call. Out comes a route, or the reason for a refusal.
"""

from alibi_mlx._metal.folded import folded_attention
from alibi_mlx._metal.routes import FEW, FOLDED_FEATURES, IMPLEMENTATIONS, LOW, Kernels, choose, refusal

__all__ = [
    "FEW",
    "FOLDED_FEATURES",
    "IMPLEMENTATIONS",
    "LOW",
    "Kernels",
    "choose",
    "folded_attention",
    "refusal",
]
