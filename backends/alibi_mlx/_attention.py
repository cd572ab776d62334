"""ALiBi attention for MLX."""

from __future__ import annotations

import mlx.core as mx

from alibi_core.backend import AttentionCall, dense_attention
from alibi_core.backend.checks import explains_keywords, one_of
from alibi_core.backend.horizon import Job
from alibi_mlx import _plan, _rows
from alibi_mlx._dispatch import IMPLEMENTATIONS, attend, choose


@explains_keywords
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
    positions: mx.array | tuple[mx.array, mx.array] | None = None,
    distance: str = "manhattan",
    law: str = "linear",
    scale: float | None = None,
    tolerance: float | None = None,
    added_bias: mx.array | None = None,
    dropout: float = 0.0,
    dropout_key: mx.array | None = None,
    return_weights: bool = False,
    allow_negative_slopes: bool = False,
    implementation: str | None = None,
) -> mx.array | tuple[mx.array, mx.array]:
    """Return ALiBi attention, ``softmax(scale * query @ key.T - slopes * distance) @ value``, over visible keys.

    Differentiable in ``query``, ``key``, ``value``, ``slopes`` and ``future_slopes``, in memory that grows with the
    lengths alone, forwards and backwards; no bias of ``q_len * kv_len`` is ever held. Keys that are proved to weigh
    less than the tolerance together are left out. To prove it, the call evaluates the tensors where there are more
    than 1,024 keys; ``tolerance=0`` leaves it lazy. Slopes of MLX are evaluated in any case, to be checked; NumPy's or
    none are not. ``mx.vmap`` makes a longer batch. Under ``mx.compile``
    nothing can be read, so all visible keys are computed. Lengths decide what that is: ``shapeless=True`` is not for
    it, and MLX refuses it, but where ``"dense"`` was traced with a single key.

    Bias and softmax are float32 (float64 for float64 inputs, which MLX has on the CPU). A query that may look
    nowhere gives zeros.

    Arguments that are not listed are those of :func:`alibi_core.attention`. ``slopes`` and ``q_offset`` may have the
    batch axes of ``query``, of which there may be any number.

    - ``tolerance``: The share of softmax weight that may be left out, which moves the result by at most ``2 * tolerance
      * max|value|``. Default: the rounding error of the dtype. 0 computes every score.
    - ``dropout``: Probability of zeroing a weight, the others being divided by what is left of 1, in every call: give 0
      where a model is not training. ``"dense"`` alone has it, and ``added_bias`` and ``return_weights``; it is then the
      default.
    - ``dropout_key``: Of ``mx.random.key``. Default: MLX's global one.
    - ``implementation``: ``"tiled"`` (blocks of queries against the keys inside their horizons, through MLX's kernel)
      or ``"dense"`` (whole scores, for comparison, and for float64). The one named runs, or the call raises.

    Returns:
        ``[batch, num_heads, q_len, head_dim]``, of the dtype of ``query``; with ``return_weights``, the pair of that
        and the weights.

    Raises:
        TypeError: If an argument is of the wrong kind, or dtypes or array libraries are mixed.
        ValueError: If a value or shape is wrong.
        NotImplementedError: If the implementation named cannot run the call; the message names those that can.

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
        positions=positions,
        distance=distance,
        law=law,
        scale=scale,
        tolerance=tolerance,
        added_bias=added_bias,
        dropout=dropout,
        return_weights=return_weights,
        allow_negative_slopes=allow_negative_slopes,
        xp=mx,
    )
    if call.dense_only is not None:
        choose(call, chosen)  # raises, if another was named
        return dense_attention(call, query, key, value, drop=lambda weights: _dropped(weights, dropout, dropout_key))
    return run(call, query, key, value, chosen, None)


def _dropped(weights: mx.array, probability: float, key: mx.array | None) -> mx.array:
    kept = mx.random.bernoulli(1 - probability, weights.shape, key=key)
    return mx.where(kept, weights / (1 - probability), 0)


def run(
    call: AttentionCall,
    query: mx.array,
    key: mx.array,
    value: mx.array,
    implementation: str | None,
    norms: _plan.Norms | None,
) -> mx.array:
    """Compute a checked call by the implementation named, or by the one that suits it.

    Without ``norms`` all keys are read once to measure them.
    """
    if call.is_empty or choose(call, implementation) == "dense":
        return dense_attention(call, query, key, value)
    if not call.is_toeplitz:
        return _rows.attention(call, query, key, value)
    flat = call.with_one_batch_axis()
    tensors = (x.reshape(*flat.batch, *x.shape[-3:]) for x in (query, key, value))

    def plan(call: AttentionCall, *tensors: mx.array) -> list[Job]:
        # The norms are of these keys: of a longer batch, which mx.vmap makes, they are measured.
        return _plan.jobs(call, *tensors, norms if call.batch == flat.batch else None)

    return attend(flat, *tensors, plan).reshape(query.shape)
