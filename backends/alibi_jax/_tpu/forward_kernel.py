"""The TPU kernel's forward pass: one program a block of queries, which walks over the blocks of keys it needs."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from alibi_jax._compatible import local
from alibi_jax._tpu.blocks import (
    HIDDEN,
    LOG2_E,
    ONE,
    ZERO,
    Bias,
    Branch,
    Place,
    lanes,
    product,
)
from alibi_jax._tpu.rows import layout, walk_over_keys
from alibi_jax._tpu.shape import LANES, KernelShape
from alibi_jax._tpu.tables import Inputs


def forward(shape: KernelShape, inputs: Inputs, with_log_sum_exps: bool) -> tuple[jax.Array, jax.Array | None]:
    """Return the result ``[batch * num_heads, padded q_len, head_dim]`` and its rows' log-sum-exps.

    These are ``[batch * num_heads, 1, padded q_len]`` float32, in powers of two, of logits as the kernels form them;
    +inf for a query that sees no key. None unless they are asked for: they take memory. With them, for a backward pass,
    the result is float32.
    """
    batch_heads, q_padded, head_dim = inputs.query.shape
    of_rows = pl.BlockSpec((1, 1, shape.q_block), lambda n, i: (n, 0, i))
    of_tables, of_block, in_hbm, of_ids, scratch = layout(shape, inputs)
    scratch |= {name: pltpu.VMEM((shape.q_block, LANES), jnp.float32) for name in ("largest", "total")}
    scratch["sums"] = pltpu.VMEM((shape.q_block, head_dim), jnp.float32)
    out_shape = [local(inputs.query.shape, jnp.float32 if with_log_sum_exps else inputs.query.dtype)]
    if with_log_sum_exps:
        out_shape.append(local((batch_heads, 1, q_padded), jnp.float32))
    result, *rest = pl.pallas_call(
        partial(_kernel, shape, with_log_sum_exps, tuple(scratch)),
        grid=(batch_heads, shape.q_blocks),
        in_specs=[*of_tables, of_block, in_hbm, in_hbm, *of_ids],
        out_specs=[of_block, of_rows][: len(out_shape)],
        out_shape=out_shape,
        scratch_shapes=list(scratch.values()),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=shape.vmem_limit
        ),
        # A block of the result may take the place of its queries, which no other program reads and, without a backward
        # pass, nothing else does either.
        input_output_aliases={} if with_log_sum_exps else {2: 0},
        interpret=shape.interpret,
        name="alibi_forward",
    )(inputs.table, inputs.slopes, inputs.query, inputs.key, inputs.value, *inputs.segment_ids)
    return result, rest[0] if rest else None


def _kernel(shape: KernelShape, with_log_sum_exps: bool, names: tuple[str, ...], *refs: Any) -> None:
    table, slopes, query, key, value, *refs = refs  # [1, 1, ...] SMEM; [1, q_block, head_dim]; HBM, whole, twice
    q_ids, kv_ids, *refs = refs if shape.has_segments else (None, None, *refs)  # [1, 1, q_block]; HBM, whole
    result, *refs = refs  # [1, q_block, head_dim]
    log_sum_exps, *refs = refs if with_log_sum_exps else (None, *refs)  # [1, 1, q_block]
    scratch = dict(zip(names, refs, strict=True))
    largest, total, sums = scratch["largest"], scratch["total"], scratch["sums"]
    largest[...] = jnp.full_like(largest, HIDDEN)
    total[...] = jnp.zeros_like(total)
    sums[...] = jnp.zeros_like(sums)

    def attend(branch: Branch, place: Place, bias: Bias, keys: Any, values: Any) -> None:
        scores = product(query[0], keys, (1, 1))  # [q_block, kv_block]
        _accumulate(shape, scores, values, bias, largest, total, sums)

    walk_over_keys(shape, table, slopes, (key, value), (q_ids, kv_ids), scratch, attend)
    weight = jnp.broadcast_to(jnp.sum(total[...], axis=1)[:, None], total.shape)
    sees = weight != 0  # NaN is not 0
    result[0] = (sums[...] / lanes(jnp.where(sees, weight, ONE), sums.shape[1])).astype(result.dtype)
    if log_sum_exps is not None:
        logarithms = jnp.where(sees, largest[...] + jnp.log2(jnp.where(sees, weight, ONE)), np.float32(jnp.inf))
        log_sum_exps[0] = logarithms.T[:1]


def _accumulate(shape: KernelShape, scores: Any, value: Any, bias: Bias, largest: Any, total: Any, sums: Any) -> None:
    """Add one block of keys to the running softmax.

    Args:
        shape: Of the kernel.
        scores: ``[q_block, kv_block]`` float32.
        value: ``[kv_block, head_dim]``.
        bias: Of the block.
        largest: ``[q_block, LANES]``: the largest logit so far, in each lane.
        total: Likewise: weights so far, a part of them in each lane.
        sums: ``[q_block, head_dim]``: weighted values so far.
    """
    logits = scores * (shape.scale * LOG2_E) + bias.keys
    if bias.visible is not None:
        logits = jnp.where(bias.visible, logits, HIDDEN)
    before = largest[...]
    most = jnp.max(logits, axis=1)[:, None]
    if bias.queries is not None:
        most = most + bias.queries
    now = jnp.maximum(before, most)  # [q_block, LANES]
    subtracted = now if bias.queries is None else now - bias.queries
    weights = jnp.exp2(logits - lanes(subtracted, shape.kv_block))
    if bias.visible is not None:
        weights = jnp.where(bias.visible, weights, ZERO)  # in a row that has seen nothing yet, all logits are HIDDEN
    decay = jnp.exp2(before - now)
    # Rounded before they are summed, too, or what all values have in common would not come back whole.
    rounded = weights.astype(value.dtype)
    weights = rounded.astype(jnp.float32)
    parts = (weights[:, at : at + LANES] for at in range(0, shape.kv_block, LANES))
    total[...] = total[...] * decay + sum(parts, start=jnp.zeros_like(total))
    largest[...] = now
    sums[...] = sums[...] * lanes(decay, sums.shape[1]) + product(rounded, value, (1, 0))
