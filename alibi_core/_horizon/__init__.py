"""The distance from which on keys do not matter.

Takes a call and measurements of its queries and keys, mainly norms. Returns the ranges of keys that each block of
queries needs, and the rectangles of scores (jobs) that a backend may compute.
"""

from alibi_core._horizon.explanation import Explanation as Explanation
from alibi_core._horizon.explanation import KeySpans as KeySpans
from alibi_core._horizon.jobs import Job as Job
from alibi_core._horizon.jobs import entry_of as entry_of
from alibi_core._horizon.jobs import jobs_of_entry as jobs_of_entry
from alibi_core._horizon.jobs import plain_jobs as plain_jobs
from alibi_core._horizon.jobs import visible_keys as visible_keys
from alibi_core._horizon.measure import KeyNorms as KeyNorms
from alibi_core._horizon.measure import Measured as Measured
from alibi_core._horizon.measure import by_query_head as by_query_head
from alibi_core._horizon.measure import host_ranges as host_ranges
from alibi_core._horizon.measure import lower_bounds as lower_bounds
from alibi_core._horizon.measure import measure as measure
from alibi_core._horizon.nearest import nearest_keys as nearest_keys
from alibi_core._horizon.ranges import ENDLESS as ENDLESS
from alibi_core._horizon.ranges import FIELDS as FIELDS
from alibi_core._horizon.ranges import LARGEST_TOLERANCE as LARGEST_TOLERANCE
from alibi_core._horizon.ranges import KeyRanges as KeyRanges
from alibi_core._horizon.ranges import ScoreBounds as ScoreBounds
from alibi_core._horizon.ranges import by_block as by_block
from alibi_core._horizon.ranges import horizon as horizon
from alibi_core._horizon.ranges import key_ranges as key_ranges
from alibi_core._horizon.ranges import reach as reach
from alibi_core._horizon.ranges import score_rounding as score_rounding
from alibi_core._horizon.ranges import tolerance_of as tolerance_of
from alibi_core._horizon.tiling import Tiling as Tiling
from alibi_core._horizon.tiling import current_tiling as current_tiling
from alibi_core._horizon.tiling import norm_bounds as norm_bounds
from alibi_core._horizon.tiling import tiled_as as tiled_as
