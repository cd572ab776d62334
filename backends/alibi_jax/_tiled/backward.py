"""The backward pass of tiled attention: weights are recomputed, block by block, from the log-sum-exps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from alibi_jax._call import Operands, moving_arrays
from alibi_jax._tiled.tiles import Rows, Tiles, as_matrices, full_precision


def backward(
    operands: Operands,
    result: jax.Array,
    log_sum_exps: jax.Array,
    cotangent: jax.Array,
    *,
    all_heads: bool,
    call_too: bool,
) -> list[jax.Array]:
    """Return the gradients of ``sum(result * cotangent)`` for query, key, value and, with ``call_too``, of the call's.

    ``result`` and ``log_sum_exps`` come from the forward pass, in the working dtype. Gradients have the working dtype,
    except the query's, which has the query's. Gradients of slopes are ``[batch, num_heads]``, those
    of gates ``[batch, num_heads, kv_len]``.
    """
    with full_precision(operands):
        tiles = Tiles(operands, all_heads)
        # sum(weights * weight gradients) of each row, [batch, num_heads, q_len], from the result.
        means = jnp.sum(cotangent.astype(tiles.dtype) * result.astype(tiles.dtype), axis=-1)
        log_sum_exps = tiles.of_queries(log_sum_exps, fill=jnp.inf)  # padding queries get weights of 0
        grad, means = tiles.of_queries(cotangent), tiles.of_queries(means)
        # Over a part of the keys, the score gradients of a row do not sum to 0, so there is no residual to remove.
        is_centred = jnp.bool_(False) if tiles.has_other_keys else _have_mean(tiles.key.astype(tiles.dtype))

        def step(index: jax.Array, sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
            rows = tiles.rows(index)
            return _add_rows(
                tiles, rows, *(tiles.cut(x, rows.starts) for x in (grad, means, log_sum_exps)), is_centred, sums
            )

        sums = {"query": jnp.zeros(tiles.query.shape, operands.query.dtype)}
        shape = *tiles.key.shape[:2], 1, 1, *tiles.key.shape[2:]
        sums |= {"key": jnp.zeros(shape, tiles.dtype), "value": jnp.zeros(shape, tiles.dtype)}
        arrays = moving_arrays(tiles.call) if call_too else {}
        shape = *tiles.sizes.whole[:3], 1
        sums |= {name: jnp.zeros((*shape, *(x.shape[2:] or (1,))), tiles.dtype) for name, x in arrays.items()}
        found = lax.fori_loop(0, len(tiles.jobs.index), step, sums)
    of_tensors = [tiles.of_heads(found["query"]), *(found[x].reshape(operands.key.shape) for x in ("key", "value"))]
    if "log_gates" in found:
        # A gate counts for all keys before it, in the rows from it on; score gradients of rows before it sum to 0.
        earlier = jnp.cumsum(found["log_gates"], axis=4) - found["log_gates"]
        found["log_gates"] = jnp.where(tiles.call.log_gates.reshape(earlier.shape) == -jnp.inf, 0, earlier)
    return of_tensors + [found[name].reshape(*operands.query.shape[:2], *x.shape[2:]) for name, x in arrays.items()]


def _have_mean(key: jax.Array) -> jax.Array:
    """Return whether the mean key of any head is over half as long as the root mean square of its keys' norms."""
    mean = jnp.mean(key, axis=2)
    squares = jnp.mean(jnp.sum(key * key, axis=-1), axis=2)
    return jnp.any(4 * jnp.sum(mean * mean, axis=-1) > squares)  # False if any is NaN


