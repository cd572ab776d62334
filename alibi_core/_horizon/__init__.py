"""The distance from which on keys do not matter: ranges of needed keys, by block of queries; rectangles of scores."""

from alibi_core._horizon.jobs import *  # noqa: F403
from alibi_core._horizon.measure import *  # noqa: F403
from alibi_core._horizon.nearest import *  # noqa: F403
from alibi_core._horizon.ranges import *  # noqa: F403
from alibi_core._horizon.tiling import *  # noqa: F403
