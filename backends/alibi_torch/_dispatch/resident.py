"""Slopes that stay on a GPU: a copy from the host would have each call wait for all that the GPU has still to do."""

from __future__ import annotations

import functools
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor

from alibi_core import slopes as canonical
from alibi_core.backend import working_dtype
from alibi_torch._dispatch.memory import is_watched


def resident(slopes: Any, query: Any) -> Any:
    """Return the canonical slopes, where they are asked for and ``query`` is on a GPU; else what is given."""
    if not isinstance(query, Tensor) or not query.is_cuda or is_watched(query):
        return slopes
    num_heads = query.shape[-3] if query.ndim > 2 else 0
    is_asked_for = slopes is None or (type(slopes) is int and slopes == num_heads)
    if not is_asked_for or num_heads == 0 or not query.is_floating_point():
        return slopes
    return kept(num_heads, working_dtype(xp, query.dtype), query.device)


@functools.lru_cache(maxsize=64)
def kept(num_heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return canonical slopes, the same tensor each time."""
    with torch.inference_mode(False):  # a differentiated call may take them, too
        return canonical(num_heads, xp=xp, dtype=dtype, device=device)
