"""Attention's two passes as primitives of JAX, so that who computes them is decided when they are compiled.

Only then is it known for which platform that is, and whether the compiler is to divide the program among devices. A
primitive also says what ``jax.vmap`` means: the mapped axis becomes part of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, xla

from alibi_jax import _tiled, _tpu
from alibi_jax._call import Operands, Rules
from alibi_jax._compatible import broadcasting, shaped_as, varying_alike, without_mesh
from alibi_jax._dispatch.choice import Implementation, Target, choose
from alibi_jax._tpu import TPU

LN_2 = math.log(2)


def forward(
    rules: Rules, operands: Operands, implementation: Implementation | None, *, with_log_sum_exps: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Return attention's result, and log-sum-exps if asked for.

    Returns:
        ``[batch, q_len, num_heads, head_dim]`` of the query's dtype, or of the working dtype if there are log-sum-exps;
        and these, ``[batch, num_heads, q_len]``, known to the backward pass of the same implementation alone. Of a part
        of the keys they mean the same whoever computes them: natural logarithms, of scores whose distances are counted
        from the query, and -inf for a query that sees no key.
    """
    leaves, structure = jax.tree.flatten(operands)  # what is absent is no leaf: the structure tells what is what
    parameters = {"rules": rules, "structure": structure, "implementation": implementation}
    result, *rest = forward_primitive.bind(*leaves, **parameters, with_log_sum_exps=with_log_sum_exps)
    return result, rest[0] if rest else None


def backward(
    rules: Rules,
    operands: Operands,
    result: jax.Array,
    log_sum_exps: jax.Array,
    cotangent: jax.Array,
    implementation: Implementation | None,
    *,
    slopes_too: bool,
) -> tuple[jax.Array | None, ...]:
    """Return the gradients of query, key, value and, ``[batch, num_heads]``, slopes and future slopes, or None.

    Of a part of the keys, result and log-sum-exps are those of all parts together, the latter +inf for queries that are
    to be left out; and gradients are what these keys add to them, in the working dtype.
    """
    leaves, structure = jax.tree.flatten(operands)
    parameters = {"rules": rules, "structure": structure, "implementation": implementation}
    gradients = backward_primitive.bind(result, log_sum_exps, cotangent, *leaves, **parameters, slopes_too=slopes_too)
    return (*gradients, *(None,) * (5 - len(gradients)))


# --- What a pass computes -------------------------------------------------------------------------------------------


def _run_forward(target: Target, *leaves: Any, with_log_sum_exps: bool, **parameters: Any) -> list[Any]:
    rules, operands, chosen = _unpacked(target, leaves, **parameters)
    if isinstance(chosen, TPU):
        result, sums = _tpu.forward(rules, operands, chosen, with_log_sum_exps=with_log_sum_exps)
    else:
        dtype = operands.slopes.dtype if with_log_sum_exps else operands.query.dtype
        result, sums = _tiled.forward(rules, operands, dtype, _tiling(target))
    if rules.is_part:
        sums = sums * LN_2 if isinstance(chosen, TPU) else sums
        sums = jnp.where(sums == jnp.inf, -jnp.inf, sums)
    return [result, sums][: 1 + with_log_sum_exps]


def _run_backward(target: Target, *leaves: Any, slopes_too: bool, **parameters: Any) -> list[Any]:
    rules, operands, chosen = _unpacked(target, leaves[3:], **parameters)
    result, sums, cotangent = leaves[:3]
    if isinstance(chosen, TPU):
        sums = sums / LN_2 if rules.is_part else sums
        found = _tpu.backward(rules, operands, result, sums, cotangent, chosen, slopes_too=slopes_too)
    else:
        found = _tiled.backward(rules, operands, result, sums, cotangent, _tiling(target), slopes_too=slopes_too)
    tensors = [x.astype(dtype) for x, dtype in zip(found[:3], _gradient_dtypes(rules, operands), strict=True)]
    return tensors + [x for x in found[3:] if x is not None]


def _gradient_dtypes(rules: Rules, operands: Operands) -> list[Any]:
    return [operands.slopes.dtype if rules.is_part else x.dtype for x in operands[:3]]


def _unpacked(target: Target, leaves: Any, *, rules: Rules, structure: Any, implementation: Any) -> tuple[Any, ...]:
    """Return a pass's rules, its operands, of which ``leaves`` are those that are there, and what is to run it."""
    operands = jax.tree.unflatten(structure, leaves)
    return rules, operands, choose(implementation, target, operands)


