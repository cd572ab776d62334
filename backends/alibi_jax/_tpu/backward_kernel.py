"""The TPU kernel's backward pass: one kernel for the gradients of keys and values, one for those of queries.

Each computes the weights again, from the scores and the forward pass's log-sum-exps. In the first, programs are blocks
of keys that walk over the blocks of queries that need them, and scores have keys along their rows, queries along their
columns; the second goes the forward pass's way.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from alibi_jax._compatible import local
from alibi_jax._tpu.blocks import (
    FIELDS,
    LOG2_E,
    OFFSET,
    ONE,
    ZERO,
    Bias,
    Branch,
    Place,
    bias_of,
    branches,
    column_of,
    distances,
    lanes,
    own_positions,
    product,
    quotient,
    walk,
)
from alibi_jax._tpu.rows import layout, walk_over_keys
from alibi_jax._tpu.shape import LANES, KernelShape
from alibi_jax._tpu.tables import Inputs

LOG_SUM_EXP, DELTA = 0, 1  # rows of the statistics
# Of each query, some in each lane: score gradients times distances, weights times distances, and score gradients alone.
SLOPE_SUMS = ("behind", "ahead", "mean_behind", "mean_ahead", "slip")
# Of each query, some in each lane: weights, and the rounding errors of score gradients.
ROUNDING_SUMS = ("weight", "excess")


def backward_of_keys(
    shape: KernelShape, inputs: Inputs, turned: jax.Array, statistics: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of keys and values, ``[batch * num_kv_heads, padded kv_len, head_dim]``.

    Args:
        shape: Of the kernel.
        inputs: As of the forward pass.
        turned: Which blocks of queries each block of keys needs, from ``queries_of_keys``.
        statistics: ``[batch * num_heads, 2, padded q_len]`` float32: log-sum-exps, and the sums of cotangent times
            result.
        cotangent: ``[batch * num_heads, padded q_len, head_dim]``.
    """
    batch_heads, _, head_dim = inputs.key.shape
    of_block = pl.BlockSpec((1, shape.kv_block, head_dim), lambda n, j, _: (n, j, 0))
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)

    def in_smem(array: jax.Array, by_query_head: bool) -> pl.BlockSpec:
        index = (lambda n, j, r: (n * shape.group + r, 0, 0)) if by_query_head else (lambda n, j, r: (n, 0, 0))
        return pl.BlockSpec((1, 1, array.shape[-1]), index, memory_space=pltpu.SMEM)

    ids = []
    if shape.has_segments:
        ids = [in_hbm, pl.BlockSpec((1, 1, shape.kv_block), lambda n, j, r: (quotient(n, shape.num_kv_heads), 0, j))]
    scratch = {
        "query_buffer": pltpu.VMEM((2, shape.q_block, head_dim), inputs.query.dtype),
        "cotangent_buffer": pltpu.VMEM((2, shape.q_block, head_dim), cotangent.dtype),
        "statistics_buffer": pltpu.VMEM((2, 2, shape.q_block), jnp.float32),
        "ids_buffer": pltpu.VMEM((2, 1, shape.q_block if shape.has_segments else LANES), jnp.int32),
        "semaphores": pltpu.SemaphoreType.DMA((4, 2)),
        "turn": pltpu.SMEM((1,), jnp.int32),
        "d_key": pltpu.VMEM((shape.kv_block, head_dim), jnp.float32),
        "d_value": pltpu.VMEM((shape.kv_block, head_dim), jnp.float32),
    }
    return pl.pallas_call(
        partial(_kernel_of_keys, shape, tuple(scratch)),
        grid=(batch_heads, shape.kv_blocks, shape.group),
        in_specs=[
            *(in_smem(turned, False), in_smem(inputs.table, True), in_smem(inputs.slopes, True)),
            *(of_block, of_block, in_hbm, in_hbm, in_hbm),
            *ids,
        ],
        out_specs=[of_block, of_block],
        out_shape=[local(x.shape, x.dtype) for x in (inputs.key, inputs.value)],
        scratch_shapes=list(scratch.values()),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=shape.vmem_limit
        ),
        # A block's gradients may take the place of its keys and values, which no other block's programs read.
        input_output_aliases={3: 0, 4: 1},
        interpret=shape.interpret,
        name="alibi_backward_of_keys",
    )(
        *(turned, inputs.table, inputs.slopes),
        *(inputs.key, inputs.value, inputs.query, cotangent, statistics),
        *inputs.segment_ids,
    )


