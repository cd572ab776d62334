"""This backend's implementations as adapters of :mod:`alibi_core.conformance`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alibi_core.conformance import FEATURES, BackendAdapter, Library
from alibi_jax._attention import attention
from alibi_jax.caches import KVCache

__all__ = ["adapters"]

DTYPES = ("float32", "float16", "bfloat16")
CUDNN_HAS = {"grouped", "batch_slopes", "some_gradients", "continuations"}  # and scales other than 0
LACKS = {"tpu": {"points", "pair_masks", "log_gates"}, "cudnn": FEATURES.keys() - CUDNN_HAS}
Static = tuple[tuple[str, bool | int | float | str], ...]


def adapters() -> list[BackendAdapter]:
    """Return an adapter for each implementation that runs here, and each dtype; float64 is off in JAX by default.

    Example:
        >>> sorted({adapter.dtype for adapter in adapters()})
        ['bfloat16', 'float16', 'float32']
    """
    names = {"tpu": ("tpu", "dense"), "gpu": ("cudnn", "tiled", "dense")}
    return [
        BackendAdapter(
            f"alibi_jax[{name}]",
            Library(jnp, _array, _numpy, functools.partial(_gradients, name), jax.jit),
            functools.partial(_attention, name),
            dtype=dtype,
            length_first=True,
            cached=None if name == "cudnn" else functools.partial(_decode_step, name),
            lacks=LACKS.get(name, ()),
        )
        for name in names.get(jax.default_backend(), ("tiled", "dense"))
        for dtype in DTYPES
        if (name, dtype) not in (("tpu", "float16"), ("cudnn", "float32"))
    ]


def _array(values: Any, dtype: str | None) -> jax.Array:
    return jnp.asarray(np.array(values), None if dtype is None else jnp.dtype(dtype))


def _numpy(array: jax.Array) -> np.ndarray[Any, Any]:
    return np.asarray(array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array)


def _attention(implementation: str, *tensors: jax.Array, **arguments: Any) -> jax.Array:
    """Attend in one compiled program; outside of jax.jit, every operation would be compiled for each shape."""
    static, arrays = _split(arguments)
    result: jax.Array = _program(implementation, static, tensors, arrays)
    return result


def _gradients(
    implementation: str,
    _: Callable[..., jax.Array],
    arguments: Mapping[str, Any],
    wrt: tuple[str, ...],
    weight: jax.Array | float,
) -> Sequence[jax.Array]:
    """Differentiate in one compiled program; a weight that is a Python number is a constant in it."""
    static, arrays = _split(arguments)
    asked = {name: arrays.pop(name) for name in wrt}
    constant, weight = (None, weight) if isinstance(weight, jax.Array) else (weight, None)
    found = _gradient_program(implementation, static, constant, asked, arrays, weight)
    return [found[name] for name in wrt]


def _split(arguments: Mapping[str, Any]) -> tuple[Static, dict[str, Any]]:
    """Split arguments into static ones (Python numbers and strings) and arrays."""
    static = {name: x for name, x in arguments.items() if isinstance(x, bool | int | float | str)}
    return tuple(sorted(static.items())), {name: x for name, x in arguments.items() if name not in static}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _program(implementation: str, static: Static, tensors: Any, arrays: Any) -> jax.Array:
    return attention(*tensors, **arrays, **dict(static), implementation=implementation)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _gradient_program(
    implementation: str, static: Static, constant: float | None, asked: Any, others: Any, weight: Any
) -> dict[str, jax.Array]:
    result, pull_back = jax.vjp(
        lambda asked: attention(**asked, **others, **dict(static), implementation=implementation), asked
    )
    found: dict[str, jax.Array] = pull_back(jnp.full_like(result, constant) if weight is None else weight)[0]
    return found


def _decode_step(
    implementation: str, query: jax.Array, key: jax.Array, value: jax.Array, slopes: jax.Array, cache: KVCache | None
) -> tuple[jax.Array, KVCache]:
    if cache is None:
        batch, heads, _, head_dim = key.shape
        cache = KVCache(batch, heads, BackendAdapter.MAX_LENGTH, head_dim, dtype=key.dtype)
    result: tuple[jax.Array, KVCache] = _step(implementation, query, key, value, slopes, cache)
    return result


@functools.partial(jax.jit, static_argnums=0)
def _step(
    implementation: str, query: jax.Array, key: jax.Array, value: jax.Array, slopes: jax.Array, cache: KVCache
) -> tuple[jax.Array, KVCache]:
    """Run a decoding step as users do: one compiled program for all steps with the same number of tokens."""
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    cache = cache.append(key, value)
    return jnp.swapaxes(cache.attend(query, slopes, implementation=implementation), 1, 2), cache
