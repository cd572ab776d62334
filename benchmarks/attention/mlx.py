"""The attention benchmark in MLX: data, clocks and memory.

MLX is lazy, so every call ends with the evaluation of what it returns. Memory is what MLX's own allocator counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

import alibi_mlx
from benchmarks import harness
from benchmarks.attention.backend import Call, Contestant, Decode
from benchmarks.attention.mlx_peers import (
    NO_POSITIONS,
    OURS,
    PEERS,
    fast,
    slopes_of,
    this_library,
    without_positions,
)
from benchmarks.attention.sizes import Decoding, Shape

DISTRIBUTIONS = ("mlx", "mlx-cpu", "mlx-metal")
SHARE_OF_MEMORY = 0.6  # of what is free: a contestant that needs more is left out, lest the machine swap


class Mlx:
    """MLX on one kind of device."""

    name, ours, distributions, peers = "mlx", OURS, DISTRIBUTIONS, PEERS

    def __init__(self, device: str | None = None) -> None:
        there = ("metal", "cpu") if mx.metal.is_available() else ("cpu",)
        self.device = device or there[0]
        if self.device not in there:
            raise RuntimeError(f"MLX is measured on {' and '.join(there)} here")
        mx.set_default_device(mx.cpu if self.device == "cpu" else mx.gpu)

    def machine(self) -> dict[str, Any]:
        """Describe what is special about this device."""
        if self.device == "cpu":
            return {}
        about = (mx if hasattr(mx, "device_info") else mx.metal).device_info()  # depends on the version of MLX
        return {"gpu": about["device_name"], "gpu_memory": about["max_recommended_working_set_size"]}

    # --- Data -------------------------------------------------------------------------------------------------------

    def tensors(self, shape: Shape, backward: bool = False) -> tuple[mx.array | None, ...]:
        """Return normally distributed query, key, value and, with ``backward``, gradient of the result, else None."""
        made = []
        for seed in range(4 if backward else 3):
            made.append(mx.random.normal(shape.dims, key=mx.random.key(seed)).astype(getattr(mx, shape.dtype)))
        mx.eval(made)
        return (*made, *[None] * (4 - len(made)))

    def as_float64(self, piece: mx.array) -> np.ndarray:
        """Return a piece of a tensor as a NumPy array."""
        return np.array(piece.astype(mx.float32)).astype(np.float64)  # NumPy has no bfloat16

    def free_bytes(self) -> float:
        """Return how much memory a contestant may take; on a Mac the GPU's is that of the machine."""
        return SHARE_OF_MEMORY * harness.available_memory()

    # --- Passes -----------------------------------------------------------------------------------------------------

    def seconds(self, call: Call) -> float:
        """Return how long a call takes; each evaluates its result."""
        return harness.seconds_of(call)

    def prepare(self, contestant: Contestant, tensors: Sequence[mx.array | None], backward: bool) -> Call:
        """Return the call to time, which returns the result, or with ``backward`` the gradients.

        Args:
            contestant: Whose.
            tensors: Query, key, value and the gradient of the result.
            backward: Whether to go on to the gradients.
        """
        *tensors, grad = tensors
        attend = contestant.prepare(*tensors)
        mx.clear_cache()  # on Metal MLX keeps what others have freed

        def forward() -> mx.array:
            return _evaluated(attend(*tensors))

        def gradients() -> list[mx.array]:
            results, found = mx.vjp(attend, tensors, [grad])
            mx.eval(results, found)  # the result too, as a model has to have it
            return found

        return gradients if backward else forward

    def baseline(self, tensors: Sequence[mx.array | None], backward: bool) -> Contestant:
        """Return causal attention with no positions."""
        return without_positions(is_dense=self.device == "cpu")

    def contestant(self) -> Contestant:
        """Return this library."""
        return this_library()

    # --- Decoding ---------------------------------------------------------------------------------------------------

    def decode(self, size: Decoding) -> Decode:
        """Fill a layer's cache and return who attends to it with one query."""
        shape = size.shape
        query, key, value, _ = self.tensors(shape)
        query = mx.contiguous(query[:, :, -1:])
        cache = alibi_mlx.KVCache()
        key, value = cache.update_and_fetch(key, value)  # what all of them attend to
        distance = mx.arange(shape.length - 1, -1, -1)
        row = (-slopes_of(shape.num_heads)[:, None, None] * distance)[None].astype(query.dtype)
        mx.eval(query, key, value, row)  # row: [1, num_heads, 1, kv_len]
        return Decode(
            (query, key, value),
            cached=lambda: _evaluated(cache.attend(query)),
            bare=lambda: _evaluated(alibi_mlx.attention(query, key, value)),
            baseline=lambda: _evaluated(fast(query, key, value)),  # all keys are in the past of the last token
            with_row=lambda: _evaluated(fast(query, key, value, row)),
            baseline_name=NO_POSITIONS,
            row_name="mx.fast, a row of biases",
        )

    # --- Memory -----------------------------------------------------------------------------------------------------

    def extra_bytes(self, shape: Shape, backward: bool) -> int:
        """Return the peak memory of a pass of ours beyond its arguments, its result and its gradients."""
        return self._extra(this_library(), shape, backward)

    def weights(self, shape: Shape, backward: bool) -> Iterator[tuple[str, int, int, str]]:
        """Yield how it was found, that peak, the other's, and its name: with a dense mask, and without positions."""
        ours = self.extra_bytes(shape, backward)
        for other in (PEERS[0], self.baseline((), backward)):
            theirs = self._extra(other, shape, backward)
            if self.device == "cpu" or theirs > 0:  # on Metal a fused kernel may take nothing: there is no ratio
                yield "by MLX's count", ours, theirs, other.name

    def _extra(self, contestant: Contestant, shape: Shape, backward: bool) -> int:
        call = self.prepare(contestant, self.tensors(shape, backward), backward)
        call()  # makes whatever is made only once
        before = mx.get_active_memory()  # arguments, and a mask
        mx.reset_peak_memory()
        result = call()
        peak = mx.get_peak_memory() - before
        del result
        # What is made during the call, and is not extra: the result and, going backward, three gradients.
        return peak - shape.tensor_bytes * (4 if backward else 1)


def _evaluated(result: mx.array) -> mx.array:
    mx.eval(result)
    return result
