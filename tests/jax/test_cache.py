"""A cache in JAX knows the norms of its keys: a decoding step reads no more than the horizon needs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")

import jax.numpy as jnp  # noqa: E402

from alibi_jax import TPU, AlibiAttention, KVCache  # noqa: E402
from alibi_jax.caches._kv_cache import append, attend, empty_cache  # noqa: E402

QUICKLY = {"xla_backend_optimization_level": 0}  # kernels take seconds to compile, and moments to run
LENGTH, HEADS, KV_HEADS, HEAD_DIM = 700, 4, 2, 8
SLOPES = jnp.asarray([1.0, 0.7, 0.5, 1.5])
IMPLEMENTATIONS = pytest.mark.parametrize(
    "implementation", ["tiled", TPU(128, 128, interpret=True)], ids=["tiled", "tpu"]
)


def tokens(length: int, heads: int = KV_HEADS, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (2, length, heads, HEAD_DIM))


def filled(length: int = LENGTH, max_length: int = 1000) -> KVCache:
    cache = empty_cache(2, max_length, KV_HEADS, HEAD_DIM, jnp.float32)
    for start in range(0, length, 300):
        part = slice(start, min(start + 300, length))
        cache, _ = append(cache, tokens(length)[:, part], tokens(length, seed=1)[:, part])
    return cache


def _last_attended(cache: KVCache, query: jax.Array, implementation: Any) -> jax.Array:
    return attend(cache, query, SLOPES, cache.length - query.shape[1], implementation)


COMPILED = {quickly: jax.jit(_last_attended, static_argnums=2, compiler_options=QUICKLY if quickly else None)
            for quickly in (False, True)}  # fmt: skip


def last_attended(cache: KVCache, query: jax.Array, implementation: Any) -> jax.Array:
    """Return attention of the last queries, the length of the cache unknown to the compiler."""
    return COMPILED[not isinstance(implementation, str)](cache, query, implementation)


def test_norms_are_those_of_each_128_keys() -> None:
    cache = filled()
    norms = np.linalg.norm(np.asarray(tokens(LENGTH), np.float64), axis=-1).swapaxes(1, 2)  # [batch, heads, length]
    padded = np.pad(norms, ((0, 0), (0, 0), (0, 1024 - LENGTH))).reshape(2, KV_HEADS, 8, 128).max(axis=-1)
    assert cache.key_norms.shape == (2, KV_HEADS, 8)
    # Not less, but for what float32 rounds away: sums of 8 squares.
    np.testing.assert_allclose(np.asarray(cache.key_norms), padded, rtol=8 * 2.0**-24, atol=1e-18)


@IMPLEMENTATIONS
def test_what_is_too_far_away_is_not_read(implementation: Any) -> None:
    cache = filled(3500, 4000)
    query = tokens(1, HEADS, seed=2)
    expected = last_attended(cache, query, implementation)
    # A slope of 1/2 looks back some 70 tokens; they are read in blocks of at most 1,024.
    poison = jnp.where(jnp.arange(4000) < 3500 - 1200, jnp.nan, 0)[:, None]
    poisoned = cache._replace(key=cache.key + poison, value=cache.value + poison)
    np.testing.assert_array_equal(last_attended(poisoned, query, implementation), expected)
    exact = last_attended(cache, query, "dense")
    np.testing.assert_allclose(expected, exact, atol=4e-6)


@IMPLEMENTATIONS
def test_an_outlier_far_back_is_found(implementation: Any) -> None:
    query = tokens(1, HEADS, seed=2)
    key = tokens(LENGTH).at[:, 5].set(2000 * jnp.sign(query[:, 0, ::2]))
    cache, _ = append(empty_cache(2, 1000, KV_HEADS, HEAD_DIM, jnp.float32), key, tokens(LENGTH, seed=1))
    found, exact = (last_attended(cache, query, x) for x in (implementation, "dense"))
    assert jnp.abs(exact[:, :, 0] - cache.value[:, 0, 5][:, None]).max() < 1e-5  # it takes all the weight
    np.testing.assert_allclose(found, exact, atol=4e-6)


@IMPLEMENTATIONS
def test_a_layer_decodes_as_it_reads(implementation: Any) -> None:
    layer = AlibiAttention(16, HEADS, num_kv_heads=KV_HEADS, implementation=implementation, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(3), (2, 140, 16))
    whole = layer(x)
    first, cache = layer(x[:, :126], cache=layer.make_cache(2, 150))
    parts, traces = [first], 0

    @nnx.jit
    def step(layer: Any, x: Any, cache: Any) -> Any:
        nonlocal traces
        traces += 1
        return layer(x, cache=cache)

    for index in range(126, 140):
        output, cache = step(layer, x[:, index : index + 1], cache)
        parts.append(output)
    assert traces == 1
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, atol=2e-6)


# At level 0 the compiler rounds the scores that it compares in two ways, so that none is equal to the maximum.
@pytest.mark.parametrize("options", [None, QUICKLY], ids=["default", "level 0"])
def test_a_cache_can_be_differentiated(options: Any) -> None:
    query = tokens(3, HEADS, seed=2)

    def loss(implementation: str, query: Any, key: Any, value: Any) -> Any:
        cache, _ = append(empty_cache(2, 40, KV_HEADS, HEAD_DIM, jnp.float32), key, value)
        return jnp.sum(jnp.sin(attend(cache, query, SLOPES, cache.length - 3, implementation)))

    arrays = query, tokens(30), tokens(30, seed=1)
    gradients = jax.jit(jax.grad(loss, argnums=(1, 2, 3)), static_argnums=0, compiler_options=options)
    found, exact = (gradients(name, *arrays) for name in ("tiled", "dense"))
    for one, other in zip(found, exact, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


def test_memory_does_not_grow_with_the_cache() -> None:
    query = tokens(1, HEADS, seed=2)

    def temporaries(max_length: int) -> int:
        cache = jax.eval_shape(lambda: empty_cache(2, max_length, KV_HEADS, HEAD_DIM, jnp.bfloat16))
        step = jax.jit(lambda query, cache: attend(cache, query, SLOPES, cache.length - 1, "tiled"))
        compiled = step.lower(query.astype(jnp.bfloat16), cache).compile()
        return int(compiled.memory_analysis().temp_size_in_bytes)

    # Bounds of norms, one for each 128 keys of 16 bytes, are all that is as long as the cache.
    assert temporaries(2**17) < temporaries(2**14) + 2 * KV_HEADS * 2**17 * HEAD_DIM * 2 // 4
