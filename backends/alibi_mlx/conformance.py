"""This backend's implementations as adapters of :mod:`alibi_core.conformance`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from alibi_core.conformance import BackendAdapter, Library
from alibi_mlx._attention import attention
from alibi_mlx.caches import KVCache

__all__ = ["adapters"]

DTYPES = ("float32", "float16", "bfloat16")


def adapters() -> list[BackendAdapter]:
    """Return an adapter for each implementation and each dtype.

    Example:
        >>> sorted({adapter.name for adapter in adapters()})
        ['alibi_mlx[dense]', 'alibi_mlx[tiled]']
    """
    return [
        BackendAdapter(
            f"alibi_mlx[{name}]",
            Library(mx, _array, _numpy, _gradients),
            functools.partial(attention, implementation=name),
            dtype=dtype,
            cached=functools.partial(_decode_step, name),
        )
        for name in ("tiled", "dense")
        for dtype in DTYPES
    ]


def _array(values: Any, dtype: str | None) -> mx.array:
    array = mx.array(np.array(values))
    return array if dtype is None else array.astype(getattr(mx, dtype))


def _numpy(array: mx.array) -> np.ndarray[Any, Any]:
    return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)


def _gradients(
    function: Callable[..., mx.array], arguments: Mapping[str, Any], wrt: tuple[str, ...], weight: mx.array | float
) -> Sequence[mx.array]:
    query = arguments["query"]
    if not isinstance(weight, mx.array):  # broadcast, like the gradient of a sum
        weight = mx.broadcast_to(mx.array(weight, query.dtype), query.shape)

    def result(*asked: mx.array) -> list[mx.array]:
        return [function(**{**arguments, **dict(zip(wrt, asked, strict=True))})]

    _, gradients = mx.vjp(result, [arguments[name] for name in wrt], [weight])
    return gradients


def _decode_step(
    implementation: str, query: mx.array, key: mx.array, value: mx.array, slopes: mx.array, cache: KVCache | None
) -> tuple[mx.array, KVCache]:
    cache = KVCache() if cache is None else cache
    cache.update_and_fetch(key, value)
    return cache.attend(query, slopes, implementation=implementation), cache
