"""JAX's caches alone: compiled steps that read no more than they need, and say NaN where none can raise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")

import jax.numpy as jnp  # noqa: E402

import alibi_core  # noqa: E402
from alibi_jax import TPU, KVCache, attention  # noqa: E402

QUICKLY = {"xla_backend_optimization_level": 0}  # kernels take seconds to compile, and moments to run
LENGTH, HEADS, KV_HEADS, HEAD_DIM = 700, 4, 2, 8
SLOPES = jnp.asarray([1.0, 0.7, 0.5, 1.5])
IMPLEMENTATIONS = pytest.mark.parametrize(
    "implementation",
    ["tiled", pytest.param(TPU(128, 128, interpret=True), marks=pytest.mark.slow)],
    ids=["tiled", "tpu"],
)


def tokens(length: int, heads: int = KV_HEADS, seed: int = 0) -> jax.Array:
    # By NumPy, as JAX would compile a program for each shape.
    return jnp.asarray(np.random.default_rng(seed).standard_normal((2, length, heads, HEAD_DIM)), jnp.float32)


def filled(length: int = LENGTH, max_length: int = 1000) -> KVCache:
    cache = KVCache.make(2, KV_HEADS, max_length, HEAD_DIM)
    for start in range(0, length, 300):
        part = slice(start, min(start + 300, length))
        cache = cache.append(tokens(length)[:, part], tokens(length, seed=1)[:, part])
    return cache


def _last_attended(cache: KVCache, query: jax.Array, implementation: Any) -> jax.Array:
    return cache.attend(query, SLOPES, implementation=implementation)


COMPILED = {quickly: jax.jit(_last_attended, static_argnums=2, compiler_options=QUICKLY if quickly else None)
            for quickly in (False, True)}  # fmt: skip


def last_attended(cache: KVCache, query: jax.Array, implementation: Any) -> jax.Array:
    """Return attention of the last queries, the length of the cache unknown to the compiler."""
    return COMPILED[not isinstance(implementation, str)](cache, query, implementation)


@pytest.mark.slow
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


# At level 0 the compiler rounds the scores that it compares in two ways, so that none is equal to the maximum.
@pytest.mark.slow
@pytest.mark.parametrize("options", [None, QUICKLY], ids=["default", "level 0"])
def test_a_cache_can_be_differentiated(options: Any) -> None:
    query = tokens(3, HEADS, seed=2)

    def loss(implementation: str, query: Any, key: Any, value: Any) -> Any:
        cache = KVCache.make(2, KV_HEADS, 40, HEAD_DIM).append(key, value)
        return jnp.sum(jnp.sin(cache.attend(query, SLOPES, implementation=implementation)))

    arrays = query, tokens(30), tokens(30, seed=1)
    gradients = jax.jit(jax.grad(loss, argnums=(1, 2, 3)), static_argnums=0, compiler_options=options)
    found, exact = (gradients(name, *arrays) for name in ("tiled", "dense"))
    for one, other in zip(found, exact, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_cache() -> None:
    query = tokens(1, HEADS, seed=2)

    def temporaries(max_length: int) -> int:
        cache = jax.eval_shape(lambda: KVCache.make(2, KV_HEADS, max_length, HEAD_DIM, dtype=jnp.bfloat16))
        step = jax.jit(lambda query, cache: cache.attend(query, SLOPES, implementation="tiled"))
        compiled = step.lower(query.astype(jnp.bfloat16), cache).compile()
        return int(compiled.memory_analysis().temp_size_in_bytes)

    # Bounds of norms, one for each 128 keys of 16 bytes, are all that is as long as the cache.
    assert temporaries(2**17) < temporaries(2**14) + 2 * KV_HEADS * 2**17 * HEAD_DIM * 2 // 4


@pytest.mark.slow
def test_what_an_overflow_hid_stays_nan() -> None:
    """Under jit nothing can be raised, and a shorter length does not bring back what was written over."""
    cache = KVCache.make(2, KV_HEADS, 10, HEAD_DIM)
    cache = jax.jit(lambda cache: cache.append(tokens(7), tokens(7)).append(tokens(4), tokens(4)))(cache)
    query = tokens(1, HEADS)
    assert int(cache.length) == 11
    assert jnp.isnan(cache.attend(query, SLOPES)).all()
    assert jnp.isnan(cache.truncate(3).attend(query, SLOPES)).all()
    one = KVCache.make(2, KV_HEADS, 10, HEAD_DIM).append(tokens(1), tokens(1))
    assert jnp.isnan(last_attended(one, tokens(2, HEADS), "dense")).all()  # of more queries than there are tokens
    with pytest.raises(ValueError, match=r"cache.key must have shape \(batch, num_kv_heads, max_length, head_dim\)"):
        jax.tree.map(lambda x: x[None], cache).append(tokens(1), tokens(1))


@pytest.mark.parametrize("way", ["append", "attend", "truncate", "truncate by row"])
def test_traced_lengths_that_cannot_be_make_nan(way: str) -> None:
    def changed(length: Any) -> jax.Array:
        cache, rows = KVCache.make(2, KV_HEADS, 20, HEAD_DIM).append(tokens(3), tokens(3)), jnp.stack([length, 2])
        if way == "append":
            cache = cache.append(tokens(3), tokens(3), lengths=rows)
        elif way == "attend":
            return cache.attend(tokens(3, HEADS), SLOPES, lengths=rows)
        else:
            cache = cache.truncate(length if way == "truncate" else rows)
        return cache.append(tokens(4), tokens(4)).truncate(3).attend(tokens(1, HEADS), SLOPES)

    changed = jax.jit(changed, compiler_options=QUICKLY)
    assert jnp.isfinite(changed(jnp.int32(2))).all()
    for length in [-1] if "truncate" in way else [-1, 4]:
        assert jnp.isnan(changed(jnp.int32(length))[0]).all()


@pytest.mark.parametrize("lengths", [pytest.param(None, marks=pytest.mark.slow), (2, 3)])
def test_a_cache_of_numpy_arrays_goes_on(lengths: tuple[int, int] | None) -> None:
    """As ``jax.device_get`` or a file leaves it."""

    def following(cache: KVCache) -> jax.Array:
        counts = None if lengths is None else jnp.asarray(lengths)
        cache = cache.append(tokens(3), tokens(3), lengths=counts)
        chosen = jax.jit(cache.select_batch)(jnp.asarray([1, 0]))
        return chosen.truncate(4).attend(tokens(1, HEADS), SLOPES)

    cache = KVCache.make(2, KV_HEADS, 20, HEAD_DIM).append(tokens(3), tokens(3))
    assert jnp.array_equal(following(jax.device_get(cache)), following(cache))


@pytest.mark.parametrize("lengths_are_divided", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_rows_that_are_divided_explicitly_stay_so(lengths_are_divided: bool) -> None:
    """One device is enough: a type tells the mesh axes, not how many devices these have."""

    def following(cache: Any, tokens: jax.Array, **lengths: jax.Array) -> Any:
        return cache.append(tokens, tokens, **lengths).select_batch(jnp.asarray([1, 0]))

    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Explicit,))
    divided = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    cache, lengths = KVCache.make(2, KV_HEADS, 20, HEAD_DIM), jnp.asarray([3, 1])
    expected = following(following(cache, tokens(3), lengths=lengths), tokens(3)).attend(tokens(1, HEADS), SLOPES)
    with jax.set_mesh(mesh):
        cache = jax.tree.map(lambda x: jax.device_put(x, divided) if x.ndim > 1 else x, cache)
        new, lengths = jax.device_put((tokens(3), lengths), (divided, divided if lengths_are_divided else None))
        found = following(following(cache, new, lengths=lengths), new)
        assert [jax.typeof(x).sharding.spec[0] for x in found] == ["rows"] * 4
        query = jax.device_put(tokens(1, HEADS), divided)
        np.testing.assert_allclose(found.attend(query, SLOPES), expected, atol=1e-6)


def step(cache: KVCache, tokens: tuple[jax.Array, ...]) -> tuple[KVCache, jax.Array]:
    query, key, value = (x[:, None] for x in tokens)
    cache = cache.append(key, value)
    return cache, cache.attend(query, SLOPES)[:, 0]


@pytest.mark.slow
def test_a_scan_decodes_in_one_program_what_attention_gives() -> None:
    query, key, value = tokens(400, HEADS, seed=2), tokens(400), tokens(400, seed=1)
    first = KVCache.make(2, KV_HEADS, 400, HEAD_DIM)
    scanned = jax.jit(lambda cache, tokens: jax.lax.scan(step, cache, tokens))
    cache, found = scanned(first, tuple(jnp.swapaxes(x, 0, 1) for x in (query, key, value)))
    expected = attention(query, key, value, SLOPES, tolerance=0.0, implementation="dense")
    # Keys that are left out weigh 2**-24 of values of up to 5; the rest is rounding.
    np.testing.assert_allclose(jnp.swapaxes(found, 0, 1), expected, rtol=0, atol=4e-6)
    assert jax.tree.structure(cache) == jax.tree.structure(first)
    assert [x.shape for x in jax.tree.leaves(cache)] == [x.shape for x in jax.tree.leaves(first)]
    assert int(cache.length) == 400


@pytest.mark.slow
def test_a_cache_can_be_mapped_and_shown_whatever_its_leaves_are() -> None:
    cache = jax.vmap(lambda _: KVCache.make(2, KV_HEADS, 4, HEAD_DIM))(jnp.arange(3))
    longer = jax.vmap(lambda cache, key: cache.append(key, key))(cache, jnp.stack([tokens(2)] * 3))
    assert longer.length.tolist() == [2, 2, 2]
    tree = KVCache.make(1, 1, 4, 4)
    assert "length=0, " in repr(tree)
    assert "None" in repr(jax.tree.map(lambda x: None, tree))
    assert "length=traced" in str(jax.eval_shape(lambda: tree))


def test_rows_of_different_lengths_are_decoded_in_one_program() -> None:
    arrays = np.random.default_rng(0).standard_normal((3, 2, 8, 2, 4)).astype(np.float32)
    query, key, value = map(jnp.asarray, arrays)
    prompts = KVCache.make(2, 2, 8, 4).append(key[:, :4], value[:, :4], lengths=jnp.asarray([4, 2]))

    def step(cache: KVCache, i: Any) -> Any:
        cache = cache.append(*(jax.lax.dynamic_slice_in_dim(x, i, 1, axis=1) for x in (key, value)))
        return cache, cache.attend(jax.lax.dynamic_slice_in_dim(query, i, 1, axis=1))[:, 0]

    decoded = jax.jit(lambda cache: jax.lax.scan(step, cache, jnp.arange(4, 8)))
    cache, found = decoded(prompts)
    assert cache.length.tolist() == [8, 6]
    assert "length=8" in repr(cache)
    for row, length in enumerate((4, 2)):
        parts = (np.concatenate([x[row, :length], x[row, 4:]]).swapaxes(0, 1) for x in arrays)
        expected = alibi_core.attention(*parts).swapaxes(0, 1)[length:]
        np.testing.assert_allclose(found[:, row], expected, rtol=1e-5, atol=1e-5)
    _, overflown = decoded(cache)
    assert np.isnan(overflown[:, 0]).all()  # and the second row has room for two
    assert np.isfinite(overflown[:2, 1]).all()
