"""A call taken apart: what a compiler knows of it, its arrays, and which keys its queries need.

In goes an :class:`alibi_core.AttentionCall` with its tensors. Out come rules, operands, and ranges of keys, measured on
the device. Every kernel starts from these.
"""

from alibi_core.backend import norm_bounds
from alibi_jax._call.operands import Operands, Rules, as_slopes, floating_dtype, kv_axis, put_together, take_apart
from alibi_jax._call.plan import NORM_BLOCK, needed_keys, ranges_of

__all__ = [
    "NORM_BLOCK",
    "Operands",
    "Rules",
    "as_slopes",
    "floating_dtype",
    "kv_axis",
    "needed_keys",
    "norm_bounds",
    "put_together",
    "ranges_of",
    "take_apart",
]
