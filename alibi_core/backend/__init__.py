"""The interface for backends: everything that a backend may import from the core. See docs/backend.md.

A backend takes an :class:`AttentionCall`, the validated arguments, and decides how to compute it. Five modules have
more:

- ``checks``: checks of public arguments, each error with the fix;
- ``horizon``: the keys that matter, and the rectangles of scores to compute;
- ``caches``, ``models``, ``sharding``: shared code of all backends for caches, for layers and models, and for parallel
  attention.
"""

from alibi_core._attention import dense_attention as dense_attention
from alibi_core._attention import with_sinks as with_sinks
from alibi_core._bias import unit_bias_of as unit_bias_of
from alibi_core._call import ARRAY_AXES as ARRAY_AXES
from alibi_core._call import AttentionCall as AttentionCall
from alibi_core._call import BiasTerms as BiasTerms
from alibi_core._call import axis_of as axis_of
from alibi_core._call import split_call as split_call
from alibi_core._distance import exact_sum as exact_sum
from alibi_core._distance import fixed_positions as fixed_positions
from alibi_core._distance import no_gradient as no_gradient
from alibi_core._distance import penalty as penalty
from alibi_core._distance import penalty_beyond as penalty_beyond
from alibi_core._distance import relative_points as relative_points
from alibi_core._distance import relative_position as relative_position
from alibi_core._explanation import Explanation as Explanation
from alibi_core._explanation import KeySpans as KeySpans
from alibi_core._frame import LENGTH_FIRST as LENGTH_FIRST
from alibi_core._gates import GateTotals as GateTotals
from alibi_core._gates import finite_gates as finite_gates
from alibi_core._gates import gate_sums as gate_sums
from alibi_core._gates import suffix_sums as suffix_sums
