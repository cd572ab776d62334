"""Tiled attention in plain XLA: memory in proportion to the lengths, and no work on keys that are too far to matter.

For the CPU, where several tiles of a few heads are computed at a time, and for whatever runs all batch entries and
heads at once, such as devices that share them.
"""

from __future__ import annotations

import contextlib
from typing import Any

import jax

from alibi_jax._call import Operands, Rules
from alibi_jax._tiled.backward_loop import backward_in_tiles
from alibi_jax._tiled.forward_loop import forward_in_tiles
from alibi_jax._tiled.scores import Tensors
from alibi_jax._tiled.tiles import jobs_of, sizes_of


def forward(rules: Rules, operands: Operands, dtype: Any, *, together: bool = False) -> tuple[jax.Array, jax.Array]:
    """Compute attention.

    Args:
        rules: Of the call.
        operands: Of a call that is not empty.
        dtype: Of the result.
        together: Whether every operation is on all batch entries and heads, which then may be distributed among
            devices: loops are over tiles of queries and over the keys that any of the heads needs. Otherwise each head
            has its own range of keys.

    Returns:
        result: ``[batch, q_len, num_heads, head_dim]``.
        log_sum_exps: ``[batch, num_heads, q_len]``, in the working dtype, for :func:`backward`. What they are relative
            to is between the two functions; infinite for a query that sees no key.
    """
    sizes = sizes_of(rules, operands, together=together)
    with full_precision(operands):
        result, log_sum_exps = forward_in_tiles(Tensors(rules, operands, sizes), jobs_of(rules, operands, sizes), dtype)
    batch, _, q_len = log_sum_exps.shape[0], *log_sum_exps.shape[2:]
    return result.reshape(operands.query.shape), log_sum_exps.reshape(batch, -1, q_len)


def backward(
    rules: Rules,
    operands: Operands,
    result: jax.Array,
    log_sum_exps: jax.Array,
    cotangent: jax.Array,
    *,
    slopes_too: bool,
    together: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Return the gradients of ``sum(result * cotangent)``.

    Args:
        rules: Of the call.
        operands: As for :func:`forward`.
        result: From :func:`forward`, as ``log_sum_exps``, with the same ``together``; in the working dtype.
        log_sum_exps: ``[batch, num_heads, q_len]``.
        cotangent: As the result, in any dtype.
        slopes_too: Whether gradients by slopes are asked for.
        together: As for :func:`forward`.

    Returns:
        By query, key and value, of their shapes and dtypes; by slopes and by future slopes, ``[batch, num_heads]`` in
        the working dtype, None unless asked for (and given).
    """
    sizes = sizes_of(rules, operands, together=together)
    tensors = Tensors(rules, operands, sizes, result, log_sum_exps, cotangent)
    with full_precision(operands):
        found = backward_in_tiles(
            tensors,
            jobs_of(rules, operands, sizes),
            tensors.by_kv_head(result, 2),
            tensors.by_kv_head(log_sum_exps, 1),
            tensors.by_kv_head(cotangent, 2),
            slopes_too=slopes_too,
        )
    by_slopes = (found[x].reshape(found[x].shape[0], -1) if x in found else None for x in ("slopes", "future_slopes"))
    return (
        found["query"].reshape(operands.query.shape),
        found["key"].astype(operands.key.dtype),
        found["value"].astype(operands.value.dtype),
        *by_slopes,
    )


def full_precision(operands: Operands) -> contextlib.AbstractContextManager[object]:
    """Return a context where products of float32 tensors are float32 products, which accelerators otherwise shorten."""
    is_low = operands.query.dtype.itemsize == 2
    return contextlib.nullcontext() if is_low else jax.default_matmul_precision("highest")
