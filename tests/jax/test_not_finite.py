"""NaN, infinity and numbers whose squares overflow: what cannot be bounded is computed whole.

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
from tests.support.full import first_of  # noqa: E402

LENGTH, HEADS, KV_HEADS, HEAD_DIM = 1024, 4, 2, 4
GROUP = HEADS // KV_HEADS
SLOPES = np.asarray([0.5, 0.25, 0.5, 0.02], np.float32)
KERNELS = {"tiled": "tiled", "tpu": TPU(256, 256, interpret=True)}
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", first_of(KERNELS.values()), ids=KERNELS.keys())
TOKEN = 300


def tensors(dtype: Any = jnp.float32) -> list[jax.Array]:
    random = np.random.default_rng(0)
    return [jnp.asarray(random.normal(size=(1, LENGTH, n, HEAD_DIM)), dtype) for n in (HEADS, KV_HEADS, KV_HEADS)]


@partial(jax.jit, static_argnames=("implementation", "is_causal"))
def attended(*arrays: jax.Array, implementation: Any, is_causal: bool = True) -> jax.Array:
    return attention(*arrays, jnp.asarray(SLOPES), implementation=implementation, is_causal=is_causal)


def weights(query: jax.Array, key: jax.Array, is_causal: bool) -> np.ndarray:
    """Return softmax's weights, ``[heads, queries, keys]``, in float64."""
    query, key = np.asarray(query, np.float64)[0], np.asarray(key, np.float64)[0].repeat(GROUP, axis=1)
    behind = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    scores = np.einsum("qhd,khd->hqk", query, key) * HEAD_DIM**-0.5 - SLOPES[:, None, None] * abs(behind)
    scores = np.where((behind < 0) & is_causal, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def spoilt_rows(result: Any) -> np.ndarray:
    """Return which rows are NaN or infinite, in every feature or at all: ``[heads, queries]``."""
    finite = np.isfinite(np.asarray(result, np.float32)[0])
    return ~finite.any(axis=-1).T, ~finite.all(axis=-1).T


@pytest.mark.parametrize(("token", "is_causal"), first_of([(0, True), (TOKEN, False)]))
@IMPLEMENTATIONS
def test_nan_in_a_key_reaches_every_query_that_may_look_at_it(token: int, implementation: Any, is_causal: bool) -> None:
    query, key, value = tensors()
    call = partial(attended, implementation=implementation, is_causal=is_causal)
    spoilt, _ = spoilt_rows(call(query, key.at[0, token, 1, 2].set(jnp.nan), value))
    assert spoilt[GROUP:].all()
    assert not spoilt[:GROUP].any()  # of the other key/value head


@pytest.mark.full
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


@pytest.mark.parametrize(("bad", "is_causal"), first_of([(np.nan, True), (np.inf, False)]))
@IMPLEMENTATIONS
def test_a_value_that_is_not_finite_reaches_all_who_give_it_weight(
    bad: float, implementation: Any, is_causal: bool
) -> None:
    query, key, value = tensors()
    result = attended(query, key, value.at[0, TOKEN, 1].set(bad), implementation=implementation, is_causal=is_causal)
    spoilt, touched = spoilt_rows(result)
    assert spoilt[GROUP:][weights(query, key, is_causal)[GROUP:, :, TOKEN] > 2.0**-24].all()
    assert not touched[:GROUP].any()


@IMPLEMENTATIONS
def test_a_query_that_is_not_finite_spoils_itself_alone(implementation: Any) -> None:
    query, key, value = tensors()
    clean = attended(query, key, value, implementation="dense")
    for bad in (jnp.nan, jnp.inf):
        result = attended(query.at[0, TOKEN, 1, 2].set(bad), key, value, implementation=implementation)
        spoilt, touched = spoilt_rows(result)
        assert np.argwhere(spoilt).tolist() == np.argwhere(touched).tolist() == [[1, TOKEN]]
        np.testing.assert_allclose(*(np.where(spoilt.T[..., None], 0, x[0]) for x in (result, clean)), atol=4e-6)


@IMPLEMENTATIONS
@pytest.mark.parametrize("power", first_of([36, 15]))  # squares overflow; the sum of all keys, too
def test_keys_as_large_as_queries_are_small(power: int, implementation: Any) -> None:
    query, key, value = tensors()
    query, key = query + jnp.sign(query), key + 1  # so that no product is subnormal, and keys have a mean
    expected = attended(query, key, value, implementation="dense")
    result = attended(query * 10.0**-power, key * 10.0**power, value, implementation=implementation)
    # Queries and keys are rounded once more each, in scores of up to 40.
    np.testing.assert_allclose(result, expected, atol=40 * 2.0**-22)


@pytest.mark.full
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


@pytest.mark.full
def test_queries_next_to_subnormal_numbers_keep_their_digits() -> None:
    # The compiler makes 0 of subnormal numbers, which a query times the scale may be where it is none itself.
    query, key, value = tensors()
    found, dense = (attended(query * 1e-36, key * 1e36, value, implementation=x) for x in ("tiled", "dense"))
    # Scores up to some 10, of float32, in two orders of summation.
    np.testing.assert_allclose(found, dense, atol=10 * 2.0**-22)
