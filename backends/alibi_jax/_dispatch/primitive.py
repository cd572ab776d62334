"""Attention's two passes as primitives of JAX, so that who computes them is decided when they are compiled.

Only then is it known for which platform that is, and whether the compiler is to divide the program among devices. A
primitive also says what ``jax.vmap`` means: the mapped axis becomes part of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from alibi_jax import _tiled, _tpu
from alibi_jax._call import Operands, Rules
from alibi_jax._compatible import shaped_as
from alibi_jax._dispatch.choice import Implementation, Target, choose
from alibi_jax._dispatch.reverse_mode import REVERSE_MODE_ALONE
from alibi_jax._tpu import TPU


def forward(
    rules: Rules, operands: Operands, implementation: Implementation | None, *, with_log_sum_exps: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Return attention's result, and what its backward pass needs besides if asked for.

    Returns:
        ``[batch, q_len, num_heads, head_dim]`` of the query's dtype, or of the working dtype if a backward pass is to
        have it; and ``[batch, num_heads, q_len]``, known to the backward pass of the same implementation alone.
    """
    leaves, structure = jax.tree.flatten(operands)  # what is absent is no leaf: the structure tells what is what
    parameters = {"rules": rules, "structure": structure, "implementation": implementation}
    result, *rest = _forward.bind(*leaves, **parameters, with_log_sum_exps=with_log_sum_exps)
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
    """Return the gradients of query, key, value and, ``[batch, num_heads]``, slopes and future slopes, or None."""
    leaves, structure = jax.tree.flatten(operands)
    parameters = {"rules": rules, "structure": structure, "implementation": implementation}
    gradients = _backward.bind(result, log_sum_exps, cotangent, *leaves, **parameters, slopes_too=slopes_too)
    return (*gradients, *(None,) * (5 - len(gradients)))


# --- What a pass computes -------------------------------------------------------------------------------------------


def _run_forward(target: Target, *leaves: Any, with_log_sum_exps: bool, **parameters: Any) -> list[Any]:
    rules, operands, chosen = unpacked(target, leaves, **parameters)
    if isinstance(chosen, TPU):
        results = _tpu.forward(rules, operands, chosen, with_log_sum_exps=with_log_sum_exps)
    else:
        dtype = operands.slopes.dtype if with_log_sum_exps else operands.query.dtype
        results = _tiled.forward(rules, operands, dtype, together=heads_together(target))
    return list(results[: 1 + with_log_sum_exps])


def _run_backward(target: Target, *leaves: Any, slopes_too: bool, **parameters: Any) -> list[Any]:
    rules, operands, chosen = unpacked(target, leaves[3:], **parameters)
    if isinstance(chosen, TPU):
        gradients = _tpu.backward(rules, operands, *leaves[:3], chosen, slopes_too=slopes_too)
    else:
        together = heads_together(target)
        gradients = _tiled.backward(rules, operands, *leaves[:3], slopes_too=slopes_too, together=together)
    return [gradient for gradient in gradients if gradient is not None]


def unpacked(target: Target, leaves: Any, *, rules: Rules, structure: Any, implementation: Any) -> tuple[Any, ...]:
    """Return a pass's rules, its operands, of which ``leaves`` are those that are there, and what is to run it."""
    operands = jax.tree.unflatten(structure, leaves)
    return rules, operands, choose(implementation, target, operands)


def heads_together(target: Target) -> bool:
    """Whether to compute heads together: a loop over them could not be divided, and would keep a GPU waiting."""
    return target.is_partitioned or target.platform != "cpu"


# --- How that becomes a primitive -----------------------------------------------------------------------------------


