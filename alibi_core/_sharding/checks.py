"""What a call of sequence-parallel attention must have in common with its plan, and with the other shards' calls."""

from __future__ import annotations

from typing import Any

from alibi_core._arrays import checks
from alibi_core._call import AttentionCall
from alibi_core._sharding.plan import ShardPlan
from alibi_core._sharding.shards import Shards


def check_plan(
    plan: Any, score_bound: float | None, call: AttentionCall, shards: Shards, head_shards: int
) -> ShardPlan | None:
    """Return the plan that the user gave, having checked that it is about the call of one shard.

    ``head_shards`` says among how many devices heads are divided besides.
    """
    if plan is None:
        return None
    if score_bound is not None:
        raise ValueError("score_bound must be None when a plan is given, which is made of one")
    if not isinstance(plan, ShardPlan):
        raise TypeError(f"plan must be an alibi_core.ShardPlan, got {type(plan).__name__}")
    expected = {
        "shards": shards,
        "is_causal": call.is_causal,
        "window_size": call.window_size,
        "head_shards": head_shards,
        "num_kv_heads": call.num_kv_heads * head_shards,
        "num_heads": call.num_heads * head_shards,
    }
    for name, value in expected.items():
        found = len(plan.horizons) if name == "num_heads" else getattr(plan, name)
        if found != value:
            raise ValueError(f"plan must have {name} {value}, as the call, got {found}")
    return plan


def check_shard_slopes(name: str, slopes: Any, heads: int, head_shards: int, owners: str) -> None:
    """Check that slopes are those of all shards' heads, of which each of ``head_shards`` owners has ``heads``.

    ``owners`` says what those are: ``"devices"`` or ``"processes"``.
    """
    total = heads * head_shards
    if checks.is_int(slopes):
        raise TypeError(f"{name} must be an array of all {owners}' slopes or None for the canonical ones, got {slopes}")
    if tuple(checks.array(name, slopes).shape) != (total,):
        among = f" on each of {head_shards} {owners}" if head_shards > 1 else ""
        raise ValueError(
            f"{name} must have shape ({total},), those of all {owners}' heads ({heads}{among}), got "
            f"{tuple(slopes.shape)}; local slopes would not tell whose heads they are"
        )
