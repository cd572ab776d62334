"""The TPU kernel's forward pass: one program per block of queries, which loops over the needed blocks of keys."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from alibi_jax._compatible import local
from alibi_jax._tpu.blocks import BLIND, LOG2_E, ONE, OVERFLOWN, Bias, Branch, Place, lanes, product
from alibi_jax._tpu.shape import LANES, KernelShape
from alibi_jax._tpu.tables import Inputs
from alibi_jax._tpu.walk import query_specs, run, walk_over_keys


def forward(shape: KernelShape, inputs: Inputs, with_log_sum_exps: bool) -> list[jax.Array]:
    """Return the result ``[batch * num_heads, padded q_len, head_dim]`` and, if requested, its rows' log-sum-exps.

    Log-sum-exps are ``[batch * num_heads, 1, padded q_len]`` float32, in base 2, of the logits that the kernels form;
    +inf for a query that sees no key. With them, for a backward pass, the result is float32.
    """
    batch_heads, q_padded, head_dim = inputs.query.shape
    operands, of_queries, scratch = query_specs(shape, inputs)
    scratch |= {name: pltpu.VMEM((shape.q_block, LANES), jnp.float32) for name in ("largest", "total")}
    scratch["sums"] = pltpu.VMEM((shape.q_block, head_dim), jnp.float32)
    scratch["sees_block"] = pltpu.SMEM((1,), jnp.int32)  # 1 if all queries see all keys of a block
    dtype = jnp.float32 if with_log_sum_exps else inputs.query.dtype
    results = {"result": (local(inputs.query.shape, dtype), of_queries)}  # [1, q_block, head_dim]
    if with_log_sum_exps:
        of_rows = pl.BlockSpec((1, 1, shape.q_block), lambda n, i: (n, 0, i))
        results["log_sum_exps"] = local((batch_heads, 1, q_padded), jnp.float32), of_rows  # [1, 1, q_block]

    def kernel(refs: Any) -> None:
        _attend_to_all(shape, refs)
        weight = jnp.broadcast_to(jnp.sum(refs.total[...], axis=1)[:, None], refs.total.shape)
        largest = jnp.maximum(refs.largest[...], jnp.where(refs.sees_block[0] == 1, OVERFLOWN, BLIND))
        sees = largest != BLIND  # True for NaN, so that it propagates
        weight = jnp.where(sees, jnp.where(largest == OVERFLOWN, np.float32(jnp.nan), weight), ONE)
        refs.result[0] = (refs.sums[...] / lanes(weight, head_dim)).astype(dtype)
        if with_log_sum_exps:
            refs.log_sum_exps[0] = jnp.where(sees, largest + jnp.log2(weight), np.float32(jnp.inf)).T[:1]

    # A block of the result may overwrite its queries: no other program reads them, nor does a backward pass.
    aliases = {} if with_log_sum_exps else {"query": "result"}
    grid = batch_heads, shape.q_blocks
    return run("alibi_forward", kernel, shape, grid, operands, results, scratch, aliases, 2)


def _attend_to_all(shape: KernelShape, refs: Any) -> None:
    """Accumulate the online softmax of a block of queries in scratch memory.

    ``largest`` is the largest logit so far, equal in all lanes, and ``total`` the sum of weights, partial in each lane,
    both ``[q_block, LANES]``; ``sums`` are the weighted values, ``[q_block, head_dim]``.
    """
    largest, total, sums = refs.largest, refs.total, refs.sums
    refs.sees_block[0] = 0
    largest[...] = jnp.full_like(largest, BLIND)
    total[...] = jnp.zeros_like(total)
    sums[...] = jnp.zeros_like(sums)

    def attend(branch: Branch, place: Place, bias: Bias, keys: Any, values: Any) -> None:
        scores = product(refs.query[0], keys, (1, 1 - shape.is_transposed))  # [q_block, kv_block]
        logits = scores * (shape.call.scale * LOG2_E) + bias.keys
        if bias.visible is None:
            refs.sees_block[0] = 1  # in place of a maximum with OVERFLOWN for each row
        else:
            logits = jnp.where(bias.visible, jnp.maximum(logits, OVERFLOWN), -jnp.inf)
        before = largest[...]
        most = jnp.max(logits, axis=1)[:, None]
        if bias.queries is not None:
            most = most + bias.queries
        now = jnp.maximum(before, most)  # [q_block, LANES]
        subtracted = now if bias.queries is None else now - bias.queries
        weights = jnp.exp2(logits - lanes(subtracted, shape.kv_block))
        # Rescale the sums so far to the new maximum.
        decay = jnp.exp2(before - now)
        # Sum the rounded weights, because the product uses them: then the mean of equal values is exact.
        rounded = weights.astype(values.dtype)
        weights = rounded.astype(jnp.float32)
        parts = (weights[:, at : at + LANES] for at in range(0, shape.kv_block, LANES))
        total[...] = total[...] * decay + sum(parts, start=jnp.zeros_like(total))
        largest[...] = now
        sums[...] = sums[...] * lanes(decay, sums.shape[1]) + product(rounded, values, (1, int(shape.is_transposed)))

    walk_over_keys(shape, refs, attend)