def _forward_shapes(query: Any, *others: Any, structure: Any, with_log_sum_exps: bool, **_: Any) -> list[Any]:
    operands = jax.tree.unflatten(structure, (query, *others))
    batch, q_len, num_heads, _ = query.shape
    log_sum_exps = shaped_as(query, (batch, num_heads, q_len), operands.slopes.dtype)
    dtype = log_sum_exps.dtype if with_log_sum_exps else query.dtype
    return [shaped_as(query, query.shape, dtype), log_sum_exps][: 1 + with_log_sum_exps]


def _backward_shapes(*leaves: Any, structure: Any, slopes_too: bool, **_: Any) -> list[Any]:
    operands = jax.tree.unflatten(structure, leaves[3:])
    tensors = [shaped_as(operands.query, x.shape, x.dtype) for x in operands[:3]]
    slopes = shaped_as(operands.query, (operands.query.shape[0], operands.query.shape[2]), operands.slopes.dtype)
    return tensors + [slopes] * (slopes_too * (1 if operands.future_slopes is None else 2))


def _local(array: Any) -> Any:
    return jax.core.ShapedArray(array.shape, array.dtype)


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
    """Return an operand with a mapped axis, or without one, with that axis as part of the batch.

    Args:
        array: The operand.
        axis: Which axis is mapped; None for none.
        size: Of the mapped axis.
        batch: How many entries the batch has.
        is_whole: Whether a batch axis of length 1 is no way to say that all entries share this.
    """
    if axis is None:
        if array.shape[0] == 1 and not is_whole:
            return array
        array = jnp.broadcast_to(array, (size, *array.shape))
    else:
        array = jnp.moveaxis(array, axis, 0)  # [size, batch or 1, ...]
    array = jnp.broadcast_to(array, (size, batch, *array.shape[2:]))
    return array.reshape(size * batch, *array.shape[2:])


def primitive_of(
    name: str, run: Callable[..., list[Any]], shapes: Callable[..., list[Any]], *, whole: int
) -> Primitive:
    """Return a primitive of which the first ``whole`` operands have the whole batch, the last three the tensors."""
    primitive = Primitive(name)
    primitive.multiple_results = True

    def call(*leaves: Any, **parameters: Any) -> list[Any]:
        if jax.config.jax_disable_jit:
            return run(Target(jax.default_backend()), *leaves, **parameters)
        return jax.jit(partial(primitive.bind, **parameters))(*leaves)

    def lower(context: Any, *operands: Any, platform: str | None = None, **parameters: Any) -> Any:
        function = partial(run, _target(context, platform), **parameters)
        # Inside shard_map, what varies among devices is no concern of what one of them computes.
        types = {name: [_local(x) for x in getattr(context, name)] for name in ("avals_in", "avals_out")}
        context = context.replace(**types)
        return mlir.lower_fun(function, multiple_results=True)(context, *operands)

    def mapped(leaves: Any, axes: Any, **parameters: Any) -> tuple[list[Any], list[int]]:
        pairs = list(zip(leaves, axes, strict=True))
        size = next(x.shape[axis] for x, axis in pairs if axis is not None)
        query, axis = pairs[whole - 3]
        batch = query.shape[0 if axis is None or axis > 0 else 1]
        merged = [_with_longer_batch(*pair, size, batch, index < whole) for index, pair in enumerate(pairs)]
        results = primitive.bind(*merged, **parameters)
        return [x.reshape(size, batch, *x.shape[1:]) for x in results], [0] * len(results)

    def differentiated(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(REVERSE_MODE_ALONE)

    primitive.def_impl(call)
    primitive.def_abstract_eval(shapes)
    for platform in ("tpu", "cpu"):
        mlir.register_lowering(primitive, partial(lower, platform=platform), platform=platform)
    mlir.register_lowering(primitive, lower)
    batching.primitive_batchers[primitive] = mapped
    ad.primitive_jvps[primitive] = differentiated
    return primitive


_forward = primitive_of("alibi_attention", _run_forward, _forward_shapes, whole=3)
_backward = primitive_of("alibi_attention_backward", _run_backward, _backward_shapes, whole=6)
