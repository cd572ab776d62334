"""The contract of a backend: what it may import from the core. docs/backend.md says what to write.

A backend takes an :class:`AttentionCall`, which says what is to be computed, and decides how:

- ``AttentionCall``, ``split_call``, ``join_call``: a call, checked; apart, as compilers ask for it, and together again;
- ``dense_attention``: the reference of a checked call, which runs what the backend's own kernels refuse;
- ``Explanation``: what a call would do, for ``explain``;
- ``checks``: arguments, of the public functions of a backend;
- ``horizon``: which keys matter, and in which rectangles of scores to compute;
- ``caches``, ``models``, ``sharding``: what caches, layers and models, and parallel attention of all backends share.
"""

from alibi_core import _caching, _horizon, _models, _sharding
from alibi_core._arrays import check_keywords as check_keywords
from alibi_core._arrays import checks as checks
from alibi_core._arrays import explains_keywords as explains_keywords
from alibi_core._arrays import host_values as host_values
from alibi_core._arrays import namespace_of as namespace_of
from alibi_core._attention import dense_attention as dense_attention
from alibi_core._bias import key_bias as key_bias
from alibi_core._bias import working_dtype as working_dtype
from alibi_core._caching import RowTokens as RowTokens
from alibi_core._caching import cache_summary as cache_summary
from alibi_core._caching import check_indices as check_indices
from alibi_core._caching import check_lengths as check_lengths
from alibi_core._caching import check_new_tokens as check_new_tokens
from alibi_core._caching import check_room as check_room
from alibi_core._caching import check_span as check_span
from alibi_core._call import ARRAY_AXES as ARRAY_AXES
from alibi_core._call import LENGTH_FIRST as LENGTH_FIRST
from alibi_core._call import AttentionCall as AttentionCall
from alibi_core._call import CallRules as CallRules
from alibi_core._call import join_call as join_call
from alibi_core._call import split_call as split_call
from alibi_core._contracts import named as named
from alibi_core._extras import install_hint as install_hint
from alibi_core._horizon import ENDLESS as ENDLESS
from alibi_core._horizon import FIELDS as FIELDS
from alibi_core._horizon import LARGEST_TOLERANCE as LARGEST_TOLERANCE
from alibi_core._horizon import Explanation as Explanation
from alibi_core._horizon import Job as Job
from alibi_core._horizon import KeyNorms as KeyNorms
from alibi_core._horizon import KeyRanges as KeyRanges
from alibi_core._horizon import KeySpans as KeySpans
from alibi_core._horizon import Measured as Measured
from alibi_core._horizon import ScoreBounds as ScoreBounds
from alibi_core._horizon import Tiling as Tiling
from alibi_core._horizon import by_block as by_block
from alibi_core._horizon import by_query_head as by_query_head
from alibi_core._horizon import current_tiling as current_tiling
from alibi_core._horizon import entry_of as entry_of
from alibi_core._horizon import host_ranges as host_ranges
from alibi_core._horizon import jobs_of_entry as jobs_of_entry
from alibi_core._horizon import key_ranges as key_ranges
from alibi_core._horizon import lower_bounds as lower_bounds
from alibi_core._horizon import measure as measure
from alibi_core._horizon import nearest_keys as nearest_keys
from alibi_core._horizon import norm_bounds as norm_bounds
from alibi_core._horizon import plain_jobs as plain_jobs
from alibi_core._horizon import reach as reach
from alibi_core._horizon import score_rounding as score_rounding
from alibi_core._horizon import tiled_as as tiled_as
from alibi_core._horizon import tolerance_of as tolerance_of
from alibi_core._horizon import visible_keys as visible_keys
from alibi_core._models import POOLING as POOLING
from alibi_core._models import AlibiConfig as AlibiConfig
from alibi_core._models import Checkpoint as Checkpoint
from alibi_core._models import Generation as Generation
from alibi_core._models import LayerShape as LayerShape
from alibi_core._sharding import HALO_SHARE as HALO_SHARE
from alibi_core._sharding import Shards as Shards
from alibi_core._sharding import check_shard_slopes as check_shard_slopes
from alibi_core._sharding import tokens_beyond as tokens_beyond
from alibi_core._slopes import slope_values as slope_values
from alibi_core._slopes import slopes as slopes

caches, horizon, models, sharding = _caching, _horizon, _models, _sharding
MAX_POSITION = checks.MAX_POSITION
array = checks.array
boolean = checks.boolean
broadcastable = checks.broadcastable
floating_dtype = checks.floating_dtype
is_int = checks.is_int
non_negative_int = checks.non_negative_int
non_negative_number = checks.non_negative_number
one_of = checks.one_of
positive_int = checks.positive_int
