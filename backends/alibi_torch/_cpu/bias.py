"""The bias of a rectangle of scores: a Toeplitz view of one row per head, or dense where a mask or segment cuts it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from alibi_core.backend import AttentionCall, GateTotals, penalty
from alibi_core.backend.horizon import Job


class Bias(NamedTuple):
    """The bias of a rectangle."""

    values: Tensor  # [batch entries or 1, heads, rows, kv_len]
    is_reversed: bool = False  # True: the first row belongs to the last query
    attends: Tensor | None = None  # [..., rows, 1], False for a query that sees no key; None if every query sees one

    def in_order(self, tensor: Tensor) -> Tensor:
        """Return ``[batch, heads, rows, ...]``, its rows flipped if the bias is reversed; applied twice, it undoes."""
        return tensor.flip(2) if self.is_reversed else tensor

    def without_blind(self, result: Tensor, logsumexp: Tensor) -> tuple[Tensor, Tensor]:
        """Return both, in the order of queries, with 0 and inf for queries that see no key."""
        if self.attends is None:
            return result, logsumexp
        return torch.where(self.attends, result, 0.0), torch.where(self.attends[..., 0], logsumexp, math.inf)


@dataclass(frozen=True)
class DistanceRow:
    """The bias as a function of distance: one row per head, from the farthest key before a query to the farthest after.

    Keys whose bias is lower than the largest bias of the query plus ``cutoff`` (``[num_heads]``, negative) are masked:
    their weights would be denormal numbers, which take a CPU a hundred times as long.
    """

    call: AttentionCall
    back: int  # index of distance 0 in the row
    values: Tensor  # [batch or 1, num_heads, back + ahead]
    cutoff: Tensor | None
    side: int = 0  # 1: only keys up to the query are visible; -1: only keys after it; 0: both

    @classmethod
    def of(cls, call: AttentionCall, jobs: Sequence[Job], cutoff: Tensor | None) -> DistanceRow:
        """Return a row that is long enough for these rectangles."""
        sizes = [(job.back + call.q_offset, job.rows, job.kv_len) for job in jobs if _has_own_keys(call, job)]
        back = max((back + rows - 1 for back, rows, _ in sizes), default=0)
        ahead = max((kv_len - back for back, _, kv_len in sizes), default=1)
        values = distance_row(call, back, ahead)
        if cutoff is not None:
            values.masked_fill_(values < cutoff[:, None], -math.inf)
        return cls(call, back, values, cutoff)

    def sides(self) -> list[tuple[DistanceRow, int]]:
        """Return the biases of the keys up to a query (sign 1) and, unless causal, of the keys after it (sign -1)."""
        if self.call.is_causal:
            return [(self, 1)]
        relative = torch.arange(self.values.shape[-1], device=self.call.device) - self.back
        return [(replace(self, values=_one_side(self.values, relative, x), side=x), x) for x in (1, -1)]

    def bias_of(self, job: Job) -> Bias:
        """Return the bias of a rectangle."""
        call, visible = self.call, None
        # Jobs with several tiles have no masked keys.
        if job.tiles == 1 and (call.mask is not None or call.q_segment_ids is not None):
            part = call.tile(batch=job.batch, heads=job.heads, queries=job.queries, keys=job.keys)
            visible = replace(part, is_causal=False, window_size=None).visible(None)
            if visible is not None and not visible.all():
                return self._dense(part, job)
        back = job.back + call.q_offset
        if _has_own_keys(call, job):
            # Index where the last query's biases start: it has the most keys before it.
            first = self.back - back - job.rows + 1
            entries = job.batch if len(self.values) > 1 else slice(None)
            row = self.values[entries, job.heads, first : first + job.kv_len + job.rows - 1]
            # Toeplitz view, [batch or 1, heads, rows, kv_len]: row i + 1 is row i shifted by one key.
            view = row.unfold(-1, job.kv_len, 1)
            # A flip copies: the bias has kv_len numbers in each row, the queries and results of all entries these.
            others = 2 * call.head_dim * (job.batch.stop - job.batch.start)
            if job.tiles == 1 < job.rows <= job.kv_len <= others:
                return Bias(view.flip(2))
            return Bias(view, is_reversed=job.rows > 1)
        part = call.tile(batch=job.batch, heads=job.heads, queries=job.queries, keys=job.keys)
        if call.window_size is None and call.is_linear and call.sinks is None and back >= job.kv_len - 1:
            # All queries are after all keys. A constant per row cancels in softmax, so all rows may use the last
            # key's position as their origin.
            row = distance_row(part, job.kv_len - 1, 1)
            return Bias(row[:, :, None].expand(-1, -1, job.rows, -1))
        return self._dense(replace(part, mask=None, q_segment_ids=None, kv_segment_ids=None), job)

    def _dense(self, part: AttentionCall, job: Job) -> Bias:
        found = dense_bias(part)
        bias = found.values
        if self.cutoff is not None:
            lowest = bias.amax(dim=-1, keepdim=True) + self.cutoff[job.heads, None, None]
            bias.masked_fill_(bias < lowest, -math.inf)
        if self.side:
            queries, keys = part.positions()
            bias = _one_side(bias, keys - queries[:, None], self.side)
        return found._replace(values=bias)


@dataclass(frozen=True)
class GatedBias:
    """The bias of forget gates: dense in memory, but formed from sums of gates, not key by key."""

    call: AttentionCall  # without slopes, which are part of the gates
    totals: GateTotals | None  # None where the call's rules are not those of a causal row alone
    has_closed: bool = False

    @classmethod
    def of(cls, call: AttentionCall) -> GatedBias:
        """Return the bias of a call with an int offset and gates of all batch entries."""
        if call.mask is not None or call.q_segment_ids is not None or call.window_size is not None:
            return cls(call, None)
        totals = GateTotals.of(call.xp, call.log_gates)
        return cls(call, totals, bool(totals.closed[..., -1].any()))

    def bias_of(self, job: Job) -> Bias:
        """Return the bias of a rectangle."""
        if self.totals is None:
            return dense_bias(self.call.tile(batch=job.batch, heads=job.heads, queries=job.queries, keys=job.keys))
        places = torch.arange(job.q_start, job.q_start + job.rows, device=self.call.device) + self.call.q_offset
        rows = places.clamp(0, self.call.kv_len - 1)
        first = int(rows[0])  # keys up to this one are visible to all queries
        shared = min(max(first + 1 - job.kv_start, 0), job.kv_len)
        # [batch entries, heads, kv_len] and [batch entries, heads, rows]
        (keys, queries), (key_rests, query_rests), (closed, closed_rows) = (
            (x[job.batch, job.heads, job.keys], x[job.batch, job.heads, rows]) for x in self.totals
        )
        values = keys.new_empty((*queries.shape, job.kv_len))
        # Sums up to the first query, and from there to each: both have one sign, so their sum has all digits.
        to_first = keys[..., :shared] - queries[..., :1] + (key_rests[..., :shared] - query_rests[..., :1])
        from_first = queries[..., :1] - queries + (query_rests[..., :1] - query_rests)
        torch.add(from_first[..., None], to_first[..., None, :], out=values[..., :shared])
        later = keys[..., None, shared:] - queries[..., None]
        later += key_rests[..., None, shared:] - query_rests[..., None]
        is_future = (
            torch.arange(job.kv_start + shared, job.kv_start + job.kv_len, device=self.call.device) > places[:, None]
        )
        values[..., shared:] = later.masked_fill_(is_future, -math.inf)
        if self.has_closed:
            values.masked_fill_(closed[..., None, :] != closed_rows[..., None], -math.inf)
        attends = None if self.call.q_offset + job.q_start >= 0 else (places >= 0)[:, None]
        return Bias(values if attends is None else values.where(attends, 0.0), attends=attends)


def dense_bias(part: AttentionCall) -> Bias:
    """Return the bias of a rectangle's call, ``[batch or 1, heads or 1, rows, kv_len]``."""
    bias, attends = (None if x is None else x.reshape((1,) * (4 - x.ndim) + x.shape) for x in part.bias())
    return Bias(bias, attends=None if attends is None or bool(attends.all()) else attends)


