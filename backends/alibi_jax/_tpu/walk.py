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
    pairs: Callable[[Any, Any, bool, int], Sequence[tuple[Any, Any]]],
    visit: Callable[[Any, Any], None],
    sizes: Sequence[tuple[Callable[[Any], Any], int]],
) -> None:
    """Visit blocks ``first`` to ``stop``; each is copied from HBM while the block before it is computed.

    During the last visit, the first block of ``following``, the next program's range, is copied; the range is empty if
    there is no next program. So only the program that ``is_first`` starts its own first copy. ``pairs`` takes a block,
    the slot of its double buffer, whether it belongs to the next program, and its number of tokens, and returns pairs
    of a slice in HBM and its place. ``visit`` takes a block and the slot. ``refs.turn`` passes the next slot from
    program to program. ``sizes`` are the numbers of tokens that a block may have, and the condition for each.
    """
    follows = following[0] < following[1]

    def each_copy(block: Any, slot: Any, of_next: bool, act: Callable[[Any], None]) -> None:
        def act_on_all(size: int) -> None:
            for i, (source, place) in enumerate(pairs(block, slot, of_next, size)):
                act(pltpu.make_async_copy(source, place, refs.semaphores.at[i, slot]))

        for applies, size in sizes:
            pl.when(applies(block))(partial(act_on_all, size))

    def start(block: Any, slot: Any, of_next: bool) -> None:
        each_copy(block, slot, of_next, lambda copy: copy.start())

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
        each_copy(block, slot, False, lambda copy: copy.wait())
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

    def pairs(of_keys: Any, slot: Any, _: bool, size: int) -> list[Any]:
        start = pl.multiple_of(of_keys * shape.kv_block, LANES)
        head = quotient(n, shape.group)
        found = [
            (tensor.at[head, *shape.of_keys(pl.ds(start, size))], buffer.at[slot, *shape.of_keys(pl.ds(0, size))])
            for tensor, buffer in ((refs.key, refs.key_buffer), (refs.value, refs.value_buffer))
        ]
        if shape.has_segments:
            ids = refs.kv_ids.at[quotient(n, shape.heads), :, pl.ds(start, shape.kv_block)]
            found.append((ids, refs.ids_buffer.at[slot]))
        return found

    def visit(of_keys: Any, slot: Any) -> None:
        place = Place(q_start, of_keys * shape.kv_block, base)
        if shape.kv_tail < shape.kv_block:

            @pl.when(of_keys == shape.kv_blocks - 1)
            def _() -> None:  # weights of 0 times what the buffer had before may be NaN
                rest = shape.kv_block - shape.kv_tail
                for buffer in (refs.key_buffer, refs.value_buffer):
                    at = slot, *shape.of_keys(pl.ds(shape.kv_tail, rest))
                    buffer[at] = jnp.zeros(shape.of_keys(rest), buffer.dtype)

        def treat(branch: Branch) -> None:
            same = None
            if shape.has_segments:
                same = blocks.lanes(blocks.column_of(refs.q_ids[0]), shape.kv_block) == refs.ids_buffer[slot]
            bias = blocks.bias_of(shape, branch, place, slopes, refs.own[...], same, 0, index)
            attend(branch, place, bias, refs.key_buffer[slot], refs.value_buffer[slot])

        for branch in blocks.branches(shape, place):
            pl.when(branch.applies)(partial(treat, branch))

    last = shape.kv_blocks - 1
    sizes: list[tuple[Callable[[Any], Any], int]] = [(lambda block: block == last, shape.kv_tail)]
    if shape.kv_tail == shape.kv_block or not last:
        sizes = [(lambda block: True, shape.kv_tail)]
    else:
        sizes.append((lambda block: block < last, shape.kv_block))
    walk(refs, first, stop, following, block == 0, pairs, visit, sizes)
