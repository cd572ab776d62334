"""Which implementation runs a call, and why another does not; and the calls that were checked before.

In go a call and its tensors. Out comes a name, or the reason for a refusal.
"""

from alibi_torch._dispatch import memory as memory
from alibi_torch._dispatch.choice import IMPLEMENTATIONS as IMPLEMENTATIONS
from alibi_torch._dispatch.choice import choose as choose
from alibi_torch._dispatch.choice import needs_gradients as needs_gradients
from alibi_torch._dispatch.choice import no_autocast as no_autocast
from alibi_torch._dispatch.choice import refusal as refusal
from alibi_torch._dispatch.memory import is_watched as is_watched
from alibi_torch._dispatch.resident import resident as resident
