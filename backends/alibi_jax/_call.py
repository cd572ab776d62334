"""A checked call and its tensors as one pytree, so that JAX can trace, map and differentiate it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from alibi_core.backend import AttentionCall, checks, split_call
from alibi_core.backend.checks import namespace_of


def _flatten(call: AttentionCall) -> tuple[tuple[Any, ...], Any]:
    static, arrays = split_call(call)
    return tuple(arrays.values()), (static, tuple(arrays))


def _unflatten(static: Any, arrays: tuple[Any, ...]) -> AttentionCall:
    call, names = static
    return call.having(**dict(zip(names, arrays, strict=True)))


jax.tree_util.register_pytree_node(AttentionCall, _flatten, _unflatten)


MOVING = ("slopes", "future_slopes", "log_gates", "sinks")  # the arrays of a call that have gradients


def moving_arrays(call: AttentionCall) -> dict[str, Any]:
    """Return the arrays of a call that have gradients, by name."""
    return {name: x for name in MOVING if (x := getattr(call, name)) is not None}


class OtherKeys(NamedTuple):
    """Marks operands that hold only a part of the keys. Distances then count from the query, without a shift per row.

    Result and log-sum-exps cover only the operands' keys; gradients are the contribution of these keys.
    """

    lower: Any = None  # [batch or 1, num_heads, q_len]: lower bounds of the log-sum-exps over all keys; None: unknown


class Operands(NamedTuple):
    """The tensors and the call of an attention, heads before tokens."""

    query: Any  # [batch, num_heads, q_len, head_dim]
    key: Any  # [batch, num_kv_heads, kv_len, head_dim]
    value: Any  # [batch, num_kv_heads, kv_len, head_dim]
    call: AttentionCall  # its arrays have one batch axis, of length batch or 1
    key_norms: Any = None  # [batch or 1, num_kv_heads, blocks]: upper bounds of the norms of each 128 keys; or None
    other_keys: OtherKeys | None = None

    def fitted(self) -> Operands:
        """Return the operands with the call's sizes updated from the tensors, after jax.vmap or jax.shard_map."""
        (batch, num_heads), num_kv_heads = self.query.shape[:2], self.key.shape[1]
        call = replace(self.call, batch=(batch,), num_heads=num_heads, num_kv_heads=num_kv_heads)
        return self._replace(call=call)


def operands_of(call: AttentionCall, query: Any, key: Any, value: Any, key_norms: Any = None) -> Operands:
    """Return the operands of a call that is not empty; tensors are ``[*batch, heads, length, head_dim]``."""
    flat = call.with_one_batch_axis()
    batch = flat.batch[0]

    def with_batch_axis(array: Any, axes: int) -> Any:
        array = array.reshape((1,) * (axes + 1 - array.ndim) + array.shape)
        return array if array.shape[0] in (1, batch) else jnp.broadcast_to(array, (batch, *array.shape[1:]))

    flat = replace(flat.map_arrays(with_batch_axis), device=None)
    return Operands(*(x.reshape(batch, *x.shape[-3:]) for x in (query, key, value)), flat, key_norms)


def lowest_scores(dtype: Any) -> tuple[Any, Any]:
    """Return the largest score of a row that sees no key, and the least score of a visible key; NumPy scalars.

    Both are finite, because inf - inf is NaN. A row whose largest score is the second one has lower scores, which have
    overflown: its weights are unknown, and its result is NaN.
    """
    blind = np.finfo(dtype).min
    return blind, np.nextafter(blind, np.zeros_like(blind))


def floating_dtype(name: str, dtype: Any) -> Any:
    """Validate an argument that names a floating dtype, and return the dtype."""
    return jnp.dtype(checks.floating_dtype(namespace_of(xp=jnp), name, dtype))
