"""The distance from which on keys do not matter: ranges of needed keys, by block of queries; rectangles of scores."""

from alibi_core._horizon.jobs import Job as Job
from alibi_core._horizon.jobs import entry_of as entry_of
from alibi_core._horizon.jobs import needed_jobs as needed_jobs
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
from alibi_core._horizon.ranges import KeyRanges as KeyRanges
from alibi_core._horizon.ranges import ScoreBounds as ScoreBounds
from alibi_core._horizon.ranges import by_block as by_block
from alibi_core._horizon.ranges import horizon as horizon
from alibi_core._horizon.ranges import key_ranges as key_ranges
from alibi_core._horizon.ranges import reach as reach
from alibi_core._horizon.ranges import score_rounding as score_rounding
from alibi_core._horizon.tiling import Tiling as Tiling
from alibi_core._horizon.tiling import current_tiling as current_tiling
from alibi_core._horizon.tiling import norm_bounds as norm_bounds
from alibi_core._horizon.tiling import tiled_as as tiled_as
