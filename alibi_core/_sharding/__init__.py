"""What the shards of a divided sequence need of each other.

In goes how a sequence is divided and how far its heads see. Out comes a plan: which tokens travel between which shards.
"""

from alibi_core._sharding.checks import check_plan, check_shard_slopes
from alibi_core._sharding.plan import HALO_SHARE, Hop, ShardPlan, shard_plan, tokens_beyond
from alibi_core._sharding.shards import Shards

__all__ = [
    "HALO_SHARE",
    "Hop",
    "ShardPlan",
    "Shards",
    "check_plan",
    "check_shard_slopes",
    "shard_plan",
    "tokens_beyond",
]
