"""The biases of jobs, and the distances for the gradients of slopes."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import mlx.core as mx

from alibi_core.backend import AttentionCall, with_sinks
from alibi_core.backend.horizon import Job


class Biases:
    """The biases of jobs. Without masks, segments, points and gates, they are Toeplitz: slices of one row per head."""

    def __init__(self, call: AttentionCall) -> None:
        self._call = call
        self._by_index = call.mask is None and call.q_segment_ids is None and call.q_points is None
        self._last: tuple[Any, Any] = None, None  # cache of the last Toeplitz bias: (key, bias)

    def of(self, job: Job) -> tuple[mx.array, mx.array | None]:
        """Return a job's bias, ``[batch entries or 1, heads, rows, kv_len]``, and whether each query sees a key.

        The latter are booleans, ``[..., rows, 1]``; None if all queries see a key.
        """
        if not (self._by_index and self._has_own_keys(job)):
            return self._masked(job)
        batch = slice(0, 1) if self._row.shape[0] == 1 else job.batch
        made_of = (batch, job.heads, job.rows, job.kv_len, job.back)
        if self._last[0] != made_of:
            # self._row starts with the bias of the first key for the call's last query; `part` starts with the bias of
            # the job's first key for the job's last query. [batch entries or 1, heads, rows + kv_len - 1]
            start = self._call.q_len - job.back - job.rows
            part = self._row[batch, job.heads, start : start + job.rows + job.kv_len - 1]
            self._last = made_of, _toeplitz(part, job.rows)
        return self._last[1] if self._call.log_gates is None else self._last[1] + self._gates(job), None

    def _masked(self, job: Job) -> tuple[mx.array, mx.array | None]:
        """Return the bias of a job, and whether each query sees a key, where a mask or an offset may hide own keys."""
        tile = self._tile(job)
        terms = tile.bias_terms()
        bias, attends = replace(tile, log_gates=None).bias(terms)
        if tile.log_gates is not None and terms.origins is not None:
            gates = tile.log_gates[..., None, :]
            # [batch entries, heads, rows, kv_len]; the mask holds what closed gates hide
            is_counted = mx.logical_and(mx.arange(job.kv_len) <= terms.origins[..., None], gates > -mx.inf)
            bias = bias + _sums(mx.where(is_counted, gates, 0.0), axis=-1, reverse=True, inclusive=False)
        return _four_axes(bias), None if attends is None else _four_axes(attends)

    def _gates(self, job: Job) -> mx.array:
        """Return the sums of gates for a job whose queries see their own keys; any number for keys after a query."""
        past = job.back + self._call.q_offset
        gates = self._tile(job).log_gates[..., None, :]  # [batch entries, heads, 1, kv_len]
        # Of the keys before all queries, up to the first query: [batch entries, heads, 1, past]
        row = _sums(gates[..., 1 : past + 1], axis=-1, reverse=True)
        # Of the other keys, a query adds its gate to the sums of the query before: [..., rows, kv_len - past]
        is_later = mx.arange(job.rows)[:, None] > mx.arange(job.kv_len - past)
        by_query = gates[..., past : past + job.rows].swapaxes(-1, -2)
        square = _sums(mx.where(is_later, by_query, 0.0), axis=-2)
        return mx.concatenate([row + square[..., :1], square], axis=-1)

    def with_sinks(self, job: Job, scores: mx.array) -> mx.array:
        """Return scores of a job, or their bias, with a last column of sinks if there are some."""
        return scores if self._call.sinks is None else with_sinks(mx, scores, self._tile(job).sinks[..., None])

    def with_own_key(self, job: Job, by_score: mx.array, by_sink: mx.array) -> mx.array:
        """Return score gradients, that of a query's sink added to the query's own key: rows then sum to 0."""
        if self._call.sinks is None:
            return by_score
        queries, keys = self._tile(job).positions()
        is_own = queries[..., :, None] == keys  # [rows, kv_len] or [batch entries, rows, kv_len]
        return by_score + mx.where(is_own if is_own.ndim == 2 else is_own[:, None], by_sink, 0)

    def distances(self, job: Job) -> list[mx.array]:
        """Return the penalties that slopes multiply, and, if there are future slopes, those that these multiply.

        Penalties are float32 and broadcast to ``[batch entries, heads, rows, kv_len]``. They count from a query's
        nearest visible key where the bias does. This changes no gradient, because the score gradients of a row sum to
        0, and keeps float32 digits when all keys are far away. At masked keys, whose score gradients are 0, they mean
        nothing.
        """
        terms = replace(self._tile(job), log_gates=None).bias_terms()
        penalties = -_four_axes(terms.unit_bias)
        if self._call.future_slopes is None:
            return [penalties]
        is_ahead = _four_axes(terms.relative) > 0
        return [mx.where(is_ahead, 0, penalties), mx.where(is_ahead, penalties, 0)]

    def _tile(self, job: Job) -> AttentionCall:
        """Return the call restricted to a job."""
        tile = self._call.tile(batch=job.batch, heads=job.heads, queries=job.queries, keys=job.keys)
        if tile.q_points is not None:
            return tile
        # The offset is an array, not a Python number: mx.compile writes Python numbers into its kernels' source, which
        # would compile a new kernel for each tile and each length.
        given, is_array = self._call.q_offset, self._call.has_offset_array
        first = job.back if is_array else job.back + given
        q_offset = mx.arange(first, first + 1)
        if is_array:
            q_offset = (given if given.size == 1 else given[job.batch]) + q_offset
        return replace(tile, q_offset=q_offset)

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


def _sums(gates: mx.array, **how: Any) -> mx.array:
    """Return running sums, as ``mx.cumsum``. Float32 alone would lose the digits of thousands of small gates."""
    cpu = {"stream": mx.cpu}  # the device that has float64
    return mx.cumsum(gates.astype(mx.float64, **cpu), **how, **cpu).astype(mx.float32, **cpu)


def _four_axes(array: mx.array) -> mx.array:
    return array.reshape((1,) * (4 - array.ndim) + array.shape)
