"""What differs among the versions of JAX that the package allows."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jax


def broadcasting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function broadcast arrays of different ranks, also for users who have JAX refuse that."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with jax.numpy_rank_promotion("allow"):
            return function(*args, **kwargs)

    return wrapper


def shaped_as(array: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return the type of an array that varies over the mesh axes that ``array``, a type itself, varies over.

    Its first axis is sharded as that of ``array`` is.
    """
    spec = jax.sharding.PartitionSpec(array.sharding.spec[0], *(None,) * (len(shape) - 1))
    return array.update(shape=shape, dtype=dtype, sharding=array.sharding.update(spec=spec), weak_type=False)


def local(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Return what a Pallas kernel returns: to say that it varies over no mesh axis is required inside ``shard_map``."""
    if "manual_axis_type" in inspect.signature(jax.ShapeDtypeStruct).parameters:  # since JAX 0.10
        return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.core.ShapedArray((), dtype).manual_axis_type)
    return jax.ShapeDtypeStruct(shape, dtype, vma=frozenset())


def without_mesh(context: Any) -> Any:
    """Return a lowering's context in which types do not tell how arrays are divided, or over which axes they vary.

    Neither is a concern of what one device computes.
    """
    types = {name: [jax.core.ShapedArray(x.shape, x.dtype) for x in getattr(context, name)]
             for name in ("avals_in", "avals_out")}  # fmt: skip
    return context.replace(**types)


def varying(array: Any) -> frozenset[Any]:
    """Return the mesh axes that an array varies over, inside ``jax.shard_map``."""
    kind = jax.typeof(array)
    return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma


def varying_alike(tree: Any) -> Any:
    """Return arrays that all vary over the mesh axes of ``jax.shard_map`` that any of them varies over.

    The derivative of this is what sums the gradients of what devices share, such as slopes.
    """
    axes = frozenset().union(*(varying(x) for x in jax.tree.leaves(tree)))

    return jax.tree.map(lambda array: varying_over(array, axes), tree)


def varying_over(array: jax.Array, axes: Iterable[Any]) -> jax.Array:
    """Return an array that varies over these mesh axes, too, inside ``jax.shard_map``."""
    missing = tuple(sorted(frozenset(axes) - varying(array)))
    if not missing:
        return array
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(array, missing, to="varying")
    return jax.lax.pvary(array, missing)
