"""How far a key can matter.

In goes a call and what is measured of its queries and keys, norms above all. Out come the keys that each block of
queries needs, as ranges, and the rectangles of scores, the jobs, in which a backend may compute them.
"""

from alibi_core._horizon.jobs import FIELDS, Job, TileSizes, entry_of, jobs_of_entry, plain_jobs
from alibi_core._horizon.nearest import nearest_keys, parts_of
from alibi_core._horizon.ranges import (
    ENDLESS,
    LARGEST_TOLERANCE,
    UNIT_ROUNDOFF,
    KeyRanges,
    ScoreBounds,
    by_block,
    horizon,
    key_ranges,
    log_sum_exp_of_mean,
    reach,
    tolerance_of,
)

__all__ = [
    "ENDLESS",
    "FIELDS",
    "LARGEST_TOLERANCE",
    "UNIT_ROUNDOFF",
    "Job",
    "KeyRanges",
    "ScoreBounds",
    "TileSizes",
    "by_block",
    "entry_of",
    "horizon",
    "jobs_of_entry",
    "key_ranges",
    "log_sum_exp_of_mean",
    "nearest_keys",
    "parts_of",
    "plain_jobs",
    "reach",
    "tolerance_of",
]
