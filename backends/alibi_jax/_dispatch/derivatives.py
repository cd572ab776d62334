"""Derivatives of attention's primitives.

A first derivative in reverse mode is the backward primitive, in memory that grows with the lengths alone: attention's
tangent is a primitive of its own, linear in the tangents of tensors and slopes, and the backward primitive is its
transpose. Where the tangent itself is computed, in forward mode, and where either is differentiated again, JAX
differentiates attention spelled out, in memory for all scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from alibi_jax._call import Operands, Rules, put_together
from alibi_jax._compatible import without_mesh
from alibi_jax._dispatch.dense import dense
from alibi_jax._dispatch.primitive import backward, backward_primitive, forward_primitive

FIRST = 5  # operands that have derivatives: query, key, value, slopes, future slopes, the first leaves of a call


def _spelled_out(rules: Rules, operands: Operands, *first: jax.Array) -> jax.Array:
    """Return attention as a function of those operands that have derivatives, and are there."""
    operands = operands._replace(**dict(zip(Operands._fields, first, strict=False)))
    heads_first = operands if rules.kv_heads_first else _turned(operands)
    call = put_together(rules, operands)
    return dense(call, jnp.swapaxes(operands.query, 1, 2), heads_first.key, heads_first.value)


def _turned(operands: Operands) -> Operands:
    """Exchange the axes of tokens and heads of keys and values."""
    return operands._replace(key=jnp.swapaxes(operands.key, 1, 2), value=jnp.swapaxes(operands.value, 1, 2))


def _pushed(function: Callable[..., Any], primals: Any, tangents: Any) -> Any:
    """Return the tangents of what a function returns, differentiated where tangents are no symbolic zeros alone."""
    moving = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

    def of_moving(*values: Any) -> Any:
        given = dict(zip(moving, values, strict=True))
        return function(*(given.get(i, primal) for i, primal in enumerate(primals)))

    return jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])[1]


def _refuse_parts(rules: Rules) -> None:
    if rules.is_part:
        raise NotImplementedError("alibi_jax.parallel.attention has first derivatives, in reverse mode, alone")


# --- Of the forward pass --------------------------------------------------------------------------------------------


def _forward_jvp(leaves: Any, tangents: Any, *, with_log_sum_exps: bool, **parameters: Any) -> tuple[Any, Any]:
    _refuse_parts(parameters["rules"])
    # A score's gradient is a difference from a mean, which follows from the result. Of a rounded one it is off by as
    # much in all scores of a row: times what keys, or queries, or distances have in common, that may be anything.
    exact, log_sum_exps = forward_primitive.bind(*leaves, **parameters, with_log_sum_exps=True)
    operands = jax.tree.unflatten(parameters["structure"], leaves)
    first = FIRST if operands.future_slopes is not None else FIRST - 1
    wanted = tuple(i for i, tangent in enumerate(tangents[:first]) if type(tangent) is not ad.Zero)
    dtype = exact.dtype if with_log_sum_exps else operands.query.dtype
    result = exact.astype(dtype)
    tangent = ad.Zero(jax.typeof(result))
    if wanted:
        given = (exact, log_sum_exps, *leaves, *(tangents[i] for i in wanted))
        tangent = _tangent.bind(*given, **parameters, wanted=wanted).astype(dtype)
    # Log-sum-exps are for the backward pass, whose derivatives take them for what they follow from.
    both = [result, log_sum_exps], [tangent, ad.Zero(jax.typeof(log_sum_exps))]
    return both if with_log_sum_exps else tuple(x[:1] for x in both)


def _tangent_of(result: Any, _: Any, *leaves: Any, rules: Rules, structure: Any, wanted: Any, **__: Any) -> Any:
    leaves, tangents = leaves[: structure.num_leaves], leaves[structure.num_leaves :]
    operands = jax.tree.unflatten(structure, leaves)

    def function(*moving: Any) -> Any:
        given = dict(zip(wanted, moving, strict=True))
        return _spelled_out(rules, operands, *(given.get(i, operands[i]) for i in range(FIRST)))

    # Slopes that all entries share may have tangents for each.
    primals = [jnp.broadcast_to(operands[i], tangent.shape) for i, tangent in zip(wanted, tangents, strict=True)]
    return jax.jvp(function, primals, list(tangents))[1].astype(result.dtype)


def _tangent_jvp(primals: Any, tangents: Any, **parameters: Any) -> tuple[Any, Any]:
    return _tangent.bind(*primals, **parameters), _pushed(partial(_tangent_of, **parameters), primals, tangents)


def _tangent_transpose(
    cotangent: Any, result: Any, log_sum_exps: Any, *leaves: Any, rules: Rules, structure: Any, **parameters: Any
) -> list[Any]:
    leaves, tangents = leaves[: structure.num_leaves], leaves[structure.num_leaves :]
    others = [None] * (2 + len(leaves))
    if type(cotangent) is ad.Zero:
        return others + [ad.Zero(x.aval) for x in tangents]
    operands = jax.tree.unflatten(structure, leaves)
    is_cache = rules.kv_heads_first  # which is seldom differentiated: a copy will do
    if is_cache:
        rules, operands = replace(rules, kv_heads_first=False), _turned(operands)
    wanted = parameters["wanted"]
    found = Operands(
        *backward(
            rules,
            operands,
            result,
            log_sum_exps,
            cotangent.astype(operands.query.dtype),
            parameters["implementation"],
            slopes_too=any(i >= Operands._fields.index("slopes") for i in wanted),
        )
    )
    found = _turned(found) if is_cache else found
    return others + [summed_as(found[i], x.aval) for i, x in zip(wanted, tangents, strict=True)]


def summed_as(gradient: jax.Array, operand: Any) -> jax.Array:
    """Return the gradient of an operand that all batch entries may share, as slopes."""
    return gradient if operand.shape[0] == gradient.shape[0] else jnp.sum(gradient, axis=0, keepdims=True)


# --- Of the backward pass -------------------------------------------------------------------------------------------


def _backward_jvp(primals: Any, tangents: Any, **parameters: Any) -> tuple[Any, Any]:
    _refuse_parts(parameters["rules"])
    found = backward_primitive.bind(*primals, **parameters)
    return found, _pushed(partial(_gradients_of, **parameters), primals, tangents)


def _gradients_of(
    _: Any, __: Any, cotangent: Any, *leaves: Any, rules: Rules, structure: Any, slopes_too: bool, **___: Any
) -> list[Any]:
    operands = jax.tree.unflatten(structure, leaves)
    first = [x for x in operands[:FIRST] if x is not None]
    first[3:] = [jnp.broadcast_to(x, (operands.query.shape[0], x.shape[1])) for x in first[3:]]
    gradients = jax.vjp(partial(_spelled_out, rules, operands), *first)[1](cotangent)
    return list(gradients if slopes_too else gradients[:3])


_tangent = Primitive("alibi_attention_tangent")
_tangent.def_impl(_tangent_of)
_tangent.def_abstract_eval(lambda result, *_, **__: result)
mlir.register_lowering(
    _tangent,
    lambda context, *leaves, **parameters: mlir.lower_fun(partial(_tangent_of, **parameters), multiple_results=False)(
        without_mesh(context), *leaves
    ),
)
batching.primitive_batchers[_tangent] = lambda leaves, axes, **parameters: (
    jax.vmap(partial(_tangent_of, **parameters), in_axes=tuple(axes))(*leaves),
    0,
)
ad.primitive_jvps[_tangent] = _tangent_jvp
ad.primitive_transposes[_tangent] = _tangent_transpose
ad.primitive_jvps[forward_primitive] = _forward_jvp
ad.primitive_jvps[backward_primitive] = _backward_jvp
