"""The division of attention into tiles, and the scores of a tile of queries with a block of keys.

Every array has the axes (batch, key/value head, query head of its group, query, key): ``[b, h, g, q, k]``; query, key
and value have features, ``d``, as a sixth axis. Axes of length 1 broadcast, so all arrays are sliced the same way.

A *job* is one tile of queries, of one head or several, with the blocks of keys that it needs. A *step* of the loop runs
either several jobs of one head each, as *lanes* along the batch axis, or one job of all batch entries and heads.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from alibi_core.backend import exact_sum, finite_gates, gate_sums, relative_points, suffix_sums, unit_bias_of
from alibi_jax._call import Operands, lowest_scores
from alibi_jax._compatible import materialised
from alibi_jax._plan import needed_keys

ROWS = 256  # A tile has at most this many queries times heads of a group.
KEYS = 384  # A block has at most this many keys.
FEW_QUERIES = 16  # Up to this many queries, the overhead of an iteration dominates, so blocks have KEYS_OF_FEW keys.
KEYS_OF_FEW = 1024
LANES = 4  # A step runs this many jobs: XLA uses one core for a single matrix product, several for a batch of them.
SCORES = 2**20  # Short sequences share a step up to about this many scores.
SIDES, SCORES_OF_ALL = (1024, 512, 256), 2**25  # A tile with all heads has sides of the first size within this limit.
PIECE = 16  # Tiles are a multiple of this many tokens, unless one tile has all tokens.
ALL_AXES, AXES_OF_KEYS = (0, 1, 2, 3, 4), (0, 1, 4)
PLAN_KEYS = 64  # The plan keeps or skips keys in blocks of this many.


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call's tiles, from its shapes alone. Axes as in this module's docstring."""

    whole: tuple[int, ...]  # the sizes of the call
    tile: tuple[int, ...]  # the sizes of one job; along keys, of one block
    lanes: int  # jobs per step

    @classmethod
    def of(cls, operands: Operands, all_heads: bool) -> Sizes:
        """Choose the tile sizes for a call."""
        batch, num_heads, q_len, _ = operands.query.shape
        num_kv_heads, kv_len = operands.key.shape[1:3]
        group = num_heads // num_kv_heads
        rows, keys = _even(q_len, ROWS), _even(kv_len, KEYS_OF_FEW if q_len <= FEW_QUERIES else KEYS)
        whole = batch, num_kv_heads, group, q_len, kv_len
        if not isinstance(batch, int):  # jax.export with a symbolic batch size
            return cls(whole, (batch, num_kv_heads, group, rows, keys), 1)
        if all_heads:  # a GPU is idle unless a step is large
            side = next((x for x in SIDES if batch * num_heads * x * x <= SCORES_OF_ALL), SIDES[-1])
            rows, keys = _even(q_len, side), _even(kv_len, KEYS_OF_FEW if q_len <= FEW_QUERIES else side)
            return cls(whole, (batch, num_kv_heads, group, rows, keys), 1)
        if (rows, keys) == (q_len, kv_len):  # one tile: several sequences share a step
            entries = _divisor(batch, SCORES // (num_heads * q_len * kv_len))
            return cls(whole, (entries, num_kv_heads, group, q_len, kv_len), 1)
        # Short tiles take several heads of a group, which share keys.
        heads = _divisor(group, ROWS // rows)
        jobs = batch * num_kv_heads * (group // heads) * -(-q_len // rows)
        return cls(whole, (1, 1, heads, rows, keys), min(LANES, jobs))

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of jobs along batch, key/value heads, groups and queries."""
        return tuple(-(-n // size) for n, size in zip(self.whole[:4], self.tile, strict=False))


def _even(length: int, most: int) -> int:
    """Return a tile size of at most ``most`` that divides a length about evenly."""
    size = -(-length // -(-length // most))
    return min(length, most, -(-size // PIECE) * PIECE)


def _divisor(number: int, most: int) -> int:
    """Return the largest divisor of ``number`` that is at most ``most``, or 1."""
    return max(n for n in range(1, number + 1) if number % n == 0 and n <= max(1, most))


class Jobs(NamedTuple):
    """All jobs of a call, int32 ``[steps, lanes]``; jobs of a step have similar numbers of keys."""

    index: jax.Array  # flat index in Sizes.grid
    first: jax.Array  # first key
    stop: jax.Array  # the key after the last


def _jobs(operands: Operands, sizes: Sizes) -> Jobs:
    """Return the jobs with the keys that each needs, computed on the device."""
    count = math.prod(sizes.grid)
    index = jnp.arange(count, dtype=jnp.int32)
    first, stop = jnp.zeros_like(index), jnp.full_like(index, sizes.whole[4])
    # With several blocks of keys some may be skipped; points may have any key anywhere.
    if sizes.tile[4] < sizes.whole[4] and operands.call.q_points is None:
        needed = needed_keys(operands, sizes.tile[3], PLAN_KEYS)  # [batch, num_heads, tiles]
        is_needed = needed.first < needed.stop
        # Split batch, key/value heads and groups into two axes each: jobs, and entries within a job. Then take the
        # union of the entries' ranges: [jobs].
        shape = [n for whole, part in zip(sizes.whole[:3], sizes.tile, strict=False) for n in (whole // part, part)]
        first = jnp.where(is_needed, needed.first, sizes.whole[4]).reshape(*shape, -1).min(axis=(1, 3, 5)).ravel()
        stop = jnp.where(is_needed, needed.stop, 0).reshape(*shape, -1).max(axis=(1, 3, 5)).ravel()
    if sizes.lanes > 1:  # a step takes as long as its longest lane: sort jobs by their number of keys
        index = jnp.argsort(first - stop).astype(jnp.int32)
        first, stop = first[index], stop[index]
    # Pad at the front with jobs that have no keys. Their index 0 is overwritten by the real job 0, which comes later.
    idle = -count % sizes.lanes
    return Jobs(*(jnp.pad(x, (idle, 0)).reshape(-1, sizes.lanes) for x in (index, first, stop)))


Starts = tuple[jax.Array, ...]  # for each axis, the start of each lane: int32 [lanes]


class Rows(NamedTuple):
    """The queries of a step."""

    starts: Starts
    first: jax.Array  # [lanes, 1, 1, 1, 1]: the first key that each job needs
    stop: jax.Array  # [lanes, 1, 1, 1, 1]: the key after the last
    blocks: jax.Array  # []: the largest number of key blocks of a job
    query: jax.Array  # [b, h, g * q, d], working dtype
    slopes: jax.Array  # [b or 1, h, g, 1, 1]
    future_slopes: jax.Array | None  # as slopes
    positions: jax.Array  # [b or 1, 1, 1, q, 1]
    points: jax.Array | None  # [b or 1, 1, 1, q, dims]
    ids: jax.Array | None  # [b or 1, 1, 1, q, 1]
    nearest: jax.Array  # distance of the nearest visible key, which is subtracted from the distances of a row
    # With gates, else None:
    origin: jax.Array | None  # [b or 1, h or 1, g or 1, q, 1]: the key from which each query counts gates
    closed: jax.Array | None  # [b, h, g, q, 1]: the last closed gate up to each query hides all keys before it
    passed: tuple[jax.Array, jax.Array] | None  # [b, h, g, q, 1]: zeros, the Block.passed of the first block


class Block(NamedTuple):
    """A block of keys, and its scores with the queries of a step."""

    starts: Starts
    key: jax.Array  # [b, h, k, d], working dtype
    value: jax.Array  # [b, h, k, d]
    scores: jax.Array  # [b, h, g, q, k]; -inf where a key is masked
    unit_bias: jax.Array  # [b, h or 1, g or 1, q, k]: the factor of slopes, nearest distance of the row minus distance
    is_ahead: jax.Array  # True if the key is after the query
    passed: tuple[jax.Array, jax.Array] | None  # the sums of gates from this block on, as numbers and rests


class Tiles:
    """The arrays of a call with common axes, and functions that slice them for a step."""

    def __init__(self, operands: Operands, all_heads: bool) -> None:
        """Reshape all arrays to the same axes, and plan the jobs."""
        call, sizes = operands.call, Sizes.of(operands, all_heads)
        num_kv_heads, group = sizes.whole[1:3]
        self.call, self.sizes, self.dtype = call, sizes, call.working_dtype
        self.blind, self.overflown = lowest_scores(self.dtype)
        self.q_len = sizes.grid[3] * sizes.tile[3]  # padded to whole tiles
        self.has_other_keys = operands.other_keys is not None
        self.jobs = _jobs(operands, sizes)
        self.query = self.of_queries(operands.query)
        # Slice before reshaping: XLA would copy a reshaped argument into the loop, an entire cache per step.
        self.key, self.value = operands[1:3]  # [batch, h, kv_len, d]
        self.slopes, self.future_slopes = (
            None if x is None else x.reshape(-1, num_kv_heads, group, 1, 1) for x in (call.slopes, call.future_slopes)
        )
        self.q_offset = call.q_offset.reshape(-1, 1, 1, 1, 1) if call.has_offset_array else call.q_offset
        self.q_ids = self.kv_ids = self.mask = self.q_points = self.kv_points = None
        if call.q_points is not None:  # [b or 1, 1, 1, q, 1, dims] and [b or 1, 1, 1, 1, k, dims]
            self.q_points = self._padded(call.q_points[:, None, None, :, None])
            self.kv_points = call.kv_points[:, None, None, None]
        if call.q_segment_ids is not None:
            self.q_ids = self._padded(call.q_segment_ids[:, None, None, :, None])
            self.kv_ids = call.kv_segment_ids[:, None, None, None]
        if call.mask is not None:
            heads = (1, 1) if call.mask.shape[1] == 1 else (num_kv_heads, group)
            mask = call.mask.reshape(-1, *heads, *call.mask.shape[2:])
            self.mask = mask if mask.shape[3] == 1 else self._padded(mask)
        self.gates = self.later_gates = self.closed = None
        if call.log_gates is not None:
            gates = call.log_gates.reshape(-1, num_kv_heads, group, 1, call.kv_len)
            # The last closed gate up to each key, then up to each query, whose places are [b or 1, 1, 1, q].
            closed = lax.cummax(jnp.where(gates == -jnp.inf, jnp.arange(call.kv_len, dtype=jnp.int32), 0), axis=4)
            places = jnp.clip(call.positions()[0], 0, call.kv_len - 1).reshape(-1, 1, 1, call.q_len)
            self.closed = self._padded(jnp.take_along_axis(closed[:, :, :, 0], places, axis=3, mode="clip")[..., None])
            self.gates = finite_gates(jnp, gates)
            # The sums of the gates after each key, up to the end of its block: [batch, h, g, 1, k]
            size, count = sizes.tile[4], -(-call.kv_len // sizes.tile[4])
            blocks = jnp.pad(self.gates, [(0, 0)] * 4 + [(0, count * size - call.kv_len)])
            sums = suffix_sums(jnp, blocks.reshape(*gates.shape[:4], count, size))[0]
            sums = jnp.pad(sums[..., 1:], [(0, 0)] * 5 + [(0, 1)])
            self.later_gates = sums.reshape(*gates.shape[:4], count * size)[..., : call.kv_len]
        has_rules = call.mask is not None or call.q_segment_ids is not None or call.q_points is not None
        # True if the nearest key depends on a mask, segments or points, so that _nearest_keys must search for it.
        self.has_hidden_keys = has_rules and not (self.has_other_keys or call.sees_own_key)

    def of_queries(self, array: jax.Array, fill: float = 0) -> jax.Array:
        """Return ``[batch, num_heads, q_len, ...]`` with this module's axes, padded to whole tiles."""
        return self._padded(array.reshape(*self.sizes.whole[:4], 1, *array.shape[3:]), fill)

    def of_heads(self, array: jax.Array) -> jax.Array:
        """Return an array with this module's axes as ``[batch, num_heads, q_len, ...]``, without padding."""
        array = array[:, :, :, : self.sizes.whole[3], 0]
        return array.reshape(array.shape[0], -1, *array.shape[3:])

    def _padded(self, array: jax.Array, fill: float = 0) -> jax.Array:
        missing = self.q_len - self.sizes.whole[3]
        widths = [(0, missing if axis == 3 else 0) for axis in range(array.ndim)]
        return jnp.pad(array, widths, constant_values=fill) if missing else array

    def cut(self, array: Any, starts: Starts, axes: tuple[int, ...] = ALL_AXES) -> Any:
        """Return a step's slices of an array, its lanes along the batch axis; None for None.

        Axes that a job covers entirely are not sliced: they may be sharded among devices. ``axes`` says which of this
        module's axes the array has, before its features.
        """
        if array is None:
            return None
        sizes = self._part(array, axes)
        if sizes != array.shape or self.sizes.lanes > 1:
            if array.dtype.itemsize == 2:
                # XLA on CPUs would hoist the cast to float32 of the entire array out of the loop. The barrier makes the
                # array depend on the loop's index.
                array, starts = lax.optimization_barrier((array, starts))
            parts = [
                lax.dynamic_slice(array, self._begin(array, starts, i, axes), sizes) for i in range(self.sizes.lanes)
            ]
            array = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
        return materialised(array) if array.ndim > len(axes) else array

    def put(self, array: jax.Array, parts: jax.Array, starts: Starts, *, add: bool = False) -> jax.Array:
        """Write the slices of a step's lanes into an array, or add them to it."""
        sizes = self._part(array)

        def put_lane(lane: Any, array: jax.Array) -> jax.Array:
            begin = self._begin(array, starts, lane)
            part = parts
            if self.sizes.lanes > 1:
                part = lax.dynamic_slice_in_dim(parts, lane, 1)
            part = part.reshape(sizes).astype(array.dtype)
            return lax.dynamic_update_slice(
                array, part + lax.dynamic_slice(array, begin, sizes) if add else part, begin
            )

        # XLA copies the array when updates are unrolled, so loop.
        return put_lane(0, array) if self.sizes.lanes == 1 else lax.fori_loop(0, self.sizes.lanes, put_lane, array)

    def _part(self, array: jax.Array, axes: tuple[int, ...] = ALL_AXES) -> tuple[int, ...]:
        sizes = (min(n, self.sizes.tile[axis]) for n, axis in zip(array.shape, axes, strict=False))
        return *sizes, *array.shape[len(axes) :]

    def _begin(self, array: jax.Array, starts: Starts, lane: Any, axes: tuple[int, ...] = ALL_AXES) -> list[Any]:
        sizes = zip(array.shape, axes, strict=False)
        begin = [starts[axis][lane] if n > self.sizes.tile[axis] else np.int32(0) for n, axis in sizes]
        return begin + [np.int32(0)] * (array.ndim - len(axes))

    def rows(self, step: jax.Array) -> Rows:
        """Return the queries of a step, with slopes, positions and segment ids."""
        index, first, stop = (x[step] for x in self.jobs)  # [lanes]
        if self.gates is not None:  # blocks as self.later_gates has them
            first = first // self.sizes.tile[4] * self.sizes.tile[4]
        # From a job's flat index to its place in the grid, and to its first element along each axis.
        grid_places = jnp.unravel_index(index, self.sizes.grid)
        starts = [x.astype(jnp.int32) * size for x, size in zip(grid_places, self.sizes.tile, strict=False)]
        starts = (*starts, jnp.zeros_like(index))
        tile = jnp.arange(self.sizes.tile[3], dtype=jnp.int32)[:, None]  # [q, 1]
        offset = self.cut(self.q_offset, starts) if self.call.has_offset_array else self.q_offset
        positions = starts[3].reshape(-1, 1, 1, 1, 1) + tile + offset
        last = self.call.kv_len - 1
        # Distance to the nearest key if a query is before the first key or after the last one.
        outside = jnp.maximum(jnp.maximum(-positions, positions - last), 0)
        rows = Rows(
            starts,
            *(x.reshape(-1, 1, 1, 1, 1) for x in (first, stop)),
            jnp.max(-(-(stop - first) // self.sizes.tile[4])),
            as_matrices(self.cut(self.query, starts).astype(self.dtype)),
            *(self.cut(x, starts) for x in (self.slopes, self.future_slopes)),
            positions,
            None if self.q_points is None else self.cut(self.q_points, starts)[..., 0, :],
            self.cut(self.q_ids, starts),
            jnp.zeros_like(positions) if self.has_other_keys or self.q_points is not None else outside,
            *(None, self.cut(self.closed, starts), None),
        )
        rows = rows._replace(nearest=self._nearest_keys(rows)) if self.has_hidden_keys else rows
        if self.gates is None:
            return rows
        none = jnp.zeros((*self._grouped(rows), 1), self.dtype)
        return rows._replace(origin=jnp.clip(positions - rows.nearest, 0, last), passed=(none, none))

    def block(self, rows: Rows, index: jax.Array, passed: Any) -> Block:
        """Return block ``index`` of a step's keys, with its scores; with gates, the nearest block is the first.

        ``passed`` is that of the block before: the sums of gates from that block on, up to each query's origin.
        """
        if self.gates is not None:  # jobs that have had all their blocks go on beyond them
            count = -(-(rows.stop - rows.first) // self.sizes.tile[4])
            index = jnp.where(index < count, count - 1 - index, index)
        starts, away, rest, visible = self._pairs(rows, index)
        key, value = (self.cut(x, starts, AXES_OF_KEYS).astype(self.dtype) for x in (self.key, self.value))
        is_ahead = away < 0
        unit_bias = unit_bias_of(jnp, away, rows.nearest, self.dtype, is_causal=False, law=self.call.law, rest=rest)
        slopes = rows.slopes
        if rows.future_slopes is not None:
            slopes = jnp.where(is_ahead, rows.future_slopes, slopes)
        # Scale the scores, not the query: XLA flushes subnormal numbers to 0, and scaled tiny queries may be subnormal.
        products = jnp.einsum("bhrd,bhkd->bhrk", rows.query, key).reshape(*self._grouped(rows), -1) * self.call.scale
        bias = slopes * unit_bias
        if self.gates is not None:
            sums, visible, passed = self._gated(rows, rows.first + index * self.sizes.tile[4], starts, visible, passed)
            bias = bias + sums
        scores = jnp.where(visible, jnp.maximum(products + bias, self.overflown), -jnp.inf)
        return Block(starts, key, value, scores, unit_bias, is_ahead, passed)

    def _gated(self, rows: Rows, wanted: jax.Array, starts: Starts, visible: jax.Array, passed: Any) -> tuple[Any, ...]:
        """Return the sums of gates after each key of a block, which keys are visible, and the block's ``passed``.

        Every sum has terms of one sign, so each is exact to its own rounding.
        """
        begin, last = starts[4].reshape(-1, 1, 1, 1, 1), self.sizes.tile[4] - 1
        positions = begin + jnp.arange(last + 1, dtype=jnp.int32)  # [lanes, 1, 1, 1, k]
        # Keys of the block before, which the last block begins with, are counted there.
        is_counted = (positions >= wanted) & (positions < rows.stop)
        gates, later = (jnp.where(is_counted, self.cut(x, starts), 0) for x in (self.gates, self.later_gates))
        origin, shape = rows.origin - begin, (*self._grouped(rows), last + 1)  # [b, h, g, q, k]
        # Most blocks end before all origins: there one row, [b, h, g, 1, k], serves all queries.
        is_past = jnp.all(((origin >= last) & (begin == wanted)) | (wanted >= rows.stop))
        inside = jnp.clip(origin, 0, last)[..., 0]
        sums = lax.cond(
            is_past,
            lambda: jnp.broadcast_to(later, shape),
            lambda: jnp.broadcast_to(gate_sums(jnp, gates[..., 0, :], inside), shape),
        )
        # The sum of the entire block, up to the origin: that after its first key, and the gate of that key.
        total = jnp.where(origin >= 0, sums[..., :1] + gates[..., :1], 0)
        number, rest = exact_sum(passed[0], total)
        return sums + passed[1] + passed[0], visible & (positions >= rows.closed), (number, passed[1] + rest)

    def _grouped(self, rows: Rows) -> tuple[int, ...]:
        return *rows.query.shape[:2], *self.sizes.tile[2:4]

    def _pairs(self, rows: Rows, index: jax.Array) -> tuple[Starts, jax.Array, jax.Array | None, jax.Array]:
        """Return a block's starts, query minus key positions, ``[b, 1, 1, q, k]``, rests, and which pairs are visible.

        Rests are those of :func:`relative_points`.
        """
        size = self.sizes.tile[4]
        wanted = rows.first + index * size
        # The last block ends at the last key, so it may begin with keys of the block before; these are masked.
        begin = jnp.minimum(wanted, self.call.kv_len - size)  # [lanes, 1, 1, 1, 1]
        positions = begin + jnp.arange(size, dtype=jnp.int32)  # [lanes, 1, 1, 1, k]
        starts = *rows.starts[:4], begin.ravel()
        if rows.points is None:
            away, rest = rows.positions - positions, None
        else:
            points = rows.points, self.cut(self.kv_points, starts)[..., 0, :, :]
            rules = self.call.distance, self.dtype, self.call.may_lack_points
            ahead, rest = relative_points(jnp, *points, *rules, with_rest=self.has_hidden_keys)
            away = -ahead
        visible = (positions >= wanted) & (positions < rows.stop)
        if self.call.is_causal:
            visible &= away >= 0
        if self.call.window_size is not None:
            visible &= jnp.abs(away) <= self.call.window_size
        if rows.ids is not None:
            visible &= rows.ids == self.cut(self.kv_ids, starts)
        return starts, away, rest, visible if self.mask is None else visible & self.cut(self.mask, starts)

    def _nearest_keys(self, rows: Rows) -> jax.Array:
        """Return the distance of each query's nearest visible key, from a first pass over the blocks."""

        def nearest(index: Any) -> list[jax.Array]:
            """Return the distances of a block's nearest visible keys, at or before each query, and after it."""
            _, away, _, visible = self._pairs(rows, index)
            sides = visible & (away >= 0), visible & (away < 0)
            return [jnp.min(jnp.where(x, jnp.abs(away), farthest(away)), axis=-1, keepdims=True) for x in sides]

        def farthest(array: Any) -> Any:
            return jnp.inf if jnp.issubdtype(array.dtype, jnp.floating) else jnp.iinfo(array.dtype).max

        start = [jnp.full(x.shape, farthest(x), x.dtype) for x in jax.eval_shape(nearest, 0)]
        behind, ahead = lax.fori_loop(0, rows.blocks, lambda i, x: list(map(jnp.minimum, x, nearest(i))), start)
        found = jnp.minimum(behind, ahead)
        hidden = found == farthest(found)
        if self.future_slopes is not None:  # with two slopes in a row, subtracting a distance is no constant
            hidden |= (behind < farthest(behind)) & (ahead < farthest(ahead))
        return jnp.where(hidden, 0, found)


def as_matrices(rows: jax.Array) -> jax.Array:
    """Return ``[b, h, g, q, ...]`` as ``[b, h, g * q, n]``: for products with more axes, XLA would transpose copies."""
    return rows.reshape(*rows.shape[:2], rows.shape[2] * rows.shape[3], -1)


def full_precision(operands: Operands) -> contextlib.AbstractContextManager[object]:
    """Return a context with full float32 products for float32 tensors; accelerators use lower precision by default."""
    is_low = operands.query.dtype.itemsize == 2
    return contextlib.nullcontext() if is_low else jax.default_matmul_precision("highest")