def _kernel_of_keys(shape: KernelShape, names: tuple[str, ...], *refs: Any) -> None:
    turned, table, slopes, key, value, query, cotangent, statistics, *refs = refs
    q_ids, kv_ids, *refs = refs if shape.has_segments else (None, None, *refs)
    out_key, out_value, *refs = refs  # [1, kv_block, head_dim]
    scratch = dict(zip(names, refs, strict=True))
    n, block, member = (pl.program_id(axis) for axis in range(3))
    item = block * shape.group + member
    first, stop, *following = (turned[0, 0, 2 * item + field] for field in range(4))

    @pl.when(member == 0)
    def _() -> None:
        for name in ("d_key", "d_value"):
            scratch[name][...] = jnp.zeros_like(scratch[name])

    def copies(of_query: Any, slot: Any, of_next: bool) -> list[Any]:
        at = pl.ds(pl.multiple_of(of_query * shape.q_block, LANES), shape.q_block)
        # The next program is of the next head that shares these keys, or of the first with the next block of keys.
        own = member if not of_next else jnp.where(member + 1 == shape.group, 0, member + 1)
        head = n * shape.group + own
        parts = [
            (query.at[head, at], scratch["query_buffer"]),
            (cotangent.at[head, at], scratch["cotangent_buffer"]),
            (statistics.at[head, :, at], scratch["statistics_buffer"]),
        ]
        if shape.has_segments:
            parts.append((q_ids.at[quotient(n, shape.num_kv_heads), :, at], scratch["ids_buffer"]))
        return [
            pltpu.make_async_copy(part, buffer.at[slot], scratch["semaphores"].at[index, slot])
            for index, (part, buffer) in enumerate(parts)
        ]

    def visit(of_query: Any, slot: Any) -> None:
        q_start = table[0, 0, table.shape[-1] + OFFSET] + of_query * shape.q_block
        needed, end, base = (table[0, 0, FIELDS * of_query + field] for field in range(FIELDS))
        place = Place(q_start, block * shape.kv_block, base)
        limits = needed * shape.kv_block, jnp.minimum(end * shape.kv_block, shape.kv_len) - 1
        own = own_positions(shape, place, limits, (1, shape.q_block), 1)

        def attend(branch: Branch) -> None:
            same = None
            if shape.has_segments:
                same = lanes(column_of(kv_ids[0]), shape.q_block) == scratch["ids_buffer"][slot]
            bias = bias_of(shape, branch, place, (slopes[0, 0, 0], slopes[0, 0, 1]), own, same, 1)
            queries, cotangents = scratch["query_buffer"][slot], scratch["cotangent_buffer"][slot]
            rows = scratch["statistics_buffer"][slot]  # [2, q_block]
            scores = product(key[0], queries, (1, 1))  # [kv_block, q_block]
            weights = _weights(shape, scores, bias, rows[LOG_SUM_EXP : LOG_SUM_EXP + 1])
            scratch["d_value"][...] += product(weights.astype(cotangents.dtype), cotangents, (1, 0))
            d_weights = product(value[0], cotangents, (1, 1))
            d_scores = weights * (d_weights - rows[DELTA : DELTA + 1])
            scratch["d_key"][...] += product(d_scores.astype(queries.dtype), queries, (1, 0))

        for branch in branches(shape, place):
            pl.when(branch.applies)(partial(attend, branch))

    walk(first, stop, tuple(following), item == 0, scratch["turn"], copies, visit)

    @pl.when(member == shape.group - 1)
    def _() -> None:
        out_key[0] = (scratch["d_key"][...] * shape.scale).astype(out_key.dtype)
        out_value[0] = scratch["d_value"][...].astype(out_value.dtype)


