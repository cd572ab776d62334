"""An attention call, and what it means.

In go the arguments of a user. Out comes an :class:`AttentionCall` in which each is checked and resolved, and the
reference: what every backend must answer to that call, or the further features that make plain attention answer it.
"""

from alibi_core._call.attention import attention as attention
from alibi_core._call.attention import dense_attention as dense_attention
from alibi_core._call.call import ARRAY_AXES as ARRAY_AXES
from alibi_core._call.call import HEADS_FIRST as HEADS_FIRST
from alibi_core._call.call import LENGTH_FIRST as LENGTH_FIRST
from alibi_core._call.call import AttentionCall as AttentionCall
from alibi_core._call.call import CallRules as CallRules
from alibi_core._call.fold import fold as fold
from alibi_core._call.fold import fold_error_bound as fold_error_bound
from alibi_core._call.fold import fold_size as fold_size
