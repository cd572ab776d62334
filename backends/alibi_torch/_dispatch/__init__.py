"""Which implementation runs a call, and why another does not; and the calls that were checked before.

In go a call and its tensors. Out comes a name, or the reason for a refusal.
"""

from alibi_torch._dispatch import memory
from alibi_torch._dispatch.choice import IMPLEMENTATIONS, choose, needs_gradients, no_autocast, refusal
from alibi_torch._dispatch.memory import is_watched
from alibi_torch._dispatch.resident import resident

__all__ = ["IMPLEMENTATIONS", "choose", "is_watched", "memory", "needs_gradients", "no_autocast", "refusal", "resident"]
