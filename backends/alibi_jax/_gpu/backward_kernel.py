"""The GPU kernel's backward pass: one kernel for the gradients of keys and values, one for those of queries.

Each computes the weights again, from the scores and the forward pass's log-sum-exps. In the first, programs are tiles
of keys that walk over the tiles of queries that need them, and scores have keys along their rows, queries along their
columns; the second goes the forward pass's way. Neither adds to memory that others write: results are the same in every
run.

Right in interpretation, not yet run on a GPU.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from alibi_jax._compatible import local
from alibi_jax._gpu.forward_kernel import (
    MAX_WINDOW,
    Keys,
    Tile,
    at_tile,
    compiler_params,
    load_rows,
    rows_there,
    spec_of_batch,
    specs_by_query,
    store_rows,
    walk,
)
from alibi_jax._tpu import LOG2_E, product

if TYPE_CHECKING:
    from alibi_jax._gpu.passes import Inputs, KernelShape

PAIRS = 2**22  # of tiles that are looked at together
FIELDS = 8  # of a tile of keys in a table; see queries_of_keys


class Rows(NamedTuple):
    """What the backward pass knows of queries besides."""

    cotangent: jax.Array  # [batch, q_len, num_heads, head_dim]
    log_sum_exps: jax.Array  # [batch, num_heads, q_len] float32, from the forward pass
    delta: jax.Array  # likewise: the sums of cotangent times result


# --- By queries -----------------------------------------------------------------------------------------------------


def backward_of_queries(shape: KernelShape, inputs: Inputs, rows: Rows, slopes_too: bool) -> tuple[jax.Array, ...]:
    """Return the gradient of queries, as they are.

    With ``slopes_too`` also ``[batch, num_heads, q_tiles, 2]`` float32, whose sums over tiles are the gradients of the
    slopes for keys behind and for keys ahead.
    """
    own = at_tile(shape)
    of_tile = pl.BlockSpec((None, shape.q_block, None, shape.width), lambda i, h, b: (b, own(i), h, 0))
    of_rows = pl.BlockSpec((None, None, shape.q_block), lambda i, h, b: (b, h, own(i)))
    out_specs, out_shape = [of_tile], [local(inputs.query.shape, inputs.query.dtype)]
    if slopes_too:
        out_specs.append(pl.BlockSpec((None, None, None, 2), lambda i, h, b: (b, h, own(i), 0)))
        out_shape.append(local((shape.batch, shape.num_heads, shape.q_tiles, 2), jnp.float32))
    return pl.pallas_call(
        partial(_kernel_of_queries, shape),
        grid=(shape.q_tiles, shape.num_heads, shape.batch),
        in_specs=[*specs_by_query(shape, inputs), of_tile, of_rows, of_rows],
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=compiler_params(shape, 2**12),
        interpret=shape.options.interpret,
        name="alibi_backward_of_queries",
    )(*inputs, *rows)


def _kernel_of_queries(shape: KernelShape, *refs: Any) -> None:
    inputs, (cotangent, log_sum_exps, delta), (out, *out_slopes) = refs[:8], refs[8:11], refs[11:]
    tile = Tile.of_query(shape, inputs)
    query, cotangent = (load_rows(shape, ref, slice(None), tile.is_there) for ref in (inputs[2], cotangent))
    log_sum_exps = _of_rows(log_sum_exps, slice(None), tile.is_there, jnp.inf)  # so that what is not there weighs 0
    delta = _of_rows(delta, slice(None), tile.is_there)

    def visit(block: Any, side: str, sums: tuple[Any, ...]) -> tuple[Any, ...]:
        keys = tile.keys(block, side)
        key, value = tile.tensors(keys, inputs[3:5])
        weights = _weights(tile, keys, side, product(query, key, (1, 1)), log_sum_exps)  # [q_block, kv_block]
        d_scores = weights * (product(cotangent, value, (1, 1)) - delta[:, None])
        d_query, *of_slopes = sums
        d_query = d_query + product(d_scores.astype(key.dtype), key, (1, 0))
        if of_slopes:
            behind, ahead, mean_behind, mean_ahead, slip = of_slopes
            distance = tile.distance(keys)
            if side != "future":
                past = jnp.maximum(distance, 0)
                behind = behind - jnp.sum(d_scores * past, axis=1)
                mean_behind = mean_behind + jnp.sum(weights * past, axis=1)
            if side != "past" and not shape.is_causal:
                future = jnp.minimum(distance, 0)
                ahead = ahead + jnp.sum(d_scores * future, axis=1)
                mean_ahead = mean_ahead - jnp.sum(weights * future, axis=1)
            of_slopes = [behind, ahead, mean_behind, mean_ahead, slip + jnp.sum(d_scores, axis=1)]
        return d_query, *of_slopes

    zeros = jnp.zeros((shape.q_block,), jnp.float32)
    start = jnp.zeros((shape.q_block, shape.width), jnp.float32), *[zeros] * (5 * len(out_slopes))
    d_query, *of_slopes = walk(shape, *tile.spans(), visit, start)
    store_rows(shape, out, d_query * shape.scale, tile.is_there)
    for ref in out_slopes:
        # The gradients of a row's scores have the sum 0, but for what delta, from a result that was rounded, is off by.
        # All of them are off by that much of their weights, and distances make the most of it.
        behind, ahead, mean_behind, mean_ahead, slip = of_slopes
        ref[0] = jnp.sum(behind + slip * mean_behind)
        ref[1] = jnp.sum(ahead + slip * mean_ahead)


# --- By keys --------------------------------------------------------------------------------------------------------


def backward_of_keys(shape: KernelShape, inputs: Inputs, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of keys and values, ``[batch, kv_len, num_kv_heads, head_dim]``."""
    grouped = shape.batch, shape.num_kv_heads, shape.group
    turned = queries_of_keys(inputs.table, shape)
    table, slopes, *statistics = (
        x.reshape(*grouped, *x.shape[2:]) for x in (inputs.table, inputs.slopes, rows.log_sum_exps, rows.delta)
    )
    queries = shape.q_tiles * shape.q_block
    of_keys = pl.BlockSpec((None, shape.kv_block, None, shape.width), lambda j, h, b: (b, j, h, 0))
    of_queries = pl.BlockSpec((None, queries, shape.group, shape.width), lambda j, h, b: (b, 0, h, 0))
    of_rows = pl.BlockSpec((None, None, shape.group, queries), lambda j, h, b: (b, h, 0, 0))
    return pl.pallas_call(
        partial(_kernel_of_keys, shape),
        grid=(shape.kv_tiles, shape.num_kv_heads, shape.batch),
        in_specs=[
            pl.BlockSpec((None, None, shape.group, None, FIELDS), lambda j, h, b: (b, h, 0, j, 0)),
            pl.BlockSpec((None, None, shape.group, shape.q_tiles, 3), lambda j, h, b: (b, h, 0, 0, 0)),
            pl.BlockSpec((None, None, shape.group, 2), lambda j, h, b: (b, h, 0, 0)),
            *(of_keys, of_keys, of_queries, of_queries, of_rows, of_rows),
            spec_of_batch(inputs.q_ids, queries, lambda j, h, b: (b, 0)),
            spec_of_batch(inputs.kv_ids, shape.kv_block, lambda j, h, b: (b, j)),
            spec_of_batch(inputs.shown, shape.kv_block, lambda j, h, b: (b, j)),
        ],
        out_specs=[of_keys, of_keys],
        out_shape=[local(x.shape, x.dtype) for x in (inputs.key, inputs.value)],
        compiler_params=compiler_params(shape, 2**12),
        interpret=shape.options.interpret,
        name="alibi_backward_of_keys",
    )(
        *(turned, table, slopes, inputs.key, inputs.value, inputs.query, rows.cotangent, *statistics),
        *(inputs.q_ids, inputs.kv_ids, inputs.shown),
    )


