"""The reference attention. It defines what every backend means; it does not try to be fast or lean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from alibi_core._arrays import Array, Namespace, astype, explains_keywords, times
from alibi_core._call import AttentionCall


@explains_keywords
def attention(
    query: Array,
    key: Array,
    value: Array,
    slopes: int | Array | None = None,
    *,
    is_causal: bool = True,
    future_slopes: Array | None = None,
    q_offset: int | Array | None = None,
    segment_ids: Array | tuple[Array, Array] | None = None,
    window_size: int | None = None,
    mask: Array | None = None,
    positions: Array | tuple[Array, Array] | None = None,
    distance: str = "manhattan",
    law: str = "linear",
    scale: float | None = None,
    added_bias: Array | None = None,
    return_weights: bool = False,
    allow_negative_slopes: bool = False,
) -> Any:
    """Return ALiBi attention: ``softmax(scale * query @ key.T - slopes * distance) @ value``, over visible keys.

    Scores, bias and softmax are float32 (float64 for float64 inputs); the result has the dtype of ``query``. A query
    that may look nowhere gives zeros.

    Args:
        query: ``[..., num_heads, q_len, head_dim]`` of float16, bfloat16, float32 or float64.
        key: ``[..., num_kv_heads, kv_len, head_dim]``. ``num_kv_heads`` divides ``num_heads``; query head ``h`` reads
            key/value head ``h // (num_heads // num_kv_heads)``.
        value: Of the shape of ``key``.
        slopes: ``[num_heads]`` or ``[..., num_heads]``, not negative; NumPy's serve any library. Default: the
            canonical slopes.
        is_causal: Mask keys after the query.
        future_slopes: With ``is_causal=False``, the slopes for keys after the query, shaped as ``slopes`` may be.
            Default ``slopes`` (symmetric); zeros give the clamped form.
        q_offset: Position of the first query, in tokens, one for all or one for each batch entry, of any integer type;
            the first key has position 0. Default ``kv_len - q_len``, which aligns the last query with the last key.
        segment_ids: ``[..., length]`` integers for packed sequences: a query sees the keys of its own id. Distances are
            counted along the row: within a sequence whose ids stand together they are what they would be alone. A pair
            ``(queries, keys)`` where queries are only some of the row's tokens.
        window_size: Mask keys farther than this many tokens: with 4 a query sees 5 keys, its own among them.
        mask: Booleans, True where a query may look, that broadcast to ``[..., num_heads, q_len, kv_len]``. A mask of
            tokens, ``[batch, kv_len]``, is ``mask[:, None, None, :]``. Where sizes agree so that a mask of two or three
            axes might be meant as one of ``[batch, kv_len]`` or ``[batch, q_len, kv_len]``, it is refused.
        positions: Positions of the caller's own, integer or floating: one array for queries and keys alike, or a pair
            ``(queries, keys)``, ``[..., length]`` on a line or ``[..., length, dims]`` in space. NaN is for a token
            without a position: its distance to every token is 0. Causal attention is by position, on a line only, and
            a query sees the keys at its own position. In place of ``q_offset`` and ``window_size``.
        distance: Between points: ``"manhattan"``, ``"euclidean"`` or ``"chebyshev"``. On a line all are the same.
        law: How the penalty grows with the distance d: ``"linear"``, d; ``"log"``, ``log(1 + d)``; ``"sqrt"``,
            ``sqrt(d)``.
        scale: Factor of the scores. Default ``head_dim ** -0.5``. The bias is not scaled.
        added_bias: Floating numbers to add to the scaled scores beside ALiBi's bias, of axes as ``mask`` has them. -inf
            hides a key, as a mask does.
        return_weights: Return the pair of the result and the weights, ``[..., num_heads, q_len, kv_len]``, of its
            dtype: zeros for a query that may look nowhere.
        allow_negative_slopes: Let slopes be negative, so that distance is rewarded. In a compiled program their values
            are not known, so none are refused.

    Returns:
        ``[..., num_heads, q_len, head_dim]``, of the dtype and on the device of ``query``.

    Raises:
        TypeError: If an argument is of the wrong kind, or dtypes or array libraries are mixed.
        ValueError: If a value or shape is wrong.

    Example:
        A slope of ln 2 halves the weight with each step back:

        >>> import math, numpy as np
        >>> query = key = np.zeros((1, 3, 1))
        >>> value = np.asarray([[[4.0], [2.0], [1.0]]])
        >>> attention(query, key, value, np.asarray([math.log(2)]))[0, :, 0].round(6).tolist()
        [4.0, 2.666667, 1.714286]

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
        positions=positions,
        distance=distance,
        law=law,
        scale=scale,
        added_bias=added_bias,
        return_weights=return_weights,
        allow_negative_slopes=allow_negative_slopes,
    )
    return dense_attention(call, query, key, value)


def dense_attention(
    call: AttentionCall,
    query: Any,
    key: Any,
    value: Any,
    softmax: Callable[[Any], Any] | None = None,
    drop: Callable[[Any], Any] | None = None,
) -> Any:
    """Compute ``call`` on heads-first tensors, whole score matrix and all, in operations of the standard.

    Args:
        call: The call.
        query: ``[..., num_heads, q_len, head_dim]``.
        key: ``[..., num_kv_heads, kv_len, head_dim]``.
        value: Of the shape of ``key``.
        softmax: Along the last axis, where scores are not all -inf. Default: in operations of the standard.
        drop: Drops out weights, as ``call.dropout`` says; asked only if it is above 0.

    Returns:
        The result, or the pair of it and the weights that were applied, if the call asks for them.
    """
    xp = call.xp
    group = call.num_heads // call.num_kv_heads
    # queries [..., num_kv_heads, group, q_len, head_dim], keys [..., num_kv_heads, 1, kv_len, head_dim]
    query = _split_heads(xp, astype(xp, query, call.working_dtype), call.num_kv_heads, group)
    key, value = (astype(xp, x, call.working_dtype)[..., :, None, :, :] for x in (key, value))
    bias, attends = call.bias()
    scores = times(xp, xp.matmul(query, xp.matrix_transpose(key)), call.scale)
    scores = scores + _split_heads(xp, bias, call.num_kv_heads, group)
    weights = _softmax(xp, scores) if softmax is None else softmax(scores)
    if call.dropout > 0 and drop is not None:
        weights = drop(weights)

    def finished(array: Any) -> Any:
        """Return ``[..., num_kv_heads, group, q_len, n]`` by heads, with zeros for queries that look nowhere."""
        array = xp.reshape(array, (*call.batch, call.num_heads, call.q_len, array.shape[-1]))
        if attends is not None:
            array = xp.where(attends, array, 0.0)
        return astype(xp, array, call.dtype)

    result = finished(xp.matmul(weights, value))
    return (result, finished(weights)) if call.return_weights else result


def _softmax(xp: Namespace, scores: Any) -> Any:
    if 0 in scores.shape:  # there is no maximum to take, and nothing to weigh
        return scores
    weights = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
    return weights / xp.sum(weights, axis=-1, keepdims=True)


def _split_heads(xp: Namespace, array: Any, num_kv_heads: int, group: int) -> Any:
    return xp.reshape(array, (*array.shape[:-3], num_kv_heads, group, *array.shape[-2:]))
