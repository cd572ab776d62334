"""ALiBi attention for JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from alibi_core.backend import LENGTH_FIRST, AttentionCall, fixed_positions
from alibi_core.backend.checks import explains_keywords, is_dimension
from alibi_jax._call import operands_of
from alibi_jax._compatible import broadcasting
from alibi_jax._dispatch import Implementation, attend, attend_densely, checked, choose, without_gradient


@explains_keywords
@broadcasting
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    slopes: int | jax.Array | None = None,
    *,
    is_causal: bool = True,
    future_slopes: jax.Array | None = None,
    log_gates: jax.Array | None = None,
    sinks: jax.Array | None = None,
    q_offset: int | jax.Array | None = None,
    segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    window_size: int | None = None,
    mask: jax.Array | None = None,
    positions: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    distance: str = "manhattan",
    law: str = "linear",
    scale: float | None = None,
    tolerance: float | None = None,
    added_bias: jax.Array | None = None,
    dropout: float = 0.0,
    dropout_key: jax.Array | None = None,
    return_weights: bool = False,
    allow_negative_slopes: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Return ALiBi attention, ``softmax(scale * query @ key.T - slopes * distance) @ value``, over visible keys.

    Memory is linear in the lengths, also with gradients. Distant keys are skipped if the norms of queries and keys
    prove that their weights sum to at most ``tolerance``. Second derivatives need memory for all scores; forward mode
    needs ``"dense"``.

    Works under ``jax.jit``, ``jax.vmap``, ``jax.grad`` (also of ``slopes``, ``future_slopes``, ``log_gates``,
    ``sinks``), ``jax.checkpoint`` and ``jax.shard_map``, and partitions batch and heads as the arrays are sharded.
    Arrays may be traced; ``is_causal``, ``window_size``, ``scale``, ``tolerance``, ``dropout``, ``return_weights``,
    ``allow_negative_slopes`` and ``implementation`` are Python values. The signs of traced slopes and gates are not
    checked.

    The result and the log-sum-exps that gradients need have the name ``"alibi_residuals"``: with ``jax.checkpoint(...,
    policy=jax.checkpoint_policies.save_only_these_names("alibi_residuals"))`` attention is not computed again.

    Bias and softmax are float32 (float64 for float64 inputs), whatever the dtype of the tensors. A query that sees no
    key gives zeros.

    Arguments that are not listed are those of :func:`alibi_core.attention`. ``query`` may have any number of batch
    axes; ``slopes`` and ``q_offset`` may have them too.

    - ``query``, ``key``, ``value``: ``[batch, length, heads, head_dim]``. In masks, biases and weights, heads come
      before lengths, as in every mask of JAX.
    - ``slopes``: Required inside ``jax.shard_map`` and ``jax.pmap`` if the query is divided, as its heads may be: the
      slopes of the heads that it has.
    - ``log_gates``: ``[batch, kv_len, num_heads]``. ``"tpu"`` takes none.
    - ``sinks``: ``"cudnn"`` takes none. Second derivatives need ``"dense"``.
    - ``tolerance``: The share of softmax weight that may be skipped; it moves the result by at most ``2 * tolerance *
      max|value|``. Default: the rounding error of the dtype. 0 computes every score.
    - ``dropout``: Probability of zeroing a weight; the other weights are divided by ``1 - dropout``. It applies in
      every call, so pass 0 outside of training. Only ``"dense"`` supports dropout, ``added_bias`` and
      ``return_weights``; it is then the default.
    - ``dropout_key``: A key of ``jax.random.key`` for dropout; required if ``dropout`` is above 0.
    - ``implementation``: ``"tpu"``, or :class:`TPU` with options, is a kernel for TPUs; ``"cudnn"`` runs causal calls
      in low precision on NVIDIA GPUs; ``"tiled"`` runs anywhere, tile by tile; ``"dense"`` computes all scores.
      Default: ``"tpu"`` or ``"cudnn"`` where it can run the call, else ``"tiled"``.
      A named implementation runs, or the call raises when it is compiled; :func:`explain` gives the reason.

    Returns:
        ``[batch, q_len, num_heads, head_dim]``, with the dtype of ``query``; with ``return_weights``, the pair of this
        array and the weights.

    Raises:
        TypeError: If an argument is of the wrong kind (for example a traced array for a Python value), or dtypes or
            array libraries are mixed.
        ValueError: If a value or shape is wrong.
        NotImplementedError: If ``implementation`` cannot run the call.

    Example:
        A slope of ln 2 halves the weight with each step back:

        >>> query = key = jnp.zeros((3, 1, 1))
        >>> value = jnp.asarray([6.0, 3.0, 0.5])[:, None, None]
        >>> [f"{x:.3f}" for x in attention(query, key, value, jnp.log(jnp.asarray([2.0])))[:, 0, 0]]
        ['6.000', '4.000', '2.000']

    References:
        Press, Smith, Lewis, "Train Short, Test Long", section 3 and footnote 10, arXiv 2108.12409.
    """
    implementation = checked(implementation)
    for name, array in (("query", query), ("key", key), ("value", value)):
        sizes = getattr(array, "shape", ())[-3:]
        may_be_long = implementation == "dense" and log_gates is None
        if any(map(is_dimension, sizes[may_be_long:])):  # the checks below would compare symbols
            raise ValueError(
                f"{name} must have a length, heads and head_dim that are numbers, got {sizes}; in jax.export only axes "
                "of the batch may be symbols, and the length with implementation='dense' and no log_gates: else pad "
                "texts to a few lengths, hide the padding by mask, and export each"
            )
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
        layout=LENGTH_FIRST,
        xp=jnp,
    )
    if call.dropout > 0 and dropout_key is None:
        raise ValueError("dropout_key must be given with a dropout above 0, got None; jax.random.key makes one")
    if dropout_key is not None and not hasattr(dropout_key, "dtype"):
        raise TypeError(f"dropout_key must be a key, got {dropout_key!r}; jax.random.key makes one")
    tensors = [jnp.swapaxes(x, -3, -2) for x in (query, key, value)]
    if call.dense_only is None:
        return jnp.swapaxes(run(call, *tensors, implementation), -3, -2)
    choose(implementation, call)  # raises if another implementation is named
    found = attend_densely(call, *tensors, dropout_key=dropout_key)
    return (jnp.swapaxes(found[0], -3, -2), found[1]) if call.return_weights else jnp.swapaxes(found, -3, -2)


def run(
    call: AttentionCall,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    implementation: Implementation | None,
    key_norms: jax.Array | None = None,
) -> jax.Array:
    """Compute a checked call on tensors ``[*batch, heads, length, head_dim]``.

    ``key_norms``, ``[batch, num_kv_heads, blocks]``, are upper bounds of the norms of each 128 keys. Default: measured.
    """
    choose(implementation, call)  # raises if the implementation is named and cannot run the call
    if call.is_empty:
        return jnp.zeros_like(query)
    if implementation == "dense":
        return attend_densely(call, query, key, value)
    return _attend(operands_of(call, query, key, value, key_norms), implementation).reshape(query.shape)


# Compile also outside of the caller's jax.jit: tiles are loops, which run slowly op by op.
_attend = jax.jit(attend, static_argnums=1)
