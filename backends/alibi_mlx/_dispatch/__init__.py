"""How attention is chosen, differentiated, mapped and compiled in MLX.

In go a call's tensors and the tiles to compute. Out come results that have gradients.
"""

from alibi_mlx._dispatch.choice import IMPLEMENTATIONS as IMPLEMENTATIONS
from alibi_mlx._dispatch.choice import choose as choose
from alibi_mlx._dispatch.choice import refusal as refusal
from alibi_mlx._dispatch.functions import attend as attend