def _tiling(target: Target) -> _tiled.Tiling:
    """Compute heads together where a loop over them could not be divided, or would keep a GPU waiting."""
    return _tiled.Tiling(together=target.is_partitioned or target.platform != "cpu")


# --- How that becomes a primitive -----------------------------------------------------------------------------------


def _forward_shapes(query: Any, *others: Any, structure: Any, with_log_sum_exps: bool, **_: Any) -> list[Any]:
    operands = jax.tree.unflatten(structure, (query, *others))
    batch, q_len, num_heads, _ = query.shape
    log_sum_exps = shaped_as(query, (batch, num_heads, q_len), operands.slopes.dtype)
    dtype = log_sum_exps.dtype if with_log_sum_exps else query.dtype
    return [shaped_as(query, query.shape, dtype), log_sum_exps][: 1 + with_log_sum_exps]


def _backward_shapes(*leaves: Any, rules: Rules, structure: Any, slopes_too: bool, **_: Any) -> list[Any]:
    operands = jax.tree.unflatten(structure, leaves[3:])
    query = operands.query
    dtypes = _gradient_dtypes(rules, operands)
    tensors = [shaped_as(query, x.shape, dtype) for x, dtype in zip(operands[:3], dtypes, strict=True)]
    slopes = shaped_as(query, (query.shape[0], query.shape[2]), operands.slopes.dtype)
    return tensors + [slopes] * (slopes_too * (1 if operands.future_slopes is None else 2))


def _target(context: Any, platform: str | None) -> Target:
    module = context.module_context
    platform = platform or module.platforms[0]
    axes = module.axis_context
    if hasattr(axes, "manual_axes"):  # inside shard_map
        sizes = dict(axes.mesh.shape)
        is_partitioned = any(size > 1 for name, size in sizes.items() if name not in axes.manual_axes)
    else:
        is_partitioned = getattr(axes, "num_devices", 1) > 1
    return Target(platform, is_partitioned)


def _with_longer_batch(array: Any, axis: Any, size: int, batch: int, is_whole: bool) -> Any:
    """Return an operand with its mapped axis, if it has one, as part of the batch.

    With ``is_whole``, a batch axis of length 1 is no way to say that all entries share this.
    """
    if axis is None:
        if array.shape[0] == 1 and not is_whole:
            return array
        array = jnp.broadcast_to(array, (size, *array.shape))
    else:
        array = jnp.moveaxis(array, axis, 0)  # [size, batch or 1, ...]
    array = jnp.broadcast_to(array, (size, batch, *array.shape[2:]))
    return array.reshape(size * batch, *array.shape[2:])


def _primitive_of(
    name: str, run: Callable[..., list[Any]], shapes: Callable[..., list[Any]], *, whole: int
) -> Primitive:
    """Return a primitive of which the first ``whole`` operands have the whole batch, the last three the tensors."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    run = broadcasting(run)

    def lower(context: Any, *operands: Any, platform: str | None = None, **parameters: Any) -> Any:
        function = partial(run, _target(context, platform), **parameters)
        return mlir.lower_fun(function, multiple_results=True)(without_mesh(context), *operands)

    def mapped(leaves: Any, axes: Any, **parameters: Any) -> tuple[list[Any], list[int]]:
        pairs = list(zip(leaves, axes, strict=True))
        size = next(x.shape[axis] for x, axis in pairs if axis is not None)
        query, axis = pairs[whole - 3]
        batch = query.shape[0 if axis is None or axis > 0 else 1]
        merged = [_with_longer_batch(*pair, size, batch, index < whole) for index, pair in enumerate(pairs)]
        merged = varying_alike(merged)  # with spmd_axis_name, what is mapped varies over mesh axes that others do not
        if size == 0:  # of which no kernel makes tiles
            results = [jnp.zeros(x.shape, x.dtype) for x in shapes(*map(jax.typeof, merged), **parameters)]
        else:
            results = primitive.bind(*merged, **parameters)
        return [x.reshape(size, batch, *x.shape[1:]) for x in results], [0] * len(results)

    primitive.def_impl(partial(xla.apply_primitive, primitive))
    primitive.def_abstract_eval(shapes)
    for platform in ("tpu", "cpu"):
        mlir.register_lowering(primitive, partial(lower, platform=platform), platform=platform)
    mlir.register_lowering(primitive, lower)
    batching.primitive_batchers[primitive] = mapped
    return primitive


forward_primitive = _primitive_of("alibi_attention", _run_forward, _forward_shapes, whole=3)
backward_primitive = _primitive_of("alibi_attention_backward", _run_backward, _backward_shapes, whole=6)
