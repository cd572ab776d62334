"""Sequence-parallel ALiBi attention on global arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from alibi_core import slopes as canonical_slopes
from alibi_core.backend import checks
from alibi_jax.parallel._attention import attention

TENSORS = ("query", "key", "value")


def sharded_attention(
    mesh: Mesh,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    slopes: jax.Array | None = None,
    *,
    axis_name: str,
    batch_axis: str | None = None,
    head_axis: str | None = None,
    length: int | None = None,
    future_slopes: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    """Return ALiBi self-attention of global arrays, sharded along tokens and optionally along batch and heads.

    This is :func:`alibi_jax.parallel.attention` inside ``jax.shard_map``. It works with and without ``jax.jit``.

    Args:
        mesh: The mesh.
        query: ``[batch, length, num_heads, head_dim]``. The length need not be divisible by the number of devices.
        key: ``[batch, length, num_kv_heads, head_dim]``.
        value: An array with the shape of ``key``.
        slopes: ``[num_heads]``. Default: the canonical slopes.
        axis_name: The mesh axis along which tokens are sharded.
        batch_axis: The mesh axis along which batch entries are sharded; None if they are not.
        head_axis: The mesh axis along which heads are sharded; None if they are not.
        length: Number of tokens without padding. Default: all.
        future_slopes: ``[num_heads]`` slopes for keys after the query. Default: ``slopes``.
        segment_ids: ``[batch, length]`` integers for packed sequences.
        **options: The other arguments of :func:`alibi_jax.parallel.attention`.

    Returns:
        ``[batch, length, num_heads, head_dim]``, sharded as the query.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If the mesh has no such axis, arrays are on another mesh, or the number of batch entries or heads is
            not divisible by the number of devices.
        NotImplementedError: If the implementation does not return log-sum-exps.

    Example:
        >>> mesh = jax.make_mesh((1, 1), ("data", "tokens"))
        >>> x = jnp.ones((2, 5, 4, 8))
        >>> sharded_attention(mesh, x, x, x, axis_name="tokens", batch_axis="data").shape
        (2, 5, 4, 8)
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
    axes = {"axis_name": axis_name, "batch_axis": batch_axis, "head_axis": head_axis}
    axes = {name: axis for name, axis in axes.items() if axis is not None or name == "axis_name"}
    sizes = {name: _axis_size(mesh, name, axis) for name, axis in axes.items()}
    if len(set(axes.values())) < len(axes):
        raise ValueError(f"axis_name, batch_axis and head_axis must differ, got {', '.join(map(repr, axes.values()))}")
    arrays = dict(zip(TENSORS, (query, key, value), strict=True))
    for name, array in (arrays | {"segment_ids": segment_ids}).items():
        if array is not None:
            _check_placed(mesh, name, checks.array(name, array), 2 if name == "segment_ids" else 4)
    tokens = query.shape[1]
    for name, array in arrays.items():
        if array.shape[1] != tokens:
            raise ValueError(f"{name} must have the length of query, {tokens}, got {array.shape[1]}")
        for axis, argument in ((0, "batch_axis"), (2, "head_axis")):
            if array.shape[axis] % sizes.get(argument, 1):
                raise ValueError(
                    f"{name} must have {'batch entries' if axis == 0 else 'heads'} that the {sizes[argument]} devices "
                    f"along {axes[argument]!r} divide, got {array.shape[axis]}"
                )
    if 0 in query.shape:
        return jnp.zeros_like(query)
    missing = -tokens % sizes["axis_name"]
    length = tokens if length is None else checks.positive_int("length", length)
    if length > tokens:
        raise ValueError(f"length must be at most that of query, {tokens}, got {length}")
    slopes = canonical_slopes(query.shape[2]) if slopes is None else slopes
    # Concrete slopes are closed over, so that their values are checked; shard_map would trace them.
    known = {"slopes": slopes, "future_slopes": future_slopes}
    traced = {name: x for name, x in known.items() if isinstance(x, jax.core.Tracer)}

    def padded(array: jax.Array) -> jax.Array:
        return jnp.pad(array, [(0, missing if axis == 1 else 0) for axis in range(array.ndim)]) if missing else array

    def local(tensors: list[jax.Array], ids: jax.Array | None, traced: dict[str, jax.Array]) -> jax.Array:
        return attention(
            *tensors,
            axis_name=axis_name,
            head_axis=head_axis,
            length=length,
            segment_ids=ids,
            **(known | traced),
            **options,
        )

    spec = Spec(batch_axis, axis_name, head_axis)
    ids = None if segment_ids is None else padded(jnp.broadcast_to(segment_ids, query.shape[:2]))
    in_specs = ([spec] * 3, None if ids is None else Spec(batch_axis, axis_name), {name: Spec() for name in traced})
    attend = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=spec)
    inputs = ([padded(x) for x in arrays.values()], ids, traced)
    is_explicit = AxisType.Explicit in mesh.axis_types  # explicit axes need explicit resharding
    if is_explicit:
        inputs = jax.tree.map(lambda x, to: jax.sharding.reshard(x, NamedSharding(mesh, to)), inputs, in_specs)
    result = attend(*inputs)
    if missing and is_explicit:
        result = jax.sharding.reshard(result, NamedSharding(mesh, Spec(batch_axis, None, head_axis)))
    return result[:, :tokens] if missing else result


def _axis_size(mesh: Mesh, argument: str, axis: Any) -> int:
    if not isinstance(axis, str):
        raise TypeError(f"{argument} must be the name of one mesh axis, got {axis!r}")
    if axis not in mesh.shape:
        raise ValueError(f"{argument} must name an axis of the mesh, {tuple(mesh.axis_names)}, got {axis!r}")
    return int(mesh.shape[axis])


def _check_placed(mesh: Mesh, name: str, array: Any, ndim: int) -> None:
    """Check an array's number of axes, and that it is not on another mesh."""
    if array.ndim != ndim:
        axes = "(batch, length)" if ndim == 2 else "(batch, length, heads, head_dim)"
        raise ValueError(f"{name} must have shape {axes}, got {tuple(array.shape)}")
    sharding = None if isinstance(array, jax.core.Tracer) else getattr(array, "sharding", None)
    if isinstance(sharding, NamedSharding) and sharding.mesh != mesh:
        raise ValueError(f"{name} must be on the mesh given, {mesh}, got one on {sharding.mesh}")
