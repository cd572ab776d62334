"""What the two TPU kernels share whose programs are blocks of queries, which walk over the blocks of keys they need."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from alibi_jax._tpu.blocks import (
    FIELDS,
    OFFSET,
    Bias,
    Branch,
    Place,
    bias_of,
    branches,
    column_of,
    lanes,
    own_positions,
    quotient,
    walk,
)
from alibi_jax._tpu.shape import LANES, KernelShape
from alibi_jax._tpu.tables import Inputs


class Layout(NamedTuple):
    """Where operands lie, and what a program keeps for itself."""

    of_tables: list[pl.BlockSpec]  # table and slopes, in SMEM
    of_block: pl.BlockSpec  # of queries, and of all that has their shape
    in_hbm: pl.BlockSpec  # keys and values, as a whole
    of_ids: list[pl.BlockSpec]  # of queries and keys
    scratch: dict[str, Any]


def layout(shape: KernelShape, inputs: Inputs) -> Layout:
    """Return the layout of a grid of batch * heads times blocks of queries."""
    head_dim = shape.head_dim
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    of_tables = [
        pl.BlockSpec((1, 1, x.shape[-1]), lambda n, i: (n, 0, 0), memory_space=pltpu.SMEM)
        for x in (inputs.table, inputs.slopes)
    ]
    of_ids = [pl.BlockSpec((1, 1, shape.q_block), lambda n, i: (quotient(n, shape.num_heads), 0, i)), in_hbm]
    scratch = {
        "key_buffer": pltpu.VMEM((2, shape.kv_block, head_dim), inputs.key.dtype),
        "value_buffer": pltpu.VMEM((2, shape.kv_block, head_dim), inputs.value.dtype),
        "ids_buffer": pltpu.VMEM((2, 1, shape.kv_block if shape.has_segments else LANES), jnp.int32),
        "semaphores": pltpu.SemaphoreType.DMA((3, 2)),
        "turn": pltpu.SMEM((1,), jnp.int32),
        "own": pltpu.VMEM((shape.q_block, LANES), jnp.float32),
    }
    of_block = pl.BlockSpec((1, shape.q_block, head_dim), lambda n, i: (n, i, 0))
    return Layout(of_tables, of_block, in_hbm, of_ids if shape.has_segments else [], scratch)


def walk_over_keys(
    shape: KernelShape,
    table: Any,
    slopes: Any,
    tensors: tuple[Any, Any],
    ids: tuple[Any, Any],
    scratch: dict[str, Any],
    attend: Callable[[Branch, Place, Bias, Any, Any], None],
) -> None:
    """Call ``attend`` for each block of keys that this program's queries need.

    Args:
        shape: Of the kernel.
        table: ``[1, 1, ...]`` int32 in SMEM, of this head.
        slopes: ``[1, 1, 2]`` float32 in SMEM.
        tensors: Keys and values, ``[batch * num_kv_heads, kv_len, head_dim]`` in HBM.
        ids: Segment ids: ``[1, 1, q_block]``, and ``[batch, 1, kv_len]`` in HBM; None without segments.
        scratch: By the names of a :class:`Layout`.
        attend: Takes how the block is treated, where it is, its bias, and its keys and values, ``[kv_block,
            head_dim]``.
    """
    n, block = pl.program_id(0), pl.program_id(1)
    first, stop, base = (table[0, 0, FIELDS * block + field] for field in range(FIELDS))
    following = tuple(table[0, 0, FIELDS * (block + 1) + field] for field in range(2))
    q_start = table[0, 0, table.shape[-1] + OFFSET] + block * shape.q_block
    limits = first * shape.kv_block, jnp.minimum(stop * shape.kv_block, shape.kv_len) - 1
    scratch["own"][...] = own_positions(shape, Place(q_start, 0, base), limits, (shape.q_block, LANES), 0)
    buffers = [scratch[name] for name in ("key_buffer", "value_buffer", "ids_buffer")]

    def copies(of_keys: Any, slot: Any, of_next: bool) -> list[Any]:
        at = pl.ds(pl.multiple_of(of_keys * shape.kv_block, LANES), shape.kv_block)
        parts = [tensor.at[quotient(n, shape.group), at] for tensor in tensors]
        if shape.has_segments:
            parts.append(ids[1].at[quotient(n, shape.num_heads), :, at])
        return [
            pltpu.make_async_copy(part, buffers[index].at[slot], scratch["semaphores"].at[index, slot])
            for index, part in enumerate(parts)
        ]

    def visit(of_keys: Any, slot: Any) -> None:
        place = Place(q_start, of_keys * shape.kv_block, base)

        def treat(branch: Branch) -> None:
            same = None
            if shape.has_segments:
                same = lanes(column_of(ids[0][0]), shape.kv_block) == scratch["ids_buffer"][slot]
            bias = bias_of(shape, branch, place, (slopes[0, 0, 0], slopes[0, 0, 1]), scratch["own"][...], same, 0)
            attend(branch, place, bias, scratch["key_buffer"][slot], scratch["value_buffer"][slot])

        for branch in branches(shape, place):
            pl.when(branch.applies)(partial(treat, branch))

    walk(first, stop, following, block == 0, scratch["turn"], copies, visit)
