"""The backward pass of tiled attention: weights are computed again, block by block, from the log-sum-exps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from alibi_jax._call import Operands, Rules
from alibi_jax._tiled.forward_loop import RESULT, STATISTICS, full_precision, put_rows
from alibi_jax._tiled.scores import AXES, Scores, Tensors, as_matrices, row_products
from alibi_jax._tiled.tiles import Places, Tiling, arranged, cut, jobs_of, put, sizes_of

KEYS = AXES["key"]
SLOPES = AXES["slopes"]


def backward(
    rules: Rules,
    operands: Operands,
    result: jax.Array,
    log_sum_exps: jax.Array,
    cotangent: jax.Array,
    tiling: Tiling,
    *,
    slopes_too: bool,
) -> tuple[jax.Array | None, ...]:
    """Return the gradients of ``sum(result * cotangent)`` by query, key, value, slopes and future slopes.

    Result and log-sum-exps are those of the forward pass with the same tiling, in the working dtype. So are the
    gradients of keys and values, as they are sums over tiles, and those of slopes, ``[batch, num_heads]``, None unless
    asked for (and given); that of the query has its dtype.
    """
    sizes = sizes_of(rules, operands, tiling)
    tensors = Tensors(rules, operands, sizes, result, log_sum_exps, cotangent)
    jobs, dtype, whole = jobs_of(rules, operands, sizes), tensors.dtype, sizes.whole
    rows = tensors.by_kv_head(cotangent, 2), tensors.by_kv_head(result, 2)
    log_sum_exps = tensors.by_kv_head(log_sum_exps, 1)

    def step(index: jax.Array, sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
        places = Places.of_step(sizes, jobs, index)
        grad, product = (arranged(cut(x, RESULT, sizes, places.starts), RESULT, "bhgqd").astype(dtype) for x in rows)
        mean = jnp.sum(grad * product, axis=-1)
        row_sums = cut(log_sum_exps, STATISTICS, sizes, places.starts)
        if places.own_rows is not None:
            row_sums = jnp.where(arranged(places.own_rows, "bq", STATISTICS), row_sums, jnp.inf)  # so that they weigh 0
        scores = Scores.of_step(tensors, places, "bhkgq")
        return _add_step(scores, grad, mean, row_sums, is_centred, sums)

    with full_precision(operands):
        # Of a part of the keys the gradients of a row's scores need not have the sum 0.
        is_centred = jnp.bool_(False) if rules.is_part else _have_mean(tensors.arrays["key"], dtype)
        start = {
            "query": tensors.full([whole[x] for x in RESULT], 0, operands.query.dtype),
            "key": tensors.full([whole[x] for x in KEYS], 0),
            "value": tensors.full([whole[x] for x in KEYS], 0),
        }
        if slopes_too:
            start["slopes"] = tensors.full([whole[x] for x in SLOPES], 0)
            if operands.future_slopes is not None:
                start["future_slopes"] = start["slopes"]
        found = lax.fori_loop(0, sizes.steps, step, start)
    by_slopes = (found[x].reshape(whole["b"], -1) if x in found else None for x in ("slopes", "future_slopes"))
    return found["query"].reshape(operands.query.shape), found["key"], found["value"], *by_slopes


def _have_mean(key: jax.Array, dtype: Any) -> jax.Array:
    """Return whether a mean that all keys of some head have in common is a good part of them."""
    key = key.astype(dtype)
    mean = jnp.mean(key, axis=KEYS.index("k"))
    squares = jnp.mean(jnp.sum(key * key, axis=-1), axis=KEYS.index("k"))
    return jnp.any(4 * jnp.sum(mean * mean, axis=-1) > squares)  # not if any is NaN


def _sum(there: jax.Array, part: jax.Array, lane: Any) -> jax.Array:
    return there + part


def _add_step(
    scores: Scores,
    grad: jax.Array,
    mean: jax.Array,
    log_sum_exps: jax.Array,
    is_centred: jax.Array,
    sums: dict[str, jax.Array],
) -> dict[str, jax.Array]:
    """Add a step's gradients, of a cotangent ``[b, h, g, q, d]`` and ``mean``, its product with the result.

    Scores have their axes in the order ``bhkgq``, in which the larger products need no transposition. With
    ``is_centred``, the mean of a row's keys is to be multiplied by nothing in the gradient of its query.
    """
    places, sizes, scale = scores.places, scores.tensors.sizes, scores.tensors.rules.scale
    mean, log_sum_exps = (arranged(x, STATISTICS, scores.onto) for x in (mean, log_sum_exps))

    def add(index: jax.Array, found: dict[str, Any]) -> dict[str, Any]:
        block = scores.block(index)
        # No weight exceeds 1, but scores beyond 2**24 are whole numbers, and not the same in each order of summation.
        weights = jnp.exp(jnp.minimum(block.scores - log_sum_exps, 0))
        by_weight = row_products(grad, block.value, scores.onto)
        by_score = weights * (by_weight - mean)
        by_score_matrices, weight_matrices = (x.reshape(*x.shape[:3], -1) for x in (by_score, weights))
        by_key = jnp.einsum("bhkr,bhrd->bhkd", by_score_matrices, as_matrices(scores.query)) * scale
        by_value = jnp.einsum("bhkr,bhrd->bhkd", weight_matrices, as_matrices(grad))

        def add_mean(mean_key: jax.Array, slip: jax.Array) -> tuple[jax.Array, jax.Array]:
            mean_key = mean_key + jnp.einsum("bhkd,bhkgq->bhdgq", block.key, weights)
            return mean_key, slip + jnp.sum(by_score, axis=2)

        mean_key, slip = found["mean_key"], found["slip"]
        mean_key, slip = lax.cond(is_centred, add_mean, lambda *same: same, mean_key, slip)
        found = found | {
            "mean_key": mean_key,
            "slip": slip,
            "query": found["query"] + jnp.einsum("bhkd,bhkgq->bhdgq", block.key, by_score),
            **{
                name: put(found[name], jnp.swapaxes(x, 1, 2), KEYS, sizes, block.starts, _sum)
                for name, x in (("key", by_key), ("value", by_value))
            },
        }
        if "slopes" in found:
            by_slope = by_score * block.reach
            if "future_slopes" in found:
                ahead = jnp.where(block.is_ahead, by_slope, 0)
                found["future_slopes"] = found["future_slopes"] + jnp.sum(ahead, axis=(2, 4))
                by_slope = by_slope - ahead
            found["slopes"] = found["slopes"] + jnp.sum(by_slope, axis=(2, 4))
        return found

    entries, heads, group, rows, head_dim = grad.shape
    full = scores.tensors.full
    # Sums of this step begin anew; those by key and value go on.
    start = sums | dict.fromkeys(("query", "mean_key"), full((entries, heads, head_dim, group, rows), 0))
    start["slip"] = full((entries, heads, group, rows), 0)
    slopes = [name for name in ("slopes", "future_slopes") if name in sums]
    start |= {name: full((entries, heads, group), 0) for name in slopes}
    found = lax.fori_loop(0, places.blocks, add, start)
    # The gradients of a row's scores have the sum 0, but for rounding: their slip, which a mean that its keys have in
    # common would multiply.
    by_query = found["query"] - found.pop("slip")[:, :, None] * found.pop("mean_key")
    by_query = jnp.moveaxis(by_query, 2, -1) * scale
    found["query"] = put_rows(sums["query"], by_query, RESULT, places)
    for name in slopes:
        found[name] = put(sums[name], found[name], SLOPES, sizes, places.starts, _sum)
    return found
