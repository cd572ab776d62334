"""The inputs of the TPU kernels: tensors by head, queries padded to whole blocks, and tables of the needed blocks."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from alibi_core.backend import AttentionCall
from alibi_core.backend.checks import MAX_POSITION
from alibi_jax._call import Operands
from alibi_jax._plan import Needed, needed_keys
from alibi_jax._tpu.blocks import LOG2_E
from alibi_jax._tpu.shape import KernelShape

FIELDS = 3  # Entries per block of queries in a table: first block of keys, the block after the last, base.
OFFSET = -1  # Index in a table of the position of the first query.
PAIRS = 2**22  # At most this many pairs of blocks are compared at a time.


class Inputs(NamedTuple):
    """The inputs of both passes. Queries and segment ids are padded to whole blocks, keys to ``kv_multiple``."""

    table: jax.Array  # [batch * heads, 1, FIELDS * (q_blocks + 1) + 1] int32
    slopes: jax.Array  # [batch * heads, 1, 2] float32, for keys behind and ahead, times log2(e)
    query: jax.Array  # [batch * heads, padded q_len, head_dim]
    key: jax.Array  # [batch * num_kv_heads, padded kv_len, head_dim]; if transposed, the last two axes the other way
    value: jax.Array  # as key
    segment_ids: tuple[jax.Array, ...]  # [batch, 1, padded q_len], [batch, 1, kv_blocks * kv_block] int32; or empty
    rows: jax.Array | None  # [batch * heads, q_block, 3] float32, if folded: both slopes and the query of each row


def inputs_of(operands: Operands, shape: KernelShape) -> Inputs:
    """Return the inputs of the kernels for these operands."""
    heads, call = (shape.call.batch[0], shape.heads), operands.call
    tokens = shape.q_blocks * shape.q_block + shape.kv_blocks * shape.kv_block
    # Clip the offset so that all positions fit int32; beyond this distance from all keys it makes no difference.
    most = MAX_POSITION - 2 * tokens
    offset = jnp.clip(jnp.asarray(call.q_offset, jnp.int32), -most, most).reshape(-1, 1, 1)  # [batch or 1, 1, 1]
    needed = needed_keys(operands, min(shape.q_block, call.q_len), shape.kv_block, by_entry=True)
    if shape.is_folded:  # a block needs what any of its heads needs
        first, stop = (x.reshape(*heads, -1, 1) for x in needed)
        first = jnp.where(first < stop, first, call.kv_len)
        needed = Needed(jnp.min(first, axis=2), jnp.max(stop, axis=2))
    starts = offset + jnp.arange(shape.q_blocks, dtype=jnp.int32) * shape.q_block
    # The base is a key near the block of queries: the query's position, moved into the range of needed keys.
    base = jnp.clip(starts, needed.first, jnp.maximum(needed.stop - 1, needed.first))
    some = needed.first < needed.stop
    first = jnp.where(some, needed.first // shape.kv_block, 0)
    stop = jnp.where(some, -(-needed.stop // shape.kv_block), 0)
    columns = [jnp.broadcast_to(x, (*heads, shape.q_blocks)) for x in (first, stop, base)]
    blocks = jnp.stack(columns, axis=-1).reshape(*heads, -1)
    ends = jnp.zeros((*heads, len(columns)), jnp.int32)  # an empty range, as "next block" of the last block
    table = jnp.concatenate([blocks, ends, jnp.broadcast_to(offset, (*heads, 1))], axis=-1)
    ahead = call.slopes if call.future_slopes is None else call.future_slopes
    slopes = jnp.stack([jnp.broadcast_to(x, (heads[0], call.num_heads)) for x in (call.slopes, ahead)], axis=-1)
    slopes, rows = slopes.astype(jnp.float32) * LOG2_E, None
    if shape.is_folded:
        index = jnp.broadcast_to(jnp.arange(call.q_len, dtype=jnp.float32)[:, None], (*slopes.shape[:2], call.q_len, 1))
        rows = jnp.concatenate([jnp.broadcast_to(slopes[:, :, None], (*index.shape[:3], 2)), index], axis=-1)
        rows = in_blocks(rows.reshape(*heads, -1, 3), shape.q_block)
        slopes = slopes[:, : shape.heads]  # not read
    return Inputs(
        table=table.reshape(-1, 1, table.shape[-1]),
        slopes=slopes.reshape(-1, 1, 2),
        query=in_blocks(operands.query.reshape(*heads, shape.rows, -1), shape.q_block),
        key=in_blocks(operands.key, shape.kv_multiple, shape.is_transposed),
        value=in_blocks(operands.value, shape.kv_multiple, shape.is_transposed),
        segment_ids=_segment_ids(call, shape) if shape.has_segments else (),
        rows=rows,
    )


def in_blocks(tensor: jax.Array, block: int, is_transposed: bool = False) -> jax.Array:
    """Return ``[batch, heads, tokens, head_dim]`` as ``[batch * heads, padded tokens, head_dim]``, or transposed."""
    tensor = jnp.pad(tensor, ((0, 0), (0, 0), (0, -tensor.shape[2] % block), (0, 0)))
    tensor = jnp.swapaxes(tensor, 2, 3) if is_transposed else tensor
    return tensor.reshape(-1, *tensor.shape[2:])


def queries_of_keys(table: jax.Array, shape: KernelShape) -> jax.Array:
    """Invert a table: return the blocks of queries that need each block of keys.

    Returns:
        ``[batch * num_kv_heads, 1, 2 * (kv_blocks * group + 1)]`` int32: the first block of queries and the block after
        the last, for each block of keys and, within it, each query head of the group.
    """
    blocks = table[:, 0, : FIELDS * shape.q_blocks].reshape(-1, shape.q_blocks, FIELDS)
    index, keys = (jnp.arange(n, dtype=jnp.int32) for n in (shape.q_blocks, shape.kv_blocks))

    def of_head(blocks: jax.Array) -> jax.Array:
        needs = (blocks[:, 0] <= keys[:, None]) & (keys[:, None] < blocks[:, 1])  # [kv_blocks, q_blocks]
        last = jnp.max(jnp.where(needs, index, -1), axis=1)
        first = jnp.min(jnp.where(needs, index, shape.q_blocks), axis=1)
        return jnp.stack([jnp.minimum(first, last + 1), last + 1], axis=-1)  # [kv_blocks, 2]

    at_once = max(1, PAIRS // (shape.q_blocks * shape.kv_blocks))
    turned = jax.vmap(of_head)(blocks) if len(blocks) <= at_once else jax.lax.map(of_head, blocks, batch_size=at_once)
    turned = turned.reshape(-1, shape.group, shape.kv_blocks, 2)
    turned = jnp.swapaxes(turned, 1, 2).reshape(len(turned), 1, -1)  # blocks of keys first, then heads
    return jnp.pad(turned, ((0, 0), (0, 0), (0, 2)))  # an empty range, as "next block" of the last block


def _segment_ids(call: AttentionCall, shape: KernelShape) -> tuple[jax.Array, jax.Array]:
    """Return segment ids padded to whole blocks; masked keys get a segment without queries."""
    q_ids, kv_ids = call.q_segment_ids, call.kv_segment_ids
    if q_ids is None:  # only a mask: one segment for all visible tokens
        q_ids, kv_ids = (jnp.zeros((1, n), jnp.int32) for n in (shape.call.q_len, shape.call.kv_len))
    q_ids, kv_ids = (jnp.broadcast_to(ids, (shape.call.batch[0], ids.shape[1])) for ids in (q_ids, kv_ids))
    if call.mask is not None or max(ids.dtype.itemsize for ids in (q_ids, kv_ids)) > 4:
        q_ids, kv_ids = _ranks(q_ids, kv_ids)  # ids may take any value or be int64; ranks leave -2 free
    if call.mask is not None:
        kv_ids = jnp.where(call.mask[:, 0, 0], kv_ids, -2)

    def padded(ids: jax.Array, length: int) -> jax.Array:
        return jnp.pad(ids.astype(jnp.int32), ((0, 0), (0, length - ids.shape[1])))[:, None]

    q_ids = jnp.tile(q_ids, (1, shape.call.num_heads // shape.heads))  # folded heads follow one another
    return padded(q_ids, shape.q_blocks * shape.q_block), padded(kv_ids, shape.kv_blocks * shape.kv_block)


def _ranks(q_ids: jax.Array, kv_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Replace ids by ranks from 0 on, equal where ids are equal; -1 for queries whose id no key has."""
    ordered = jnp.sort(kv_ids, axis=1)
    q_ranks, kv_ranks = (jax.vmap(jnp.searchsorted)(ordered, ids) for ids in (q_ids, kv_ids))
    found = jnp.take_along_axis(ordered, jnp.minimum(q_ranks, ordered.shape[1] - 1), axis=1) == q_ids
    return jnp.where(found, q_ranks, -1), kv_ranks
