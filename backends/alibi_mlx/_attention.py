"""ALiBi attention for MLX."""

from __future__ import annotations

import mlx.core as mx

from alibi_core.backend import AttentionCall, dense_attention, fixed_positions
from alibi_core.backend.checks import explains_keywords, one_of
from alibi_core.backend.horizon import Job
from alibi_mlx import _plan
from alibi_mlx._dispatch import IMPLEMENTATIONS, attend, choose, without_gradient


@explains_keywords
def attention(
    query: mx.array,
    key: mx.array,
    value: mx.array,
    slopes: int | mx.array | None = None,
    *,
    is_causal: bool = True,
    future_slopes: mx.array | None = None,
    log_gates: mx.array | None = None,
    sinks: mx.array | None = None,
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

    Differentiable in ``query``, ``key``, ``value``, ``slopes``, ``future_slopes``, ``log_gates`` and ``sinks``. Memory
    is linear in the lengths, forward and backward; no bias of ``q_len * kv_len`` is allocated. Keys are skipped if
    their norms and the gates prove that their weights sum to less than the tolerance. For this proof the call evaluates
    the tensors if there are more than 1,024 keys; with ``tolerance=0`` it stays lazy. Slopes, gates and sinks that are
    MLX arrays are always evaluated, to validate them; NumPy slopes and default slopes are not. ``mx.vmap`` is
    supported. Under ``mx.compile`` no values can be read, so all visible keys are computed. The program depends on the
    lengths, so ``shapeless=True`` is not supported: MLX refuses it, except for ``"dense"``, where MLX 0.32 crashes if
    it traces a single key.

    Bias and softmax are float32 (float64 for float64 inputs, which MLX has on the CPU). A query that sees no key gives
    zeros.

    Arguments that are not listed are those of :func:`alibi_core.attention`. ``query`` may have any number of batch
    axes; ``slopes`` and ``q_offset`` may have them too.

    - ``tolerance``: The share of softmax weight that may be skipped; it moves the result by at most ``2 * tolerance *
      max|value|``. Default: the rounding error of the dtype. 0 computes every score.
    - ``dropout``: Probability of zeroing a weight; the other weights are divided by ``1 - dropout``. It applies in
      every call, so pass 0 outside of training. Only ``"dense"`` supports dropout, ``added_bias`` and
      ``return_weights``; it is then the default.
    - ``dropout_key``: A key of ``mx.random.key`` for dropout. Default: MLX's global random state.
    - ``implementation``: ``"tiled"`` (blocks of queries against the keys inside their horizons, through MLX's kernel)
      or ``"dense"`` (all scores in memory, for comparison, and for float64). A named implementation runs, or the call
      raises.

    Returns:
        ``[batch, num_heads, q_len, head_dim]``, with the dtype of ``query``; with ``return_weights``, the pair of this
        array and the weights.

    Raises:
        TypeError: If an argument is of the wrong kind, or dtypes or array libraries are mixed.
        ValueError: If a value or shape is wrong.
        NotImplementedError: If ``implementation`` cannot run the call; the message names implementations that can.

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
        log_gates=log_gates,
        sinks=sinks,
        q_offset=q_offset,
        segment_ids=segment_ids,
        window_size=window_size,
        mask=mask,
        positions=fixed_positions(positions, without_gradient),
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
        choose(call, chosen)  # raises if another implementation is named
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
    """Compute a checked call by ``implementation``, or by default the first that can run it.

    Without ``norms``, all keys are read once to measure their norms.
    """
    if choose(call, implementation) == "dense" or call.is_empty:
        return dense_attention(call, query, key, value)
    flat = call.with_one_batch_axis()
    tensors = (x.reshape(*flat.batch, *x.shape[-3:]) for x in (query, key, value))

    def plan(call: AttentionCall, *tensors: mx.array) -> list[Job]:
        # `norms` belong to these keys only; the longer batch of mx.vmap is measured again.
        return _plan.jobs(call, *tensors, norms if call.batch == flat.batch else None)

    return attend(flat, *tensors, plan).reshape(query.shape)
