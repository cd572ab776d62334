"""A call taken apart: what a compiler knows of it, its arrays, and which keys its queries need.

In goes an ``AttentionCall`` with its tensors. Out come rules, operands, and ranges of keys, measured on the device.
Every kernel starts from these.
"""

from alibi_core.backend.horizon import norm_bounds as norm_bounds
from alibi_jax._call.operands import Operands as Operands
from alibi_jax._call.operands import Rules as Rules
from alibi_jax._call.operands import as_slopes as as_slopes
from alibi_jax._call.operands import floating_dtype as floating_dtype
from alibi_jax._call.operands import kv_axis as kv_axis
from alibi_jax._call.operands import put_together as put_together
from alibi_jax._call.operands import take_apart as take_apart
from alibi_jax._call.plan import NORM_BLOCK as NORM_BLOCK
from alibi_jax._call.plan import needed_keys as needed_keys
from alibi_jax._call.plan import ranges_of as ranges_of
