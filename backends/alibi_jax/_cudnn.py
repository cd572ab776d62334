"""Causal attention by cuDNN, whose kernel takes no bias: ALiBi as features of query and key (``alibi_core.fold``).

Heads go in groups. Each group computes one window, the shortest of a few that covers the keys which its heads need by
the bound of ``_plan.py``. The device chooses the window, so slopes may be traced.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alibi_core import fold, fold_error_bound, fold_size
from alibi_core.backend import AttentionCall
from alibi_jax._call import Operands
from alibi_jax._plan import NORM_BLOCK, needed_keys

DTYPES = (jnp.bfloat16, jnp.float16)
GROUP = 4  # heads that share a window: neighbours, as their slopes are alike
WINDOWS = tuple(4**n for n in range(4, 12))  # 256 tokens to 4 million: each is a further program of a group
LEAST_MEASURED = 4096  # Below this many keys, measuring takes longer than windows save (reckoned, never timed).
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def refusal(call: AttentionCall) -> str | None:
    """Return why JAX refuses to run cuDNN on folded tensors of a call, on the GPU here; None if it does not."""
    query, key = ((call.batch[0], call.kv_len, heads) for heads in (call.num_heads, call.num_kv_heads))
    try:
        width = _width(call)
        tensors = (jax.ShapeDtypeStruct((*shape, width), call.dtype) for shape in (query, key, key))
        jax.eval_shape(partial(_attend, 1.0, None), *tensors)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return f"cannot run here: {str(error).rstrip('.')}"
    return None


def is_exact(call: AttentionCall) -> jax.Array:
    """Return whether folding moves no score by more than two roundings to the dtype, a weight's and a result's.

    The error grows with slope times length. The kernel adds features to sums of the query's products, so these count
    as one product.
    """
    bound = fold_error_bound(call.slopes, call.kv_len, head_dim=1, dtype=call.dtype, q_len=call.q_len)
    return jnp.all(bound <= float(jnp.finfo(call.dtype).eps))


def forward(operands: Operands) -> jax.Array:
    """Return the result, ``[batch, num_heads, q_len, head_dim]``."""
    parts = _by_group(operands, lambda attend, *tensors: attend(*tensors))
    return _heads_first(operands, jnp.concatenate(parts, axis=2))


def backward(operands: Operands, cotangent: jax.Array) -> list[jax.Array]:
    """Return the gradients of query, key and value; the forward pass is computed again."""

    def gradients(attend: Attend, *tensors: jax.Array) -> Any:
        return jax.vjp(attend, *tensors[:3])[1](tensors[3])

    def joined(parts: Any) -> jax.Array:
        """Return the gradients of all heads of keys; several groups may share one."""
        heads = operands.call.num_kv_heads
        if sum(x.shape[2] for x in parts) == heads:
            return jnp.concatenate(parts, axis=2)
        found = jnp.stack(parts, axis=2)  # [batch, length, groups, 1, features]
        return jnp.sum(found.reshape(*found.shape[:2], heads, -1, found.shape[-1]), axis=3)

    query, key, value = zip(*_by_group(operands, gradients, cotangent), strict=True)
    return [_heads_first(operands, x) for x in (jnp.concatenate(query, axis=2), joined(key), joined(value))]


def _by_group(operands: Operands, compute: Callable[..., Any], *more: jax.Array) -> list[Any]:
    """Return the results of ``compute`` for each group of heads.

    It takes the attention within the group's window, and folded query, key and value, ``[batch, length, heads,
    features]``, and ``more`` as long.
    """
    call, width = operands.call, _width(operands.call)
    slopes = call.slopes if call.slopes.shape[0] > 1 else call.slopes[0]
    pair = fold(operands.query, operands.key, slopes, scale=call.scale, head_dim=width)
    others = (jnp.pad(x, [(0, 0)] * 3 + [(0, width - call.head_dim)]) for x in (operands.value, *more))
    tensors = [jnp.swapaxes(x, 1, 2) for x in (*pair, *others)]
    sharing, windows = call.num_heads // call.num_kv_heads, [x for x in WINDOWS if 2 * x <= call.kv_len]
    is_divided = sharing % GROUP == 0 or (GROUP % sharing == 0 and call.num_heads % GROUP == 0)
    size, chosen = GROUP if is_divided else sharing, np.zeros(call.num_heads, np.int32)
    if call.tolerance == 0 or call.kv_len < LEAST_MEASURED:
        size, windows = call.num_heads, []
    else:
        need = needed_keys(operands, NORM_BLOCK, NORM_BLOCK)
        longest = jnp.max(need.stop - need.first, axis=(0, 2)).reshape(-1, size)  # [groups, heads]: own keys included
        chosen = jnp.searchsorted(np.asarray(windows, np.int32), jnp.max(longest, axis=1))
    branches = [partial(compute, partial(_attend, call.scale, window)) for window in (*windows, None)]
    found = []
    for group, first in enumerate(range(0, call.num_heads, size)):
        heads, own = slice(first, first + size), slice(first // sharing, (first + size - 1) // sharing + 1)
        given = [x[:, :, own if index in (1, 2) else heads] for index, x in enumerate(tensors)]
        found.append(jax.lax.switch(chosen[group], branches, *given))
    return found


def _attend(scale: float, window: int | None, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Attend to the last ``window`` keys, the own one included."""
    span = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=True, scale=scale, local_window_size=span, implementation="cudnn"
    )


def _width(call: AttentionCall) -> int:
    """Return the features of folded tensors: cuDNN wants a multiple of 8, and as many of the value."""
    return -(-(call.head_dim + fold_size(call.kv_len, call.dtype)) // 8) * 8


def _heads_first(operands: Operands, array: jax.Array) -> jax.Array:
    return jnp.swapaxes(array[..., : operands.call.head_dim], 1, 2)
