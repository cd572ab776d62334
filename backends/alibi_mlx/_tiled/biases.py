"""The biases of tiles, and the distances they are made of."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import Any

import mlx.core as mx

from alibi_core.backend import AttentionCall, Job


class Biases:
    """The biases of jobs. Where they follow from distance alone they are one line a head, read at different places.

    A tile of such a bias is constant along its diagonals: each row is the one before it, shifted by one.
    """

    def __init__(self, call: AttentionCall) -> None:
        self._call = call
        self._by_distance = call.mask is None and call.q_segment_ids is None
        self._tiles: dict[tuple[int, ...], mx.array] = {}  # the last one made, under what it is made of

    def of(self, job: Job) -> tuple[mx.array, mx.array | None]:
        """Return a job's bias, ``[batch entries or 1, heads, rows, kv_len]``, and which queries see a key.

        The second are booleans, ``[..., rows, 1]``; None if all queries do.
        """
        if not (self._by_distance and self._has_own_keys(job)):
            tile = self._call.tile(batch=job.batch, heads=job.heads, queries=job.queries, keys=job.keys)
            bias, attends = replace(tile, q_offset=self._q_positions(job)[..., 0]).bias()
            return _four_axes(bias), None if attends is None else _four_axes(attends)
        back = job.back + self._call.q_offset
        of_each = self._line.shape[0] > 1  # batch entry; else one is for all
        batch = (job.batch.start, job.batch.stop) if of_each else (0, 1)
        made_of = (*batch, job.heads.start, job.heads.stop, job.rows, job.kv_len, back)
        if made_of not in self._tiles:
            part = _part_of_line(self._farthest, job, back)
            self._tiles = {made_of: _toeplitz(self._line[slice(*batch), job.heads, part], job.rows)}
        return self._tiles[made_of], None

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
    def _line(self) -> mx.array:
        """The biases of keys by their distance, from the farthest past on, ``[batch or 1, heads, distances]``."""
        return _line_of(self._call, self._farthest, self._call.kv_len - 1 - max(self._call.q_offset, 0))

    @property
    def _farthest(self) -> int:
        """How far a key is at most before a query that has a key at its own position."""
        return min(self._call.q_offset + self._call.q_len, self._call.kv_len) - 1

    def _has_own_keys(self, job: Job) -> bool:
        """Whether each query's own key is known to be among a job's."""
        if self._call.has_offset_array:
            return False
        back = job.back + self._call.q_offset
        return bool(back >= 0 and back + job.rows <= job.kv_len)


def _line_of(call: AttentionCall, past: int, after: int) -> Any:
    """Return the biases of keys by their distance, from ``past`` tokens before the query to ``after`` tokens after it.

    ``[batch or 1, heads, distances]``, in the library of the call.
    """
    # Of one query at 0, whose keys before it are those after it, seen in a mirror: no length is in its numbers.
    one = {"q_len": 1, "q_offset": 0, "is_causal": False}
    slopes = {"slopes": call.slopes, "future_slopes": call.future_slopes}
    if call.future_slopes is not None:
        slopes = dict(zip(slopes, call.xp.broadcast_arrays(*slopes.values()), strict=True))
    line = replace(call, **one, **slopes | {"future_slopes": None, "kv_len": past + 1}).bias_by_distance[..., ::-1]
    if after > 0 and call.is_causal:
        hidden = call.xp.full((*line.shape[:-1], after), -math.inf, dtype=line.dtype)
        line = call.xp.concatenate([line, hidden], axis=-1)
    elif after > 0:
        future = replace(call, **one, **slopes, kv_len=after + 1).bias_by_distance
        line = call.xp.concatenate([line, future[..., 1:]], axis=-1)
    return _four_axes(line[..., None, :])[:, :, 0]


def _part_of_line(farthest: int, job: Job, back: int) -> slice:
    """Return the part of a line, from ``farthest`` on, that a job's rows see."""
    # The first row's first key is `back` before its query, and the last row's `rows - 1` further.
    start = farthest + 1 - back - job.rows
    return slice(start, start + job.rows + job.kv_len - 1)


def _toeplitz(line: mx.array, rows: int) -> mx.array:
    """Return a bias of so many rows from the part of the line that these see."""
    if rows == 1:
        return line[:, :, None]
    # Of rows that follow one another, each one element less than a row later, row by row moves one to the right.
    *axes, width = line.shape
    copies = mx.broadcast_to(line[:, :, None], (*axes, rows, width)).reshape(*axes, rows * width)
    skewed = copies[..., rows - 1 : rows - 1 + rows * (width - 1)]
    return skewed.reshape(*axes, rows, width - 1)[..., : width + 1 - rows]


def _four_axes(array: Any) -> Any:
    return array.reshape((1,) * (4 - array.ndim) + array.shape)
