"""The names that backends may import from the core: the contract of a new backend.

A backend takes an :class:`AttentionCall`, which says what is to be computed, and decides how. Whatever else it needs of
the core, checks, plans of keys and tiles, slopes and bias, models and explanations, stands here; nothing else in
``alibi_core`` is meant for it.
"""

from alibi_core._arrays import (
    MAX_POSITION,
    array,
    boolean,
    broadcastable,
    checks,
    floating_array,
    floating_dtype,
    host_values,
    is_int,
    namespace_of,
    non_negative_int,
    non_negative_number,
    one_of,
    positive_int,
    positive_number,
)
from alibi_core._attention import dense_attention
from alibi_core._bias import key_bias, relative_positions, working_dtype
from alibi_core._caching import (
    EvictionPolicy,
    EvictionRules,
    HeadGroup,
    cache_summary,
    check_new_tokens,
    check_room,
    check_span,
    check_truncated,
)
from alibi_core._call import LENGTH_FIRST
from alibi_core._contracts import named
from alibi_core._explanation import Explanation, visible_pairs
from alibi_core._fold import largest_slope
from alibi_core._horizon import (
    ENDLESS,
    FIELDS,
    LARGEST_TOLERANCE,
    UNIT_ROUNDOFF,
    Job,
    TileSizes,
    by_block,
    entry_of,
    jobs_of_entry,
    log_sum_exp_of_mean,
    nearest_keys,
    parts_of,
    plain_jobs,
    reach,
    tolerance_of,
)
from alibi_core._models import AlibiConfig, Checkpoint, LayerShape, fixed_or_scheme_slopes
from alibi_core._sharding import HALO_SHARE
from alibi_core._slopes import slope_values, slopes

__all__ = [
    "ENDLESS",
    "FIELDS",
    "HALO_SHARE",
    "LARGEST_TOLERANCE",
    "LENGTH_FIRST",
    "MAX_POSITION",
    "UNIT_ROUNDOFF",
    "AlibiConfig",
    "Checkpoint",
    "EvictionPolicy",
    "EvictionRules",
    "Explanation",
    "HeadGroup",
    "Job",
    "LayerShape",
    "TileSizes",
    "array",
    "boolean",
    "broadcastable",
    "by_block",
    "cache_summary",
    "check_new_tokens",
    "check_room",
    "check_span",
    "check_truncated",
    "checks",
    "dense_attention",
    "entry_of",
    "fixed_or_scheme_slopes",
    "floating_array",
    "floating_dtype",
    "host_values",
    "is_int",
    "jobs_of_entry",
    "key_bias",
    "largest_slope",
    "log_sum_exp_of_mean",
    "named",
    "namespace_of",
    "nearest_keys",
    "non_negative_int",
    "non_negative_number",
    "one_of",
    "parts_of",
    "plain_jobs",
    "positive_int",
    "positive_number",
    "reach",
    "relative_positions",
    "slope_values",
    "slopes",
    "tolerance_of",
    "visible_pairs",
    "working_dtype",
]
