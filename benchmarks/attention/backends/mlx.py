"""The attention benchmark in MLX: data, clocks and memory.

MLX is lazy, so every call ends with the evaluation of what it returns. Memory is what MLX's own allocator counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

import alibi_mlx
from benchmarks.attention.backends.backend import Backend, Call, Contestant, Decode, made_in
from benchmarks.attention.exact import canonical_slopes, row_of_biases
from benchmarks.attention.sizes import Shape

NO_POSITIONS = "mx.fast, no positions"

# Takes query, key and value, so that gradients can be asked for.
Attend = Callable[[mx.array, mx.array, mx.array], mx.array]


def fast(query: mx.array, key: mx.array, value: mx.array, mask: mx.array | str | None = None) -> mx.array:
    """Return MLX's own attention, with the usual scale."""
    return mx.fast.scaled_dot_product_attention(query, key, value, scale=query.shape[-1] ** -0.5, mask=mask)


def _dense_mask(query: mx.array, key: mx.array, value: mx.array) -> Attend:
    num_heads, length = query.shape[1:3]
    position = mx.arange(length)
    distance = position[:, None] - position
    slopes = mx.array(canonical_slopes(num_heads), dtype=mx.float32)[:, None, None]
    bias = mx.where(distance < 0, -mx.inf, -slopes * distance)
    mask = bias[None].astype(query.dtype)  # [1, num_heads, length, length]; MLX takes no wider one than the query
    mx.eval(mask)
    return partial(fast, mask=mask)


def _module(query: mx.array, key: mx.array, value: mx.array) -> Attend:
    alibi = nn.ALiBi()
    hidden = nn.MultiHeadAttention.create_additive_causal_mask(query.shape[2], query.dtype)
    mx.eval(hidden)

    def attend(query: mx.array, key: mx.array, value: mx.array) -> mx.array:
        scores = (query * query.shape[-1] ** -0.5) @ key.swapaxes(-1, -2)
        return mx.softmax(alibi(scores, mask=hidden), axis=-1, precise=True) @ value

    return attend


# Bytes needed are those of float32 arrays of all scores, what it takes to build a mask included.
PEERS = (
    Contestant(
        "mx.fast, dense mask",
        _dense_mask,
        lambda shape: 6 * 4 * shape.scores,
        note="the mask, [1, heads, queries, keys] in the dtype of the query, is built before",
        is_dense=True,
    ),
    Contestant(
        "nn.ALiBi, softmax",
        _module,
        lambda shape: 8 * 4 * shape.scores,
        note="products and a softmax around the module, which builds its biases in each call",
        is_dense=True,
    ),
)


def _evaluated(result: mx.array) -> mx.array:
    mx.eval(result)
    return result


class Mlx(Backend):
    """MLX on one kind of device."""

    name, distributions = "mlx", ("mlx", "mlx-cpu", "mlx-metal")
    ours, peers = Contestant("alibi_mlx", lambda query, key, value: alibi_mlx.attention), PEERS

    def __init__(self, device: str | None = None) -> None:
        there = ("metal", "cpu") if mx.metal.is_available() else ("cpu",)
        self.device = device or there[0]
        if self.device not in there:
            raise RuntimeError(f"MLX is measured on {' and '.join(there)} here")
        mx.set_default_device(mx.cpu if self.device == "cpu" else mx.gpu)

    def machine(self) -> dict[str, Any]:
        if self.device == "cpu":
            return {}
        about = (mx if hasattr(mx, "device_info") else mx.metal).device_info()  # depends on the version of MLX
        return {"gpu": about["device_name"], "gpu_memory": about["max_recommended_working_set_size"]}

    def normal(self, shape: Shape, seed: int) -> mx.array:
        return _evaluated(mx.random.normal(shape.dims, key=mx.random.key(seed)).astype(getattr(mx, shape.dtype)))

    def as_float64(self, piece: mx.array) -> np.ndarray:
        return np.array(piece.astype(mx.float32)).astype(np.float64)  # NumPy has no bfloat16

    def prepare(self, contestant: Contestant, tensors: Sequence[mx.array | None], backward: bool) -> Call:
        *tensors, grad = tensors
        attend = contestant.prepare(*tensors)
        mx.clear_cache()  # on Metal MLX keeps what others have freed

        def gradients() -> list[mx.array]:
            results, found = mx.vjp(attend, tensors, [grad])
            mx.eval(results, found)  # the result too, as a model has to have it
            return found

        return gradients if backward else lambda: _evaluated(attend(*tensors))

    def baseline(self, tensors: Sequence[mx.array | None], backward: bool) -> Contestant:
        is_dense = self.device == "cpu"  # it computes whole scores: MLX has a fused kernel on Metal alone
        return Contestant(NO_POSITIONS, lambda query, key, value: partial(fast, mask="causal"), is_dense=is_dense)

    def decode(self, shape: Shape) -> Decode:
        query, key, value, _ = self.tensors(shape)
        query = mx.contiguous(query[:, :, -1:])
        cache = alibi_mlx.KVCache()
        key, value = cache.update_and_fetch(key, value)  # what all of them attend to
        row = mx.array(row_of_biases(shape.num_heads, shape.length)).astype(query.dtype)
        mx.eval(query, key, value, row)
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

    def weights(self, shape: Shape, backward: bool) -> Iterator[tuple[str, int, int, str]]:
        ours = self.extra_of(self.ours, shape, backward)
        for other in (PEERS[0], self.baseline((), backward)):
            theirs = self.extra_of(other, shape, backward)
            if self.device == "cpu" or theirs > 0:  # on Metal a fused kernel may take nothing: there is no ratio
                yield "by MLX's count", ours, theirs, other.name

    def extra_of(self, contestant: Contestant, shape: Shape, backward: bool) -> int:
        """Return the peak memory of a contestant's pass beyond its arguments, a mask, its result and its gradients."""
        call = self.prepare(contestant, self.tensors(shape, backward), backward)
        call()  # makes whatever is made only once
        before = mx.get_active_memory()  # arguments, and a mask
        mx.reset_peak_memory()
        result = call()
        peak = mx.get_peak_memory() - before
        del result
        return peak - made_in(shape, backward)
