"""An attention call, and what it means.

In go the arguments of a user. Out comes an :class:`AttentionCall` in which each is checked and resolved, and the
reference: what every backend must answer to that call, or the further features that make plain attention answer it.
"""

from alibi_core._call.attention import attention, dense_attention
from alibi_core._call.call import ARRAY_AXES, HEADS_FIRST, LENGTH_FIRST, AttentionCall, CallRules
from alibi_core._call.fold import fold, fold_error_bound, fold_size, largest_slope

__all__ = [
    "ARRAY_AXES",
    "HEADS_FIRST",
    "LENGTH_FIRST",
    "AttentionCall",
    "CallRules",
    "attention",
    "dense_attention",
    "fold",
    "fold_error_bound",
    "fold_size",
    "largest_slope",
]
