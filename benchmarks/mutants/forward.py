"""Mistakes of the forward pass that are not in the kit's catalogue."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from benchmarks.mutants._mutant import instead, mutant
from benchmarks.mutants.reference import Array, Call, Reference


@instead(Reference, "slopes", "slopes")
def slopes_of_at_most_64_heads(self, num_heads: int) -> Array:
    """The table of slopes ends with 64 heads, and begins again for more."""
    return Reference.slopes(self, min(num_heads, 64))[np.arange(num_heads) % 64]


@instead(Reference, "bias", "causal_bias", expected="finite|mask|infin|not hidden|-?10.?000|1e-?4")
def causal_bias_of_minus_thousand(self, num_heads: int, q_len: int, kv_len: int, is_causal: bool) -> Array:
    """What the causal mask hides has a bias of -1000, and is not hidden from large scores."""
    return np.maximum(Reference.bias(self, num_heads, q_len, kv_len, is_causal), -1000)


@instead(Reference, "q_positions", "precision")
def positions_in_int_16(self, call: Call) -> Array:
    """Positions are kept in 16 bits, and wrap."""
    return Reference.q_positions(self, call).astype(np.int16).astype(np.int64)


@mutant("combined")
class MaskByKvHead(Reference):
    """A mask by head is looked up by key/value head, in a kernel without a backward pass."""

    attention_grad: Any = None

    def visible_by_mask(self, call: Call) -> Array | bool:
        if call.mask is None or call.mask.shape[-3] == 1:
            return super().visible_by_mask(call)
        return call.mask[..., np.arange(call.query.shape[1]) // call.group, :, :]


@instead(Reference, "output", "causal")
def reshaped_instead_of_transposed(self, call: Call) -> Array:
    """Heads and length are exchanged by a reshape, which mixes them, instead of a transposition."""
    result = Reference.output(self, call)
    batch, num_heads, q_len, head_dim = result.shape
    return result.reshape(batch, q_len, num_heads, head_dim).swapaxes(1, 2).reshape(result.shape)


@instead(Reference, "output", "combined")
def layout_guessed(self, call: Call) -> Array:
    """The layout is guessed from the shape: as many heads as queries are taken for [batch, length, heads, head_dim]."""
    if not call.query.shape[1] == call.query.shape[2] == call.key.shape[1] == call.key.shape[2] > 1:
        return Reference.output(self, call)
    tensors = {name: getattr(call, name).swapaxes(1, 2) for name in ("query", "key", "value")}
    return Reference.output(self, dataclasses.replace(call, **tensors)).swapaxes(1, 2)


@instead(Reference, "softmax", "causal")
def softmax_over_heads(self, scores: Array) -> Array:
    """The softmax runs over heads instead of keys."""
    return Reference.softmax(self, scores.swapaxes(1, -1)).swapaxes(1, -1)


@mutant("precision")
class SumsInFloat16(Reference):
    """A row's weights are summed up in float16, one after the other."""

    dtype = "float16"

    def softmax(self, scores: Array) -> Array:
        highest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
        weights = np.exp(scores - np.where(np.isfinite(highest), highest, 0)).astype(np.float16)
        total = np.add.accumulate(weights, axis=-1, dtype=np.float16)[..., -1:].astype(np.float32)
        return weights.astype(np.float32) / np.where(total > 0, total, 1)


@instead(Reference, "visible_by_segments", "segments")
def negative_segments_are_padding(self, call: Call) -> Array | bool:
    """Segments with negative ids are taken for padding."""
    sees = Reference.visible_by_segments(self, call)
    return sees if call.segment_ids is None else sees & (call.segment_ids[1] >= 0)[:, None, None]


@instead(Reference, "visible_by_segments", "segments", "long")
def segments_end_with_their_run(self, call: Call) -> Array | bool:
    """A segment that goes on after another is taken for a new one."""
    if call.segment_ids is None or not np.array_equal(*call.segment_ids):
        return Reference.visible_by_segments(self, call)
    runs = np.cumsum(np.diff(call.segment_ids[0], axis=1, prepend=0) != 0, axis=1)
    return Reference.visible_by_segments(self, dataclasses.replace(call, segment_ids=(runs, runs)))
