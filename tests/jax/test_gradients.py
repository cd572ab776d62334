"""Gradients as users ask for them: some of them alone, of sums and means, under the compiler's own flags.

With a cotangent that is one number repeated, and where nothing but one gradient is asked for, the compiler makes other
programs than of random cotangents and all gradients at once (see `alibi_jax._compatible.materialised`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import alibi_jax  # noqa: E402
from alibi_core.conformance.testing import COTANGENTS, Case, Sizes  # noqa: E402
from tests.fuzz import TENSORS, Problem, departures  # noqa: E402
from tests.support.frameworks import JAX, Backend  # noqa: E402

QUERY, KEY, VALUE, SLOPES, FUTURE = names = (*TENSORS, "slopes", "future_slopes")
SUBSETS = ((QUERY,), (KEY,), (VALUE,), (SLOPES,), (QUERY, KEY), (KEY, VALUE), (QUERY, SLOPES), names[:4])


def asked(
    *wrt: str, length: int = 128, heads: int = 2, dtype: str = "float32", compiled: bool = True, **rest: Any
) -> Problem:
    """Return the problem of some gradients, by default of a sum."""
    case = Case(Sizes(1, heads, 1, (length, length), 32), seed=3, wrt=wrt, **{"cotangent": "ones"} | rest)
    return Problem(case, dtype, compiled=compiled, closed_over=False, keeps_result=False)


PROBLEMS = (asked(QUERY), asked(KEY, form="symmetric"), asked(*names, form="asymmetric"))
OTHERS = (
    *(asked(*wrt) for wrt in SUBSETS[1:]),
    *(asked(QUERY, cotangent=x) for x in COTANGENTS if x != "ones"),
    *(asked(x, form="asymmetric") for x in (QUERY, FUTURE)),
    # About the sizes of tiles, and where one block of keys becomes several.
    *(asked(QUERY, length=length) for length in (1, 16, 17, 64, 256, 257, 385)),
    *(asked(KEY, length=length) for length in (1, 256, 385)),
    asked(QUERY, dtype="bfloat16"),
    asked(KEY, dtype="float16"),
    asked(QUERY, heads=1),
    *(asked(QUERY, compiled=False), asked(KEY, cotangent="zeros", compiled=False)),
)


@pytest.mark.parametrize("problem", [*PROBLEMS, *(pytest.param(x, marks=pytest.mark.slow) for x in OTHERS)], ids=str)
def test_gradients_asked_for_alone_are_right(problem: Problem) -> None:
    assert not departures(problem, Backend(JAX, "alibi_jax", None))[0]


def test_gradients_of_other_arguments_before_change_nothing() -> None:
    x, slopes = jax.random.normal(jax.random.key(0), (1, 3, 2, 4)), jnp.ones(2)

    def loss(query: jax.Array, slopes: jax.Array) -> jax.Array:
        return jnp.sum(alibi_jax.attention(query, x, x, slopes) ** 2)

    expected = [jax.grad(loss, argnums=n)(x, slopes) for n in (0, 1)]
    # Rematerialisation differentiates the traced function anew, after the gradients of each argument.
    for n, gradient in enumerate(expected):
        np.testing.assert_allclose(jax.grad(jax.checkpoint(loss), argnums=n)(x, slopes), gradient, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", TENSORS)
def test_gradients_asked_for_alone_of_dense_attention_are_right(name: str) -> None:
    assert not departures(asked(name), Backend(JAX, "alibi_jax", "dense"))[0]


# A user's program may add a sum or a maximum of the result to a fusion.
@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["tiled", "dense"])
@pytest.mark.parametrize(("constant", "form"), [("value", "causal"), ("key", "symmetric")])
def test_repeated_numbers_for_keys_or_values_are_right_beside_a_sum(
    implementation: str, constant: str, form: str
) -> None:
    tensors = dict(zip(TENSORS, jax.random.normal(jax.random.key(0), (3, 1, 128, 4, 32)), strict=True))

    def total(implementation: str, tensors: Any) -> Any:
        tensors = tensors | {constant: jnp.ones_like(tensors[constant])}
        return alibi_jax.attention(**tensors, is_causal=form == "causal", implementation=implementation).sum(axis=1)

    with jax.disable_jit():
        expected = total("dense", tensors)
    found = jax.jit(total, static_argnums=0)(implementation, tensors)
    np.testing.assert_allclose(found, expected, atol=128 * 128 * 2.0**-24 * 4)  # sums of 128 rows of 128 values up to 4


@pytest.mark.slow
def test_sums_of_gradients_are_right() -> None:
    query, *rest = jax.random.normal(jax.random.key(0), (3, 1, 128, 4, 32))

    def norms(implementation: str, *tensors: Any) -> Any:
        gradient = jax.grad(lambda *x: alibi_jax.attention(*x, implementation=implementation).sum(), argnums=2)
        return (gradient(*tensors) ** 2).sum()

    with jax.disable_jit():
        expected = norms("dense", query, *rest)
    np.testing.assert_allclose(jax.jit(norms, static_argnums=0)("tiled", query, *rest), expected, rtol=128 * 2.0**-24)
