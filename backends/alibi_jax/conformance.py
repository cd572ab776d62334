"""This backend's implementations as adapters of :mod:`alibi_core.conformance`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alibi_core.conformance._backend import BackendAdapter, Library
from alibi_jax import _cache
from alibi_jax._attention import attention
from alibi_jax._cache import KVCache

DTYPES = ("float32", "float16", "bfloat16")


def adapters() -> list[BackendAdapter]:
    """Return an adapter for each implementation that runs here, and each dtype; float64 is off in JAX by default."""
    names = ("tpu", "dense") if jax.default_backend() == "tpu" else ("tiled", "dense")
    return [
        BackendAdapter(
            f"alibi_jax[{name}]",
            Library(jnp, _array, _numpy, _gradients, jax.jit),
            functools.partial(_attention, name),
            dtype=dtype,
            length_first=True,
            cached=functools.partial(_decode_step, name),
        )
        for name in names
        for dtype in DTYPES
    ]


def _array(values: Any, dtype: str | None) -> jax.Array:
    return jnp.asarray(np.array(values), None if dtype is None else jnp.dtype(dtype))


def _numpy(array: jax.Array) -> np.ndarray[Any, Any]:
    return np.asarray(array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array)


def _gradients(
    function: Callable[..., jax.Array], arrays: Sequence[jax.Array], weight: jax.Array
) -> Sequence[jax.Array]:
    _, pull_back = jax.vjp(function, *arrays)
    gradients: Sequence[jax.Array] = pull_back(weight)
    return gradients


def _attention(implementation: str, *tensors: jax.Array, **arguments: Any) -> jax.Array:
    """Attend as one program: each operation by itself would be compiled for each shape."""
    fixed = {name: x for name, x in arguments.items() if isinstance(x, bool | int | float)}
    arrays = {name: x for name, x in arguments.items() if name not in fixed}
    result: jax.Array = _program(implementation, tuple(sorted(fixed.items())))(*tensors, **arrays)
    return result


@functools.cache
def _program(implementation: str, fixed: tuple[tuple[str, bool | int | float], ...]) -> Callable[..., jax.Array]:
    """Return attention with these arguments, compiled once for each shape of the others."""
    return jax.jit(functools.partial(attention, implementation=implementation, **dict(fixed)))


def _decode_step(
    implementation: str, query: jax.Array, key: jax.Array, value: jax.Array, slopes: jax.Array, cache: KVCache | None
) -> tuple[jax.Array, KVCache]:
    if cache is None:
        batch, heads, _, head_dim = key.shape
        cache = _cache.empty_cache(batch, BackendAdapter.MAX_LENGTH, heads, head_dim, key.dtype)
    result: tuple[jax.Array, KVCache] = _step(implementation, query, key, value, slopes, cache)
    return result


@functools.partial(jax.jit, static_argnums=0)
def _step(
    implementation: str, query: jax.Array, key: jax.Array, value: jax.Array, slopes: jax.Array, cache: KVCache
) -> tuple[jax.Array, KVCache]:
    """Decode as users do, with one program for all steps of as many tokens."""
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    longer, _ = _cache.append(cache, key, value)
    result = _cache.attend(longer, query, slopes, cache.length, implementation)
    return jnp.swapaxes(result, 1, 2), longer
