"""Where the parameters of a model come from: a tensor of a checkpoint, or a part of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Source:
    """Where a parameter, or some rows of it, come from.

    Attributes:
        tensor: Name of the checkpoint's tensor.
        shape: Its shape.
        take: Returns the rows from the tensor's values. None for a tensor taken whole.
    """

    tensor: str
    shape: tuple[int, ...]
    take: Callable[[Any], Any] | None = None


def rows_of(tensor: Any, *, start: int, stop: int, is_turned: bool = False) -> Any:
    """Return rows ``start`` until ``stop`` of a tensor; of one that is turned, those of its transpose."""
    rows = tensor.T if is_turned else tensor
    return rows[start:stop].copy()  # a view would keep the other rows in memory


def part_of_groups(fused: Any, *, index: int, num_heads: int, num_kv_heads: int) -> Any:
    """Return queries (0), keys (1) or values (2) of rows that hold, by key/value head, its queries, its key, its value.

    Args:
        fused: ``[(num_heads + 2 * num_kv_heads) * head_dim, ...]``.
        index: Which of the three.
        num_heads: Query heads.
        num_kv_heads: Key/value heads.
    """
    group, rest = num_heads // num_kv_heads, fused.shape[1:]
    rows = fused.reshape(num_kv_heads, group + 2, -1, *rest)
    chosen = (slice(0, group), slice(group, group + 1), slice(group + 1, group + 2))[index]
    return np.ascontiguousarray(rows[:, chosen]).reshape(-1, *rest)


def rows_of_unit_norm(tensor: Any) -> Any:
    """Return a matrix with its rows divided by their Euclidean norms, those of 0 left alone."""
    norms = np.linalg.norm(tensor.astype(np.float64), axis=1, keepdims=True)
    return (tensor / np.maximum(norms, 1e-12)).astype(tensor.dtype)