def backward_of_queries(
    shape: KernelShape, inputs: Inputs, statistics: jax.Array, cotangent: jax.Array, slopes_too: bool
) -> tuple[jax.Array, ...]:
    """Return the gradient of queries, ``[batch * num_heads, padded q_len, head_dim]``.

    With ``slopes_too`` also, for keys behind and for keys ahead, ``[batch * num_heads, 1, LANES * q_blocks]`` float32
    each, whose sums are the gradients of the slopes.
    """
    batch_heads, _, head_dim = inputs.query.shape
    of_rows = pl.BlockSpec((1, 2, shape.q_block), lambda n, i: (n, 0, i))
    of_parts = pl.BlockSpec((1, 1, LANES), lambda n, i: (n, 0, i))
    of_head = pl.BlockSpec((1, 1, 1), lambda n, i: (quotient(n, shape.group), 0, 0), memory_space=pltpu.SMEM)
    of_tables, of_block, in_hbm, of_ids, scratch = layout(shape, inputs)
    of_lanes = pltpu.VMEM((shape.q_block, LANES), jnp.float32)
    scratch |= {"log_sum_exp": of_lanes, "delta": of_lanes}
    scratch |= dict.fromkeys(ROUNDING_SUMS, of_lanes)
    scratch |= dict.fromkeys(("d_query", "mean_key"), pltpu.VMEM((shape.q_block, head_dim), jnp.float32))
    out_shape = [local(inputs.query.shape, inputs.query.dtype)]
    if slopes_too:
        scratch |= dict.fromkeys(SLOPE_SUMS, of_lanes)
        out_shape += [local((batch_heads, 1, LANES * shape.q_blocks), jnp.float32)] * 2
    return pl.pallas_call(
        partial(_kernel_of_queries, shape, slopes_too, tuple(scratch)),
        grid=(batch_heads, shape.q_blocks),
        in_specs=[*of_tables, of_head, of_block, of_block, of_rows, in_hbm, in_hbm, *of_ids],
        out_specs=[of_block, of_parts, of_parts][: len(out_shape)],
        out_shape=out_shape,
        scratch_shapes=list(scratch.values()),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=shape.vmem_limit
        ),
        interpret=shape.interpret,
        name="alibi_backward_of_queries",
    )(
        *(inputs.table, inputs.slopes, _have_mean(inputs.key, shape.kv_len)),
        *(inputs.query, cotangent, statistics, inputs.key, inputs.value),
        *inputs.segment_ids,
    )


def _have_mean(key: jax.Array, kv_len: int) -> jax.Array:
    """Return whether a mean that all keys of a head have in common is a good part of them, ``[heads, 1, 1]`` int32."""
    keys = key.astype(jnp.float32)
    squares = jnp.sum(keys * keys, axis=(1, 2)) / kv_len  # keys that are not there are 0
    mean = jnp.sum(keys, axis=1) / kv_len
    return (4 * jnp.sum(mean * mean, axis=1) > squares).astype(jnp.int32)[:, None, None]  # not if any is NaN


