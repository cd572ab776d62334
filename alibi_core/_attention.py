"""The reference attention. It defines the result of every backend; it is not optimised for speed or memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from alibi_core._arrays import Array, Namespace, astype, explains_keywords, joined
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
    log_gates: Array | None = None,
    sinks: Array | None = None,
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

    Scores, bias and softmax are float32 (float64 for float64 inputs); the result has the dtype of ``query``. The
    result of a fully masked query is zeros.

    Args:
        query: ``[..., num_heads, q_len, head_dim]`` of float16, bfloat16, float32 or float64.
        key: ``[..., num_kv_heads, kv_len, head_dim]``. ``num_kv_heads`` divides ``num_heads``; query head ``h`` reads
            key/value head ``h // (num_heads // num_kv_heads)``.
        value: The same shape as ``key``.
        slopes: ``[num_heads]`` or ``[..., num_heads]``, not negative; a NumPy array is accepted with any library.
            Default: the canonical slopes.
        is_causal: Mask keys after the query.
        future_slopes: With ``is_causal=False``, the slopes for keys after the query, in a shape that ``slopes`` may
            have. Default ``slopes`` (symmetric); zeros give the clamped form.
        log_gates: ``[..., num_heads, kv_len]``, logarithms of forget gates, at most 0, -inf for a gate that closes: the
            score of an earlier key is lowered by the gates of all tokens after it, up to the query (see
            :func:`alibi_core.bias_from_gates`). Then ``slopes`` default to zeros, and the other arguments must be those
            of causal attention along the row, with the linear law. The gate of a token that a mask of keys hides
            counts as 0. The gate of a segment's first token counts for nobody.
        sinks: ``[num_heads]`` logits, one beside the scores of each query, that take a share of the softmax and have no
            value: the weights of keys sum to less than 1. -inf is no sink.
        q_offset: Position of the first query, in tokens: an int, or an array of any integer dtype, ``[]`` or one value
            for each batch entry. The first key has position 0. Default ``kv_len - q_len``, which aligns the last query
            with the last key.
        segment_ids: ``[..., length]`` integers for packed sequences: a query sees the keys with its own id. Distances
            are counted along the row, so a contiguous sequence has the same distances as alone. Give a pair
            ``(queries, keys)`` if the queries are not all tokens of the row.
        window_size: Mask keys farther than this many tokens: with 4 a query sees 5 keys, its own among them.
        mask: Booleans, True where a query may look, that broadcast to ``[..., num_heads, q_len, kv_len]``; or of axes
            ``[batch, kv_len]`` or ``[batch, q_len, kv_len]``, the axis ``kv_len`` of full length. Booleans that fit
            both readings (``q_len`` equals ``batch``) are refused: ``mask[:, None, None, :]`` is never mistaken.
            Integers 0 and 1 of two axes, as tokenizers make them, are always ``[batch, kv_len]``. Integers are checked
            where that takes no waiting for an accelerator or a compiler; elsewhere all but 0 are True.
        positions: Explicit positions, integer or floating: one array for queries and keys alike, or a pair
            ``(queries, keys)``; ``[..., length]`` on a line or ``[..., length, dims]`` in space. A token without a
            position has NaN: its distance to every token is 0. Causal attention compares positions, on a line only, and
            a query sees the keys at its own position. Excludes ``q_offset`` and ``window_size``. Backends have no
            derivatives by positions, and raise NotImplementedError if asked for some.
        distance: Distance between points: ``"manhattan"``, ``"euclidean"`` or ``"chebyshev"``. All are the same on a
            line.
        law: How the penalty grows with the distance d: ``"linear"``, d; ``"log"``, ``log(1 + d)``; ``"sqrt"``,
            ``sqrt(d)``.
        scale: Factor of the scores. Default ``head_dim ** -0.5``. The bias is not scaled.
        added_bias: Floating numbers to add to the scaled scores beside ALiBi's bias, with the axes of ``mask``. -inf
            hides a key, as a mask does.
        return_weights: Return the pair of the result and the weights, ``[..., num_heads, q_len, kv_len]``, in the dtype
            of the result; weights of a fully masked query are zeros.
        allow_negative_slopes: Accept negative slopes, which reward distance. A compiled program accepts them always:
            their values are unknown there.

    Returns:
        ``[..., num_heads, q_len, head_dim]``, with the dtype and device of ``query``.

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
        log_gates=log_gates,
        sinks=sinks,
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
    """Compute ``call`` on heads-first tensors with a dense score matrix, in operations of the standard.

    Args:
        call: The checked arguments.
        query: ``[..., num_heads, q_len, head_dim]``.
        key: ``[..., num_kv_heads, kv_len, head_dim]``.
        value: The same shape as ``key``.
        softmax: Softmax along the last axis; no row of scores is all -inf. Default: in operations of the standard.
        drop: Function that applies dropout with probability ``call.dropout`` to weights; called only if that is above
            0.

    Returns:
        The result, or the pair of the result and the applied weights if ``call.return_weights``.
    """
    xp = call.xp
    group = call.num_heads // call.num_kv_heads
    # queries [..., num_kv_heads, group, q_len, head_dim], keys [..., num_kv_heads, 1, kv_len, head_dim]
    query = _split_heads(xp, astype(xp, query, call.working_dtype), call.num_kv_heads, group)
    key, value = (astype(xp, x, call.working_dtype)[..., :, None, :, :] for x in (key, value))
    # bias [..., num_heads, q_len, kv_len]; attends [..., q_len, 1], or None if every query sees a key
    bias, attends = call.bias()
    # [..., num_kv_heads, group, q_len, kv_len]
    scores = xp.matmul(query, xp.matrix_transpose(key)) * call.scale
    scores = scores + _split_heads(xp, bias, call.num_kv_heads, group)
    if call.sinks is not None:
        sinks = _split_heads(xp, call.sinks[..., None], call.num_kv_heads, group)
        scores = scores + sinks if call.is_empty else with_sinks(xp, scores, sinks)
    weights = _softmax(xp, scores) if softmax is None else softmax(scores)
    weights = weights if call.sinks is None else weights[..., : call.kv_len]
    if call.dropout > 0 and drop is not None:
        weights = drop(weights)

    def finished(array: Any) -> Any:
        """Return ``[..., num_kv_heads, group, q_len, n]`` with one head axis, and zeros for fully masked queries."""
        # [*batch, num_heads, q_len, n]
        array = xp.reshape(array, (*call.batch, call.num_heads, call.q_len, array.shape[-1]))
        if attends is not None:
            array = xp.where(attends, array, 0.0)
        return astype(xp, array, call.dtype)

    result = finished(xp.matmul(weights, value))
    return (result, finished(weights)) if call.return_weights else result


def with_sinks(xp: Namespace, scores: Any, sinks: Any) -> Any:
    """Return scores, or biases, with a last column of sinks, which broadcast to it."""
    column = xp.zeros_like(scores[..., :1]) + sinks
    return joined(xp, xp.broadcast_to(scores, (*column.shape[:-1], scores.shape[-1])), column)


def _softmax(xp: Namespace, scores: Any) -> Any:
    if 0 in scores.shape:  # max() of an empty axis would raise
        return scores
    # No row is all -inf (see AttentionCall.bias), so the maximum is finite.
    weights = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
    return weights / xp.sum(weights, axis=-1, keepdims=True)


def _split_heads(xp: Namespace, array: Any, num_kv_heads: int, group: int) -> Any:
    """Return ``[..., num_heads, rows, n]`` as ``[..., num_kv_heads, group, rows, n]``."""
    return xp.reshape(array, (*array.shape[:-3], num_kv_heads, group, *array.shape[-2:]))
