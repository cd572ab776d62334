"""How attention is checked, differentiated, mapped and compiled in MLX.

In go a call's tensors and the tiles to compute. Out come results that have gradients.
"""

from alibi_mlx._dispatch.functions import Jobs as Jobs
from alibi_mlx._dispatch.functions import attend as attend
from alibi_mlx._dispatch.memory import checked as checked
