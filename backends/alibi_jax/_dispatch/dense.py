"""Attention spelled out, which JAX differentiates by itself, any number of times, in either mode."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from alibi_core.backend import AttentionCall, dense_attention
from alibi_jax._compatible import broadcasting
from alibi_jax._tiled import materialised


@broadcasting
def dense(call: AttentionCall, *tensors: jax.Array, dropout_key: jax.Array | None = None) -> Any:
    """Compute a call on heads-first tensors, and return the result with its lengths first."""

    def drop(weights: jax.Array) -> jax.Array:
        kept = jax.random.bernoulli(dropout_key, 1 - call.dropout, weights.shape)
        return jnp.where(kept, weights / (1 - call.dropout), 0)

    # JAX's softmax takes the maximum for a constant. Its derivative asks which scores are equal to it: none are if
    # the compiler computes them twice, rounded in two ways, and then it divides by zero.
    found = dense_attention(call, *map(materialised, tensors), softmax=jax.nn.softmax, drop=drop)
    result, *weights = found if call.return_weights else (found,)
    result = jnp.swapaxes(materialised(result), -3, -2)  # for the sake of its cotangent
    return (result, *weights) if call.return_weights else result
