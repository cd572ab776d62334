"""What the two TPU kernels share whose programs are blocks of queries, which walk over the blocks of keys they need."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from alibi_jax._tpu import blocks
from alibi_jax._tpu.blocks import FIELDS, OFFSET, Bias, Branch, Place, quotient
from alibi_jax._tpu.shape import LANES, KernelShape
from alibi_jax._tpu.tables import Inputs


class Layout(NamedTuple):
    """Where operands lie, and what a program keeps for itself; both by the names that the kernel knows them by."""

    operands: dict[str, tuple[Any, pl.BlockSpec]]
    of_block: pl.BlockSpec  # of queries, and of all that has their shape
    scratch: dict[str, Any]


def layout(shape: KernelShape, inputs: Inputs) -> Layout:
    """Return the layout of a grid of batch * heads times blocks of queries."""
    head_dim = shape.head_dim
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    of_block = pl.BlockSpec((1, shape.q_block, head_dim), lambda n, i: (n, i, 0))
    tables = {"table": inputs.table, "slopes": inputs.slopes}
    operands = {
        name: (x, pl.BlockSpec((1, 1, x.shape[-1]), lambda n, i: (n, 0, 0), memory_space=pltpu.SMEM))
        for name, x in tables.items()
    }
    operands |= {"query": (inputs.query, of_block), "key": (inputs.key, in_hbm), "value": (inputs.value, in_hbm)}
    if shape.has_segments:
        of_ids = pl.BlockSpec((1, 1, shape.q_block), lambda n, i: (quotient(n, shape.num_heads), 0, i))
        operands |= {"q_ids": (inputs.segment_ids[0], of_ids), "kv_ids": (inputs.segment_ids[1], in_hbm)}
    scratch = {
        "key_buffer": pltpu.VMEM((2, shape.kv_block, head_dim), inputs.key.dtype),
        "value_buffer": pltpu.VMEM((2, shape.kv_block, head_dim), inputs.value.dtype),
        "ids_buffer": pltpu.VMEM((2, 1, shape.kv_block if shape.has_segments else LANES), jnp.int32),
        "semaphores": pltpu.SemaphoreType.DMA((3, 2)),
        "turn": pltpu.SMEM((1,), jnp.int32),
        "own": pltpu.VMEM((shape.q_block, LANES), jnp.float32),
    }
    return Layout(operands, of_block, scratch)


def walk_over_keys(shape: KernelShape, refs: Any, attend: Callable[[Branch, Place, Bias, Any, Any], None]) -> None:
    """Call ``attend`` for each block of keys that this program's queries need.

    It takes how the block is treated, where it is, its bias, and its keys and values, ``[kv_block, head_dim]``.
    """
    n, block, table = pl.program_id(0), pl.program_id(1), refs.table
    first, stop, base = (table[0, 0, FIELDS * block + field] for field in range(FIELDS))
    following = tuple(table[0, 0, FIELDS * (block + 1) + field] for field in range(2))
    q_start = table[0, 0, table.shape[-1] + OFFSET] + block * shape.q_block
    limits = first * shape.kv_block, jnp.minimum(stop * shape.kv_block, shape.kv_len) - 1
    refs.own[...] = blocks.own_positions(shape, Place(q_start, 0, base), limits, (shape.q_block, LANES), 0)

    def copies(of_keys: Any, slot: Any, of_next: bool) -> list[Any]:
        at = pl.ds(pl.multiple_of(of_keys * shape.kv_block, LANES), shape.kv_block)
        head = quotient(n, shape.group)
        pairs = [(refs.key.at[head, at], refs.key_buffer), (refs.value.at[head, at], refs.value_buffer)]
        if shape.has_segments:
            pairs.append((refs.kv_ids.at[quotient(n, shape.num_heads), :, at], refs.ids_buffer))
        return blocks.copies(pairs, refs.semaphores, slot)

    def visit(of_keys: Any, slot: Any) -> None:
        place = Place(q_start, of_keys * shape.kv_block, base)

        def treat(branch: Branch) -> None:
            same = None
            if shape.has_segments:
                same = blocks.lanes(blocks.column_of(refs.q_ids[0]), shape.kv_block) == refs.ids_buffer[slot]
            slopes = refs.slopes[0, 0, 0], refs.slopes[0, 0, 1]
            bias = blocks.bias_of(shape, branch, place, slopes, refs.own[...], same, 0)
            attend(branch, place, bias, refs.key_buffer[slot], refs.value_buffer[slot])

        for branch in blocks.branches(shape, place):
            pl.when(branch.applies)(partial(treat, branch))

    blocks.walk(first, stop, following, block == 0, refs.turn, copies, visit)
