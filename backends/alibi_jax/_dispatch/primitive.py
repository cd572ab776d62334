"""The forward and the backward pass of attention as primitives of JAX.

A primitive chooses the implementation when it is lowered: only then is it known for which platform it is compiled, and
whether XLA partitions the program. Under ``jax.vmap`` the mapped axis is merged into the batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from alibi_jax import _cudnn, _tiled, _tpu
from alibi_jax._call import Operands, OtherKeys, moving_arrays
from alibi_jax._compatible import Target, is_zero, new_primitive, shaped_as, varying_alike
from alibi_jax._dispatch.choice import Implementation, choose, name_of, refusal
from alibi_jax._dispatch.derivatives import dense
from alibi_jax._tpu import TPU


def forward(
    implementation: Implementation | None, operands: Operands, with_log_sum_exps: bool, call_too: bool = True
) -> tuple[jax.Array, jax.Array | None]:
    """Return attention's result, with the query's shape and dtype, and the log-sum-exps of its rows, or None.

    With log-sum-exps, ``[batch, num_heads, q_len]``, the result has the working dtype. They are +inf for a query that
    sees no key. Their base depends on the implementation, so only its own backward pass can use them; with
    ``other_keys`` they are natural logarithms. ``call_too`` says whether the backward pass computes gradients of
    slopes.

    The primitive does not know sinks: a row with one has its keys as a part of all. Sinks are a factor of its result.
    With them, the result always has the working dtype, and the log-sum-exps include them.
    """
    if (sinks := operands.call.sinks) is not None:  # [batch or 1, num_heads, 1]
        result, sums = forward(implementation, _without_sinks(operands), True, call_too)
        return result * jax.nn.sigmoid(sums - sinks)[..., None], jnp.logaddexp(sums, sinks)
    leaves, structure = jax.tree.flatten(operands)
    parameters = {"structure": structure, "implementation": implementation}
    parameters |= {"with_log_sum_exps": with_log_sum_exps, "call_too": with_log_sum_exps and call_too}
    result, *rest = _forward.bind(*leaves, **parameters)
    return result, rest[0] if rest else None


def backward(
    implementation: Implementation | None,
    operands: Operands,
    result: jax.Array,
    log_sum_exps: jax.Array,
    cotangent: jax.Array,
    call_too: bool,
) -> list[jax.Array]:
    """Return the gradients of query, key, value and, with ``call_too``, of the call's :data:`MOVING` arrays.

    The gradients of slopes are ``[batch, num_heads]``, those of gates ``[batch, num_heads, kv_len]``. With
    ``other_keys``, result and log-sum-exps cover all keys, the log-sum-exps are +inf for queries to skip, and the
    gradients, in the working dtype, are the contribution of the operands' keys.
    """
    if (sinks := operands.call.sinks) is not None:
        found = backward(implementation, _without_sinks(operands), result, log_sum_exps, cotangent, call_too)
        by_sink = -jnp.exp(sinks - log_sum_exps) * jnp.sum(cotangent.astype(result.dtype) * result, axis=-1)
        if call_too and operands.call.log_gates is not None:
            found[-1] = found[-1] + _by_gates(operands.call, by_sink)
        return [*found, jnp.sum(by_sink, axis=-1, keepdims=True)] if call_too else found
    leaves, structure = jax.tree.flatten(operands)
    parameters = {"structure": structure, "implementation": implementation, "call_too": call_too}
    return _backward.bind(result, log_sum_exps, cotangent, *leaves, **parameters)


def _without_sinks(operands: Operands) -> Operands:
    return operands._replace(call=replace(operands.call, sinks=None), other_keys=OtherKeys())


def _by_gates(call: Any, by_sink: jax.Array) -> jax.Array:
    """Return the gradients that gates lack where score gradients of earlier rows were taken to sum to 0, but for sinks.

    ``by_sink`` are the score gradients of sinks, ``[batch, num_heads, q_len]``.
    """
    sums = jnp.pad(jnp.cumsum(by_sink, axis=-1), [(0, 0), (0, 0), (1, 0)])
    offset = call.q_offset[:, None, None] if call.has_offset_array else call.q_offset
    earlier = jnp.clip(jnp.arange(call.kv_len) - offset, 0, call.q_len)  # the number of queries before each gate
    found = jnp.take_along_axis(sums, jnp.broadcast_to(earlier, (*by_sink.shape[:2], call.kv_len)), axis=-1)
    return jnp.where(call.log_gates == -jnp.inf, 0, found)


def _unpacked(structure: Any, leaves: Any) -> Operands:
    """Rebuild operands from their leaves, whose batch may have become longer."""
    operands: Operands = jax.tree.unflatten(structure, leaves)
    return operands.fitted()


def _run_forward(
    target: Target, *leaves: Any, structure: Any, implementation: Any, with_log_sum_exps: bool, call_too: bool
) -> list[jax.Array]:
    operands = _unpacked(structure, leaves)
    call, is_plain = operands.call, operands.other_keys is None and not call_too
    chosen = choose(implementation, call, target, is_plain=is_plain)
    alone = choose(implementation, call, Target(target.platform), is_plain=is_plain)  # on one device
    if target.is_partitioned and implementation is None and alone != chosen:
        name = name_of(alone)
        warnings.warn(f"attention runs as tiles of XLA, as {name!r} {refusal(name, call, target)}", stacklevel=2)
    if isinstance(chosen, TPU):
        return _tpu.forward(operands, chosen, with_log_sum_exps=with_log_sum_exps)
    dtype = call.working_dtype if with_log_sum_exps else operands.query.dtype

    def tiles() -> list[jax.Array]:
        return _tiled.forward(operands, dtype, all_heads=_all_heads(target))[: 1 + with_log_sum_exps]

    def folded() -> list[jax.Array]:  # Its backward pass needs no log-sum-exps.
        result = _cudnn.forward(operands).astype(dtype)
        return [result, jnp.zeros(result.shape[:3], dtype)][: 1 + with_log_sum_exps]

    return _of_both(implementation, call, folded, tiles) if chosen == "cudnn" else tiles()


def _run_backward(target: Target, *leaves: Any, structure: Any, implementation: Any, call_too: bool) -> list[jax.Array]:
    result, log_sum_exps, cotangent, *leaves = leaves
    operands = _unpacked(structure, leaves)
    is_plain, dtypes = operands.other_keys is None and not call_too, _gradient_dtypes(operands)
    chosen = choose(implementation, operands.call, target, is_plain=is_plain)

    def cast(found: list[jax.Array]) -> list[jax.Array]:
        return [x.astype(dtype) for x, dtype in zip(found, dtypes, strict=False)]

    if isinstance(chosen, TPU):
        return cast(_tpu.backward(operands, result, log_sum_exps, cotangent, chosen, slopes_too=call_too))

    def tiles() -> list[jax.Array]:
        saved = result, log_sum_exps, cotangent
        return cast(_tiled.backward(operands, *saved, all_heads=_all_heads(target), call_too=call_too))

    def folded() -> list[jax.Array]:
        return cast(_cudnn.backward(operands, cotangent))

    return _of_both(implementation, operands.call, folded, tiles) if chosen == "cudnn" else tiles()


def _of_both(implementation: Any, call: Any, folded: Callable[[], Any], tiles: Callable[[], Any]) -> list[jax.Array]:
    """Run cuDNN if it is named; by default the device chooses, by the values of slopes."""
    if implementation is not None:
        return folded()
    return jax.lax.cond(_cudnn.is_exact(call), folded, tiles)


def _all_heads(target: Target) -> bool:
    """Whether a tile has all heads: XLA cannot partition a loop over heads, and it would leave a GPU idle."""
    return target.is_partitioned or target.platform != "cpu"


def _gradient_dtypes(operands: Operands) -> list[Any]:
    working = operands.call.working_dtype
    return [working if operands.other_keys is not None else x.dtype for x in operands[:3]] + [working] * 3


def _forward_types(*leaves: Any, structure: Any, with_log_sum_exps: bool, **_: Any) -> list[Any]:
    query, working = leaves[0], _unpacked(structure, leaves).call.working_dtype
    if not with_log_sum_exps:
        return [shaped_as(query, query.shape, query.dtype)]
    return [shaped_as(query, shape, working) for shape in (query.shape, query.shape[:3])]


def _backward_types(*leaves: Any, structure: Any, call_too: bool, **_: Any) -> list[Any]:
    operands = _unpacked(structure, leaves[3:])
    arrays = moving_arrays(operands.call).values() if call_too else ()
    shapes = [*(x.shape for x in operands[:3]), *((*operands.query.shape[:2], *x.shape[2:]) for x in arrays)]
    dtypes = _gradient_dtypes(operands)
    return [shaped_as(operands.query, *both) for both in zip(shapes, dtypes, strict=False)]


def _mapped(
    primitive: Any, types: Callable[..., list[Any]], leaves: Any, axes: Any, *, whole: int, **parameters: Any
) -> Any:
    """Apply a primitive under ``jax.vmap``; return its results with the mapped axis first.

    The first ``whole`` arrays have the full batch; the batch axis of others may have length 1 and broadcasts.
    """
    pairs = list(zip(leaves, axes, strict=True))
    size = next(x.shape[axis] for x, axis in pairs if axis is not None)
    tensor, axis = pairs[0]
    batch = tensor.shape[0 if axis is None or axis > 0 else 1]

    def merged(array: Any, axis: Any, is_whole: bool) -> Any:
        if axis is None and array.shape[0] == 1 and not is_whole:
            return array
        array = array[None] if axis is None else jnp.moveaxis(array, axis, 0)  # [size or 1, batch or 1, ...]
        return jnp.broadcast_to(array, (size, batch, *array.shape[2:])).reshape(size * batch, *array.shape[2:])

    # With spmd_axis_name, mapped arrays vary over more mesh axes than the others.
    arrays = varying_alike([merged(*pair, index < whole) for index, pair in enumerate(pairs)])
    if size == 0:  # kernels cannot run on an empty batch
        results = [jnp.zeros(x.shape, x.dtype) for x in types(*map(jax.typeof, arrays), **parameters)]
    else:
        results = primitive.bind(*arrays, **parameters)
    return [x.reshape(size, batch, *x.shape[1:]) for x in results], [0] * len(results)


# --- Derivatives of derivatives -------------------------------------------------------------------------------------


def _dense_forward(*leaves: Any, structure: Any, with_log_sum_exps: bool, **_: Any) -> list[jax.Array]:
    operands = _unpacked(structure, leaves)
    result = dense(operands.call, *operands[:3])
    # The backward pass treats log-sum-exps as functions of the operands: their own tangent is 0.
    sums = jnp.zeros(result.shape[:-1], operands.call.working_dtype)
    return [result.astype(operands.call.working_dtype), sums] if with_log_sum_exps else [result]


def _dense_backward(_: Any, __: Any, cotangent: Any, *leaves: Any, structure: Any, call_too: bool, **___: Any) -> Any:
    operands = _unpacked(structure, leaves)
    given = moving_arrays(operands.call) if call_too else {}
    # There is one gradient per batch entry, also of arrays that entries share.
    arrays = [jnp.broadcast_to(x, (*operands.query.shape[:2], *x.shape[2:])) for x in given.values()]

    def function(*tensors: Any) -> jax.Array:
        return dense(replace(operands.call, **dict(zip(given, tensors[3:], strict=True))), *tensors[:3])

    return list(jax.vjp(function, *operands[:3], *arrays)[1](cotangent))


def _dense_jvp(
    function: Callable[..., list[Any]], primitive: Any, primals: Any, tangents: Any, **parameters: Any
) -> Any:
    """Compute the primitive, and the tangents of ``function``, its results by dense attention."""
    operands = _unpacked(parameters["structure"], primals[-parameters["structure"].num_leaves :])
    if operands.other_keys is not None:
        calls = "calls with sinks (but by 'dense') and alibi_jax.parallel.attention"
        raise NotImplementedError(f"{calls} have first derivatives, in reverse mode, alone")
    moving = [index for index, tangent in enumerate(tangents) if not is_zero(tangent)]

    def of_moving(*values: Any) -> list[Any]:
        given = dict(zip(moving, values, strict=True))
        return function(*(given.get(index, x) for index, x in enumerate(primals)), **parameters)

    found = jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])[1]
    return primitive.bind(*primals, **parameters), found


def _is_simulated(parameters: Any) -> bool:
    implementation = parameters["implementation"]
    return isinstance(implementation, TPU) and not isinstance(implementation.interpret, bool)


_forward = new_primitive(
    "alibi_attention",
    *(_run_forward, _forward_types, partial(_mapped, whole=3), partial(_dense_jvp, _dense_forward), _is_simulated),
)
_backward = new_primitive(
    "alibi_attention_backward",
    *(_run_backward, _backward_types, partial(_mapped, whole=6), partial(_dense_jvp, _dense_backward), _is_simulated),
)
