"""Operands of matrix products that are in memory when a program runs, whatever the compiler knows of their values.

XLA's compiler for the CPU (jaxlib 0.10.2) hands products and sums to a library, YNNPACK, as one fusion. If the right
operand of a product is a number repeated (ones, zeros, the gradient of a sum or a mean) and the fusion holds a sum or a
maximum besides, that operand is one number in memory, with strides of 0, and the library reads beyond it. The smallest
such program::

    jax.jit(lambda x: (x @ jnp.ones((32, 64))).sum(0))(jnp.ones((64, 32)))  # garbage, differing from run to run

A user's own sum counts, as of squares of gradients. ``jax.lax.optimization_barrier`` is no help: it is taken out before
that fusion is made. A selection by position stays, as no pass of the compiler knows that it always has one outcome; and
as the library has no selection, what is selected is an array in memory. It costs nothing where a copy is made anyway.
``tests/jax/test_compiler.py`` has the program and tells when the compiler is mended.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from alibi_jax._compatible import without_mesh


def materialised(array: jax.Array) -> jax.Array:
    """Return a floating array as it is; inside of a program for the CPU, one that is no repeated number."""
    return _materialised.bind(array)


def _selected(array: jax.Array) -> jax.Array:
    """Select all of an array, by a rule that depends on the position along each axis.

    Along an axis that it did not depend on, the compiler would select once and repeat the outcome. The other choice is
    NaN: of two numbers that are alike it would take either.
    """
    places = sum(lax.broadcasted_iota(np.int32, array.shape, axis) for axis in range(array.ndim))
    always = places < lax.optimization_barrier(np.int32(np.iinfo(np.int32).max))
    return jnp.where(always, array, jnp.full_like(array, jnp.nan))


_materialised = Primitive("alibi_materialised")
_materialised.def_impl(lambda array: array)
_materialised.def_abstract_eval(lambda array: array)
mlir.register_lowering(_materialised, lambda context, operand: [operand])
mlir.register_lowering(
    _materialised,
    lambda context, operand: mlir.lower_fun(_selected, multiple_results=False)(without_mesh(context), operand),
    platform="cpu",
)
ad.deflinear2(_materialised, lambda cotangent, array: [_materialised.bind(cotangent)])
batching.defvectorized(_materialised)