def _kernel_of_queries(shape: KernelShape, slopes_too: bool, names: tuple[str, ...], *refs: Any) -> None:
    table, slopes, have_mean, query, cotangent, statistics, key, value, *refs = refs
    q_ids, kv_ids, *refs = refs if shape.has_segments else (None, None, *refs)
    out_query, *refs = refs  # [1, q_block, head_dim]
    out_slopes, refs = (refs[:2], refs[2:]) if slopes_too else ([], refs)  # [1, 1, LANES] each
    scratch = dict(zip(names, refs, strict=True))
    for name, row in (("log_sum_exp", LOG_SUM_EXP), ("delta", DELTA)):
        scratch[name][...] = column_of(statistics[0, row : row + 1])
    for name in ("d_query", *SLOPE_SUMS) if slopes_too else ("d_query",):
        scratch[name][...] = jnp.zeros_like(scratch[name])
    where_keys_have_a_mean = pl.when(have_mean[0, 0, 0] != 0)

    @where_keys_have_a_mean
    def _() -> None:
        for name in ("mean_key", *ROUNDING_SUMS):
            scratch[name][...] = jnp.zeros_like(scratch[name])

    def attend(branch: Branch, place: Place, bias: Bias, keys: Any, values: Any) -> None:
        scores = product(query[0], keys, (1, 1))  # [q_block, kv_block]
        weights = _weights(shape, scores, bias, scratch["log_sum_exp"][...])
        d_weights = product(cotangent[0], values, (1, 1))
        d_scores = weights * (d_weights - lanes(scratch["delta"][...], shape.kv_block))
        rounded = d_scores.astype(keys.dtype)
        scratch["d_query"][...] += product(rounded, keys, (1, 0))

        @where_keys_have_a_mean
        def _() -> None:
            # The gradients of a row's scores have the sum 0, but for rounding. Of a part of the keys they need not.
            excess = rounded.astype(jnp.float32)
            scratch["excess"][...] += _by_lane(excess - d_scores if shape.is_part else excess)
            scratch["weight"][...] += _by_lane(weights)
            low = jnp.bfloat16  # has digits enough for a mean that is multiplied by a rounding error
            scratch["mean_key"][...] += product(weights.astype(low), keys.astype(low), (1, 0))

        if slopes_too:
            behind = distances(shape, place, scratch["own"][...], 0)
            scratch["slip"][...] += _by_lane(d_scores)
            if branch.side != "future":
                past = jnp.maximum(behind, 0)
                scratch["behind"][...] -= _by_lane(d_scores * past)
                scratch["mean_behind"][...] += _by_lane(weights * past)
            if branch.side != "past" and not shape.is_causal:
                future = jnp.minimum(behind, 0)
                scratch["ahead"][...] += _by_lane(d_scores * future)
                scratch["mean_ahead"][...] -= _by_lane(weights * future)

    walk_over_keys(shape, table, slopes, (key, value), (q_ids, kv_ids), scratch, attend)

    @where_keys_have_a_mean
    def _() -> None:
        # A mean that all keys have in common multiplies the sum of the rounding errors of a row's score gradients. The
        # mean of the keys that the row sees, by weight, has as much of it.
        weight, excess = (jnp.sum(scratch[name][...], axis=1)[:, None] for name in ROUNDING_SUMS)
        scratch["d_query"][...] -= excess * (scratch["mean_key"][...] / jnp.where(weight == 0, ONE, weight))

    out_query[0] = (scratch["d_query"][...] * shape.scale).astype(out_query.dtype)
    if slopes_too:
        # The gradients of a row's scores have the sum 0, but for what delta, from a result that was rounded, is off by.
        # All of them are off by that much of their weights, and distances make the most of it.
        # Of a part of the keys the sum need not be 0.
        slip = ZERO if shape.is_part else jnp.sum(scratch["slip"][...], axis=1)[:, None]
        slip = jnp.broadcast_to(slip, scratch["slip"].shape)
        for out, name in zip(out_slopes, ("behind", "ahead"), strict=True):
            out[0] = jnp.sum(scratch[name][...] + slip * scratch[f"mean_{name}"][...], axis=0, keepdims=True)


def _weights(shape: KernelShape, scores: Any, bias: Bias, log_sum_exps: Any) -> Any:
    """Return what softmax made of scores; ``log_sum_exps`` is a row, or ``[q_block, LANES]``."""
    logits = scores * (shape.scale * LOG2_E) + bias.keys
    subtracted = log_sum_exps if bias.queries is None else log_sum_exps - bias.queries
    if subtracted.shape[0] > 1:
        subtracted = lanes(subtracted, shape.kv_block)
    # No weight exceeds 1, but large scores are rounded in another way in each order of summation.
    weights = jnp.exp2(jnp.minimum(logits - subtracted, ZERO))
    return weights if bias.visible is None else jnp.where(bias.visible, weights, ZERO)


def _by_lane(array: Any) -> Any:
    """Return the sums over all blocks of ``LANES`` columns."""
    return sum((array[:, at : at + LANES] for at in range(LANES, array.shape[1], LANES)), start=array[:, :LANES])
