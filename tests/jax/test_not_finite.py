"""NaN and infinity in long rows: what cannot be bounded is computed whole. tests/contracts/test_tiled.py has the rest.

Compiled as users compile. There are enough tokens that XLA's maximum on the CPU passes over a NaN: 4,096 in all heads.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from alibi_jax import TPU, attention  # noqa: E402

LENGTH, HEADS, KV_HEADS, HEAD_DIM = 1024, 4, 2, 4
GROUP = HEADS // KV_HEADS
SLOPES = np.asarray([0.5, 0.25, 0.5, 0.02], np.float32)
IMPLEMENTATIONS = pytest.mark.parametrize(
    "implementation",
    ["tiled", pytest.param(TPU(256, 256, interpret=True), marks=pytest.mark.slow)],
    ids=["tiled", "tpu"],
)
TOKEN = 300


def tensors(dtype: Any = jnp.float32) -> list[jax.Array]:
    random = np.random.default_rng(0)
    return [jnp.asarray(random.normal(size=(1, LENGTH, n, HEAD_DIM)), dtype) for n in (HEADS, KV_HEADS, KV_HEADS)]


@partial(jax.jit, static_argnames=("implementation", "is_causal"))
def attended(*arrays: jax.Array, implementation: Any, is_causal: bool = True) -> jax.Array:
    return attention(*arrays, jnp.asarray(SLOPES), implementation=implementation, is_causal=is_causal)


def spoilt_rows(result: Any) -> np.ndarray:
    """Return which rows are NaN or infinite, in every feature or at all: ``[heads, queries]``."""
    finite = np.isfinite(np.asarray(result, np.float32)[0])
    return ~finite.any(axis=-1).T, ~finite.all(axis=-1).T


@pytest.mark.parametrize(("token", "is_causal"), [(0, True), pytest.param(TOKEN, False, marks=pytest.mark.slow)])
@IMPLEMENTATIONS
def test_nan_in_a_key_reaches_every_query_that_may_look_at_it(token: int, implementation: Any, is_causal: bool) -> None:
    query, key, value = tensors()
    call = partial(attended, implementation=implementation, is_causal=is_causal)
    spoilt, _ = spoilt_rows(call(query, key.at[0, token, 1, 2].set(jnp.nan), value))
    assert spoilt[GROUP:].all()
    assert not spoilt[:GROUP].any()  # of the other key/value head


@pytest.mark.slow
@IMPLEMENTATIONS
def test_infinity_in_a_key_takes_all_weight_or_none(implementation: Any) -> None:
    query, key, value = tensors()
    query = jnp.abs(query) * jnp.where(jnp.arange(LENGTH) % 2 == 0, 1.0, -1.0)[:, None, None]  # so that signs are known
    result = attended(query, key.at[0, TOKEN, 1, 2].set(jnp.inf), value, implementation=implementation)
    exact = attended(query, key.at[0, TOKEN, 1, 2].set(1e6), value, implementation="dense")
    spoilt, touched = spoilt_rows(result)
    sees = (np.arange(LENGTH) >= TOKEN) & (np.arange(HEADS) >= GROUP)[:, None]
    assert spoilt[sees & (np.arange(LENGTH) % 2 == 0)].all()
    assert not touched[sees & (np.arange(LENGTH) % 2 == 1)].any()
    np.testing.assert_allclose(*(np.where(spoilt.T[..., None], 0, x[0]) for x in (result, exact)), atol=4e-6)


@pytest.mark.slow
@IMPLEMENTATIONS
def test_gradients_of_what_is_spoilt_are_nan(implementation: Any) -> None:
    query, key, value = tensors()

    def loss(*arrays: jax.Array) -> jax.Array:
        result = attention(*arrays, jnp.asarray(SLOPES), implementation=implementation)
        return jnp.sum(result * jnp.cos(jnp.arange(LENGTH))[:, None, None])

    key = key.at[0, TOKEN, 1, 2].set(jnp.nan)
    by_query, by_key, by_value = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(query, key, value)
    assert np.isnan(by_query[:, TOKEN:, GROUP:]).all()
    assert np.isfinite(by_query[:, :, :GROUP]).all()
    for gradient in (by_key, by_value):
        assert np.isnan(gradient[:, TOKEN:, 1]).all()
        assert np.isfinite(gradient[:, :, 0]).all()