def _add_rows(
    tiles: Tiles,
    rows: Rows,
    grad: jax.Array,
    means: jax.Array,
    log_sum_exps: jax.Array,
    is_centred: jax.Array,
    sums: dict[str, jax.Array],
) -> dict[str, jax.Array]:
    """Add a step's gradients to ``sums``, from a cotangent ``[b, h, g, q, 1, d]`` and its products with the result.

    With ``is_centred``, the rounding error that a common mean of the keys multiplies is removed from query gradients.
    """
    scale = tiles.call.scale
    grad = as_matrices(grad.astype(tiles.dtype))  # [b, h, g * q, d]
    # [b, h, d, g * q]: XLA's fast products on CPUs take a left operand that is not transposed, so do that once.
    query_columns, grad_columns = jnp.swapaxes(rows.query, 2, 3), jnp.swapaxes(grad, 2, 3)

    def add(index: jax.Array, found: dict[str, Any]) -> dict[str, Any]:
        block = tiles.block(rows, index, found["passed"])
        found["passed"] = block.passed
        # Clamp at 0, as weights are at most 1: scores above 2**24 are rounded to integers, differently from the forward
        # pass if the order of summation differs.
        weights = jnp.exp(jnp.minimum(block.scores - log_sum_exps, 0))  # [b, h, g, q, k]
        by_weight = jnp.einsum("bhrd,bhkd->bhrk", grad, block.value).reshape(weights.shape)
        by_score = weights * (by_weight - means)  # the gradient of softmax
        matrix = as_matrices(by_score)  # [b, h, g * q, k]

        def add_mean(mean_key: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
            mean_key = mean_key + jnp.einsum("bhrk,bhkd->bhrd", as_matrices(weights), block.key)
            return mean_key, residual + jnp.sum(matrix, axis=-1, keepdims=True)

        both = found["mean_key"], found["residual"]
        found["mean_key"], found["residual"] = lax.cond(is_centred, add_mean, lambda *same: same, *both)
        found["query"] = found["query"] + jnp.einsum("bhrk,bhkd->bhrd", matrix, block.key)
        by_key = jnp.einsum("bhdr,bhrk->bhdk", query_columns, matrix) * scale
        by_value = jnp.einsum("bhdr,bhrk->bhdk", grad_columns, as_matrices(weights))
        for name, part in (("key", by_key), ("value", by_value)):
            found[name] = tiles.put(found[name], jnp.swapaxes(part, 2, 3), block.starts, add=True)
        if "log_gates" in found:
            by_gate = jnp.sum(by_score, axis=3, keepdims=True)
            found["log_gates"] = tiles.put(found["log_gates"], by_gate, block.starts, add=True)
        if "slopes" in found:
            # `unit_bias` is minus the distance plus a constant per row, which the sum over keys cancels.
            by_slope, axes = by_score * block.unit_bias, (3, 4)
            if "future_slopes" in found:
                ahead = jnp.where(block.is_ahead, by_slope, 0)
                found["future_slopes"] = found["future_slopes"] + jnp.sum(ahead, axis=axes, keepdims=True)
                by_slope = by_slope - ahead
            found["slopes"] = found["slopes"] + jnp.sum(by_slope, axis=axes, keepdims=True)
        return found

    # Gradients of keys, values and gates accumulate over steps; those of queries and slopes start from 0 in each step.
    start = sums | dict.fromkeys(("query", "mean_key"), jnp.zeros_like(rows.query))
    start |= {"residual": jnp.zeros_like(rows.query[..., :1]), "passed": rows.passed}
    slopes = [name for name in ("slopes", "future_slopes") if name in sums]
    heads = *rows.query.shape[:2], tiles.sizes.tile[2], 1, 1
    start |= {name: jnp.zeros(heads, tiles.dtype) for name in slopes}
    found = lax.fori_loop(0, rows.blocks, add, start)
    # `residual` is the rounding error of a row's sum of score gradients, which is 0 in exact arithmetic. Remove its
    # product with the mean key, which may be large.
    by_query = (found["query"] - found.pop("residual") * found.pop("mean_key")) * scale
    found["query"] = tiles.put(sums["query"], by_query, rows.starts)
    del found["passed"]
    for name in slopes:
        found[name] = tiles.put(sums[name], found[name], rows.starts, add=True)
    return found
