"""Mistakes of the forward pass that are not in the kit's catalogue."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from benchmarks.mutants._mutant import mutant
from benchmarks.mutants.reference import Array, Call, Reference


@mutant("slopes", expected="at most 64|64 heads|repeat|begin again|the first slopes again", is_diagnosable=False)
class SlopesOfAtMost64Heads(Reference):
    """The table of slopes ends with 64 heads, and begins again for more."""

    def slopes(self, num_heads: int) -> Array:
        return super().slopes(min(num_heads, 64))[np.arange(num_heads) % 64]


@mutant("causal_bias", expected="finite|mask|infin|not hidden|-?10.?000|1e-?4")
class CausalBiasOfMinusThousand(Reference):
    """What the causal mask hides has a bias of -1000, and is not hidden from large scores."""

    def bias(self, num_heads: int, q_len: int, kv_len: int, is_causal: bool) -> Array:
        return np.maximum(super().bias(num_heads, q_len, kv_len, is_causal), -1000)


@mutant("precision", expected="int16|wrap|overflow|32.?76|65.?53|far", is_diagnosable=False)
class PositionsInInt16(Reference):
    """Positions are kept in 16 bits, and wrap."""

    def q_positions(self, call: Call) -> Array:
        return super().q_positions(call).astype(np.int16).astype(np.int64)


@mutant("combined", expected="mask.*(key/value|kv|group)|(key/value|kv|group).*mask", is_diagnosable=False)
class MaskByKvHead(Reference):
    """A mask by head is looked up by key/value head, in a kernel without a backward pass."""

    attention_grad: Any = None

    def visible_by_mask(self, call: Call) -> Array | bool:
        if call.mask is None or call.mask.shape[-3] == 1:
            return super().visible_by_mask(call)
        return call.mask[..., np.arange(call.query.shape[1]) // call.group, :, :]


@mutant("causal", expected="transpos|reshap|axes|swap|layout|mixed", is_diagnosable=False)
class ReshapedInsteadOfTransposed(Reference):
    """Heads and length are exchanged by a reshape, which mixes them, instead of a transposition."""

    def output(self, call: Call) -> Array:
        result = super().output(call)
        batch, num_heads, q_len, head_dim = result.shape
        return result.reshape(batch, q_len, num_heads, head_dim).swapaxes(1, 2).reshape(result.shape)


@mutant("combined", expected="transpos|layout|axes|swap|heads.*(length|len)", is_diagnosable=False)
class LayoutGuessed(Reference):
    """The layout is guessed from the shape: as many heads as queries are taken for [batch, length, heads, head_dim]."""

    def output(self, call: Call) -> Array:
        if not call.query.shape[1] == call.query.shape[2] == call.key.shape[1] == call.key.shape[2] > 1:
            return super().output(call)
        tensors = {name: getattr(call, name).swapaxes(1, 2) for name in ("query", "key", "value")}
        return super().output(dataclasses.replace(call, **tensors)).swapaxes(1, 2)


@mutant("causal", expected="softmax.*heads|over heads", is_diagnosable=False)
class SoftmaxOverHeads(Reference):
    """The softmax runs over heads instead of keys."""

    def softmax(self, scores: Array) -> Array:
        return super().softmax(scores.swapaxes(1, -1)).swapaxes(1, -1)


@mutant("precision", expected="(sum|denominator).*float16", is_diagnosable=False)
class SumsInFloat16(Reference):
    """A row's weights are summed up in float16, one after the other."""

    dtype = "float16"

    def softmax(self, scores: Array) -> Array:
        highest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
        weights = np.exp(scores - np.where(np.isfinite(highest), highest, 0)).astype(np.float16)
        total = np.add.accumulate(weights, axis=-1, dtype=np.float16)[..., -1:].astype(np.float32)
        return weights.astype(np.float32) / np.where(total > 0, total, 1)
