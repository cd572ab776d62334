"""What the TPU kernels are called with: tensors by head, in whole blocks, and tables of the blocks that are needed."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from alibi_core.backend.checks import MAX_POSITION
from alibi_jax._call import Operands, Rules, kv_axis, needed_keys
from alibi_jax._tpu.blocks import FIELDS, LOG2_E
from alibi_jax._tpu.shape import KernelShape

PAIRS = 2**22  # of blocks that are looked at together


class Inputs(NamedTuple):
    """What both passes read. Axes are batch * heads, then tokens, padded to whole blocks."""

    table: jax.Array  # [batch * num_heads, 1, FIELDS * (q_blocks + 1) + 1] int32; see blocks.py
    slopes: jax.Array  # [batch * num_heads, 1, 2] float32, times log2(e): for keys behind, and ahead
    query: jax.Array  # [batch * num_heads, q_len, head_dim]
    key: jax.Array  # [batch * num_kv_heads, kv_len, head_dim]
    value: jax.Array  # likewise
    segment_ids: tuple[jax.Array, ...]  # [batch, 1, q_len], [batch, 1, kv_len] int32; empty if there are none


def inputs_of(rules: Rules, operands: Operands, shape: KernelShape) -> Inputs:
    """Return what the kernels read."""
    heads = shape.batch, shape.num_heads
    tokens = shape.q_blocks * shape.q_block + shape.kv_blocks * shape.kv_block
    offset = _first_positions(rules, operands, tokens)
    needed = needed_keys(rules, operands, shape.q_block, shape.kv_block)
    starts = offset + jnp.arange(shape.q_blocks, dtype=jnp.int32) * shape.q_block
    base = jnp.clip(starts, needed.first, jnp.maximum(needed.stop - 1, needed.first))
    some = needed.first < needed.stop
    first = jnp.where(some, needed.first // shape.kv_block, 0)
    stop = jnp.where(some, -(-needed.stop // shape.kv_block), 0)
    columns = [jnp.broadcast_to(x, (*heads, shape.q_blocks)) for x in (first, stop, base)]
    blocks = jnp.stack(columns, axis=-1).reshape(*heads, -1)
    ends = jnp.zeros((*heads, len(columns)), jnp.int32)  # no blocks are needed by what follows the last
    table = jnp.concatenate([blocks, ends, jnp.broadcast_to(offset, (*heads, 1))], axis=-1)
    return Inputs(
        table=table.reshape(-1, 1, table.shape[-1]),
        slopes=_both_slopes(operands).reshape(-1, 1, 2),
        query=by_head(operands.query, shape.q_blocks * shape.q_block),
        key=by_head(operands.key, shape.kv_blocks * shape.kv_block, kv_axis(rules)),
        value=by_head(operands.value, shape.kv_blocks * shape.kv_block, kv_axis(rules)),
        segment_ids=_segment_ids(operands, shape) if shape.has_segments else (),
    )


def _first_positions(rules: Rules, operands: Operands, tokens: int) -> jax.Array:
    """Return the positions of the first queries, ``[batch or 1, 1, 1]`` int32, with room for ``tokens`` around them.

    Farther from all keys than that it makes no difference, and the last block's positions must fit.
    """
    offset = rules.q_offset if rules.q_offset is not None else operands.q_offset
    most = MAX_POSITION - 2 * tokens
    return jnp.clip(jnp.asarray(offset, jnp.int32), -most, most).reshape(-1, 1, 1)


def _both_slopes(operands: Operands) -> jax.Array:
    """Return the slopes for keys behind and ahead, times log2(e): ``[batch, num_heads, 2]`` float32."""
    heads = operands.query.shape[0], operands.query.shape[2]
    ahead = operands.slopes if operands.future_slopes is None else operands.future_slopes
    slopes = jnp.stack([jnp.broadcast_to(x, heads) for x in (operands.slopes, ahead)], axis=-1)
    return slopes.astype(jnp.float32) * LOG2_E


def by_head(tensor: jax.Array, length: int, axis: int = 1) -> jax.Array:
    """Return a tensor with tokens along this axis as ``[batch * heads, length, head_dim]``, zeros at the end."""
    tensor = jnp.swapaxes(tensor, 1, 2) if axis == 1 else tensor
    tensor = jnp.pad(tensor, ((0, 0), (0, 0), (0, length - tensor.shape[2]), (0, 0)))
    return tensor.reshape(-1, *tensor.shape[2:])


def by_token(tensor: jax.Array, heads: int, length: int) -> jax.Array:
    """Return ``[batch * heads, tokens, head_dim]`` as ``[batch, length, heads, head_dim]``."""
    tensor = tensor[:, :length].reshape(-1, heads, length, tensor.shape[-1])
    return jnp.swapaxes(tensor, 1, 2)


def queries_of_keys(table: jax.Array, shape: KernelShape) -> jax.Array:
    """Turn a table around: which blocks of queries need each block of keys.

    Returns:
        ``[batch * num_kv_heads, 1, 2 * (kv_blocks * group + 1)]`` int32: the first block and the one after the last,
        for each block of keys and each of the heads that share it, in this order.
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
    turned = jnp.swapaxes(turned, 1, 2).reshape(len(turned), 1, -1)
    return jnp.pad(turned, ((0, 0), (0, 0), (0, 2)))


def _segment_ids(operands: Operands, shape: KernelShape) -> tuple[jax.Array, jax.Array]:
    """Return segment ids in whole blocks, masked keys in a segment that no query is in."""
    q_ids, kv_ids = operands.q_segment_ids, operands.kv_segment_ids
    if q_ids is None:
        q_ids, kv_ids = (jnp.zeros((1, n), jnp.int32) for n in (shape.q_len, shape.kv_len))
    elif kv_ids is None:
        kv_ids = q_ids
    q_ids, kv_ids = (jnp.broadcast_to(ids, (shape.batch, ids.shape[1])) for ids in (q_ids, kv_ids))
    if operands.mask is not None or max(ids.dtype.itemsize for ids in (q_ids, kv_ids)) > 4:
        q_ids, kv_ids = _ranks(q_ids, kv_ids)  # any numbers may be in use; ranks leave some free
    if operands.mask is not None:
        shown = jnp.broadcast_to(operands.mask[:, 0, 0], (operands.mask.shape[0], shape.kv_len))
        kv_ids = jnp.where(shown, kv_ids, -2)

    def padded(ids: jax.Array, length: int) -> jax.Array:
        return jnp.pad(ids.astype(jnp.int32), ((0, 0), (0, length - ids.shape[1])))[:, None]

    return padded(q_ids, shape.q_blocks * shape.q_block), padded(kv_ids, shape.kv_blocks * shape.kv_block)


def _ranks(q_ids: jax.Array, kv_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return ids that are equal where the given ones are, from 0 on; -1 for queries whose id no key has."""
    ordered = jnp.sort(kv_ids, axis=1)
    q_ranks, kv_ranks = (jax.vmap(jnp.searchsorted)(ordered, ids) for ids in (q_ids, kv_ids))
    found = jnp.take_along_axis(ordered, jnp.minimum(q_ranks, ordered.shape[1] - 1), axis=1) == q_ids
    return jnp.where(found, q_ranks, -1), kv_ranks
