"""Sequence-parallel ALiBi attention inside ``jax.shard_map``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from alibi_core import slopes as canonical_slopes
from alibi_core.backend import LENGTH_FIRST, AttentionCall, checks
from alibi_core.backend.sharding import Shards, check_shard_slopes, divided_along
from alibi_jax._call import operands_of
from alibi_jax._compatible import varying_alike
from alibi_jax._dispatch import Implementation, checked, name_of
from alibi_jax.parallel._ring import Ring, ring_attention

ABLE = ("tpu", "tiled")  # the implementations that return log-sum-exps


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    slopes: jax.Array | None = None,
    *,
    axis_name: str,
    head_axis: str | None = None,
    length: int | None = None,
    is_causal: bool = True,
    future_slopes: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    window_size: int | None = None,
    scale: float | None = None,
    tolerance: float | None = None,
    allow_negative_slopes: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Return this device's shard of ALiBi self-attention over a sequence that is sharded along a mesh axis.

    Call it inside ``jax.shard_map``, with local shards. The result equals that of :func:`alibi_jax.attention` on the
    whole sequence up to rounding. Query, key, value and slopes have first derivatives in reverse mode; other
    derivatives raise.

    Shards of keys and values are passed from device to device until no device needs more. The number of hops follows
    from the norms of queries and keys of all devices. If horizons are shorter than a shard, it is one hop.

    Arguments that are not listed are those of :func:`alibi_jax.attention`.

    - ``query``: ``[batch, shard_len, num_heads, head_dim]``, the tokens after those of the device before. ``key``,
      ``value`` and ``segment_ids`` (``[batch, shard_len]``) belong to the same tokens.
    - ``slopes``, ``future_slopes``: ``[num_heads]``, the slopes of *all* devices' heads, equal on every device.
      Default: canonical slopes. They are required if the query is sharded along a further mesh axis and ``head_axis``
      is None.
    - ``axis_name``: The mesh axis along which tokens are sharded.
    - ``head_axis``: The mesh axis along which heads are sharded; None if they are not.
    - ``length``: Number of tokens of the sequence; the rest is padding, whose results are zeros. Default: the number of
      tokens of all shards.
    - ``tolerance``: The share of softmax weight that may be skipped, keys that are not sent and keys that are not
      computed taken together.
    - ``implementation``: ``"tpu"``, :class:`alibi_jax.TPU` or ``"tiled"``.

    Returns:
        ``[batch, shard_len, num_heads, head_dim]``, with the dtype of ``query``.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value or shape is wrong, or there is no such mesh axis.
        NotImplementedError: If ``implementation`` does not return log-sum-exps.

    Example:
        >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("tokens",))
        >>> from functools import partial
        >>> from jax.sharding import PartitionSpec
        >>> attend = partial(attention, axis_name="tokens")
        >>> spec = PartitionSpec(None, "tokens")
        >>> x = jnp.ones((1, 6, 2, 4))
        >>> jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)(x, x, x).shape
        (1, 6, 2, 4)

    References:
        Press, Smith, Lewis, "Train Short, Test Long", arXiv 2108.12409; Liu, Zaharia, Abbeel, "Ring Attention with
        Blockwise Transformers", arXiv 2310.01889.
    """
    num_shards = _axis_size(axis_name, "axis_name")
    head_shards = 1 if head_axis is None else _axis_size(head_axis, "head_axis")
    for name, array in (("query", query), ("key", key)):
        if checks.array(name, array).ndim != 4:
            raise ValueError(f"{name} must have shape (batch, shard_len, heads, head_dim), got {array.shape}")
    given = _default_slopes(query, axis_name, head_axis, head_shards) if slopes is None else slopes
    local, local_future = (
        _local_slopes(name, x, query.shape[2], head_axis, head_shards)
        for name, x in (("slopes", given), ("future_slopes", future_slopes))
    )
    if key.shape[1] != query.shape[1]:
        raise ValueError(f"key must have the shard_len of query, {query.shape[1]}, got {key.shape[1]}")
    call = AttentionCall.check(
        *(query, key, value, local),
        is_causal=is_causal,
        future_slopes=local_future,
        segment_ids=segment_ids,
        window_size=window_size,
        scale=scale,
        tolerance=tolerance,
        allow_negative_slopes=allow_negative_slopes,
        layout=LENGTH_FIRST,
        xp=jnp,
    )
    shards = Shards(num_shards, query.shape[1], length)
    if checked(implementation) is not None and name_of(implementation) not in ABLE:
        raise NotImplementedError(
            f"implementation {name_of(implementation)!r} cannot tell log-sum-exps; {' and '.join(map(repr, ABLE))} can"
        )
    if getattr(implementation, "sharding", None) is not None:
        raise ValueError(f"implementation must have no sharding inside jax.shard_map, got {implementation}")
    if call.is_empty:
        return jnp.zeros_like(query)
    operands = operands_of(call, *(jnp.swapaxes(x, 1, 2) for x in (query, key, value)))
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(name for name in mesh.axis_names if name in mesh.manual_axes)
    return jnp.swapaxes(_attend(Ring(shards, axis_name, axes, implementation), varying_alike(operands)), 1, 2)


# Compile it as one program also outside of the caller's jax.jit.
_attend = jax.jit(ring_attention, static_argnums=0)


def _axis_size(axis_name: Any, argument: str) -> int:
    if not isinstance(axis_name, str):
        raise TypeError(f"{argument} must be the name of one mesh axis, got {axis_name!r}")
    try:
        return lax.axis_size(axis_name)
    except NameError as error:
        mesh = jax.sharding.get_abstract_mesh()
        raise ValueError(
            f"{argument} must name a mesh axis of the jax.shard_map around, {mesh.axis_names}, got {axis_name!r}"
        ) from error


def _default_slopes(query: jax.Array, axis_name: str, head_axis: str | None, head_shards: int) -> Any:
    """Return the canonical slopes of all devices' heads; raise if the number of heads may be sharded unknown to us."""
    others = [name for name in divided_along(jnp, query) if name != axis_name]
    if head_axis is None and others:
        raise ValueError(
            f"slopes must be given, or head_axis, where query is divided along {', '.join(map(repr, others))} too, as "
            "it may be the heads that are"
        )
    return canonical_slopes(query.shape[2] * head_shards)


def _local_slopes(name: str, slopes: Any, heads: int, head_axis: str | None, head_shards: int) -> Any:
    """Return the slopes of this device's heads, a slice of the slopes of all heads."""
    if slopes is None:
        return None
    check_shard_slopes(name, slopes, heads, head_shards, "devices")
    slopes = jnp.asarray(slopes)
    if head_axis is None:
        return slopes
    return lax.dynamic_slice_in_dim(slopes, lax.axis_index(head_axis) * heads, heads)
