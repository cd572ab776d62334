"""Attention on GPUs by kernels in Triton: the plan, one kernel forward and two backward, two for a decoding step.

Input: a call and its tensors. Output: results and gradients. Importing this package imports Triton.
"""

import triton

if triton.knobs.runtime.interpret:
    from alibi_torch._triton.interpreter import mend

    mend()

from alibi_torch._triton.launch import TILES as TILES
from alibi_torch._triton.launch import Tile as Tile
from alibi_torch._triton.operator import backward as backward
from alibi_torch._triton.operator import forward as forward
