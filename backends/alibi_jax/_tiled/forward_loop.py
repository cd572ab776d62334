"""The forward pass of tiled attention: an online softmax over the blocks of keys that each tile of queries needs."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from alibi_jax._call import Operands, Rules
from alibi_jax._tiled.scores import AXES, Scores, Tensors, as_matrices
from alibi_jax._tiled.tiles import Places, Tiling, arranged, jobs_of, put, sizes_of

RESULT, STATISTICS = AXES["query"], "bhgq"


def forward(rules: Rules, operands: Operands, dtype: Any, tiling: Tiling) -> tuple[jax.Array, jax.Array]:
    """Return attention, ``[batch, q_len, num_heads, head_dim]`` of this dtype, and log-sum-exps of its rows.

    These are ``[batch, num_heads, q_len]``, in the working dtype, of scores whose distances are counted as
    :class:`Scores` does; +inf for a query that sees no key.

    Where tiles are ``together``, every operation is on all batch entries and heads, which then may be distributed among
    devices: loops are over tiles of queries and over the keys that any of the heads needs. Otherwise each head has its
    own range of keys.
    """
    sizes = sizes_of(rules, operands, tiling)
    tensors, jobs, whole = Tensors(rules, operands, sizes), jobs_of(rules, operands, sizes), sizes.whole

    def step(index: jax.Array, out: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        places = Places.of_step(sizes, jobs, index)
        found = _rows(Scores.of_step(tensors, places, "bhgqk"))
        return put_rows(out[0], found[0], RESULT, places), put_rows(out[1], found[1], STATISTICS, places)

    with full_precision(operands):
        result = tensors.full([whole[x] for x in RESULT], 0, dtype)
        start = result, tensors.full([whole[x] for x in STATISTICS], 0)
        result, log_sum_exps = lax.fori_loop(0, sizes.steps, step, start)
    return result.reshape(operands.query.shape), log_sum_exps.reshape(whole["b"], -1, whole["q"])


def full_precision(operands: Operands) -> contextlib.AbstractContextManager[object]:
    """Return a context where products of float32 tensors are float32 products, which accelerators otherwise shorten."""
    is_low = operands.query.dtype.itemsize == 2
    return contextlib.nullcontext() if is_low else jax.default_matmul_precision("highest")


def put_rows(array: jax.Array, part: jax.Array, axes: str, places: Places) -> jax.Array:
    """Put a step's own rows where they belong. They have the axes ``bhgq`` or ``bhgqd``, and the array ``axes``."""
    part = jnp.transpose(part, ["bhgqd".index(x) for x in axes])

    def own_ones(there: jax.Array, part: jax.Array, lane: Any) -> jax.Array:
        own = arranged(places.own_rows[lane][None], "bq", axes)
        return jnp.where(own, part.astype(there.dtype), there)

    return put(array, part, axes, places.sizes, places.starts, None if places.own_rows is None else own_ones)


def _rows(scores: Scores) -> tuple[jax.Array, jax.Array]:
    """Return the result ``[b, h, g, q, d]`` and the log-sum-exps ``[b, h, g, q]`` of a step."""
    query = scores.query
    rows = query.shape[:-1]
    # Finite, or what a hidden key weighs were exp(-inf + inf).
    lowest = jnp.finfo(query.dtype).min

    def add(index: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        highest, total, mean = sums
        block = scores.block(index)
        higher = jnp.maximum(highest, jnp.max(block.scores, axis=-1))
        weights = jnp.exp(block.scores - higher[..., None])
        shrunk = jnp.exp(highest - higher)
        total = total * shrunk + jnp.sum(weights, axis=-1)
        weighted = jnp.einsum("bhrk,bhkd->bhrd", as_matrices(weights), block.value).reshape(mean.shape)
        return higher, total, mean * shrunk[..., None] + weighted

    full = scores.tensors.full
    start: Any = full(rows, lowest), full(rows, 0), full(query.shape, 0)
    highest, total, mean = lax.fori_loop(0, scores.places.blocks, add, start)
    attends = total != 0  # NaN is not 0
    total = jnp.where(attends, total, 1)
    result = mean / total[..., None]  # zeros where no key was added
    return result, jnp.where(attends, highest + jnp.log(total), jnp.inf)
