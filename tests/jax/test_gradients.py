"""Gradients in programs of users in which XLA's compiler sees repeated numbers, sums and squares of gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import alibi_jax  # noqa: E402

TENSORS = ("query", "key", "value")


def test_gradients_of_other_arguments_before_change_nothing() -> None:
    x, slopes = jax.random.normal(jax.random.key(0), (1, 3, 2, 4)), jnp.ones(2)

    def loss(query: jax.Array, slopes: jax.Array) -> jax.Array:
        return jnp.sum(alibi_jax.attention(query, x, x, slopes) ** 2)

    expected = [jax.grad(loss, argnums=n)(x, slopes) for n in (0, 1)]
    # Rematerialisation differentiates the traced function anew, after the gradients of each argument.
    for n, gradient in enumerate(expected):
        np.testing.assert_allclose(jax.grad(jax.checkpoint(loss), argnums=n)(x, slopes), gradient, atol=1e-5)


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
