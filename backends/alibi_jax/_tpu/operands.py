"""What the kernels for TPUs and for GPUs do alike with a call's operands, before and after they run."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from alibi_core.backend import MAX_POSITION
from alibi_jax._call import Operands, Rules

LOG2_E = 1.4426950408889634


def first_positions(rules: Rules, operands: Operands, tokens: int) -> jax.Array:
    """Return the positions of the first queries, ``[batch or 1, 1, 1]`` int32, with room for ``tokens`` around them.

    Farther from all keys than that it makes no difference, and the last block's positions must fit.
    """
    offset = rules.q_offset if rules.q_offset is not None else operands.q_offset
    most = MAX_POSITION - 2 * tokens
    return jnp.clip(jnp.asarray(offset, jnp.int32), -most, most).reshape(-1, 1, 1)


def both_slopes(operands: Operands) -> jax.Array:
    """Return the slopes for keys behind and ahead, times log2(e): ``[batch, num_heads, 2]`` float32."""
    heads = operands.query.shape[0], operands.query.shape[2]
    ahead = operands.slopes if operands.future_slopes is None else operands.future_slopes
    slopes = jnp.stack([jnp.broadcast_to(x, heads) for x in (operands.slopes, ahead)], axis=-1)
    return slopes.astype(jnp.float32) * LOG2_E


def row_products(cotangent: jax.Array, result: jax.Array) -> jax.Array:
    """Return the sums of cotangent times result over features, ``[batch, num_heads, q_len]`` float32."""
    products = jnp.sum(cotangent.astype(jnp.float32) * result.astype(jnp.float32), axis=-1)
    return jnp.swapaxes(products, 1, 2)


def by_slopes(
    operands: Operands, behind: jax.Array | None, ahead: jax.Array | None
) -> tuple[jax.Array | None, jax.Array | None]:
    """Return the gradients of slopes and future slopes, from those for keys behind and ahead; None where not asked."""
    if operands.future_slopes is not None or behind is None or ahead is None:
        return behind, ahead
    return behind + ahead, None
