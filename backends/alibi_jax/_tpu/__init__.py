"""Attention as Pallas kernels for TPUs, which load only the keys inside the horizons: from operands to results."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from alibi_jax._call import Operands
from alibi_jax._tpu.backward_kernel import backward_of_keys, backward_of_queries
from alibi_jax._tpu.forward_kernel import forward as forward_kernel
from alibi_jax._tpu.shape import TPU as TPU
from alibi_jax._tpu.shape import KernelShape
from alibi_jax._tpu.tables import in_blocks, inputs_of, queries_of_keys

LN_2 = math.log(2)


def forward(operands: Operands, options: TPU, *, with_log_sum_exps: bool) -> list[jax.Array]:
    """Return the result, ``[batch, num_heads, q_len, head_dim]``, and if requested log-sum-exps for the backward pass.

    Log-sum-exps are in base 2, as in the kernels; with ``other_keys`` they are natural logarithms.
    """
    shape = KernelShape.of(operands, options, may_fold=not with_log_sum_exps)
    result, *rest = forward_kernel(shape, inputs_of(operands, shape), with_log_sum_exps)
    sums = [x.reshape(shape.call.batch[0], shape.call.num_heads, -1)[..., : shape.call.q_len] for x in rest]
    sums = [x * LN_2 for x in sums] if shape.has_other_keys else sums
    return [result[:, : shape.rows].reshape(operands.query.shape), *sums]


def backward(
    operands: Operands,
    result: jax.Array,
    log_sum_exps: jax.Array,
    cotangent: jax.Array,
    options: TPU,
    *,
    slopes_too: bool,
) -> list[jax.Array]:
    """Return the gradients of query, key, value and, with ``slopes_too``, of the slopes, ``[batch, num_heads]``."""
    shape = KernelShape.of(operands, options, may_fold=False)
    inputs = inputs_of(operands, shape)
    log_sum_exps = log_sum_exps / LN_2 if shape.has_other_keys else log_sum_exps
    products = jnp.sum(cotangent.astype(jnp.float32) * result.astype(jnp.float32), axis=-1)
    statistics = jnp.stack([log_sum_exps, products], axis=2)  # [batch, num_heads, 2, q_len]
    # Padding queries see no key: their log-sum-exps are inf, their products 0.
    padding = shape.q_blocks * shape.q_block - shape.call.q_len
    statistics = jnp.pad(statistics, ((0, 0), (0, 0), (0, 0), (0, padding)), constant_values=jnp.inf)
    statistics = jnp.where(statistics == jnp.inf, jnp.asarray([[jnp.inf], [0.0]], jnp.float32), statistics)
    statistics = statistics.reshape(-1, *statistics.shape[2:])
    # The barriers order the copies and the two kernels one after the other, so that fewer tensors are in memory at the
    # same time.
    statistics, cotangent = jax.lax.optimization_barrier((statistics, cotangent))
    cotangents = in_blocks(cotangent.astype(operands.query.dtype), shape.q_block)
    turned = queries_of_keys(inputs.table, shape)
    d_query, *parts = backward_of_queries(shape, inputs, statistics, cotangents, slopes_too)
    d_query = d_query[:, : shape.call.q_len].reshape(operands.query.shape)
    d_query, cotangents = jax.lax.optimization_barrier((d_query, cotangents))
    of_keys = backward_of_keys(shape, inputs, turned, statistics, cotangents)
    of_slopes = [x.sum(axis=(1, 2)).reshape(shape.call.batch[0], shape.call.num_heads) for x in parts]
    if parts and operands.call.future_slopes is None:  # one slope serves both sides
        of_slopes = [of_slopes[0] + of_slopes[1]]
    return [d_query, *(x[:, : shape.call.kv_len].reshape(operands.key.shape) for x in of_keys), *of_slopes]
