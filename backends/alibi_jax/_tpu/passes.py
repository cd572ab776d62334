"""ALiBi attention as a TPU kernel: both passes, from a call's operands to its results."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from alibi_jax._call import Operands, Rules
from alibi_jax._tpu.backward_kernel import backward_of_keys, backward_of_queries
from alibi_jax._tpu.forward_kernel import forward as forward_kernel
from alibi_jax._tpu.shape import TPU, KernelShape
from alibi_jax._tpu.tables import by_head, by_token, inputs_of, queries_of_keys


def forward(
    rules: Rules, operands: Operands, options: TPU, *, with_log_sum_exps: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Return the result, ``[batch, q_len, num_heads, head_dim]``, and log-sum-exps for the backward pass or None."""
    shape = KernelShape.of(rules, operands, options)
    result, log_sum_exps = forward_kernel(shape, inputs_of(rules, operands, shape), with_log_sum_exps)
    if log_sum_exps is not None:
        log_sum_exps = log_sum_exps.reshape(shape.batch, shape.num_heads, -1)[..., : shape.q_len]
    return by_token(result, shape.num_heads, shape.q_len), log_sum_exps


def backward(
    rules: Rules,
    operands: Operands,
    result: jax.Array,
    log_sum_exps: jax.Array,
    cotangent: jax.Array,
    options: TPU,
    *,
    slopes_too: bool,
) -> tuple[jax.Array | None, ...]:
    """Return the gradients of query, key, value, and ``[batch, num_heads]`` of slopes and future slopes, or None."""
    shape = KernelShape.of(rules, operands, options)
    inputs = inputs_of(rules, operands, shape)
    products = jnp.sum(cotangent.astype(jnp.float32) * result.astype(jnp.float32), axis=-1)
    statistics = jnp.stack([log_sum_exps, jnp.swapaxes(products, 1, 2)], axis=2)  # [batch, num_heads, 2, q_len]
    # A query that is not there sees nothing.
    padding = shape.q_blocks * shape.q_block - shape.q_len
    statistics = jnp.pad(statistics, ((0, 0), (0, 0), (0, 0), (0, padding)), constant_values=jnp.inf)
    statistics = jnp.where(statistics == jnp.inf, jnp.asarray([[jnp.inf], [0.0]], jnp.float32), statistics)
    statistics = statistics.reshape(-1, *statistics.shape[2:])
    # One thing after the other, so that few tensors are in memory together: what is read as it was given, then copied
    # with its heads first, then a kernel whose result is on its way before the next one starts.
    statistics, cotangent = jax.lax.optimization_barrier((statistics, cotangent))
    cotangents = by_head(cotangent.astype(operands.query.dtype), shape.q_blocks * shape.q_block)
    turned = queries_of_keys(inputs.table, shape)
    d_query, *parts = backward_of_queries(shape, inputs, statistics, cotangents, slopes_too)
    d_query = by_token(d_query, shape.num_heads, shape.q_len)
    d_query, cotangents = jax.lax.optimization_barrier((d_query, cotangents))
    d_key, d_value = backward_of_keys(shape, inputs, turned, statistics, cotangents)
    by_slopes = [x.sum(axis=(1, 2)).reshape(shape.batch, shape.num_heads) for x in parts] or [None, None]
    if parts and operands.future_slopes is None:
        by_slopes = [by_slopes[0] + by_slopes[1], None]
    return (
        d_query,
        by_token(d_key, shape.num_kv_heads, shape.kv_len),
        by_token(d_value, shape.num_kv_heads, shape.kv_len),
        *by_slopes,
    )
