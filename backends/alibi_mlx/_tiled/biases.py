"""The biases of tiles, and the distances they are made of."""

from __future__ import annotations

from functools import cached_property

import mlx.core as mx

from alibi_core import AttentionCall
from alibi_core.backend import Job, relative_positions


class Biases:
    """The biases of jobs. Where they follow from distance alone they are one line a head, read at different places.

    A tile of such a bias is constant along its diagonals: each row is the one before it, shifted by one.
    """

    def __init__(self, call: AttentionCall) -> None:
        self._call = call
        self._by_distance = call.mask is None and call.q_segment_ids is None and not call.has_offset_array
        self._tiles: dict[tuple[int, ...], mx.array] = {}  # the last one made, under what it is made of

    def of(self, job: Job) -> tuple[mx.array, mx.array | None]:
        """Return a job's bias, ``[batch entries or 1, heads, rows, kv_len]``, and which queries see a key.

        The second are booleans, ``[..., rows, 1]``; None if all queries do.
        """
        if not self._is_toeplitz(job):
            tile = self._call.tile(batch=job.batch, heads=job.heads, queries=job.queries, keys=job.keys)
            bias, attends = tile.bias()
            return _four_axes(bias), None if attends is None else _four_axes(attends)
        back = job.back + self._call.q_offset
        of_each = self._line.shape[0] > 1  # batch entry; else one is for all
        batch = (job.batch.start, job.batch.stop) if of_each else (0, 1)
        made_of = (*batch, job.heads.start, job.heads.stop, job.rows, job.kv_len, back)
        if made_of not in self._tiles:
            self._tiles = {made_of: self._toeplitz(job, self._line[slice(*batch), job.heads], back)}
        return self._tiles[made_of], None

    def distances(self, job: Job) -> tuple[mx.array, mx.array | None]:
        """Return how far keys are before the query, and how far after it: tokens, float32, 0 on the other side.

        Where all are on one side, they are counted from the nearest: the gradients of a row's scores have the sum 0,
        and a large distance would take the digits of what they differ in.

        ``[rows, kv_len]``, or ``[batch entries, 1, rows, kv_len]``. The second is None where no key after is seen.
        """
        tile = self._call.tile(batch=job.batch, heads=job.heads, queries=job.queries, keys=job.keys)
        q_positions, kv_positions = tile.positions()
        ahead = relative_positions(tile.xp, q_positions, kv_positions)
        outside = mx.maximum(mx.maximum(-q_positions, q_positions - (tile.kv_len - 1)), 0)[..., None]
        if ahead.ndim > 2:
            ahead, outside = ahead[:, None], outside[:, None]
        # In two steps, for less than 0 counts as 0, and a difference of two offsets need not fit into int32.
        past, future = (mx.maximum(mx.maximum(x, 0) - outside, 0).astype(mx.float32) for x in (-ahead, ahead))
        return past, None if self._call.is_causal else future

    @cached_property
    def _line(self) -> mx.array:
        """The biases of keys by their distance, ``[batch or 1, heads, q_len + kv_len - 1]``."""
        return _four_axes(self._call.bias_by_distance[..., None, :])[:, :, 0]

    def _is_toeplitz(self, job: Job) -> bool:
        """Whether bias depends on distance alone, and each query's own key is among the job's, to count it from."""
        if not self._by_distance:
            return False
        back = job.back + self._call.q_offset
        return bool(back >= 0 and back + job.rows <= job.kv_len)

    def _toeplitz(self, job: Job, line: mx.array, back: int) -> mx.array:
        """Return the bias of a tile, ``back`` keys before its first query's own, from its heads' by distance."""
        # The first row's first key is `back` before its query, and the last row's `rows - 1` further.
        start = self._call.q_offset + self._call.q_len - back - job.rows
        width = job.rows + job.kv_len - 1
        line = line[..., start : start + width]
        if job.rows == 1:
            return line[:, :, None]
        # Of rows that follow one another, each one element less than a row later, row by row moves one to the right.
        copies = mx.broadcast_to(line[:, :, None], (*line.shape[:2], job.rows, width)).reshape(*line.shape[:2], -1)
        skewed = copies[..., job.rows - 1 : job.rows - 1 + job.rows * (width - 1)]
        return skewed.reshape(*line.shape[:2], job.rows, width - 1)[..., : job.kv_len]


def _four_axes(array: mx.array) -> mx.array:
    return array.reshape((1,) * (4 - array.ndim) + array.shape)
