"""How far a key can matter.

In goes a call and what is measured of its queries and keys, norms above all. Out come the keys that each block of
queries needs, as ranges, and the rectangles of scores, the jobs, in which a backend may compute them.
"""

from alibi_core._horizon.explanation import Explanation, KeySpans
from alibi_core._horizon.jobs import FIELDS, Job, TileSizes, entry_of, jobs_of_entry, plain_jobs, seen_keys
from alibi_core._horizon.measure import (
    KeyNorms,
    Measured,
    Measuring,
    by_query_head,
    lower_bounds,
    measure,
    norm_bounds,
    ranges_on_host,
)
from alibi_core._horizon.nearest import nearest_keys
from alibi_core._horizon.ranges import (
    ENDLESS,
    LARGEST_TOLERANCE,
    UNIT_ROUNDOFF,
    KeyRanges,
    ScoreBounds,
    by_block,
    horizon,
    key_ranges,
    reach,
    score_rounding,
    tolerance_of,
)
from alibi_core._horizon.tiling import Tiling, current_tiling, tiled_as

__all__ = [
    "ENDLESS",
    "FIELDS",
    "LARGEST_TOLERANCE",
    "UNIT_ROUNDOFF",
    "Explanation",
    "Job",
    "KeyNorms",
    "KeyRanges",
    "KeySpans",
    "Measured",
    "Measuring",
    "ScoreBounds",
    "TileSizes",
    "Tiling",
    "by_block",
    "by_query_head",
    "current_tiling",
    "entry_of",
    "horizon",
    "jobs_of_entry",
    "key_ranges",
    "lower_bounds",
    "measure",
    "nearest_keys",
    "norm_bounds",
    "plain_jobs",
    "ranges_on_host",
    "reach",
    "score_rounding",
    "seen_keys",
    "tiled_as",
    "tolerance_of",
]
