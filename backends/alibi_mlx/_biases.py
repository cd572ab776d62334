"""The biases of tiles, and the distances they are made of."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import mlx.core as mx

from alibi_core.backend import AttentionCall
from alibi_core.backend.horizon import Job


class Biases:
    """The biases of jobs. Where distance alone decides, they are parts of one row a head."""

    def __init__(self, call: AttentionCall) -> None:
        self._call = call
        self._by_distance = call.mask is None and call.q_segment_ids is None
        self._last: tuple[Any, Any] = None, None  # the last bias by distance, behind what it was made of

    def of(self, job: Job) -> tuple[mx.array, mx.array | None]:
        """Return a job's bias, ``[batch entries or 1, heads, rows, kv_len]``, and which queries see a key.

        The second are booleans, ``[..., rows, 1]``; None if all queries do.
        """
        if not (self._by_distance and self._has_own_keys(job)):
            tile = self._call.tile(batch=job.batch, heads=job.heads, queries=job.queries, keys=job.keys)
            bias, attends = replace(tile, q_offset=self._q_positions(job)[..., 0]).bias()
            return _four_axes(bias), None if attends is None else _four_axes(attends)
        batch = slice(0, 1) if self._row.shape[0] == 1 else job.batch
        made_of = (batch, job.heads, job.rows, job.kv_len, job.back)
        if self._last[0] != made_of:
            # The row begins with the first key seen from the last query, this part with the job's own two.
            start = self._call.q_len - job.back - job.rows
            part = self._row[batch, job.heads, start : start + job.rows + job.kv_len - 1]
            self._last = made_of, _toeplitz(part, job.rows)
        return self._last[1], None

    def distances(self, job: Job) -> tuple[mx.array, mx.array | None]:
        """Return how far keys are before the query, and how far after it: tokens, float32, 0 on the other side.

        Where all are on one side, they are counted from the nearest: the gradients of a row's scores have the sum 0,
        and a large distance would take the digits of what they differ in.

        ``[rows, kv_len]``, or ``[batch entries, 1, rows, kv_len]``. The second is None where no key after is seen.
        """
        queries, keys = self._q_positions(job), mx.arange(job.kv_len)
        ahead = keys - queries[..., None]
        sides = -ahead, ahead
        if not self._has_own_keys(job):
            # In two steps, for less than 0 counts as 0, and a difference of two offsets need not fit into int32.
            outside = mx.maximum(mx.maximum(-queries, queries - keys[-1]), 0)[..., None]
            sides = tuple(mx.maximum(x, 0) - outside for x in sides)
        past, future = (mx.maximum(x, 0).astype(mx.float32) for x in sides)
        if past.ndim > 2:
            past, future = past[:, None], future[:, None]
        return past, None if self._call.is_causal else future

    def _q_positions(self, job: Job) -> mx.array:
        """Return the positions of a job's queries, counted from its first key: ``[rows]`` or ``[batch entries, rows]``.

        They never enter as Python numbers: ``mx.compile`` writes those into the source of its kernels, which would be
        new ones for each tile and each length.
        """
        offset, start, stop = self._call.q_offset, job.back, job.back + job.rows
        if not self._call.has_offset_array:
            return mx.arange(offset + start, offset + stop)
        return (offset if offset.size == 1 else offset[job.batch])[..., None] + mx.arange(start, stop)

    @cached_property
    def _row(self) -> mx.array:
        """The biases of keys by their distance, ``[batch or 1, heads, q_len + kv_len - 1]``."""
        return _four_axes(self._call.bias_by_distance[..., None, :])[:, :, 0]

    def _has_own_keys(self, job: Job) -> bool:
        """Whether each query's own key is known to be among a job's."""
        if self._call.has_offset_array:
            return False
        back = job.back + self._call.q_offset
        return bool(back >= 0 and back + job.rows <= job.kv_len)


def _toeplitz(row: mx.array, rows: int) -> mx.array:
    """Return ``[..., rows, kv_len]``, each row the one above shifted right, from ``[..., rows + kv_len - 1]``."""
    *axes, width = row.shape
    if rows == 1:
        return row[..., None, :]
    # Copies end to end, read one element less at a time: [..., rows * width] -> [..., rows, width - 1].
    copies = mx.broadcast_to(row[..., None, :], (*axes, rows, width)).reshape(*axes, rows * width)
    skewed = copies[..., rows - 1 : rows - 1 + rows * (width - 1)]
    return skewed.reshape(*axes, rows, width - 1)[..., : width + 1 - rows]


def _four_axes(array: mx.array) -> mx.array:
    return array.reshape((1,) * (4 - array.ndim) + array.shape)
