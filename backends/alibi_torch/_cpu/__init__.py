"""Attention on the CPU: a call is split into parts, each part into rectangles of scores, one fused kernel call each.

Input: a call and its tensors. Output: results and gradients, with as few kernel calls as the horizons allow.
"""

from alibi_torch._cpu.op import attention as attention
from alibi_torch._cpu.op import with_dense_rows as with_dense_rows
from alibi_torch._cpu.plan import norm_bounds as norm_bounds
from alibi_torch._cpu.plan import tiling as tiling
from alibi_torch._cpu.plan import uses_norms as uses_norms
from alibi_torch._cpu.step import NEAR as NEAR
from alibi_torch._cpu.step import NextStep as NextStep
from alibi_torch._cpu.step import attend_last_query as attend_last_query
from alibi_torch._cpu.step import is_last_query as is_last_query
