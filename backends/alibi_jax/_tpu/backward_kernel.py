"""The TPU kernel's backward pass: one kernel for the gradients of keys and values, one for the gradients of queries.

Each recomputes the weights from scores and the forward pass's log-sum-exps. In the first kernel, a program has one
block of keys and loops over the blocks of queries that need it; scores have keys along rows and queries along columns.
The second kernel is organised as the forward pass: a program has one block of queries.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from alibi_jax._compatible import local
from alibi_jax._tpu import blocks
from alibi_jax._tpu.blocks import LOG2_E, ONE, ZERO, Bias, Branch, Place, lanes, product, quotient
from alibi_jax._tpu.shape import LANES, KernelShape
from alibi_jax._tpu.tables import FIELDS, OFFSET, Inputs
from alibi_jax._tpu.walk import query_specs, run, walk, walk_over_keys

LOG_SUM_EXP, DELTA = 0, 1  # rows of the statistics
# Sums for each query, partial in each lane: score gradients times distances, weights times distances (for keys on each
# side), and score gradients.
SLOPE_SUMS = ("behind", "ahead", "mean_behind", "mean_ahead", "residual")
ROUNDING_SUMS = ("weight", "excess")  # sums of weights, and of the rounding errors of score gradients


def backward_of_keys(
    shape: KernelShape, inputs: Inputs, turned: jax.Array, statistics: jax.Array, cotangent: jax.Array
) -> list[jax.Array]:
    """Return the gradients of keys and values, ``[batch * num_kv_heads, padded kv_len, head_dim]``.

    ``turned`` comes from ``queries_of_keys``. ``statistics``, ``[batch * num_heads, 2, padded q_len]`` float32, are
    log-sum-exps and ``sum(cotangent * result)``. The cotangent has the query's layout.
    """
    batch_heads, _, head_dim = inputs.key.shape
    of_block = pl.BlockSpec((1, shape.kv_block, head_dim), lambda n, j, _: (n, j, 0))
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)

    def in_smem(array: jax.Array, by_query_head: bool) -> tuple[jax.Array, pl.BlockSpec]:
        index = (lambda n, j, r: (n * shape.group + r, 0, 0)) if by_query_head else (lambda n, j, r: (n, 0, 0))
        return array, pl.BlockSpec((1, 1, array.shape[-1]), index, memory_space=pltpu.SMEM)

    operands = {
        "turned": in_smem(turned, False),  # [1, 1, 2 * (kv_blocks * group + 1)]
        "table": in_smem(inputs.table, True),  # [1, 1, length of the table]
        "slopes": in_smem(inputs.slopes, True),  # [1, 1, 2]
        "key": (inputs.key, of_block),  # [1, kv_block, head_dim]
        "value": (inputs.value, of_block),  # [1, kv_block, head_dim]
        "query": (inputs.query, in_hbm),  # [batch * num_heads, padded q_len, head_dim]
        "cotangent": (cotangent, in_hbm),  # [batch * num_heads, padded q_len, head_dim]
        "statistics": (statistics, in_hbm),  # [batch * num_heads, 2, padded q_len]
    }
    if shape.has_segments:
        of_ids = pl.BlockSpec((1, 1, shape.kv_block), lambda n, j, r: (quotient(n, shape.call.num_kv_heads), 0, j))
        operands |= {"q_ids": (inputs.segment_ids[0], in_hbm), "kv_ids": (inputs.segment_ids[1], of_ids)}
    results = {f"out_{name}": (local(operands[name][0].shape, operands[name][0].dtype), of_block)
               for name in ("key", "value")}  # fmt: skip
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
    # A block's gradients may overwrite its keys and values: no other block's program reads them.
    aliases = {"key": "out_key", "value": "out_value"}
    grid = batch_heads, shape.kv_blocks, shape.group
    kernel = partial(_kernel_of_keys, shape)
    return run("alibi_backward_of_keys", kernel, shape, grid, operands, results, scratch, aliases, 4)


def _kernel_of_keys(shape: KernelShape, refs: Any) -> None:
    table, slopes = refs.table, refs.slopes
    n, block, member = refs.head, pl.program_id(1), pl.program_id(2)
    # This program's range of query blocks, and the next program's.
    item = block * shape.group + member
    first, stop, *following = (refs.turned[0, 0, 2 * item + field] for field in range(4))

    # The first head of the group clears the sums; the last one writes them out.
    @pl.when(member == 0)
    def _() -> None:
        for sums in (refs.d_key, refs.d_value):
            sums[...] = jnp.zeros_like(sums)

    def pairs(of_query: Any, of_next: bool) -> list[Any]:
        at = pl.ds(pl.multiple_of(of_query * shape.q_block, LANES), shape.q_block)
        # The next program has the next head of the group, or the first head with the next block of keys.
        own = member if not of_next else jnp.where(member + 1 == shape.group, 0, member + 1)
        head = n * shape.group + own
        found = [
            (refs.query.at[head, at], refs.query_buffer),
            (refs.cotangent.at[head, at], refs.cotangent_buffer),
            (refs.statistics.at[head, :, at], refs.statistics_buffer),
        ]
        if shape.has_segments:
            found.append((refs.q_ids.at[quotient(n, shape.call.num_kv_heads), :, at], refs.ids_buffer))
        return found

    def visit(of_query: Any, slot: Any) -> None:
        q_start = table[0, 0, table.shape[-1] + OFFSET] + of_query * shape.q_block
        needed, end, base = (table[0, 0, FIELDS * of_query + field] for field in range(FIELDS))
        place = Place(q_start, block * shape.kv_block, base)
        limits = needed * shape.kv_block, jnp.minimum(end * shape.kv_block, shape.call.kv_len) - 1
        own = blocks.own_positions(shape, place, limits, (1, shape.q_block), 1)

        def attend(branch: Branch) -> None:
            same = None
            if shape.has_segments:
                same = lanes(blocks.column_of(refs.kv_ids[0]), shape.q_block) == refs.ids_buffer[slot]
            bias = blocks.bias_of(shape, branch, place, (slopes[0, 0, 0], slopes[0, 0, 1]), own, same, 1)
            queries, cotangents = refs.query_buffer[slot], refs.cotangent_buffer[slot]
            rows = refs.statistics_buffer[slot]  # [2, q_block]
            scores = product(refs.key[0], queries, (1, 1))  # [kv_block, q_block]
            weights = _weights(shape, scores, bias, rows[LOG_SUM_EXP : LOG_SUM_EXP + 1])
            refs.d_value[...] += product(weights.astype(cotangents.dtype), cotangents, (1, 0))
            d_weights = product(refs.value[0], cotangents, (1, 1))  # [kv_block, q_block]
            d_scores = weights * (d_weights - rows[DELTA : DELTA + 1])
            refs.d_key[...] += product(d_scores.astype(queries.dtype), queries, (1, 0))

        for branch in blocks.branches(shape, place):
            pl.when(branch.applies)(partial(attend, branch))

    walk(refs, first, stop, following, item == 0, pairs, visit)

    @pl.when(member == shape.group - 1)
    def _() -> None:
        refs.out_key[0] = (refs.d_key[...] * shape.call.scale).astype(refs.out_key.dtype)
        refs.out_value[0] = refs.d_value[...].astype(refs.out_value.dtype)


def backward_of_queries(
    shape: KernelShape, inputs: Inputs, statistics: jax.Array, cotangent: jax.Array, slopes_too: bool
) -> list[jax.Array]:
    """Return the gradient of queries, ``[batch * num_heads, padded q_len, head_dim]``.

    With ``slopes_too``, also return two arrays ``[batch * num_heads, 1, LANES * q_blocks]`` float32, for keys behind
    and for keys ahead. Their sums over the last axis are the gradients of the slopes.
    """
    batch_heads, _, head_dim = inputs.query.shape
    operands, of_block, scratch = query_specs(shape, inputs)
    of_head = pl.BlockSpec((1, 1, 1), lambda n, i: (quotient(n, shape.group), 0, 0), memory_space=pltpu.SMEM)
    operands |= {
        "have_mean": (_have_mean(inputs.key, shape.call.kv_len), of_head),
        "cotangent": (cotangent, of_block),
        "statistics": (statistics, pl.BlockSpec((1, 2, shape.q_block), lambda n, i: (n, 0, i))),
    }
    of_lanes = pltpu.VMEM((shape.q_block, LANES), jnp.float32)
    scratch |= dict.fromkeys(("log_sum_exp", "delta", *ROUNDING_SUMS), of_lanes)
    scratch |= dict.fromkeys(("d_query", "mean_key"), pltpu.VMEM((shape.q_block, head_dim), jnp.float32))
    results = {"out_query": (local(inputs.query.shape, inputs.query.dtype), of_block)}
    if slopes_too:
        scratch |= dict.fromkeys(SLOPE_SUMS, of_lanes)
        parts = local((batch_heads, 1, LANES * shape.q_blocks), jnp.float32)
        of_parts = pl.BlockSpec((1, 1, LANES), lambda n, i: (n, 0, i))
        results |= dict.fromkeys(("out_behind", "out_ahead"), (parts, of_parts))
    kernel, grid = partial(_kernel_of_queries, shape, slopes_too), (batch_heads, shape.q_blocks)
    return run("alibi_backward_of_queries", kernel, shape, grid, operands, results, scratch, {}, 3)


def _have_mean(key: jax.Array, kv_len: int) -> jax.Array:
    """Return, ``[heads, 1, 1]`` int32, whether a mean key is over half as long as the root mean square of its keys."""
    keys = key.astype(jnp.float32)
    squares = jnp.sum(keys * keys, axis=(1, 2)) / kv_len  # padding is 0
    mean = jnp.sum(keys, axis=1) / kv_len
    return (4 * jnp.sum(mean * mean, axis=1) > squares).astype(jnp.int32)[:, None, None]  # 0 if any is NaN


def _kernel_of_queries(shape: KernelShape, slopes_too: bool, refs: Any) -> None:
    def clear(*names: str) -> None:
        for name in names:
            sums = getattr(refs, name)
            sums[...] = jnp.zeros_like(sums)

    refs.log_sum_exp[...] = blocks.column_of(refs.statistics[0, LOG_SUM_EXP : LOG_SUM_EXP + 1])
    refs.delta[...] = blocks.column_of(refs.statistics[0, DELTA : DELTA + 1])
    clear("d_query", *(SLOPE_SUMS if slopes_too else ()))
    where_keys_have_a_mean = pl.when(refs.have_mean[0, 0, 0] != 0)
    where_keys_have_a_mean(lambda: clear("mean_key", *ROUNDING_SUMS))

    def attend(branch: Branch, place: Place, bias: Bias, keys: Any, values: Any) -> None:
        scores = product(refs.query[0], keys, (1, 1))  # [q_block, kv_block]
        weights = _weights(shape, scores, bias, refs.log_sum_exp[...])
        d_weights = product(refs.cotangent[0], values, (1, 1))
        d_scores = weights * (d_weights - lanes(refs.delta[...], shape.kv_block))
        rounded = d_scores.astype(keys.dtype)
        refs.d_query[...] += product(rounded, keys, (1, 0))

        @where_keys_have_a_mean
        def _() -> None:
            # Without other keys, the sum of a row's score gradients is 0 in exact arithmetic, so the sum of the rounded
            # ones is the rounding error. With other keys it is not, so subtract the unrounded ones.
            excess = rounded.astype(jnp.float32)
            refs.excess[...] += _by_lane(excess - d_scores if shape.has_other_keys else excess)
            refs.weight[...] += _by_lane(weights)
            low = jnp.bfloat16  # precise enough, as the mean key is multiplied by a rounding error
            refs.mean_key[...] += product(weights.astype(low), keys.astype(low), (1, 0))

        if slopes_too:
            behind = blocks.distances(shape, place, refs.own[...], 0)
            refs.residual[...] += _by_lane(d_scores)
            if branch.side != "future":
                past = jnp.maximum(behind, 0)
                refs.behind[...] -= _by_lane(d_scores * past)
                refs.mean_behind[...] += _by_lane(weights * past)
            if branch.side != "past" and not shape.call.is_causal:
                future = jnp.minimum(behind, 0)
                refs.ahead[...] += _by_lane(d_scores * future)
                refs.mean_ahead[...] -= _by_lane(weights * future)

    walk_over_keys(shape, refs, attend)

    @where_keys_have_a_mean
    def _() -> None:
        # A common mean of all keys multiplies the rounding error of a row's sum of score gradients. Remove this product
        # with the row's weighted mean key, which contains the common mean.
        weight, excess = (jnp.sum(x[...], axis=1)[:, None] for x in (refs.weight, refs.excess))
        refs.d_query[...] -= excess * (refs.mean_key[...] / jnp.where(weight == 0, ONE, weight))

    refs.out_query[0] = (refs.d_query[...] * shape.call.scale).astype(refs.out_query.dtype)
    if slopes_too:
        # A row's score gradients sum to 0 except for the rounding of delta, which shifts each by its weight times
        # `residual`; distances multiply this shift, so remove it. With other keys the sum is not 0.
        residual = ZERO if shape.has_other_keys else jnp.sum(refs.residual[...], axis=1)[:, None]
        residual = jnp.broadcast_to(residual, refs.residual.shape)
        refs.out_behind[0] = jnp.sum(refs.behind[...] + residual * refs.mean_behind[...], axis=0, keepdims=True)
        refs.out_ahead[0] = jnp.sum(refs.ahead[...] + residual * refs.mean_ahead[...], axis=0, keepdims=True)


def _weights(shape: KernelShape, scores: Any, bias: Bias, log_sum_exps: Any) -> Any:
    """Return the softmax weights of scores; ``log_sum_exps`` is ``[1, q_block]`` or ``[q_block, LANES]``."""
    logits = scores * (shape.call.scale * LOG2_E) + bias.keys
    subtracted = log_sum_exps if bias.queries is None else log_sum_exps - bias.queries
    if subtracted.shape[0] > 1:
        subtracted = lanes(subtracted, shape.kv_block)
    # Clamp at 0, as weights are at most 1: large scores may be rounded differently than in the forward pass.
    weights = jnp.exp2(jnp.minimum(logits - subtracted, ZERO))
    return weights if bias.visible is None else jnp.where(bias.visible, weights, ZERO)


def _by_lane(array: Any) -> Any:
    """Sum ``[n, width]`` to ``[n, LANES]``: column ``i`` goes to lane ``i % LANES``."""
    return sum((array[:, at : at + LANES] for at in range(LANES, array.shape[1], LANES)), start=array[:, :LANES])
