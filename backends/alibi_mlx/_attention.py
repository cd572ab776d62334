"""ALiBi attention for MLX."""

from __future__ import annotations

import math

import mlx.core as mx

from alibi_core import AttentionCall
from alibi_core._attention import dense_attention
from alibi_core._checks import one_of

IMPLEMENTATIONS = ("fast", "dense")


def attention(
    query: mx.array,
    key: mx.array,
    value: mx.array,
    slopes: int | mx.array | None = None,
    *,
    is_causal: bool = True,
    future_slopes: mx.array | None = None,
    q_offset: int | mx.array | None = None,
    segment_ids: mx.array | tuple[mx.array, mx.array] | None = None,
    window_size: int | None = None,
    mask: mx.array | None = None,
    scale: float | None = None,
    tolerance: float | None = None,
    allow_negative_slopes: bool = False,
    implementation: str | None = None,
) -> mx.array:
    """Return ALiBi attention, ``softmax(scale * query @ key.T - slopes * distance) @ value``, over visible keys.

    Differentiable in ``query``, ``key``, ``value``, ``slopes`` and ``future_slopes``; works under ``mx.vmap`` and
    ``mx.compile``, but not with ``shapeless=True``, which would go on with the distances of the first lengths. Bias and
    softmax are float32 (float64 for float64 inputs, which MLX has on the CPU). A query that may look nowhere gives
    zeros.

    Args:
        query: ``[batch, num_heads, q_len, head_dim]``, floating. Any number of batch axes, none included.
        key: ``[batch, num_kv_heads, kv_len, head_dim]``; ``num_kv_heads`` divides ``num_heads``, and query head ``h``
            reads key/value head ``h // (num_heads // num_kv_heads)``.
        value: Of the shape of ``key``.
        slopes: ``[num_heads]`` or ``[batch, num_heads]``, not negative. Default: the canonical slopes.
        is_causal: Mask keys after the query.
        future_slopes: With ``is_causal=False``, the slopes for keys after the query. Default ``slopes`` (symmetric).
        q_offset: Position of the first query, in tokens; an int or a ``[batch]`` integer array. Default
            ``kv_len - q_len``.
        segment_ids: ``[batch, length]`` integers for packed sequences, or a pair (queries, keys) of them.
        window_size: Mask keys farther than this many tokens.
        mask: Booleans, True where a query may look, that broadcast to ``[batch, num_heads, q_len, kv_len]``.
        scale: Factor of the scores. Default ``head_dim ** -0.5``. The bias is not scaled.
        tolerance: The share of softmax weight that an implementation may leave out. Both implementations here leave
            out nothing, so they meet any.
        allow_negative_slopes: Let slopes be negative, so that distance is rewarded.
        implementation: ``"fast"`` hands the bias to ``mx.fast.scaled_dot_product_attention``; ``"dense"`` spells out
            the scores. Default ``"fast"``, and ``"dense"`` for float64. The one named runs, or the call raises.

    Returns:
        ``[batch, num_heads, q_len, head_dim]``, of the dtype of ``query``.

    Raises:
        TypeError: If an argument is of the wrong kind, or dtypes or array libraries are mixed.
        ValueError: If a value or shape is wrong.
        NotImplementedError: If ``"fast"`` is named for float64.

    Example:
        >>> query, key, value = mx.random.normal((3, 2, 8, 5, 16))
        >>> attention(query, key, value).shape
        (2, 8, 5, 16)

    References:
        Press, Smith, Lewis, "Train Short, Test Long", section 3, arXiv 2108.12409.
    """
    chosen = None if implementation is None else one_of("implementation", implementation, IMPLEMENTATIONS)
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
        xp=mx,
    )
    if chosen is None:
        chosen = "dense" if call.dtype == mx.float64 else "fast"
    if chosen == "dense":
        return dense_attention(call, query, key, value)
    if call.dtype == mx.float64:
        raise NotImplementedError(
            "implementation 'fast' cannot compute in float64 (MLX takes its scale and exponential in float32); "
            "use 'dense', or float32"
        )
    return _fast(call, query, key, value)


def _fast(call: AttentionCall, query: mx.array, key: mx.array, value: mx.array) -> mx.array:
    bias, attends = call.bias()
    batch_size = math.prod(call.batch)  # MLX wants one batch axis, whatever there were
    # In float32, because MLX rounds the bias to the dtype of the result.
    tensors = (x.reshape(batch_size, *x.shape[-3:]).astype(mx.float32) for x in (query, key, value))
    if bias.ndim > 3:
        bias = mx.broadcast_to(bias, (*call.batch, *bias.shape[-3:])).reshape(batch_size, *bias.shape[-3:])
    result = mx.fast.scaled_dot_product_attention(*tensors, scale=call.scale, mask=bias).reshape(query.shape)
    if attends is not None:
        result = mx.where(attends, result, 0.0)
    return result.astype(call.dtype)
