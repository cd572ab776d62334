"""Who builds a dense bias: this library in four array libraries, and the builders of others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

import alibi_core

Call = Callable[[], Any]
Prepare = Callable[[int, int], Call]  # takes heads and length; imports, and prepares whatever is not part of building


@dataclass(frozen=True)
class Library:
    """An array library: its namespace, what waits for a result, and what compiles a function if it has that."""

    xp: Any
    finish: Callable[[Any], Any] = lambda array: array
    compile: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None

    def fill(self, shape: tuple[int, ...]) -> Any:
        """Return a float32 array filled with a number that no allocator has ready."""
        return self.finish(self.xp.full(shape, -1.0, dtype=self.xp.float32))


@cache
def library(name: str) -> Library:
    """Import a library by the name of its namespace."""
    if name == "torch":
        import torch

        return Library(torch)
    if name == "jax.numpy":
        import jax

        return Library(jax.numpy, jax.block_until_ready, jax.jit)
    if name == "mlx.core":
        import mlx.core as mx

        mx.set_cache_limit(0)  # a fill must not be handed the memory of the last bias, nor the other way round

        def finish(array: Any) -> Any:
            mx.eval(array)
            return array

        return Library(mx, finish, mx.compile)
    return Library(np)


@dataclass(frozen=True)
class Builder:
    """Something that builds a dense bias in a library."""

    name: str
    library: str
    prepare: Prepare
    masked: Prepare | None = None  # of the call that also masks what is causally hidden
    note: str = ""


def _ours(name: str, function: str, num_heads: int, length: int) -> Call:
    lib = library(name)
    return lambda: lib.finish(getattr(alibi_core, function)(num_heads, length, xp=lib.xp))


def _ours_compiled(name: str, num_heads: int, length: int) -> Call:
    lib = library(name)
    # Slopes are an argument: all that is constant in a compiled function may be computed before it is called.
    slopes = alibi_core.slopes(num_heads, xp=lib.xp)
    function = lib.compile(lambda slopes: alibi_core.bias(slopes, length))
    return lambda: lib.finish(function(slopes))


LIBRARIES = {"NumPy": "numpy", "PyTorch": "torch", "MLX": "mlx.core", "JAX": "jax.numpy"}
JUDGED = ("NumPy", "PyTorch")
OURS = (
    *(Builder(name, module, partial(_ours, module, "bias")) for name, module in LIBRARIES.items()),
    *(Builder(f"{x}, compiled", LIBRARIES[x], partial(_ours_compiled, LIBRARIES[x])) for x in ("MLX", "JAX")),
)
OF_KEYS = tuple(Builder(name, module, partial(_ours, module, "key_bias")) for name, module in LIBRARIES.items())


def _bloom(num_heads: int, length: int) -> Call:
    import torch
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    everything = torch.ones(1, length, dtype=torch.int64)  # BLOOM's padding mask, without padding
    return lambda: build_alibi_tensor(everything, num_heads, torch.float32)


def _mpt(num_heads: int, length: int) -> Call:
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    return lambda: build_mpt_alibi_tensor(num_heads, length)


def _x_transformers(num_heads: int, length: int) -> Call:
    from x_transformers.x_transformers import AlibiPositionalBias

    return lambda: AlibiPositionalBias(num_heads)(length, length)  # a new one, since each keeps the bias it has built


def _mlx_nn(num_heads: int, length: int) -> Call:
    from mlx.nn import ALiBi

    finish = library("mlx.core").finish
    return lambda: finish(ALiBi.create_alibi_matrix(length, length, num_heads))


def _broadcast(rows: Prepare, num_heads: int, length: int) -> Call:
    build = rows(num_heads, length)
    return lambda: build().expand(num_heads, length, length).contiguous()


def _masked(bias: Prepare, name: str, num_heads: int, length: int) -> Call:
    build, lib = bias(num_heads, length), library(name)

    def call() -> Any:
        mask = lib.xp.triu(lib.xp.full((length, length), -lib.xp.inf), 1)
        return lib.finish(build() + mask)

    return call


def _peer(name: str, library: str, bias: Prepare, note: str) -> Builder:
    whole = partial(_broadcast, bias) if ROW in note else bias
    return Builder(name, library, whole, partial(_masked, bias, library), note)


ROW = "a row a head, broadcast and copied; no mask"
PEERS = (
    _peer("BLOOM", "torch", _bloom, f"transformers, build_alibi_tensor: {ROW}"),
    _peer("MPT", "torch", _mpt, f"transformers, build_mpt_alibi_tensor: {ROW}"),
    _peer("x-transformers", "torch", _x_transformers, "AlibiPositionalBias: symmetric; no mask"),
    _peer("mlx.nn.ALiBi", "mlx.core", _mlx_nn, "create_alibi_matrix: symmetric; no mask"),
)
