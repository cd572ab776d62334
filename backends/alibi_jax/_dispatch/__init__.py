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
from alibi_jax._dispatch.derivatives import gradients_of, unperturbed
from alibi_jax._dispatch.primitive import backward, forward, in_reverse_mode_alone
from alibi_jax._dispatch.sharded import attend

__all__ = [
    "IMPLEMENTATIONS",
    "Implementation",
    "Target",
    "attend",
    "backward",
    "checked",
    "choose",
    "forward",
    "gradients_of",
    "in_full",
    "in_reverse_mode_alone",
    "name_of",
    "refusal",
    "unperturbed",
]
