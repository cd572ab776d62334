"""The forward pass of tiled attention: an online softmax over the blocks of keys that each tile of queries needs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from alibi_jax._call import Operands
from alibi_jax._tiled.tiles import Rows, Tiles, as_matrices, full_precision


def forward(operands: Operands, dtype: Any, *, all_heads: bool) -> list[jax.Array]:
    """Return attention, ``[batch, num_heads, q_len, head_dim]`` in ``dtype``, and the log-sum-exps of its rows.

    Log-sum-exps are ``[batch, num_heads, q_len]``, in the working dtype; +inf for a query that sees no key.

    With ``all_heads``, every operation covers all batch entries and heads, so that XLA can partition it: loops run over
    tiles of queries and the keys that any head needs. Otherwise each head has its own range of keys.
    """
    with full_precision(operands):
        tiles = Tiles(operands, all_heads)

        def step(index: jax.Array, out: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            rows = tiles.rows(index)
            return tuple(tiles.put(x, part, rows.starts) for x, part in zip(out, _attend(tiles, rows), strict=True))

        result = jnp.zeros(tiles.query.shape, dtype)
        out = lax.fori_loop(0, len(tiles.jobs.index), step, (result, jnp.zeros(result.shape[:5], tiles.dtype)))
    return [tiles.of_heads(x) for x in out]


def _attend(tiles: Tiles, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """Return the result ``[b, h, g * q, d]`` and the log-sum-exps ``[b, h, g, q, 1]`` of a step."""

    def add(index: jax.Array, sums: tuple[Any, ...]) -> tuple[Any, ...]:
        highest, total, mean, passed = sums
        block = tiles.block(rows, index, passed)
        higher = jnp.maximum(highest, jnp.max(block.scores, axis=-1, keepdims=True))
        weights = jnp.exp(block.scores - higher)  # [b, h, g, q, k]
        decay = jnp.exp(highest - higher)  # [b, h, g, q, 1]
        total = total * decay + jnp.sum(weights, axis=-1, keepdims=True)
        weighted = jnp.einsum("bhrk,bhkd->bhrd", as_matrices(weights), block.value)
        return higher, total, mean * as_matrices(decay) + weighted, block.passed

    shape = *rows.query.shape[:2], *tiles.sizes.tile[2:4], 1
    start = jnp.full(shape, tiles.blind, tiles.dtype), jnp.zeros(shape, tiles.dtype), jnp.zeros_like(rows.query)
    highest, total, mean, _ = lax.fori_loop(0, rows.blocks, add, (*start, rows.passed))
    attends = highest != tiles.blind  # True for NaN, so that it propagates
    total = jnp.where(attends, jnp.where(highest == tiles.overflown, jnp.nan, total), 1)
    return mean / as_matrices(total), jnp.where(attends, highest + jnp.log(total), jnp.inf)
