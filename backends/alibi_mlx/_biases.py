"""The biases of jobs, and the distances for the gradients of slopes."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import mlx.core as mx

from alibi_core.backend import AttentionCall
from alibi_core.backend.horizon import Job


class Biases:
    """The biases of jobs. Without masks and segments, they are Toeplitz and slices of one row per head."""

    def __init__(self, call: AttentionCall) -> None:
        self._call = call
        self._by_distance = call.mask is None and call.q_segment_ids is None
        self._last: tuple[Any, Any] = None, None  # cache of the last Toeplitz bias: (key, bias)

    def of(self, job: Job) -> tuple[mx.array, mx.array | None]:
        """Return a job's bias, ``[batch entries or 1, heads, rows, kv_len]``, and whether each query sees a key.

        The latter are booleans, ``[..., rows, 1]``; None if all queries see a key.
        """
        if not (self._by_distance and self._has_own_keys(job)):
            tile = self._call.tile(batch=job.batch, heads=job.heads, queries=job.queries, keys=job.keys)
            bias, attends = replace(tile, q_offset=self._q_positions(job)[..., 0]).bias()
            return _four_axes(bias), None if attends is None else _four_axes(attends)
        batch = slice(0, 1) if self._row.shape[0] == 1 else job.batch
        made_of = (batch, job.heads, job.rows, job.kv_len, job.back)
        if self._last[0] != made_of:
            # self._row starts with the bias of the first key for the call's last query; `part` starts with the bias of
            # the job's first key for the job's last query. [batch entries or 1, heads, rows + kv_len - 1]
            start = self._call.q_len - job.back - job.rows
            part = self._row[batch, job.heads, start : start + job.rows + job.kv_len - 1]
            self._last = made_of, _toeplitz(part, job.rows)
        return self._last[1], None

    def distances(self, job: Job) -> tuple[mx.array, mx.array | None]:
        """Return the distances of keys before the query and of keys after it: tokens, float32, 0 on the other side.

        If all keys are on one side, distances count from the nearest key. This changes no gradient, because the score
        gradients of a row sum to 0, and keeps float32 digits when all keys are far away.

        Both are ``[rows, kv_len]``, or ``[batch entries, 1, rows, kv_len]``; the second is None in causal calls.
        """
        queries, keys = self._q_positions(job), mx.arange(job.kv_len)
        ahead = keys - queries[..., None]
        sides = -ahead, ahead
        if not self._has_own_keys(job):
            # Clamp at 0 before the subtraction and after it: a difference of two large offsets could overflow int32.
            outside = mx.maximum(mx.maximum(-queries, queries - keys[-1]), 0)[..., None]
            sides = tuple(mx.maximum(x, 0) - outside for x in sides)
        past, future = (mx.maximum(x, 0).astype(mx.float32) for x in sides)
        if past.ndim > 2:
            past, future = past[:, None], future[:, None]
        return past, None if self._call.is_causal else future

    def _q_positions(self, job: Job) -> mx.array:
        """Return the query positions relative to the job's first key: ``[rows]`` or ``[batch entries, rows]``.

        They are arrays, not Python numbers: ``mx.compile`` writes Python numbers into its kernels' source, which would
        compile a new kernel for each tile and each length.
        """
        offset, start, stop = self._call.q_offset, job.back, job.back + job.rows
        if not self._call.has_offset_array:
            return mx.arange(offset + start, offset + stop)
        return (offset if offset.size == 1 else offset[job.batch])[..., None] + mx.arange(start, stop)

    @cached_property
    def _row(self) -> mx.array:
        """The bias by distance, from the farthest key before to the farthest after: ``[batch or 1, heads, width]``."""
        return _four_axes(self._call.bias_by_distance[..., None, :])[:, :, 0]

    def _has_own_keys(self, job: Job) -> bool:
        """Whether the job has each query's own key; False if offsets are an array."""
        if self._call.has_offset_array:
            return False
        back = job.back + self._call.q_offset
        return bool(back >= 0 and back + job.rows <= job.kv_len)


def _toeplitz(row: mx.array, rows: int) -> mx.array:
    """Return ``[..., rows, kv_len]``, each row the one above shifted right, from ``[..., rows + kv_len - 1]``."""
    *axes, width = row.shape
    if rows == 1:
        return row[..., None, :]
    # Concatenate copies and read them with a row length one shorter: each row starts one element earlier.
    # [..., rows * width] -> [..., rows, width - 1]
    copies = mx.broadcast_to(row[..., None, :], (*axes, rows, width)).reshape(*axes, rows * width)
    skewed = copies[..., rows - 1 : rows - 1 + rows * (width - 1)]
    return skewed.reshape(*axes, rows, width - 1)[..., : width + 1 - rows]


def _four_axes(array: mx.array) -> mx.array:
    return array.reshape((1,) * (4 - array.ndim) + array.shape)