def _one_side(bias: Tensor, relative: Tensor, side: int) -> Tensor:
    """Return the bias with keys on the other side masked; ``relative`` is key position minus query position."""
    return bias.masked_fill(relative > 0 if side > 0 else relative <= 0, -math.inf)


def distance_row(call: AttentionCall, back: int, ahead: int) -> Tensor:
    """Return the bias of keys from ``back`` tokens before a query to ``ahead - 1`` after it, -inf where masked.

    The result is ``[batch or 1, num_heads, back + ahead]``, newly allocated. Only causality and the window mask keys.
    """
    relative = torch.arange(-back, ahead, device=call.device).to(call.working_dtype)
    rates = call.slopes[..., None]
    if call.future_slopes is not None:
        rates = torch.where(relative > 0, call.future_slopes[..., None], rates)
    row = rates * -penalty(call.xp, relative.abs(), call.law)
    if call.is_causal and ahead > 1:
        row[..., back + 1 :] = -math.inf
    if call.window_size is not None:
        row[..., : max(0, back - call.window_size)] = -math.inf
        row[..., back + call.window_size + 1 :] = -math.inf
    return row if row.ndim == 3 else row[None]


def _has_own_keys(call: AttentionCall, job: Job) -> bool:
    """Whether the rectangle has, for each query, the key at the query's own position (distance 0)."""
    back = job.back + call.q_offset
    return back >= 0 and back + job.rows <= job.kv_len
