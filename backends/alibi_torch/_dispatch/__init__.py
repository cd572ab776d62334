"""Which implementation runs a call, and why another does not.

In go a call and its tensors. Out comes a name, or the reason for a refusal.
"""

from alibi_torch._dispatch.choice import IMPLEMENTATIONS, choose, needs_gradients, refusal

__all__ = ["IMPLEMENTATIONS", "choose", "needs_gradients", "refusal"]
