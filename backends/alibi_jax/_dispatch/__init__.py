"""Which implementation runs a call, and how it is differentiated, mapped and divided among devices.

In go rules and operands. Out comes attention, as primitives of JAX that choose a kernel when they are compiled.
"""

from alibi_jax._dispatch.choice import (
    IMPLEMENTATIONS,
    Implementation,
    Target,
    checked,
    choose,
    in_full,
    name_of,
    refusal,
)
from alibi_jax._dispatch.dense import dense
from alibi_jax._dispatch.derivatives import summed_as
from alibi_jax._dispatch.primitive import backward, forward
from alibi_jax._dispatch.sharded import attend

__all__ = [
    "IMPLEMENTATIONS",
    "Implementation",
    "Target",
    "attend",
    "backward",
    "checked",
    "choose",
    "dense",
    "forward",
    "in_full",
    "name_of",
    "refusal",
    "summed_as",
]
