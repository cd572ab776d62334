"""Attention on the CPU: a call, its parts, rectangles of their scores, and PyTorch's fused kernel for each.

In go a call and its tensors. Out come results and gradients, computed in as few calls of the kernel as the horizons
allow.
"""

from alibi_core.backend.horizon import KeyNorms as KeyNorms
from alibi_torch._cpu.op import attention as attention
from alibi_torch._cpu.op import plan_of as plan_of
from alibi_torch._cpu.plan import norm_bounds as norm_bounds
from alibi_torch._cpu.plan import tiling as tiling
from alibi_torch._cpu.plan import uses_norms as uses_norms
from alibi_torch._cpu.step import NEAR as NEAR
