"""The loop of the TPU kernels over the blocks that a program needs, with double-buffered copies from HBM."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from alibi_jax._tpu import blocks
from alibi_jax._tpu.blocks import Bias, Branch, Place, quotient
from alibi_jax._tpu.shape import LANES, KernelShape
from alibi_jax._tpu.tables import FIELDS, OFFSET, Inputs

Specs = dict[str, tuple[Any, pl.BlockSpec]]  # by name: an array, or its type, and the block of it that a program sees


def run(
    name: str,
    kernel: Callable[[Any], None],
    shape: KernelShape,
    grid: tuple[int, ...],
    operands: Specs,
    results: Specs,
    scratch: dict[str, Any],
    aliases: dict[str, str],
    products: int,
) -> list[jax.Array]:
    """Run a kernel, which gets the refs of operands, results and scratch memory by name, and return the results.

    The first axis of the grid is batch * heads, in another order than arrays have it; ``refs.head`` is its index in
    arrays. ``products`` is the number of matrix products with each score, for XLA's estimate of the time.
    """
    names, batch = (*operands, *results, *scratch), shape.call.batch[0]
    order = partial(head_of, heads=grid[0] // batch, batch=batch)
    flops = 2 * products * shape.scores * shape.call.head_dim
    moved = sum(math.prod(x.shape) * x.dtype.itemsize for x, _ in (*operands.values(), *results.values()))

    def run_kernel(*refs: Any) -> None:
        kernel(SimpleNamespace(head=order(pl.program_id(0)), **dict(zip(names, refs, strict=True))))

    def ordered(spec: pl.BlockSpec) -> pl.BlockSpec:
        if (index := spec.index_map) is None:
            return spec
        return replace(spec, index_map=lambda n, *others: index(order(n), *others))

    found: list[jax.Array] = pl.pallas_call(
        run_kernel,
        grid=grid,
        in_specs=[ordered(spec) for _, spec in operands.values()],
        out_specs=[ordered(spec) for _, spec in results.values()],
        out_shape=[kind for kind, _ in results.values()],
        scratch_shapes=list(scratch.values()),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", *("arbitrary",) * (len(grid) - 1)), vmem_limit_bytes=shape.vmem_limit
        ),
        input_output_aliases={list(operands).index(x): list(results).index(y) for x, y in aliases.items()},
        cost_estimate=pl.CostEstimate(flops=flops, transcendentals=shape.scores, bytes_accessed=moved),
        interpret=shape.interpret,
        name=name,
    )(*(array for array, _ in operands.values()))
    return found


def head_of(n: Any, heads: int, batch: int) -> Any:
    """Return the head, among batch * heads, that the ``n``-th place of a grid has.

    The cores of a chip share a grid by halves. Canonical slopes become flatter from head to head, and flat heads need
    more keys: so each half gets one head of each pair, ``2 * m`` or ``2 * m + 1``, by the Thue-Morse sequence, which
    makes the sums of smooth functions nearly equal. With an even batch, halves have the same heads already.
    """
    if heads % 2 or batch % 2 == 0:
        return n
    place = n if batch == 1 else jax.lax.rem(n, jnp.int32(heads))
    is_second = (place >= heads // 2).astype(jnp.int32)
    pair = place - is_second * (heads // 2)
    parity = pair  # of the number of ones among the bits of `pair`
    for bits in (8, 4, 2, 1):
        parity = parity ^ jax.lax.shift_right_logical(parity, jnp.int32(bits))
    return n - place + 2 * pair + ((parity ^ is_second) & 1)


def walk(
    refs: Any,
    first: Any,
    stop: Any,
    following: Sequence[Any],
    is_first: Any,
    pairs: Callable[[Any, bool], Sequence[tuple[Any, Any]]],
    visit: Callable[[Any, Any], None],
) -> None:
    """Visit blocks ``first`` to ``stop``; each is copied from HBM while the block before it is computed.

    During the last visit, the first block of ``following``, the next program's range, is copied; the range is empty if
    there is no next program. So only the program that ``is_first`` starts its own first copy. ``pairs`` takes a block,
    and whether it belongs to the next program, and returns pairs of a slice in HBM and its double buffer. ``visit``
    takes a block and the slot of the double buffer. ``refs.turn`` passes the next slot from program to program.
    """
    follows = following[0] < following[1]

    def copies(block: Any, slot: Any, of_next: bool) -> list[Any]:
        found = enumerate(pairs(block, of_next))
        return [pltpu.make_async_copy(x, buffer.at[slot], refs.semaphores.at[i, slot]) for i, (x, buffer) in found]

    def start(block: Any, slot: Any, of_next: bool) -> None:
        for copy in copies(block, slot, of_next):
            copy.start()

    @pl.when(is_first)
    def _() -> None:
        refs.turn[0] = 0

    turn = refs.turn[0]
    pl.when(is_first & (first < stop))(lambda: start(first, turn, False))
    # A program without blocks still starts the next program's first copy.
    pl.when((first >= stop) & follows)(lambda: start(following[0], turn, True))

    def step(block: Any, _: None) -> None:
        slot = jax.lax.rem(turn + block - first, jnp.int32(2))
        pl.when(block + 1 < stop)(lambda: start(block + 1, 1 - slot, False))
        pl.when((block + 1 == stop) & follows)(lambda: start(following[0], 1 - slot, True))
        for copy in copies(block, slot, False):
            copy.wait()
        visit(block, slot)

    jax.lax.fori_loop(first, stop, step, None)
    refs.turn[0] = jax.lax.rem(turn + jnp.maximum(stop - first, 0), jnp.int32(2))


def query_specs(shape: KernelShape, inputs: Inputs) -> tuple[Specs, pl.BlockSpec, dict[str, Any]]:
    """Return the specs of a kernel with one program per block of queries, in a grid of (batch * heads, q_blocks).

    Returns:
        The operands; the BlockSpec of an array with the query's shape; the scratch memory.
    """
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    of_queries = pl.BlockSpec((1, shape.q_block, shape.call.head_dim), lambda n, i: (n, i, 0))
    tables = {"table": inputs.table, "slopes": inputs.slopes}  # [1, 1, length of the table] and [1, 1, 2]
    operands = {
        name: (x, pl.BlockSpec((1, 1, x.shape[-1]), lambda n, i: (n, 0, 0), memory_space=pltpu.SMEM))
        for name, x in tables.items()
    }
    operands |= {
        "query": (inputs.query, of_queries),  # [1, q_block, head_dim]
        "key": (inputs.key, in_hbm),  # [batch * num_kv_heads, padded kv_len, head_dim], or transposed
        "value": (inputs.value, in_hbm),
    }
    if shape.has_segments:
        of_ids = pl.BlockSpec((1, 1, shape.q_block), lambda n, i: (quotient(n, shape.heads), 0, i))
        operands["q_ids"] = inputs.segment_ids[0], of_ids  # [1, 1, q_block]
        operands["kv_ids"] = inputs.segment_ids[1], in_hbm  # [batch, 1, kv_blocks * kv_block]
    if inputs.rows is not None:
        operands["rows"] = inputs.rows, pl.BlockSpec((1, shape.q_block, 3), lambda n, i: (n, 0, 0))
    scratch = {
        "key_buffer": pltpu.VMEM((2, *shape.of_keys(shape.kv_block)), inputs.key.dtype),
        "value_buffer": pltpu.VMEM((2, *shape.of_keys(shape.kv_block)), inputs.value.dtype),
        "ids_buffer": pltpu.VMEM((2, 1, shape.kv_block if shape.has_segments else LANES), jnp.int32),
        "semaphores": pltpu.SemaphoreType.DMA((3, 2)),
        "turn": pltpu.SMEM((1,), jnp.int32),
        "own": pltpu.VMEM((shape.q_block, LANES), jnp.float32),  # positions of the queries minus the base
    }
    return operands, of_queries, scratch


def walk_over_keys(shape: KernelShape, refs: Any, attend: Callable[[Branch, Place, Bias, Any, Any], None]) -> None:
    """Call ``attend`` for each block of keys that this program's queries need.

    ``attend`` takes the block's branch, place and bias, and its keys and values, ``[kv_block, head_dim]``.
    """
    n, block, table = refs.head, pl.program_id(1), refs.table
    first, stop, base = (table[0, 0, FIELDS * block + field] for field in range(FIELDS))
    following = [table[0, 0, FIELDS * (block + 1) + field] for field in range(2)]
    q_start = table[0, 0, table.shape[-1] + OFFSET] + block * shape.q_block
    limits = first * shape.kv_block, jnp.minimum(stop * shape.kv_block, shape.call.kv_len) - 1
    index = None
    slopes: tuple[Any, Any] = refs.slopes[0, 0, 0], refs.slopes[0, 0, 1]
    if shape.is_folded:
        columns = [jnp.broadcast_to(refs.rows[0, :, i : i + 1], (shape.q_block, LANES)) for i in range(3)]
        slopes, index = tuple(blocks.lanes(x, shape.kv_block) for x in columns[:2]), columns[2].astype(jnp.int32)
    refs.own[...] = blocks.own_positions(shape, Place(q_start, 0, base), limits, (shape.q_block, LANES), 0, index)

    def first_key(of_keys: Any) -> Any:
        start = of_keys * shape.kv_block
        return start if shape.last_start % shape.kv_block == 0 else jnp.minimum(start, shape.last_start)

    def pairs(of_keys: Any, _: bool) -> list[Any]:
        at = pl.ds(pl.multiple_of(first_key(of_keys), LANES), shape.kv_block)
        matrix = quotient(n, shape.group), *shape.of_keys(at)
        found = [(refs.key.at[matrix], refs.key_buffer), (refs.value.at[matrix], refs.value_buffer)]
        if shape.has_segments:
            found.append((refs.kv_ids.at[quotient(n, shape.heads), :, at], refs.ids_buffer))
        return found

    def visit(of_keys: Any, slot: Any) -> None:
        start = first_key(of_keys)
        place = Place(q_start, start, base, of_keys * shape.kv_block - start)

        def treat(branch: Branch) -> None:
            same = None
            if shape.has_segments:
                same = blocks.lanes(blocks.column_of(refs.q_ids[0]), shape.kv_block) == refs.ids_buffer[slot]
            bias = blocks.bias_of(shape, branch, place, slopes, refs.own[...], same, 0, index)
            attend(branch, place, bias, refs.key_buffer[slot], refs.value_buffer[slot])

        for branch in blocks.branches(shape, place):
            pl.when(branch.applies)(partial(treat, branch))

    walk(refs, first, stop, following, block == 0, pairs, visit)
