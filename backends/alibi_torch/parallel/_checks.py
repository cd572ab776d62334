"""What a call of sequence-parallel attention must have in common with its plan, and with other processes' calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from alibi_core import AttentionCall, ShardPlan, Shards


def facts_of(
    call: AttentionCall, shards: Shards, plan: ShardPlan | None, key: Tensor, value: Tensor, implementation: str | None
) -> dict[str, Any]:
    """Return what must be the same on all processes of a group."""
    differentiated = torch.is_grad_enabled() and (key.requires_grad or value.requires_grad)
    segments = None if call.q_segment_ids is None else call.q_segment_ids.dtype
    return {
        "query's shape": (*call.batch, call.num_heads, call.q_len, call.head_dim),
        "key's shape": tuple(key.shape),
        "dtype": call.dtype,
        "placement and length": shards,
        "slopes": call.slopes.tolist(),
        "future_slopes": None if call.future_slopes is None else call.future_slopes.tolist(),
        "plan or score_bound": plan,
        "is_causal": call.is_causal,
        "window_size": call.window_size,
        "scale": call.scale,
        "tolerance": call.tolerance,
        "segment_ids' dtype": segments,
        "implementation": implementation,
        "whether key or value requires gradients": differentiated,
    }