def _kernel_of_keys(shape: KernelShape, *refs: Any) -> None:
    turned, table, slopes, key, value, query, cotangent, log_sum_exps, delta, q_ids, kv_ids, shown, *out = refs
    start = pl.program_id(0) * shape.kv_block
    positions = start + jnp.arange(shape.kv_block, dtype=jnp.int32)
    there = None if shape.kv_len % shape.kv_block == 0 else positions < shape.kv_len
    # What nobody needs may be anything: even a weight of 0 would not do away with a NaN.
    needed = (positions >= turned[0, 6]) & (positions < turned[0, 7])
    key, value = (load_rows(shape, ref, slice(None), needed) for ref in (key, value))  # [kv_block, width]
    kv_ids, shown = (None if ref is None else _of_rows(ref, slice(None), there) for ref in (kv_ids, shown))

    def visit(member: Any, block: Any, side: str, sums: tuple[Any, Any]) -> tuple[Any, Any]:
        rows_of = pl.ds(block * shape.q_block, shape.q_block)
        # Where nothing is masked, all rows are there: see queries_of_keys.
        rows = rows_there(shape, block) if side == "both" else None
        queries, cotangents = (load_rows(shape, ref, (rows_of, member), rows) for ref in (query, cotangent))
        sums_of_row = _of_rows(log_sum_exps, (member, rows_of), rows, jnp.inf)
        means = _of_rows(delta, (member, rows_of), rows)
        ids = None if q_ids is None else _of_rows(q_ids, rows_of, rows)
        first, stop, q_start = (table[member, block, field] for field in range(3))
        tile = Tile(shape, first, stop, q_start, (slopes[member, 0], slopes[member, 1]), rows, ids, (), q_axis=1)
        keys = Keys(start, positions, (positions >= first) & (positions < stop), kv_ids, shown)
        scores = product(key, queries, (1, 1))  # [kv_block, q_block]
        weights = _weights(tile, keys, side, scores, sums_of_row)
        d_value = sums[1] + product(weights.astype(cotangents.dtype), cotangents, (1, 0))
        d_scores = weights * (product(value, cotangents, (1, 1)) - means[None, :])
        return sums[0] + product(d_scores.astype(queries.dtype), queries, (1, 0)), d_value

    def add_head(member: Any, sums: tuple[Any, Any]) -> tuple[Any, Any]:
        begin, end, *ends = (turned[member, field] for field in range(6))
        spans = [("past", *ends[2:])] if shape.is_causal else [("future", *ends[:2]), ("past", *ends[2:])]
        return walk(shape, begin, end, spans, partial(visit, member), sums)

    zeros = jnp.zeros((shape.kv_block, shape.width), jnp.float32)
    if shape.group == 1:
        d_key, d_value = add_head(jnp.int32(0), (zeros, zeros))
    else:
        d_key, d_value = jax.lax.fori_loop(0, shape.group, add_head, (zeros, zeros))
    store_rows(shape, out[0], d_key * shape.scale, there)
    store_rows(shape, out[1], d_value, there)


