"""The choice of an implementation, and the rules by which a call is differentiated, mapped and sharded."""

from alibi_jax._dispatch.choice import IMPLEMENTATIONS as IMPLEMENTATIONS
from alibi_jax._dispatch.choice import Implementation as Implementation
from alibi_jax._dispatch.choice import checked as checked
from alibi_jax._dispatch.choice import choose as choose
from alibi_jax._dispatch.choice import name_of as name_of
from alibi_jax._dispatch.choice import refusal as refusal
from alibi_jax._dispatch.derivatives import differentiable as differentiable
from alibi_jax._dispatch.derivatives import without_gradient as without_gradient
from alibi_jax._dispatch.primitive import backward as backward
from alibi_jax._dispatch.primitive import forward as forward
from alibi_jax._dispatch.sharded import attend as attend
from alibi_jax._dispatch.sharded import attend_densely as attend_densely
