"""Names of JAX that are private or differ between versions (0.10.2 and 0.11), and a work-around for a bug of XLA."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla


def broadcasting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function broadcast arrays of different ranks, even if ``jax_numpy_rank_promotion`` is set to raise."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with jax.numpy_rank_promotion("allow"):
            return function(*args, **kwargs)

    return wrapper


# --- A bug of XLA on CPUs -------------------------------------------------------------------------------------------


def materialised(array: jax.Array) -> jax.Array:
    """Return a floating array times 1, in a way that XLA cannot simplify, so that a broadcast scalar gets memory.

    Work-around for XLA on CPUs (jaxlib 0.10.2), which hands products and sums to YNNPACK as one fusion. If the right
    operand of a product is a broadcast scalar (ones, zeros, the gradient of a sum) and the fusion also contains a sum
    or a maximum, the operand is one number in memory, with strides of 0, and YNNPACK reads beyond it. The smallest such
    program, which ``tests/jax/test_compiler.py`` runs, returns garbage::

        jax.jit(lambda x: (x @ jnp.ones((32, 64))).sum(0))(jnp.ones((64, 32)))

    ``jax.lax.optimization_barrier`` alone is removed before that fusion is made. Here a comparison of indices selects
    1 everywhere; no compiler pass can prove that 2 is never selected. Derivatives are products with the same ones.
    """
    places = sum(jax.lax.broadcasted_iota(np.int32, array.shape, axis) for axis in range(array.ndim))
    always = places < jax.lax.optimization_barrier(np.int32(np.iinfo(np.int32).max))
    one, two = (jnp.asarray(x, array.dtype) for x in (1, 2))
    return array * jnp.where(always, one, two)


# --- Types of arrays ------------------------------------------------------------------------------------------------


def shaped_as(array: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return the type ``array`` with another shape and dtype, varying over the same mesh axes.

    The first axis is sharded as in ``array``, the others are not.
    """
    spec = jax.sharding.PartitionSpec(array.sharding.spec[0], *(None,) * (len(shape) - 1))
    return array.update(shape=shape, dtype=dtype, sharding=array.sharding.update(spec=spec), weak_type=False)


def local(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Return the type of a Pallas kernel's result; ``shard_map`` requires its varying axes, and there are none."""
    if "manual_axis_type" in inspect.signature(jax.ShapeDtypeStruct).parameters:  # since JAX 0.10
        return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.core.ShapedArray((), dtype).manual_axis_type)
    return jax.ShapeDtypeStruct(shape, dtype, vma=frozenset())


def varying(array: Any) -> frozenset[Any]:
    """Return the mesh axes that an array varies over, inside ``jax.shard_map``."""
    kind = jax.typeof(array)
    return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma


def varying_over(array: jax.Array, axes: Iterable[Any]) -> jax.Array:
    """Return the array cast to also vary over these mesh axes, inside ``jax.shard_map``."""
    missing = tuple(sorted(frozenset(axes) - varying(array)))
    if not missing:
        return array
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(array, missing, to="varying")
    return jax.lax.pvary(array, missing)


def varying_alike(tree: Any) -> Any:
    """Cast all arrays to vary over every mesh axis of ``jax.shard_map`` that any of them varies over.

    The transpose of this cast sums the gradients of replicated arrays, such as slopes, over devices.
    """
    axes = frozenset().union(*(varying(x) for x in jax.tree.leaves(tree)))
    return jax.tree.map(lambda array: varying_over(array, axes), tree)


# --- Primitives -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """The target of a compilation.

    Attributes:
        platform: ``"tpu"``, ``"cpu"``, ``"cuda"`` or ``"rocm"``.
        is_partitioned: Whether XLA partitions the program among several devices automatically.
        is_exported: Whether ``jax.export`` writes the program down.
    """

    platform: str
    is_partitioned: bool = False
    is_exported: bool = False


def new_primitive(
    name: str,
    run: Callable[..., list[Any]],
    result_types: Callable[..., list[Any]],
    mapped: Callable[..., Any],
    jvp: Callable[..., Any],
    has_effects: Callable[[dict[str, Any]], bool],
) -> Primitive:
    """Return a primitive whose implementation gets the compilation target, which no public function of JAX provides.

    Args:
        name: Name of the primitive.
        run: The implementation: takes the target, arrays and parameters, and returns arrays.
        result_types: Abstract evaluation: takes types and parameters, and returns the types of the results.
        mapped: The rule for jax.vmap: takes the primitive, ``result_types``, arrays, their mapped axes and parameters.
        jvp: The rule for jax.jvp: takes the primitive, arrays, their tangents (see :func:`is_zero`) and parameters.
        has_effects: Whether the implementation calls back to the host in order, given the parameters.
    """
    primitive, run = Primitive(name), broadcasting(run)
    primitive.multiple_results = True

    def lower(context: Any, *arrays: Any, platform: str | None = None, **parameters: Any) -> Any:
        module, axes = context.module_context, context.module_context.axis_context
        if hasattr(axes, "manual_axes"):  # inside shard_map
            is_partitioned = any(size > 1 for name, size in axes.mesh.shape.items() if name not in axes.manual_axes)
        else:
            is_partitioned = getattr(axes, "num_devices", 1) > 1
        is_exported = getattr(module.lowering_parameters, "for_export", False)
        target = Target(platform or module.platforms[0], is_partitioned, is_exported)
        # Drop shardings from the types: the lowered function is one device's computation.
        plain = {name: [jax.core.ShapedArray(x.shape, x.dtype) for x in getattr(context, name)]
                 for name in ("avals_in", "avals_out")}  # fmt: skip
        function = functools.partial(run, target, **parameters)
        if not is_partitioned and getattr(axes, "device_assignment", ()) is None:  # lowered for another machine
            # cuDNN's attention asks which devices divide it: one, of any kind.
            module = module.replace(axis_context=replace(axes, device_assignment=(jax.devices()[0],)))
        inner = context.replace(module_context=module, **plain)
        found = mlir.lower_fun(function, multiple_results=True)(inner, *arrays)
        context.set_tokens_out(inner.tokens_out)
        return found

    def abstract(*types: Any, **parameters: Any) -> Any:
        found = result_types(*types, **parameters)
        return found, _ordered_effects() if has_effects(parameters) else set()

    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    primitive.def_effectful_abstract_eval(abstract)
    for platform in ("tpu", "cpu"):
        mlir.register_lowering(primitive, functools.partial(lower, platform=platform), platform=platform)
    mlir.register_lowering(primitive, lower)
    batching.primitive_batchers[primitive] = functools.partial(mapped, primitive, result_types)
    ad.primitive_jvps[primitive] = functools.partial(jvp, primitive)
    return primitive


@functools.cache
def _ordered_effects() -> Any:
    """Return the effects of a program that calls back to the host in order."""
    call = functools.partial(jax.experimental.io_callback, lambda: None, None, ordered=True)
    return jax.make_jaxpr(call)().effects


def is_zero(tangent: Any) -> bool:
    """Whether a tangent is a symbolic zero."""
    return type(tangent) is ad.Zero
