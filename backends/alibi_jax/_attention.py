"""ALiBi attention for JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from alibi_core import AttentionCall
from alibi_core._attention import dense_attention
from alibi_core._call import LENGTH_FIRST
from alibi_core._checks import one_of

IMPLEMENTATIONS = ("xla", "dense")


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    slopes: int | jax.Array | None = None,
    *,
    is_causal: bool = True,
    future_slopes: jax.Array | None = None,
    q_offset: int | jax.Array | None = None,
    segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    window_size: int | None = None,
    mask: jax.Array | None = None,
    scale: float | None = None,
    tolerance: float | None = None,
    allow_negative_slopes: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Return ALiBi attention, ``softmax(scale * query @ key.T - slopes * distance) @ value``, over visible keys.

    Works under ``jax.jit``, ``jax.vmap``, ``jax.grad`` (also of ``slopes`` and ``future_slopes``) and
    ``jax.checkpoint``. Arrays may be traced; ``is_causal``, ``window_size``, ``scale``, ``tolerance``,
    ``allow_negative_slopes`` and ``implementation`` are Python values. The sign of traced slopes goes unchecked.

    Bias and softmax are float32 (float64 for float64 inputs), whatever the dtype of the tensors. A query that may look
    nowhere gives zeros.

    Args:
        query: ``[batch, q_len, num_heads, head_dim]``, floating. Any number of batch axes, none included; several are
            folded into one for ``"xla"``.
        key: ``[batch, kv_len, num_kv_heads, head_dim]``; ``num_kv_heads`` divides ``num_heads``, and query head ``h``
            reads key/value head ``h // (num_heads // num_kv_heads)``.
        value: Of the shape of ``key``.
        slopes: ``[num_heads]`` or ``[batch, num_heads]``, not negative. Default: the canonical slopes.
        is_causal: Mask keys after the query.
        future_slopes: With ``is_causal=False``, the slopes for keys after the query, shaped as ``slopes`` may be.
            Default ``slopes`` (symmetric).
        q_offset: Position of the first query, in tokens: an int, or an integer array of shape ``[]`` or ``[batch]``.
            Default ``kv_len - q_len``.
        segment_ids: ``[batch, length]`` integers for packed sequences, or a pair (queries, keys) of them.
        window_size: Mask keys farther than this many tokens.
        mask: Booleans, True where a query may look, that broadcast to ``[batch, num_heads, q_len, kv_len]``. Heads
            come before lengths here, as in every mask of JAX.
        scale: Factor of the scores. Default ``head_dim ** -0.5``. The bias is not scaled.
        tolerance: The share of softmax weight that an implementation may leave out. Both implementations here leave
            out nothing, so they meet any.
        allow_negative_slopes: Let slopes be negative, so that distance is rewarded.
        implementation: ``"xla"`` hands a dense bias to ``jax.nn.dot_product_attention``; ``"dense"`` spells out the
            scores in the tensors' working precision. Default ``"xla"``, but ``"dense"`` for float64, because JAX's
            function takes every softmax in float32. The one named runs, or the call raises.

    Returns:
        ``[batch, q_len, num_heads, head_dim]``, of the dtype of ``query``.

    Raises:
        TypeError: If an argument is of the wrong kind (a traced array where a Python value is asked for, say), or
            dtypes or array libraries are mixed.
        ValueError: If a value or shape is wrong.
        NotImplementedError: If ``implementation="xla"`` is asked for with float64.

    Example:
        A slope of ln 2 halves the weight with each step back:

        >>> query = key = jnp.zeros((3, 1, 1))
        >>> value = jnp.asarray([6.0, 3.0, 0.5])[:, None, None]
        >>> [f"{x:.3f}" for x in attention(query, key, value, jnp.log(jnp.asarray([2.0])))[:, 0, 0]]
        ['6.000', '4.000', '2.000']

    References:
        Press, Smith, Lewis, "Train Short, Test Long", section 3 and footnote 10, arXiv 2108.12409.
    """
    call = AttentionCall.check(
        query,
        key,
        value,
        slopes,
        is_causal=is_causal,
        future_slopes=future_slopes,
        q_offset=q_offset,
        segment_ids=segment_ids,
        window_size=window_size,
        mask=mask,
        scale=scale,
        tolerance=tolerance,
        allow_negative_slopes=allow_negative_slopes,
        layout=LENGTH_FIRST,
        xp=jnp,
    )
    if implementation is None:
        implementation = "dense" if call.dtype == jnp.float64 else "xla"
    if one_of("implementation", implementation, IMPLEMENTATIONS) == "dense":
        heads_first = (jnp.swapaxes(x, -3, -2) for x in (query, key, value))
        return jnp.swapaxes(dense_attention(call, *heads_first), -3, -2)
    if call.dtype == jnp.float64:
        raise NotImplementedError(
            "implementation 'xla' must not be used for float64 (jax.nn.dot_product_attention takes its softmax in "
            "float32); use 'dense', the default for float64"
        )
    return _xla(call, query, key, value)


def _xla(call: AttentionCall, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    if call.is_empty:  # JAX's softmax refuses an axis without keys
        return jnp.zeros_like(query)
    bias, attends = call.bias()
    if len(call.batch) > 1 and bias.ndim > 3:  # its batch axes, if it has any, must fold as those of the tensors do
        bias = jnp.broadcast_to(bias, (*call.batch, *bias.shape[-3:]))
    tensors = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value, bias))  # one batch axis each
    # The bias stays float32 beside low-precision tensors: JAX adds it to float32 scores.
    result = jax.nn.dot_product_attention(*tensors, scale=call.scale, implementation="xla").reshape(query.shape)
    if attends is None:
        return result
    attends = attends if attends.ndim > 2 else attends[None]  # [..., 1 or num_heads, q_len, 1]
    return jnp.where(jnp.swapaxes(attends, -3, -2), result, 0)
