"""How attention is cut into tiles, and the scores of a tile of queries with a block of keys.

Every array has the axes (batch, key/value head, query head of its group, query, key), and tensors features as a sixth.
An axis of length 1 stands for any length, so that all arrays broadcast, and are cut, alike.

A *job* is one tile of queries, of one head or several, with the blocks of keys that it needs. A *step* of the loop is
several jobs of one head each, *lanes* along the axis of the batch; or one job of all batch entries and heads.
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

from alibi_core.backend.checks import MAX_POSITION
from alibi_jax._call import Operands
from alibi_jax._compatible import materialised
from alibi_jax._plan import needed_keys

ROWS = 256  # queries of a tile, times heads of a group, at most
KEYS = 384  # of a block, at most
FEW_QUERIES = 16  # Up to this many queries, an iteration costs little but its overhead, and blocks are longer:
KEYS_OF_FEW = 1024
LANES = 4  # jobs at a time: XLA computes the product of one matrix alone on one core
SCORES = 2**20  # of short sequences that share a step, about
PIECE = 16  # Tiles are a multiple of this many tokens, unless they have them all.
PLAN_KEYS = 64  # keys that the plan takes or leaves together


@dataclass(frozen=True)
class Sizes:
    """How a call is cut, by its shapes alone. Axes as in this module's docstring."""

    whole: tuple[int, ...]
    tile: tuple[int, ...]  # of one job; along keys, one of its blocks
    lanes: int

    @classmethod
    def of(cls, operands: Operands, all_heads: bool) -> Sizes:
        """Decide how to cut a call."""
        batch, num_heads, q_len, _ = operands.query.shape
        num_kv_heads, kv_len = operands.key.shape[1:3]
        group = num_heads // num_kv_heads
        rows, keys = _even(q_len, ROWS), _even(kv_len, KEYS_OF_FEW if q_len <= FEW_QUERIES else KEYS)
        whole = batch, num_kv_heads, group, q_len, kv_len
        if all_heads or not isinstance(batch, int):  # a symbol, in a program exported for any batch
            return cls(whole, (batch, num_kv_heads, group, rows, keys), 1)
        if (rows, keys) == (q_len, kv_len):  # nothing can be left out: several sequences share a step
            entries = _divisor(batch, SCORES // (num_heads * q_len * kv_len))
            return cls(whole, (entries, num_kv_heads, group, q_len, kv_len), 1)
        heads = _divisor(group, ROWS // rows)
        jobs = batch * num_kv_heads * (group // heads) * -(-q_len // rows)
        return cls(whole, (1, 1, heads, rows, keys), min(LANES, jobs))

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of jobs along batch, key/value heads, groups and queries."""
        return tuple(-(-n // size) for n, size in zip(self.whole[:4], self.tile, strict=False))


def _even(length: int, most: int) -> int:
    """Return the size of pieces of ``most`` at most that a length is cut into, about evenly."""
    size = -(-length // -(-length // most))
    return min(length, most, -(-size // PIECE) * PIECE)


def _divisor(number: int, most: int) -> int:
    """Return the largest divisor that is ``most`` at most, or 1."""
    return max(n for n in range(1, number + 1) if number % n == 0 and n <= max(1, most))


class Jobs(NamedTuple):
    """All jobs of a call, int32 ``[steps, lanes]``; those of a step have about as many keys."""

    index: jax.Array  # in the grid
    first: jax.Array  # key
    stop: jax.Array  # the key after the last


def _jobs(operands: Operands, sizes: Sizes) -> Jobs:
    """Return which keys each job needs, computed on the device."""
    count = math.prod(sizes.grid)
    index = jnp.arange(count, dtype=jnp.int32)
    first, stop = jnp.zeros_like(index), jnp.full_like(index, sizes.whole[4])
    if sizes.tile[4] < sizes.whole[4]:
        needed = needed_keys(operands, sizes.tile[3], PLAN_KEYS)  # [batch, num_heads, tiles]
        is_needed = needed.first < needed.stop
        # Each of batch, key/value heads and groups as two axes: jobs, and the parts of one job.
        shape = [n for whole, part in zip(sizes.whole[:3], sizes.tile, strict=False) for n in (whole // part, part)]
        first = jnp.where(is_needed, needed.first, sizes.whole[4]).reshape(*shape, -1).min(axis=(1, 3, 5)).ravel()
        stop = jnp.where(is_needed, needed.stop, 0).reshape(*shape, -1).max(axis=(1, 3, 5)).ravel()
    if sizes.lanes > 1:
        index = jnp.argsort(first - stop).astype(jnp.int32)
        first, stop = first[index], stop[index]
    # Lanes without a job have one without keys. It comes before the job whose place it has, which overwrites it.
    idle = -count % sizes.lanes
    return Jobs(*(jnp.pad(x, (idle, 0)).reshape(-1, sizes.lanes) for x in (index, first, stop)))


Starts = tuple[jax.Array, ...]  # where lanes begin along each axis, int32 [lanes] each


class Rows(NamedTuple):
    """The queries of a step."""

    starts: Starts
    first: jax.Array  # [lanes, 1, 1, 1, 1]: the first key that each job needs
    stop: jax.Array  # [lanes, 1, 1, 1, 1]: and the one after the last
    blocks: jax.Array  # []: blocks of keys of the job that has the most
    query: jax.Array  # [b, h, g * q, d], working dtype
    slopes: jax.Array
    future_slopes: jax.Array | None
    positions: jax.Array
    ids: jax.Array | None
    nearest: jax.Array  # tokens to the nearest key that a query sees, from which distances are counted


class Block(NamedTuple):
    """A block of keys, and its scores with the queries of a step."""

    starts: Starts
    key: jax.Array  # [b, h, k, d], working dtype
    value: jax.Array  # [b, h, k, d]
    scores: jax.Array  # [b, h, g, q, k]; -inf where a key is hidden
    reach: jax.Array  # [b, h or 1, g or 1, q, k]: by which slopes are multiplied, minus distance plus a constant a row
    is_ahead: jax.Array  # whether the key lies after the query


class Tiles:
    """The arrays of a call, and how to cut them."""

    def __init__(self, operands: Operands, all_heads: bool) -> None:
        """Give all arrays the same axes, and plan the jobs."""
        call, sizes = operands.call, Sizes.of(operands, all_heads)
        batch, num_kv_heads, group, _, kv_len = sizes.whole
        self.call, self.sizes, self.dtype = call, sizes, call.working_dtype
        self.q_len = sizes.grid[3] * sizes.tile[3]  # padded to whole tiles
        self.has_other_keys = operands.other_keys is not None
        self.jobs = _jobs(operands, sizes)
        self.query = self.of_queries(operands.query)
        self.key, self.value = (x.reshape(batch, num_kv_heads, 1, 1, kv_len, -1) for x in operands[1:3])
        self.slopes, self.future_slopes = (
            None if x is None else x.reshape(-1, num_kv_heads, group, 1, 1) for x in (call.slopes, call.future_slopes)
        )
        self.q_offset = call.q_offset.reshape(-1, 1, 1, 1, 1) if call.has_offset_array else call.q_offset
        self.q_ids = self.kv_ids = self.mask = None
        if call.q_segment_ids is not None:
            self.q_ids = self._padded(call.q_segment_ids[:, None, None, :, None])
            self.kv_ids = call.kv_segment_ids[:, None, None, None]
        if call.mask is not None:
            heads = (1, 1) if call.mask.shape[1] == 1 else (num_kv_heads, group)
            mask = call.mask.reshape(-1, *heads, *call.mask.shape[2:])
            self.mask = mask if mask.shape[3] == 1 else self._padded(mask)
        is_inside = not call.has_offset_array and 0 <= call.q_offset <= call.kv_len - call.q_len
        is_plain = call.every_query_attends and is_inside
        has_rules = call.mask is not None or call.q_segment_ids is not None
        # Whether the nearest key that a query sees is to be looked for among those that are not hidden.
        self.has_hidden_keys = has_rules and not (self.has_other_keys or is_plain)

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

    def cut(self, array: Any, starts: Starts) -> Any:
        """Return the parts of an array that a step has, its lanes along the batch; None of None.

        Nothing is cut along an axis that a job has as a whole: it may be distributed among devices.
        """
        if array is None:
            return None
        sizes = self._part(array)
        if sizes != array.shape or self.sizes.lanes > 1:
            if array.dtype.itemsize == 2:
                # XLA on CPUs widens low precision before it cuts, the whole array, ahead of the loop, unless the array
                # seems to depend on the loop's index.
                array, starts = lax.optimization_barrier((array, starts))
            parts = [lax.dynamic_slice(array, self._begin(array, starts, i), sizes) for i in range(self.sizes.lanes)]
            array = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
        return materialised(array) if array.ndim == 6 else array

    def put(self, array: jax.Array, parts: jax.Array, starts: Starts, *, add: bool = False) -> jax.Array:
        """Write the parts of a step's lanes into an array, or add them to it."""
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

    def _part(self, array: jax.Array) -> tuple[int, ...]:
        return *(min(pair) for pair in zip(array.shape, self.sizes.tile, strict=False)), *array.shape[5:]

    def _begin(self, array: jax.Array, starts: Starts, lane: Any) -> list[Any]:
        pairs = zip(array.shape, self.sizes.tile, starts, strict=False)
        return [x[lane] if n > size else np.int32(0) for n, size, x in pairs] + [np.int32(0)] * (array.ndim - 5)

    def rows(self, step: jax.Array) -> Rows:
        """Return the queries of a step."""
        index, first, stop = (x[step] for x in self.jobs)  # [lanes]
        grid_places = jnp.unravel_index(index, self.sizes.grid)
        starts = [x.astype(jnp.int32) * size for x, size in zip(grid_places, self.sizes.tile, strict=False)]
        starts = (*starts, jnp.zeros_like(index))
        tile = jnp.arange(self.sizes.tile[3], dtype=jnp.int32)[:, None]  # [q, 1]
        offset = self.cut(self.q_offset, starts) if self.call.has_offset_array else self.q_offset
        positions = starts[3].reshape(-1, 1, 1, 1, 1) + tile + offset
        last = self.call.kv_len - 1
        outside = jnp.maximum(jnp.maximum(-positions, positions - last), 0)
        rows = Rows(
            starts,
            *(x.reshape(-1, 1, 1, 1, 1) for x in (first, stop)),
            jnp.max(-(-(stop - first) // self.sizes.tile[4])),
            as_matrices(self.cut(self.query, starts).astype(self.dtype)),
            *(self.cut(x, starts) for x in (self.slopes, self.future_slopes)),
            positions,
            self.cut(self.q_ids, starts),
            jnp.zeros_like(positions) if self.has_other_keys else outside,
        )
        return rows._replace(nearest=self._nearest_keys(rows)) if self.has_hidden_keys else rows

    def block(self, rows: Rows, index: jax.Array) -> Block:
        """Return a block of keys with its scores."""
        starts, away, visible = self._pairs(rows, index)
        # [b, h, 1, 1, k, d] becomes [b, h, k, d]
        key, value = (self.cut(x, starts).astype(self.dtype)[:, :, 0, 0] for x in (self.key, self.value))
        is_ahead, reach = away < 0, (rows.nearest - jnp.abs(away)).astype(self.dtype)
        slopes = rows.slopes
        if rows.future_slopes is not None:
            slopes = jnp.where(is_ahead, rows.future_slopes, slopes)
        # Not the query times the scale: XLA makes 0 of subnormal numbers, and a tiny product would become one.
        products = jnp.einsum("bhrd,bhkd->bhrk", rows.query, key).reshape(*self._grouped(rows), -1) * self.call.scale
        return Block(starts, key, value, jnp.where(visible, products + slopes * reach, -jnp.inf), reach, is_ahead)

    def _grouped(self, rows: Rows) -> tuple[int, ...]:
        return *rows.query.shape[:2], *self.sizes.tile[2:4]

    def _pairs(self, rows: Rows, index: jax.Array) -> tuple[Starts, jax.Array, jax.Array]:
        """Return where a block begins, how far its keys are behind the queries, and which of them these see."""
        size = self.sizes.tile[4]
        wanted = rows.first + index * size
        # No block reaches beyond the last key: it rather begins with keys of the block before, which do not count.
        begin = jnp.minimum(wanted, self.call.kv_len - size)
        positions = begin + jnp.arange(size, dtype=jnp.int32)  # [lanes, 1, 1, 1, k]
        starts = *rows.starts[:4], begin.ravel()
        away = rows.positions - positions
        visible = (positions >= wanted) & (positions < rows.stop)
        if self.call.is_causal:
            visible &= away >= 0
        if self.call.window_size is not None:
            visible &= jnp.abs(away) <= self.call.window_size
        if rows.ids is not None:
            visible &= rows.ids == self.cut(self.kv_ids, starts)
        return starts, away, visible if self.mask is None else visible & self.cut(self.mask, starts)

    def _nearest_keys(self, rows: Rows) -> jax.Array:
        """Return the distance of the nearest key that each query sees, found in a first pass over the blocks."""

        def nearest(index: Any) -> list[jax.Array]:
            """Return how far the nearest keys of a block are, behind or at each query, and ahead of it."""
            _, away, visible = self._pairs(rows, index)
            sides = visible & (away >= 0), visible & (away < 0)
            return [jnp.min(jnp.where(x, jnp.abs(away), MAX_POSITION), axis=-1, keepdims=True) for x in sides]

        start = [jnp.full(x.shape, MAX_POSITION, x.dtype) for x in jax.eval_shape(nearest, 0)]
        behind, ahead = lax.fori_loop(0, rows.blocks, lambda i, x: list(map(jnp.minimum, x, nearest(i))), start)
        found = jnp.minimum(behind, ahead)
        hidden = found == MAX_POSITION
        if self.future_slopes is not None:  # slopes of two kinds in a row: no distance is worth the same everywhere
            hidden |= (behind < MAX_POSITION) & (ahead < MAX_POSITION)
        return jnp.where(hidden, 0, found)


def as_matrices(rows: jax.Array) -> jax.Array:
    """Return ``[b, h, g, q, ...]`` as ``[b, h, g * q, n]``; of more axes XLA would make transposed copies."""
    return rows.reshape(*rows.shape[:2], rows.shape[2] * rows.shape[3], -1)


def full_precision(operands: Operands) -> contextlib.AbstractContextManager[object]:
    """Return a context where products of float32 tensors are float32 products, which accelerators otherwise shorten."""
    is_low = operands.query.dtype.itemsize == 2
    return contextlib.nullcontext() if is_low else jax.default_matmul_precision("highest")
