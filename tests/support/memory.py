"""The memory that PyTorch allocates."""

from collections.abc import Callable
from typing import Any

import torch


def largest_allocation(compute: Callable[[], Any]) -> int:
    """Return the bytes of the largest allocation of any operator that a function calls on the CPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        compute()
    return max(event.self_cpu_memory_usage for event in profile.events())
