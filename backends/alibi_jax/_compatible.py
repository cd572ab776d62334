"""Names of JAX that are not public or differ by version (seen in 0.10.2 and 0.11), and a bug of XLA worked around."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla


def broadcasting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function broadcast arrays of different ranks, also where ``jax_numpy_rank_promotion`` refuses that."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with jax.numpy_rank_promotion("allow"):
            return function(*args, **kwargs)

    return wrapper


# --- A bug of XLA on CPUs -------------------------------------------------------------------------------------------


def materialised(array: jax.Array) -> jax.Array:
    """Return a floating array times 1, so that XLA does not know it to be a repeated number, and puts it in memory.

    XLA's compiler for CPUs (jaxlib 0.10.2) hands products and sums to YNNPACK as one fusion. If the right operand of a
    product is a repeated number (ones, zeros, the gradient of a sum) and the fusion holds a sum or a maximum besides,
    the operand is one number in memory, with strides of 0, and the library reads beyond it. The smallest such program,
    which ``tests/jax/test_compiler.py`` runs, returns garbage::

        jax.jit(lambda x: (x @ jnp.ones((32, 64))).sum(0))(jnp.ones((64, 32)))

    ``jax.lax.optimization_barrier`` alone is removed before that fusion is made. Here 1 is selected by position, along
    each axis; no pass of the compiler knows that NaN is never selected. Derivatives are products with the same ones.
    """
    places = sum(jax.lax.broadcasted_iota(np.int32, array.shape, axis) for axis in range(array.ndim))
    always = places < jax.lax.optimization_barrier(np.int32(np.iinfo(np.int32).max))
    one, nan = (jnp.asarray(x, array.dtype) for x in (1, np.nan))
    return array * jnp.where(always, one, nan)


# --- Types of arrays ------------------------------------------------------------------------------------------------


def shaped_as(array: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return the type of an array that varies over the mesh axes that ``array``, a type itself, varies over.

    Its first axis is sharded as that of ``array``.
    """
    spec = jax.sharding.PartitionSpec(array.sharding.spec[0], *(None,) * (len(shape) - 1))
    return array.update(shape=shape, dtype=dtype, sharding=array.sharding.update(spec=spec), weak_type=False)


def local(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Return the type of a Pallas kernel's result, which has to say that it varies over no axis of ``shard_map``."""
    if "manual_axis_type" in inspect.signature(jax.ShapeDtypeStruct).parameters:  # since JAX 0.10
        return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.core.ShapedArray((), dtype).manual_axis_type)
    return jax.ShapeDtypeStruct(shape, dtype, vma=frozenset())


def varying(array: Any) -> frozenset[Any]:
    """Return the mesh axes that an array varies over, inside ``jax.shard_map``."""
    kind = jax.typeof(array)
    return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma


def varying_over(array: jax.Array, axes: Iterable[Any]) -> jax.Array:
    """Return an array that varies over these mesh axes, too, inside ``jax.shard_map``."""
    missing = tuple(sorted(frozenset(axes) - varying(array)))
    if not missing:
        return array
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(array, missing, to="varying")
    return jax.lax.pvary(array, missing)


def varying_alike(tree: Any) -> Any:
    """Return arrays that all vary over the mesh axes of ``jax.shard_map`` that any of them varies over.

    The derivative of this sums the gradients of arrays that devices share, such as slopes.
    """
    axes = frozenset().union(*(varying(x) for x in jax.tree.leaves(tree)))
    return jax.tree.map(lambda array: varying_over(array, axes), tree)


# --- Primitives -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """What a program is compiled for.

    Attributes:
        platform: ``"tpu"``, ``"cpu"``, ``"cuda"`` or ``"rocm"``.
        is_partitioned: Whether XLA divides the program among several devices by itself.
    """

    platform: str
    is_partitioned: bool = False


def new_primitive(name: str, run: Callable[..., list[Any]], result_types: Callable[..., list[Any]]) -> Primitive:
    """Return a primitive that knows its target when it is lowered, as no public function does.

    Args:
        name: Its name.
        run: Takes the target, arrays and parameters, and returns arrays.
        result_types: Takes types and parameters, and returns the types of the results.
    """
    primitive, run = Primitive(name), broadcasting(run)
    primitive.multiple_results = True

    def lower(context: Any, *arrays: Any, platform: str | None = None, **parameters: Any) -> Any:
        module, axes = context.module_context, context.module_context.axis_context
        if hasattr(axes, "manual_axes"):  # inside shard_map
            is_partitioned = any(size > 1 for name, size in axes.mesh.shape.items() if name not in axes.manual_axes)
        else:
            is_partitioned = getattr(axes, "num_devices", 1) > 1
        target = Target(platform or module.platforms[0], is_partitioned)
        # One device's computation does not depend on how types say that arrays are divided.
        plain = {name: [jax.core.ShapedArray(x.shape, x.dtype) for x in getattr(context, name)]
                 for name in ("avals_in", "avals_out")}  # fmt: skip
        function = functools.partial(run, target, **parameters)
        return mlir.lower_fun(function, multiple_results=True)(context.replace(**plain), *arrays)

    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    primitive.def_abstract_eval(result_types)
    for platform in ("tpu", "cpu"):
        mlir.register_lowering(primitive, functools.partial(lower, platform=platform), platform=platform)
    mlir.register_lowering(primitive, lower)
    return primitive


def set_rules(primitive: Primitive, *, vmap: Any, jvp: Any, transpose: Any = None) -> None:
    """Set how a primitive is mapped and differentiated."""
    batching.primitive_batchers[primitive] = vmap
    ad.primitive_jvps[primitive] = jvp
    if transpose is not None:
        ad.primitive_transposes[primitive] = transpose


def is_zero(tangent: Any) -> bool:
    """Whether a tangent or cotangent is zero without being an array."""
    return type(tangent) is ad.Zero


def zero(aval: Any) -> Any:
    """Return a tangent or cotangent of this type that is zero without being an array."""
    return ad.Zero(aval)
