"""The contract of a backend: what it may import from the core. docs/backend.md says what to write.

A backend takes an :class:`AttentionCall`, which says what is to be computed, and decides how. Five modules have more:

- ``checks``: arguments of public functions, each error with the fix;
- ``horizon``: which keys matter, and in which rectangles of scores to compute;
- ``caches``, ``models``, ``sharding``: what caches, layers and models, and parallel attention of all backends share.
"""

from alibi_core._attention import dense_attention as dense_attention
from alibi_core._call import ARRAY_AXES as ARRAY_AXES
from alibi_core._call import LENGTH_FIRST as LENGTH_FIRST
from alibi_core._call import AttentionCall as AttentionCall
from alibi_core._call import axis_of as axis_of
from alibi_core._call import join_call as join_call
from alibi_core._call import split_call as split_call
from alibi_core._horizon import Explanation as Explanation
