"""How attention is cut into tiles: their sizes, which of them are computed together, and what is cut out for them.

A *job* is one tile of queries, of one head or of several, with the blocks of keys that it needs. Axes are named by
letters: ``b`` batch entries, ``h`` key/value heads, ``g`` the query heads that share one, ``q`` queries, ``k`` keys and
``d`` features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from alibi_jax._call import Operands, Rules, kv_axis, needed_keys
from alibi_jax._tiled.materialised import materialised

FEW = 16  # queries


@dataclass(frozen=True)
class Tiling:
    """How large tiles may be, and how many are computed at a time."""

    together: bool = False  # whether each operation is on all batch entries and heads
    rows: int = 256  # queries of a tile, times heads of a group that it covers, at most
    keys: int = 384  # of a block, at most, beside that many queries
    keys_of_few: int = 1024  # beside few queries, where an iteration costs little but its overhead
    lanes: int = 4  # jobs at a time: the products of one matrix alone take one core
    scores: int = 2**20  # of short sequences that are computed at a time, about
    piece: int = 16  # rows and keys of tiles are a multiple of this, if they do not take up the whole length
    plan_keys: int = 64  # that are taken or left together, where norms can be had for so few

    def even(self, length: int, most: int) -> int:
        """Return the size of pieces of ``most`` at most that a length is cut into, about evenly."""
        size = -(-length // -(-length // most))
        return min(length, most, -(-size // self.piece) * self.piece)


@dataclass(frozen=True)
class Sizes:
    """How a call is cut up. All numbers are fixed when it is traced."""

    whole: dict[str, int]  # letters and lengths of the whole call
    part: dict[str, int]  # and of one job, ``k`` being one of its blocks of keys
    lanes: int  # jobs at a time; if several, each has one batch entry
    plan_keys: int  # that are taken or left together

    @property
    def grid(self) -> tuple[int, ...]:
        """How many jobs there are along batch, key/value heads, groups and queries."""
        return tuple(-(-self.whole[x] // self.part[x]) for x in "bhgq")

    @property
    def jobs(self) -> int:
        """How many jobs there are."""
        return math.prod(self.grid)

    @property
    def steps(self) -> int:
        """How many times ``lanes`` jobs there are."""
        return -(-self.jobs // self.lanes)

    @property
    def has_idle_rows(self) -> bool:
        """Whether some jobs have rows of other jobs, or lanes have no job."""
        return self.jobs % self.lanes > 0 or self.whole["q"] % self.part["q"] > 0


def sizes_of(rules: Rules, operands: Operands, tiling: Tiling) -> Sizes:
    """Decide how to cut a call up, by its shapes alone."""
    batch, q_len, num_heads, head_dim = operands.query.shape
    kv_len, num_kv_heads = operands.key.shape[kv_axis(rules)], operands.key.shape[3 - kv_axis(rules)]
    group = num_heads // num_kv_heads
    axes = {"b": batch, "h": num_kv_heads, "g": group, "q": q_len, "k": kv_len, "d": head_dim}
    keys = tiling.keys_of_few if q_len <= FEW else tiling.keys
    box = axes | {"q": tiling.even(q_len, tiling.rows), "k": tiling.even(kv_len, keys)}
    lanes = 1
    if not tiling.together and isinstance(batch, int):  # which is a symbol in a program exported for any batch
        if (box["q"], box["k"]) == (q_len, kv_len):
            # Nothing can be left out.
            box["b"] = _divisor(batch, tiling.scores // (num_heads * q_len * kv_len))
        else:
            box |= {"b": 1, "h": 1, "g": _divisor(group, tiling.rows // box["q"])}
            lanes = min(tiling.lanes, batch * num_kv_heads * (group // box["g"]) * -(-q_len // box["q"]))
    return Sizes(axes, box, lanes, tiling.plan_keys)


def _divisor(number: int, most: int) -> int:
    """Return the largest divisor that is ``most`` at most, or 1."""
    return max(n for n in range(1, number + 1) if number % n == 0 and n <= max(1, most))


class Jobs(NamedTuple):
    """All jobs of a call, ``[steps, lanes]``, int32: those of a step have about as many keys."""

    index: jax.Array  # in the grid; ``Sizes.jobs`` for none
    first: jax.Array  # key
    blocks: jax.Array  # of keys, from that one on


def jobs_of(rules: Rules, operands: Operands, sizes: Sizes) -> Jobs:
    """Return which keys each job needs, as computed on the device."""
    index = jnp.arange(sizes.jobs, dtype=jnp.int32)
    block, kv_len = sizes.part["k"], sizes.whole["k"]
    if block == kv_len:
        first, blocks = jnp.zeros_like(index), jnp.ones_like(index)
    else:
        needed = needed_keys(rules, operands, sizes.part["q"], sizes.plan_keys)
        # [batch, num_heads, tiles], each axis but the last one as that of jobs and that of one job
        shape = [n for x in "bhg" for n in (sizes.whole[x] // sizes.part[x], sizes.part[x])]
        # What nobody needs is no part of the keys that several heads need.
        is_needed = needed.first < needed.stop
        first = jnp.where(is_needed, needed.first, kv_len).reshape(*shape, sizes.grid[-1])
        stop = jnp.where(is_needed, needed.stop, 0).reshape(*shape, sizes.grid[-1])
        first, stop = first.min(axis=(1, 3, 5)).ravel(), stop.max(axis=(1, 3, 5)).ravel()
        blocks = jnp.maximum(-(-(stop - first) // block), 0)
    if sizes.lanes > 1:
        index = jnp.argsort(-blocks).astype(jnp.int32)
        first, blocks = first[index], blocks[index]
    idle = sizes.steps * sizes.lanes - sizes.jobs
    padded = (jnp.pad(x, (0, idle), constant_values=n) for x, n in ((index, sizes.jobs), (first, 0), (blocks, 0)))
    return Jobs(*(x.reshape(sizes.steps, sizes.lanes) for x in padded))


class Places(NamedTuple):
    """Where the jobs of one step are, and which of their rows are their own."""

    sizes: Sizes
    starts: dict[str, jax.Array]  # along ``b``, ``h``, ``g`` and ``q``; [lanes] each
    own_rows: jax.Array | None  # [lanes, rows]; None for all
    first: jax.Array  # [lanes]: each job's first key
    blocks: jax.Array  # []: of keys, of the job that has the most

    @classmethod
    def of_step(cls, sizes: Sizes, jobs: Jobs, step: jax.Array) -> Places:
        """Return the places of the jobs of a step."""
        index, first, blocks = (x[step] for x in jobs)
        grid_places = jnp.unravel_index(jnp.minimum(index, sizes.jobs - 1), sizes.grid)
        place = {x: i.astype(jnp.int32) * sizes.part[x] for x, i in zip("bhgq", grid_places, strict=True)}
        # The last tile ends with the last query, so that it may begin with some of the one before.
        begin = jnp.minimum(place["q"], sizes.whole["q"] - sizes.part["q"])
        own_rows = None
        if sizes.has_idle_rows:
            rows = begin[:, None] + jnp.arange(sizes.part["q"], dtype=jnp.int32)
            own_rows = (rows >= place["q"][:, None]) & (index < sizes.jobs)[:, None]
        place["q"] = begin
        return cls(sizes, place, own_rows, first, jnp.max(blocks))

    def keys(self, block: jax.Array) -> tuple[dict[str, jax.Array], jax.Array, jax.Array]:
        """Return the starts of a block of keys, its positions, and which of these are its own: both ``[lanes, keys]``.

        No block reaches beyond the last key: it rather begins with keys of the block before.
        """
        size = self.sizes.part["k"]
        wanted = self.first + block * size
        begin = jnp.minimum(wanted, self.sizes.whole["k"] - size)
        positions = begin[:, None] + jnp.arange(size, dtype=jnp.int32)
        return self.starts | {"k": begin}, positions, positions >= wanted[:, None]


def cut(array: jax.Array, axes: str, sizes: Sizes, starts: dict[str, jax.Array]) -> jax.Array:
    """Return what lanes have of an array with these axes, one after the other along the first one, ``b``.

    An axis of length 1 stands for any. Along an axis that a job has as a whole nothing is cut: it may be distributed
    among devices. What has features is :func:`materialised`, as it is multiplied with others.
    """
    lengths = _lengths(array, axes, sizes)
    if lengths != array.shape or sizes.lanes > 1:
        if array.dtype.itemsize == 2:
            # For the CPU, the compiler widens what is cut into low precision before it is cut: all of it, ahead of the
            # loop, unless the array seems to depend on the loop's index.
            array, starts = lax.optimization_barrier((array, starts))
        parts = [lax.dynamic_slice(array, _starts(array, axes, sizes, starts, i), lengths) for i in range(sizes.lanes)]
        array = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    return materialised(array) if "d" in axes else array


def put(
    array: jax.Array,
    part: jax.Array,
    axes: str,
    sizes: Sizes,
    starts: dict[str, jax.Array],
    merge: Callable[[jax.Array, jax.Array, Any], jax.Array] | None = None,
) -> jax.Array:
    """Put back into an array what :func:`cut` would return of it: ``merge(what is there, part, lane)``, or the part."""
    lengths = _lengths(array, axes, sizes)

    def put_lane(lane: Any, array: jax.Array) -> jax.Array:
        begin = _starts(array, axes, sizes, starts, lane)
        own = part if sizes.lanes == 1 else lax.dynamic_slice_in_dim(part, lane * lengths[0], lengths[0])
        if merge is not None:
            own = merge(lax.dynamic_slice(array, begin, lengths), own, lane)
        return lax.dynamic_update_slice(array, own.astype(array.dtype), begin)

    # A loop, as of several reads and writes in a row the compiler would copy the whole array.
    return put_lane(0, array) if sizes.lanes == 1 else lax.fori_loop(0, sizes.lanes, put_lane, array)


def _lengths(array: jax.Array, axes: str, sizes: Sizes) -> tuple[int, ...]:
    return tuple(min(n, sizes.part[x]) for x, n in zip(axes, array.shape, strict=True))


def _starts(array: jax.Array, axes: str, sizes: Sizes, starts: dict[str, jax.Array], lane: Any) -> list[Any]:
    is_cut = [n > sizes.part[x] for x, n in zip(axes, array.shape, strict=True)]
    return [starts[x][lane] if inside else np.int32(0) for x, inside in zip(axes, is_cut, strict=True)]


def arranged(array: jax.Array, axes: str, onto: str) -> jax.Array:
    """Return an array with its axes in the order of ``onto``, and those it lacks as axes of length 1."""
    order = sorted(range(len(axes)), key=lambda i: onto.index(axes[i]))
    missing = [i for i, x in enumerate(onto) if x not in axes]
    return jnp.expand_dims(jnp.transpose(array, order), missing)
