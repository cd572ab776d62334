"""Forward-mode derivatives, refused by name: of a function with ``jax.custom_vjp`` JAX tells no way out."""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

REVERSE_MODE_ALONE = (
    "alibi_jax.attention has first derivatives, in reverse mode, alone; implementation='dense' has others"
)


def in_reverse_mode_alone(tree: Any) -> Any:
    """Return arrays as they are, whose tangents cannot be computed, only transposed."""
    return jax.tree.map(_same.bind, tree)


def _refuse(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(REVERSE_MODE_ALONE)


def _identity(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda array: array)
    return primitive


_same = _identity("alibi_operand")
_tangent = _identity("alibi_tangent")
_same.def_impl(lambda array: array)
mlir.register_lowering(_same, lambda _, array: [array])
batching.primitive_batchers[_same] = lambda arrays, axes: (_same.bind(*arrays), *axes)
ad.primitive_jvps[_same] = lambda arrays, tangents: (
    _same.bind(*arrays),
    tangents[0] if isinstance(tangents[0], ad.Zero) else _tangent.bind(*tangents),
)
# Reverse mode transposes what is linear in tangents; only forward mode computes it.
_tangent.def_impl(_refuse)
batching.primitive_batchers[_tangent] = _refuse
mlir.register_lowering(_tangent, _refuse)
ad.primitive_transposes[_tangent] = lambda cotangent, _: (cotangent,)
