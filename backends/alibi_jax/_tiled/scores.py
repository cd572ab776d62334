"""Scores of tiles of queries with blocks of keys: what :mod:`alibi_jax._tiled.tiles` cuts out, put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from alibi_core.backend.checks import MAX_POSITION
from alibi_jax._call import Operands, Rules, put_together
from alibi_jax._tiled.tiles import Places, Sizes, arranged, cut

AXES = {"query": "bqhgd", "key": "bkhd", "value": "bkhd", "slopes": "bhg", "future_slopes": "bhg", "q_offset": "b"}
AXES |= {"q_segment_ids": "bq", "kv_segment_ids": "bk", "mask": "bhgqk"}


class Tensors:
    """The arrays of a call, with the axes that :data:`AXES` names, and what is known of it besides."""

    def __init__(self, rules: Rules, operands: Operands, sizes: Sizes, *others: jax.Array) -> None:
        """Name the axes; ``others`` are whatever else is computed with."""
        call = put_together(rules, operands)
        self.rules, self.sizes, self.dtype = rules, sizes, operands.slopes.dtype
        self.axes = AXES | dict.fromkeys(("key", "value"), "bhkd" if rules.kv_heads_first else AXES["key"])
        whole = sizes.whole
        mask = operands.mask
        if mask is not None:
            heads = (1, 1) if mask.shape[1] == 1 else (whole["h"], whole["g"])
            mask = mask.reshape(mask.shape[0], *heads, *mask.shape[2:])
        ids = operands.q_segment_ids
        self.arrays: dict[str, Any] = operands._asdict() | {
            "query": self.by_kv_head(operands.query, 2),
            "slopes": self.by_kv_head(operands.slopes, 1),
            "future_slopes": None if operands.future_slopes is None else self.by_kv_head(operands.future_slopes, 1),
            "kv_segment_ids": ids if operands.kv_segment_ids is None else operands.kv_segment_ids,
            "mask": mask,
        }
        # Whether the nearest key that a query sees is to be looked for among those that are not hidden.
        is_plain = call.every_query_attends and 0 <= call.q_offset <= call.kv_len - call.q_len
        self.has_hidden_keys = not (rules.is_part or is_plain or (mask is None and ids is None))

        # Inside of shard_map, an array's type tells along which axes of devices it varies.
        self._zero = sum(jnp.zeros_like(x, self.dtype, shape=()) for x in jax.tree.leaves((operands, others)))

    def full(self, shape: Sequence[int], value: Any, dtype: Any = None) -> jax.Array:
        """Return an array, of the working dtype by default, for a loop to begin with."""
        dtype = self.dtype if dtype is None else dtype
        return jnp.full(shape, value, dtype) + self._zero.astype(dtype)

    def by_kv_head(self, array: jax.Array, axis: int) -> jax.Array:
        """Split the axis of query heads into key/value heads and the query heads that share one."""
        heads = self.sizes.whole["h"], self.sizes.whole["g"]
        return array.reshape(*array.shape[:axis], *heads, *array.shape[axis + 1 :])

    def cut(self, name: str, starts: dict[str, jax.Array], onto: str) -> Any:
        """Return what lanes have of an array, its axes arranged; None if the call has no such array."""
        array, axes = self.arrays[name], self.axes[name]
        return None if array is None else arranged(cut(array, axes, self.sizes, starts), axes, onto)


class Block(NamedTuple):
    """A block of keys, and its scores with the rows of a step."""

    starts: dict[str, jax.Array]
    key: jax.Array  # [b, h, k, d]
    value: jax.Array  # likewise
    scores: jax.Array  # in the order of axes that was asked for; -inf where a key is hidden
    reach: jax.Array  # what the slopes are multiplied by: minus distance, plus what is constant along a row
    is_ahead: Any  # where the key lies after the query; None where no key that counts does


@dataclass(frozen=True)
class Scores:
    """The rows of a step, ready to meet blocks of keys."""

    tensors: Tensors
    places: Places
    onto: str  # the order of axes of scores: ``bhgqk`` or ``bhkgq``
    query: jax.Array  # [b, h, g, q, d]
    slopes: jax.Array  # arranged as scores are, as everything below
    future_slopes: Any
    positions: jax.Array
    ids: Any
    nearest: jax.Array  # tokens to the nearest key that a query sees: distances are counted from there

    @classmethod
    def of_step(cls, tensors: Tensors, places: Places, onto: str) -> Scores:
        """Cut out the rows of a step."""

        def rows(name: str) -> Any:
            return tensors.cut(name, places.starts, onto)

        begin = places.starts["q"]  # [lanes]
        offset = tensors.rules.q_offset
        if offset is None:
            offset = cut(tensors.arrays["q_offset"], "b", tensors.sizes, places.starts)
        positions = (begin + offset)[:, None] + jnp.arange(tensors.sizes.part["q"], dtype=jnp.int32)
        positions = arranged(positions, "bq", onto)
        last = tensors.sizes.whole["k"] - 1
        is_part = tensors.rules.is_part
        outside = jnp.zeros_like(positions) if is_part else jnp.maximum(jnp.maximum(-positions, positions - last), 0)
        query = tensors.cut("query", places.starts, "bhgqd").astype(tensors.dtype)
        scores = cls(
            tensors,
            places,
            onto,
            query,
            rows("slopes"),
            rows("future_slopes"),
            positions,
            rows("q_segment_ids"),
            outside,
        )
        return scores._with_nearest_keys() if tensors.has_hidden_keys else scores

    def block(self, index: jax.Array) -> Block:
        """Return the scores with a block of keys."""
        starts, positions, is_new = self.places.keys(index)
        key, value = (self.tensors.cut(name, starts, "bhkd").astype(self.tensors.dtype) for name in ("key", "value"))
        positions = arranged(positions, "bk", self.onto)
        is_ahead = None if self.tensors.rules.is_causal else positions > self.positions
        reach = positions - (self.positions - self.nearest)
        rates = self.slopes
        if is_ahead is not None:
            reach = jnp.where(is_ahead, (self.positions + self.nearest) - positions, reach)
            rates = rates if self.future_slopes is None else jnp.where(is_ahead, self.future_slopes, rates)
        reach = reach.astype(self.tensors.dtype)
        products = self._products(key) + rates * reach
        scores = jnp.where(self._visible(starts, positions, is_new), products, -jnp.inf)
        return Block(starts, key, value, scores, reach, is_ahead)

    def _products(self, key: jax.Array) -> jax.Array:
        # Not the query times the scale: the compiler makes 0 of subnormal numbers, and what is tiny would become one.
        return row_products(self.query, key, self.onto) * self.tensors.rules.scale

    def _visible(self, starts: dict[str, jax.Array], positions: jax.Array, is_new: jax.Array) -> jax.Array:
        rules = self.tensors.rules
        visible = arranged(is_new, "bk", self.onto)
        if rules.is_causal:
            visible &= positions <= self.positions
        if rules.window_size is not None:
            away = self.positions - positions
            visible &= away <= rules.window_size
            visible &= away >= -rules.window_size
        if self.ids is not None:
            visible &= self.ids == self.tensors.cut("kv_segment_ids", starts, self.onto)
        mask = self.tensors.cut("mask", starts, self.onto)
        return visible if mask is None else visible & mask

    def _with_nearest_keys(self) -> Scores:
        """Look for the nearest key that each query sees, in a first turn through the blocks."""
        far = jnp.int32(MAX_POSITION)
        axis = self.onto.index("k")

        def nearest(index: Any) -> tuple[jax.Array, jax.Array]:
            """Return how far the nearest keys of a block are: one behind or at each query, and one ahead of it."""
            starts, positions, is_new = self.places.keys(index)
            positions = arranged(positions, "bk", self.onto)
            visible = self._visible(starts, positions, is_new)
            away = self.positions - positions
            sides = (visible & (away >= 0), visible & (away < 0))
            return tuple(jnp.min(jnp.where(side, abs(away), far), axis=axis, keepdims=True) for side in sides)

        shapes = jax.eval_shape(nearest, 0)
        behind, ahead = lax.fori_loop(
            0,
            self.places.blocks,
            lambda index, found: tuple(jnp.minimum(*x) for x in zip(found, nearest(index), strict=True)),
            tuple(self.tensors.full(x.shape, far, far.dtype) for x in shapes),
        )
        found = jnp.minimum(behind, ahead)
        found = jnp.where(found == far, 0, found)
        if self.future_slopes is not None:
            # With slopes of two kinds in a row no one distance is worth the same everywhere.
            found = jnp.where((behind < far) & (ahead < far), 0, found)
        return replace(self, nearest=found)


def row_products(rows: jax.Array, keys: jax.Array, onto: str) -> jax.Array:
    """Return the products of rows ``[b, h, g, q, d]`` and keys ``[b, h, k, d]``, with the axes ``bhgqk`` or ``bhkgq``.

    Here and below the heads of a group and their queries are one axis of a matrix: of more the compiler would make
    transposed copies.
    """
    *heads, group, length, _ = rows.shape
    matrices = as_matrices(rows)
    if onto == "bhgqk":
        return jnp.einsum("bhrd,bhkd->bhrk", matrices, keys).reshape(*heads, group, length, -1)
    return jnp.einsum("bhkd,bhrd->bhkr", keys, matrices).reshape(*heads, -1, group, length)


def as_matrices(rows: jax.Array) -> jax.Array:
    """Return ``[b, h, g, q, x]`` as ``[b, h, g * q, x]``."""
    return rows.reshape(*rows.shape[:2], -1, rows.shape[-1])
