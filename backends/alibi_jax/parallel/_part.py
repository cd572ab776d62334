"""Attention to a part of the keys, as primitives of JAX: what several parts say is merged by their log-sum-exps.

Unlike those of :mod:`alibi_jax._dispatch.primitive`, log-sum-exps here mean the same whoever computes them: natural
logarithms, of scores whose distances are counted from the query.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from alibi_jax import _dispatch, _tpu
from alibi_jax._call import Operands, Rules
from alibi_jax._compatible import shaped_as
from alibi_jax._dispatch import Implementation, Target
from alibi_jax._tiled import Tensors, backward_in_tiles, forward_in_tiles, full_precision, jobs_of, sizes_of
from alibi_jax._tpu import TPU

LN_2 = math.log(2)


def part_forward(
    rules: Rules, operands: Operands, implementation: Implementation | None
) -> tuple[jax.Array, jax.Array]:
    """Return attention to the keys that there are, for rules with ``is_part``.

    Returns:
        result: ``[batch, q_len, num_heads, head_dim]``, in the working dtype.
        log_sum_exps: ``[batch, num_heads, q_len]``, in the working dtype; -inf for a query that sees no key.
    """
    leaves, structure = jax.tree.flatten(operands)
    result, sums = _forward.bind(*leaves, rules=rules, structure=structure, implementation=implementation)
    return result, sums


def part_backward(
    rules: Rules,
    operands: Operands,
    result: jax.Array,
    log_sum_exps: jax.Array,
    cotangent: jax.Array,
    implementation: Implementation | None,
    *,
    slopes_too: bool,
) -> tuple[jax.Array | None, ...]:
    """Return what these keys add to gradients, in the working dtype.

    Args:
        rules: Of the part.
        operands: Of the part.
        result: Of all parts together, in the working dtype.
        log_sum_exps: Likewise; +inf for queries that are to be left out.
        cotangent: Of the result, in the dtype of the query.
        implementation: As of the forward pass.
        slopes_too: Whether gradients of slopes are asked for.

    Returns:
        By query, key, value and, ``[batch, num_heads]``, slopes and future slopes, or None.
    """
    leaves, structure = jax.tree.flatten(operands)
    parameters = {"rules": rules, "structure": structure, "implementation": implementation}
    gradients = _backward.bind(result, log_sum_exps, cotangent, *leaves, **parameters, slopes_too=slopes_too)
    return (*gradients, *(None,) * (5 - len(gradients)))


def _run_forward(target: Target, *leaves: Any, **parameters: Any) -> list[jax.Array]:
    rules, operands, chosen = _dispatch.unpacked(target, leaves, **parameters)
    if isinstance(chosen, TPU):
        result, sums = _tpu.forward(rules, operands, chosen, with_log_sum_exps=True)
        result, sums = result.astype(sums.dtype), sums * LN_2
    else:
        sizes = sizes_of(rules, operands, together=_dispatch.heads_together(target))
        tensors, jobs = Tensors(rules, operands, sizes), jobs_of(rules, operands, sizes)
        with full_precision(operands):
            result, sums = forward_in_tiles(tensors, jobs, tensors.dtype)
        result = result.reshape(operands.query.shape)
        sums = sums.reshape(sums.shape[0], -1, sums.shape[-1])
    return [result, jnp.where(sums == jnp.inf, -jnp.inf, sums)]


def _run_backward(target: Target, *leaves: Any, slopes_too: bool, **parameters: Any) -> list[jax.Array]:
    rules, operands, chosen = _dispatch.unpacked(target, leaves[3:], **parameters)
    result, sums, cotangent = leaves[:3]
    if isinstance(chosen, TPU):
        gradients = _tpu.backward(rules, operands, result, sums / LN_2, cotangent, chosen, slopes_too=slopes_too)
        return [x.astype(sums.dtype) for x in gradients if x is not None]
    sizes = sizes_of(rules, operands, together=_dispatch.heads_together(target))
    tensors = Tensors(rules, operands, sizes, result, sums, cotangent)
    with full_precision(operands):
        found = backward_in_tiles(
            tensors,
            jobs_of(rules, operands, sizes),
            tensors.by_kv_head(result, 2),
            tensors.by_kv_head(sums, 1),
            tensors.by_kv_head(cotangent, 2),
            slopes_too=slopes_too,
        )
    by_slopes = [found[x].reshape(found[x].shape[0], -1) for x in ("slopes", "future_slopes") if x in found]
    by_query = found["query"].reshape(operands.query.shape).astype(tensors.dtype)
    return [by_query, found["key"], found["value"], *by_slopes]


def _forward_shapes(query: Any, *others: Any, structure: Any, **_: Any) -> list[Any]:
    operands = jax.tree.unflatten(structure, (query, *others))
    batch, q_len, num_heads, _ = query.shape
    dtype = operands.slopes.dtype
    return [shaped_as(query, query.shape, dtype), shaped_as(query, (batch, num_heads, q_len), dtype)]


def _backward_shapes(*leaves: Any, structure: Any, slopes_too: bool, **_: Any) -> list[Any]:
    operands = jax.tree.unflatten(structure, leaves[3:])
    dtype, like = operands.slopes.dtype, operands.query
    slopes = shaped_as(like, (like.shape[0], like.shape[2]), dtype)
    tensors = [shaped_as(like, x.shape, dtype) for x in operands[:3]]
    return tensors + [slopes] * (slopes_too * (1 if operands.future_slopes is None else 2))


_forward = _dispatch.primitive_of("alibi_attention_part", _run_forward, _forward_shapes, whole=3)
_backward = _dispatch.primitive_of("alibi_attention_part_backward", _run_backward, _backward_shapes, whole=6)
