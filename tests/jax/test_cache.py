"""JAX's caches alone: compiled steps that read no more than they need, and say NaN where none can raise."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")

import jax.numpy as jnp  # noqa: E402

import alibi_core  # noqa: E402
from alibi_jax import TPU, KVCache  # noqa: E402

QUICKLY = {"xla_backend_optimization_level": 0}  # kernels take seconds to compile, and moments to run
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
SLOPES = jnp.asarray([1.0, 0.7, 0.5, 1.5])
IMPLEMENTATIONS = pytest.mark.parametrize(
    "implementation",
    ["tiled", pytest.param(TPU(128, 128, interpret=True), marks=pytest.mark.slow)],
    ids=["tiled", "tpu"],
)


def tokens(length: int, heads: int = KV_HEADS, seed: int = 0) -> jax.Array:
    # By NumPy, as JAX would compile a program for each shape.
    return jnp.asarray(np.random.default_rng(seed).standard_normal((2, length, heads, HEAD_DIM)), jnp.float32)


@functools.cache
def attended(implementation: Any) -> Any:
    """Return compiled attention of the last queries of a cache, whose length the compiler does not know."""
    options = None if isinstance(implementation, str) else QUICKLY
    attend = functools.partial(KVCache.attend, slopes=SLOPES, implementation=implementation)
    return jax.jit(attend, compiler_options=options)


@pytest.mark.slow
@IMPLEMENTATIONS
def test_what_is_too_far_away_is_not_read(implementation: Any) -> None:
    cache = KVCache(2, KV_HEADS, 4000, HEAD_DIM).append(tokens(3500), tokens(3500, seed=1))
    query = tokens(1, HEADS, seed=2)
    expected = attended(implementation)(cache, query)
    # A slope of 1/2 looks back some 70 tokens; they are read in blocks of at most 1,024.
    poison = jnp.where(jnp.arange(cache.max_length) < 3500 - 1200, jnp.nan, 0)[:, None]
    poisoned = copy.copy(cache)
    vars(poisoned).update(keys=cache.keys + poison, values=cache.values + poison)
    np.testing.assert_array_equal(attended(implementation)(poisoned, query), expected)
    np.testing.assert_allclose(expected, attended("dense")(cache, query), atol=4e-6)


# At level 0 the compiler rounds the scores that it compares in two ways, so that none is equal to the maximum.
@pytest.mark.slow
@pytest.mark.parametrize("options", [None, QUICKLY], ids=["default", "level 0"])
def test_a_cache_can_be_differentiated(options: Any) -> None:
    query = tokens(3, HEADS, seed=2)

    def loss(implementation: str, query: Any, key: Any, value: Any) -> Any:
        cache = KVCache(2, KV_HEADS, 40, HEAD_DIM).append(key, value)
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
        cache = jax.eval_shape(lambda: KVCache(2, KV_HEADS, max_length, HEAD_DIM, dtype=jnp.bfloat16))
        step = jax.jit(lambda query, cache: cache.attend(query, SLOPES, implementation="tiled"))
        compiled = step.lower(query.astype(jnp.bfloat16), cache).compile()
        return int(compiled.memory_analysis().temp_size_in_bytes)

    # Bounds of norms, one for each 128 keys of 16 bytes, are all that is as long as the cache.
    assert temporaries(2**17) < temporaries(2**14) + 2 * KV_HEADS * 2**17 * HEAD_DIM * 2 // 4


@pytest.mark.slow
def test_what_an_overflow_hid_stays_nan() -> None:
    """Under jit nothing can be raised, and a shorter length does not bring back what was written over."""
    cache = KVCache(2, KV_HEADS, 10, HEAD_DIM)
    cache = jax.jit(lambda cache: cache.append(tokens(7), tokens(7)).append(tokens(4), tokens(4)))(cache)
    query = tokens(1, HEADS)
    assert int(cache.length) == 11
    assert jnp.isnan(cache.attend(query, SLOPES)).all()
    assert jnp.isnan(cache.truncate(3).attend(query, SLOPES)).all()
    one = KVCache(2, KV_HEADS, 10, HEAD_DIM).append(tokens(1), tokens(1))
    assert jnp.isnan(attended("dense")(one, tokens(2, HEADS))).all()  # of more queries than there are tokens
    with pytest.raises(ValueError, match=r"cache.keys must have shape \(batch, num_kv_heads, max_length, head_dim\)"):
        jax.tree.map(lambda x: x[None], cache).append(tokens(1), tokens(1))


@pytest.mark.parametrize("way", ["append", "attend", "mask", "truncate", "truncate by row"])
def test_traced_lengths_that_cannot_be_make_nan(way: str) -> None:
    def changed(length: Any) -> jax.Array:
        cache, rows = KVCache(2, KV_HEADS, 20, HEAD_DIM).append(tokens(3), tokens(3)), jnp.stack([length, 2])
        if way == "append":
            cache = cache.append(tokens(3), tokens(3), lengths=rows)
        elif way == "attend":
            return cache.attend(tokens(3, HEADS), SLOPES, lengths=rows)
        elif way == "mask":  # of 5 tokens, where there may be 7
            cache = cache.append(tokens(4), tokens(4), lengths=rows)
            return cache.attend(tokens(1, HEADS), SLOPES, mask=jnp.ones((2, 1, 1, 5), bool))
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
        return cache.select_batch(jnp.asarray([1, 0])).truncate(4).attend(tokens(1, HEADS), SLOPES)

    cache = KVCache(2, KV_HEADS, 20, HEAD_DIM).append(tokens(3), tokens(3))
    of_numpy = functools.partial(following, jax.device_get(cache))
    np.testing.assert_allclose(jax.jit(of_numpy)(), jax.jit(following)(cache), atol=1e-6)


@pytest.mark.parametrize("lengths_are_divided", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_rows_that_are_divided_explicitly_stay_so(lengths_are_divided: bool) -> None:
    """One device is enough: a type tells the mesh axes, not how many devices these have."""

    @jax.jit
    def following(cache: KVCache, new: jax.Array, lengths: jax.Array, query: jax.Array) -> tuple[KVCache, jax.Array]:
        for counts in (lengths, None):
            cache = cache.append(new, new, lengths=counts).select_batch(jnp.asarray([1, 0]))
        return cache, cache.attend(query, SLOPES)

    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Explicit,))
    divided = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    cache, lengths = KVCache(2, KV_HEADS, 20, HEAD_DIM), jnp.asarray([3, 1])
    new, query = tokens(3), tokens(1, HEADS)
    _, expected = following(cache, new, lengths, query)
    with jax.set_mesh(mesh):
        cache = jax.tree.map(lambda x: jax.device_put(x, divided) if x.ndim > 1 else x, cache)
        new, query = jax.device_put((new, query), divided)
        lengths = jax.device_put(lengths, divided if lengths_are_divided else None)
        found, result = following(cache, new, lengths, query)
        assert [jax.typeof(x).sharding.spec[0] for x in jax.tree.leaves(found)] == ["rows"] * 4
        np.testing.assert_allclose(result, expected, atol=1e-6)


@pytest.mark.slow
def test_a_cache_can_be_mapped_and_shown_whatever_its_leaves_are() -> None:
    cache = jax.vmap(lambda _: KVCache(2, KV_HEADS, 4, HEAD_DIM))(jnp.arange(3))
    longer = jax.vmap(lambda cache, key: cache.append(key, key))(cache, jnp.stack([tokens(2)] * 3))
    assert jax.vmap(lambda cache: cache.length)(longer).tolist() == [2, 2, 2]
    tree = KVCache(1, 1, 4, 4)
    assert "length=0, " in repr(tree)
    assert "None" in repr(jax.tree.map(lambda x: None, tree))
    assert "length=traced" in str(jax.eval_shape(lambda: tree))


@pytest.mark.parametrize("has_gates", [True, False])
@pytest.mark.parametrize("lengths", [(4, 2), pytest.param((4, 4), marks=pytest.mark.slow)])
def test_a_scan_decodes_rows_of_any_lengths_in_one_program(lengths: tuple[int, int], has_gates: bool) -> None:
    arrays = np.random.default_rng(0).standard_normal((3, 2, 8, 2, 4)).astype(np.float32)
    query, key, value = map(jnp.asarray, arrays)
    counts = jnp.asarray(lengths) if len({*lengths}) > 1 else None
    gates = np.float32(-0.5) * np.abs(arrays[0, ..., 0]) if has_gates else None  # [row, token, head]
    prompts = KVCache(2, 2, 8, 4, gate_heads=2 if has_gates else None)
    prompts = prompts.append(key[:, :4], value[:, :4], lengths=counts, log_gates=gates[:, :4] if has_gates else None)
    if has_gates:  # forgotten again, what others append in its place is all that counts
        more = prompts.append(key[:, :2], value[:, :2], log_gates=gates[:, :2] * 9)
        prompts = more.truncate(4 if counts is None else counts)

    def step(cache: KVCache, i: Any) -> Any:
        new = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i, 1, axis=1), (key, value, gates))
        cache = cache.append(*new[:2], log_gates=new[2])
        return cache, cache.attend(jax.lax.dynamic_slice_in_dim(query, i, 1, axis=1))[:, 0]

    decoded = jax.jit(lambda cache: jax.lax.scan(step, cache, jnp.arange(4, 8)))
    cache, found = decoded(prompts)
    assert "length=8" in repr(cache)
    assert np.broadcast_to(cache.length if counts is None else cache.lengths, 2).tolist() == [n + 4 for n in lengths]
    _, overflown = decoded(cache)
    for row, length in enumerate(lengths):
        of_row = [
            np.concatenate([x[row, :length], x[row, 4:]]).swapaxes(0, 1) for x in (*arrays, gates) if x is not None
        ]
        expected = alibi_core.attention(*of_row[:3], log_gates=of_row[3] if has_gates else None).swapaxes(0, 1)[length:]
        np.testing.assert_allclose(found[:, row], expected, rtol=1e-5, atol=1e-5)
        assert np.isnan(overflown[4 - length :, row]).all()  # once there is no more room
        assert np.isfinite(overflown[: 4 - length, row]).all()
