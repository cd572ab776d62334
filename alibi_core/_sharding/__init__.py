"""What the shards of a divided sequence need of each other.

In goes how a sequence is divided and how far its heads see. Out comes a plan: which tokens travel between which shards.
"""

from alibi_core._sharding.checks import check_plan as check_plan
from alibi_core._sharding.checks import check_shard_slopes as check_shard_slopes
from alibi_core._sharding.plan import HALO_SHARE as HALO_SHARE
from alibi_core._sharding.plan import Hop as Hop
from alibi_core._sharding.plan import ShardPlan as ShardPlan
from alibi_core._sharding.plan import shard_plan as shard_plan
from alibi_core._sharding.plan import tokens_beyond as tokens_beyond
from alibi_core._sharding.shards import Shards as Shards
