"""The inputs of the TPU kernels: tensors by head, padded to whole blocks, and tables of the needed blocks."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from alibi_core.backend import AttentionCall
from alibi_core.backend.checks import MAX_POSITION
from alibi_jax._call import Operands
from alibi_jax._plan import needed_keys
from alibi_jax._tpu.blocks import LOG2_E
from alibi_jax._tpu.shape import KernelShape

FIELDS = 3  # Entries per block of queries in a table: first block of keys, the block after the last, base.
OFFSET = -1  # Index in a table of the position of the first query.
PAIRS = 2**22  # At most this many pairs of blocks are compared at a time.


class Inputs(NamedTuple):
    """The inputs of both passes. Axes are batch * heads, then tokens, padded to whole blocks."""

    table: jax.Array  # [batch * num_heads, 1, FIELDS * (q_blocks + 1) + 1] int32
    slopes: jax.Array  # [batch * num_heads, 1, 2] float32, for keys behind and ahead, times log2(e)
    query: jax.Array  # [batch * num_heads, q_len, head_dim]
    key: jax.Array  # [batch * num_kv_heads, kv_len, head_dim]
    value: jax.Array  # [batch * num_kv_heads, kv_len, head_dim]
    segment_ids: tuple[jax.Array, ...]  # [batch, 1, q_len], [batch, 1, kv_len] int32; empty if there are none


def inputs_of(operands: Operands, shape: KernelShape) -> Inputs:
    """Return the inputs of the kernels for these operands."""
    heads, call = (shape.call.batch[0], shape.call.num_heads), operands.call
    tokens = shape.q_blocks * shape.q_block + shape.kv_blocks * shape.kv_block
    # Clip the offset so that all positions fit int32; beyond this distance from all keys it makes no difference.
    most = MAX_POSITION - 2 * tokens
    offset = jnp.clip(jnp.asarray(call.q_offset, jnp.int32), -most, most).reshape(-1, 1, 1)  # [batch or 1, 1, 1]
    needed = needed_keys(operands, shape.q_block, shape.kv_block)
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
    slopes = jnp.stack([jnp.broadcast_to(x, heads) for x in (call.slopes, ahead)], axis=-1)
    return Inputs(
        table=table.reshape(-1, 1, table.shape[-1]),
        slopes=slopes.astype(jnp.float32).reshape(-1, 1, 2) * LOG2_E,
        query=in_blocks(operands.query, shape.q_blocks * shape.q_block),
        key=in_blocks(operands.key, shape.kv_blocks * shape.kv_block),
        value=in_blocks(operands.value, shape.kv_blocks * shape.kv_block),
        segment_ids=_segment_ids(call, shape) if shape.has_segments else (),
    )


def in_blocks(tensor: jax.Array, length: int) -> jax.Array:
    """Return ``[batch, heads, tokens, head_dim]`` as ``[batch * heads, length, head_dim]``, zeros at the end."""
    tensor = jnp.pad(tensor, ((0, 0), (0, 0), (0, length - tensor.shape[2]), (0, 0)))
    return tensor.reshape(-1, *tensor.shape[2:])


def without_padding(tensor: jax.Array, heads: int, length: int) -> jax.Array:
    """Return ``[batch * heads, padded length, head_dim]`` as ``[batch, heads, length, head_dim]``."""
    return tensor[:, :length].reshape(-1, heads, length, tensor.shape[-1])


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

    return padded(q_ids, shape.q_blocks * shape.q_block), padded(kv_ids, shape.kv_blocks * shape.kv_block)


def _ranks(q_ids: jax.Array, kv_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Replace ids by ranks from 0 on, equal where ids are equal; -1 for queries whose id no key has."""
    ordered = jnp.sort(kv_ids, axis=1)
    q_ranks, kv_ranks = (jax.vmap(jnp.searchsorted)(ordered, ids) for ids in (q_ids, kv_ids))
    found = jnp.take_along_axis(ordered, jnp.minimum(q_ranks, ordered.shape[1] - 1), axis=1) == q_ids
    return jnp.where(found, q_ranks, -1), kv_ranks