def queries_of_keys(table: jax.Array, shape: KernelShape) -> jax.Array:
    """Turn the table of needed keys around: which tiles of queries need each tile of keys.

    Returns:
        ``[batch, num_kv_heads, group, kv_tiles, FIELDS]`` int32: the first tile and the one after the last that need
        any of the keys; of these, which need no masks and lie before all of the keys, and which after, each from and
        to; and the first key and the one after the last that any tile of any head of the group needs, of all keys.
    """
    index = jnp.arange(shape.q_tiles, dtype=jnp.int32)
    low = jnp.arange(shape.kv_tiles, dtype=jnp.int32)[:, None] * shape.kv_block
    high = low + shape.kv_block - 1
    window = MAX_WINDOW if shape.window_size is None else min(shape.window_size, MAX_WINDOW)

    def of_head(tiles: jax.Array) -> jax.Array:
        first, stop, start = tiles.T
        last = start + shape.q_block - 1
        needs = (first <= high) & (stop > low) & (first < stop)  # [kv_tiles, q_tiles]
        end = jnp.max(jnp.where(needs, index + 1, 0), axis=1)
        begin = jnp.minimum(jnp.min(jnp.where(needs, index, shape.q_tiles), axis=1), end)
        is_whole = (first <= low) & (stop > high) & ((index + 1) * shape.q_block <= shape.q_len)
        before = is_whole & (last <= low) & (high - start <= window)
        after = is_whole & (start >= high) & (last - low <= window)
        least = jnp.min(jnp.where(needs, first, shape.kv_len), axis=1)
        most = jnp.max(jnp.where(needs, stop, 0), axis=1)
        return jnp.stack([begin, end, *_run(before, begin), *_run(after, end), least, most], axis=-1)

    heads = table.reshape(-1, *table.shape[2:])
    at_once = max(1, PAIRS // (shape.q_tiles * shape.kv_tiles))
    turned = jax.vmap(of_head)(heads) if len(heads) <= at_once else jax.lax.map(of_head, heads, batch_size=at_once)
    turned = turned.reshape(shape.batch, shape.num_kv_heads, shape.group, shape.kv_tiles, FIELDS)
    extents = turned[..., 6].min(axis=2, keepdims=True), turned[..., 7].max(axis=2, keepdims=True)
    together = jnp.broadcast_to(jnp.stack(extents, axis=-1), (*turned.shape[:-1], 2))
    return jnp.concatenate([turned[..., :6], together], axis=-1)


def _run(holds: jax.Array, otherwise: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return, for each row, where the first run of what holds begins and ends; an empty one if there is none."""
    index = jnp.arange(holds.shape[1], dtype=jnp.int32)
    first = jnp.min(jnp.where(holds, index, holds.shape[1]), axis=1)
    stop = jnp.min(jnp.where(~holds & (index > first[:, None]), index, holds.shape[1]), axis=1)
    some = first < holds.shape[1]
    return jnp.where(some, first, otherwise), jnp.where(some, stop, otherwise)


def _weights(tile: Tile, keys: Keys, side: str, scores: Any, log_sum_exps: Any) -> Any:
    """Return what softmax made of scores; ``log_sum_exps`` is ``[q_block]``."""
    bias, of_queries = tile.bias(keys, side)
    subtracted = log_sum_exps - of_queries
    subtracted = subtracted[:, None] if tile.q_axis == 0 else subtracted[None, :]
    # No weight exceeds 1, but large scores are rounded in another way in each order of summation.
    return jnp.exp2(jnp.minimum(scores * (tile.shape.scale * LOG2_E) + bias - subtracted, 0))


def _of_rows(ref: Any, at: Any, rows: Any, other: float = 0) -> Any:
    """Return part of a reference as a vector, another number where there is nothing."""
    at = at if isinstance(at, tuple) else (at,)
    return plgpu.load(ref.at[at], mask=rows, other=None if rows is None else other)
