"""A correct adapter in NumPy, complete and plain, cut into small steps, each of which a mutant may get wrong.

It is written from the paper and the contract of :class:`alibi_core.conformance.Adapter` alone; it shares no code with
what judges it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from alibi_core.conformance import FEATURES

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Call:
    """The arguments of one call, defaults filled in, tensors in the dtype in which is computed.

    Attributes:
        query, key, value: ``[batch, num_heads or num_kv_heads, q_len or kv_len, head_dim]``.
        slopes, future_slopes: ``[num_heads]`` or ``[batch, num_heads]``, as given.
        q_offset: ``[batch, 1, 1, 1]``.
        segment_ids: None, or ``[batch, q_len]`` and ``[batch, kv_len]``.
        mask: None, or booleans that broadcast to ``[batch, num_heads, q_len, kv_len]``.
    """

    query: Array
    key: Array
    value: Array
    slopes: Array
    is_causal: bool
    q_offset: Array
    scale: float
    future_slopes: Array | None = None
    window_size: int | None = None
    segment_ids: tuple[Array, Array] | None = None
    mask: Array | None = None

    @property
    def group(self) -> int:
        return self.query.shape[1] // max(1, self.key.shape[1])

    @property
    def lengths(self) -> tuple[int, int]:
        return self.query.shape[2], self.key.shape[2]


class Reference:
    """Correct attention with all features; ``dtype`` may be replaced."""

    dtype = "float32"
    features = frozenset(FEATURES)

    # --- The five functions -------------------------------------------------------------------------------------------

    def slopes(self, num_heads: int) -> Array:
        return self.slope_list(num_heads).astype(self.working_dtype)

    def bias(self, num_heads: int, q_len: int, kv_len: int, is_causal: bool) -> Array:
        tensors = (np.zeros((1, num_heads, n, 1), self.working_dtype) for n in (q_len, kv_len, kv_len))
        call = self.call(*tensors, self.slopes(num_heads), is_causal=is_causal, q_offset=kv_len - q_len)
        return self.masked(call, self.raw_bias(call))[0].astype(self.working_dtype)

    def attention(self, query: Array, key: Array, value: Array, slopes: Array, **arguments: Any) -> Array:
        return self.stored(self.output(self.call(query, key, value, slopes, **arguments)))

    def attention_grad(
        self,
        query: Array,
        key: Array,
        value: Array,
        slopes: Array,
        *,
        grad_output: Array,
        wrt: tuple[str, ...] | None = None,
        **arguments: Any,
    ) -> dict[str, Array]:
        call = self.call(query, key, value, slopes, **arguments)
        grads = self.grads(call, grad_output.astype(self.working_dtype), wrt)
        return {name: x for name, x in grads.items() if wrt is None or name in wrt}

    def decode_step(self, query: Array, key: Array, value: Array, slopes: Array, cache: Any) -> tuple[Array, Any]:
        if cache is None:
            cache = key[:, :, :0], value[:, :, :0]
        keys, values = (np.concatenate(pair, axis=2) for pair in zip(cache, (key, value), strict=True))
        q_offset = self.decode_offset(query, keys)
        return self.attention(query, keys, values, slopes, is_causal=True, q_offset=q_offset), (keys, values)

    # --- Steps of the forward pass ------------------------------------------------------------------------------------

    def call(
        self, query: Array, key: Array, value: Array, slopes: Array, *, q_offset: int | Array, **arguments: Any
    ) -> Call:
        """Return the arguments, defaults filled in."""
        query, key, value = (x.astype(self.working_dtype) for x in (query, key, value))
        offsets = np.broadcast_to(np.asarray(q_offset, np.int64), query.shape[:1])[:, None, None, None]
        given = {name: x for name, x in arguments.items() if x is not None}
        return Call(query, key, value, slopes, q_offset=offsets, **{"scale": query.shape[-1] ** -0.5} | given)

    def slope_list(self, num_heads: int) -> Array:
        """Return the slopes of the paper's code: a power of two's, then every other one of twice as many."""
        power = 1 << (num_heads.bit_length() - 1)
        own = 2.0 ** (-8.0 * np.arange(1, power + 1) / power)
        between = 2.0 ** (-8.0 * np.arange(1, 2 * power + 1, 2) / (2 * power))
        return np.concatenate([own, between])[:num_heads]

    def q_positions(self, call: Call) -> Array:
        """Return ``[batch, 1, q_len, 1]``."""
        return call.q_offset + np.arange(call.lengths[0])[:, None]

    def kv_positions(self, call: Call) -> Array:
        """Return what broadcasts to ``[batch, 1, 1, kv_len]``."""
        return np.arange(call.lengths[1])[None, None, None]

    def ahead(self, call: Call) -> Array:
        """Return how many tokens a key lies after a query, ``[batch, 1, q_len, kv_len]``."""
        return self.kv_positions(call) - self.q_positions(call)

    def by_head(self, call: Call, slopes: Array) -> Array:
        """Return slopes as ``[batch, num_heads, 1, 1]``."""
        return np.broadcast_to(slopes, call.query.shape[:2])[..., None, None]

    def steepness(self, call: Call) -> Array:
        """Return the slope that counts for each key, ``[batch, num_heads, q_len, kv_len]``."""
        past = self.by_head(call, call.slopes)
        future = past if call.future_slopes is None else self.by_head(call, call.future_slopes)
        return np.where(self.ahead(call) > 0, future, past)

    def visible_by_causality(self, call: Call) -> Array | bool:
        return self.ahead(call) <= 0 if call.is_causal else True

    def visible_by_window(self, call: Call) -> Array | bool:
        return True if call.window_size is None else np.abs(self.ahead(call)) <= call.window_size

    def visible_by_segments(self, call: Call) -> Array | bool:
        if call.segment_ids is None:
            return True
        q_ids, kv_ids = call.segment_ids
        return (q_ids[:, :, None] == kv_ids[:, None, :])[:, None]

    def visible_by_mask(self, call: Call) -> Array | bool:
        return True if call.mask is None else call.mask

    def visible(self, call: Call) -> Array:
        """Return which keys a query may look at, ``[batch, num_heads, q_len, kv_len]``."""
        by_position = np.logical_and(self.visible_by_causality(call), self.visible_by_window(call))
        by_argument = np.logical_and(self.visible_by_segments(call), self.visible_by_mask(call))
        return np.broadcast_to(by_position & by_argument, (*call.query.shape[:3], call.key.shape[2]))

    def raw_bias(self, call: Call) -> Array:
        """Return what is added to each score, ``[batch, num_heads, q_len, kv_len]``, in float64."""
        return -self.steepness(call).astype(np.float64) * np.abs(self.ahead(call))

    def position_bias(self, call: Call) -> Array:
        """Return the same, counted from each row's nearest key, and rounded; softmax ignores from where it counts."""
        bias = self.raw_bias(call)
        highest = np.where(self.visible(call), bias, -np.inf).max(axis=-1, keepdims=True, initial=-np.inf)
        return (bias - np.where(np.isfinite(highest), highest, 0)).astype(self.working_dtype)

    def masked(self, call: Call, scores: Array) -> Array:
        return np.where(self.visible(call), scores, -np.inf)

    def grouped(self, call: Call, x: Array) -> Array:
        """Return keys or values for each query head."""
        return x.repeat(call.group, axis=1)

    def products(self, call: Call) -> Array:
        """Return the scaled products of queries and keys."""
        scale = np.asarray(call.scale, self.working_dtype)
        return (call.query @ self.grouped(call, call.key).swapaxes(-1, -2)) * scale

    def scores(self, call: Call) -> Array:
        return self.masked(call, self.products(call) + self.position_bias(call))

    def softmax(self, scores: Array) -> Array:
        """Return the weights; zeros where a query may look nowhere."""
        highest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
        weights = np.exp(scores - np.where(np.isfinite(highest), highest, 0))
        total = weights.sum(axis=-1, keepdims=True)
        return weights / np.where(total > 0, total, 1)

    def weights(self, call: Call) -> Array:
        return self.softmax(self.scores(call))

    def output(self, call: Call) -> Array:
        return self.weights(call) @ self.grouped(call, call.value)

    # --- Steps of the backward pass -----------------------------------------------------------------------------------

    def grads(self, call: Call, grad_output: Array, wrt: tuple[str, ...] | None) -> dict[str, Array]:
        """Return all gradients, of which those that ``wrt`` names will be kept."""
        weights = self.weights(call)
        grad_scores = self.grad_scores(call, weights, grad_output)
        grads = {
            "query": self.stored(self.grad_query(call, grad_scores)),
            "key": self.stored(self.grad_key(call, grad_scores)),
            "value": self.stored(self.grad_value(call, weights, grad_output)),
        }
        return grads | self.grad_both_slopes(call, grad_scores)

    def grad_scores(self, call: Call, weights: Array, grad_output: Array) -> Array:
        grad_weights = grad_output @ self.grouped(call, call.value).swapaxes(-1, -2)
        delta = (weights * grad_weights).sum(axis=-1, keepdims=True)
        return weights * (grad_weights - delta)

    def grad_query(self, call: Call, grad_scores: Array) -> Array:
        return (grad_scores @ self.grouped(call, call.key)) * np.asarray(call.scale, self.working_dtype)

    def grad_key(self, call: Call, grad_scores: Array) -> Array:
        by_head = (grad_scores.swapaxes(-1, -2) @ call.query) * np.asarray(call.scale, self.working_dtype)
        return self.summed_over_group(call, by_head)

    def grad_value(self, call: Call, weights: Array, grad_output: Array) -> Array:
        return self.summed_over_group(call, weights.swapaxes(-1, -2) @ grad_output)

    def summed_over_group(self, call: Call, by_head: Array) -> Array:
        batch, num_kv_heads, kv_len, head_dim = call.key.shape
        return by_head.reshape(batch, num_kv_heads, call.group, kv_len, head_dim).sum(axis=2)

    def grad_both_slopes(self, call: Call, grad_scores: Array) -> dict[str, Array]:
        ahead = self.ahead(call)
        if call.future_slopes is None:
            return {"slopes": self.grad_slopes(call, grad_scores, np.abs(ahead))}
        return {
            "slopes": self.grad_slopes(call, grad_scores, np.maximum(-ahead, 0)),
            "future_slopes": self.grad_slopes(call, grad_scores, np.maximum(ahead, 0)),
        }

    def grad_slopes(self, call: Call, grad_scores: Array, distances: Array) -> Array:
        """Return the gradient of slopes that are the negated multiples of these distances."""
        by_entry = -(grad_scores * distances.astype(self.working_dtype)).sum(axis=(2, 3))
        return by_entry if call.slopes.ndim == 2 else by_entry.sum(axis=0)

    # --- Decoding -----------------------------------------------------------------------------------------------------

    def decode_offset(self, query: Array, keys: Array) -> int:
        """Return the position of the first of the new queries, when all keys are there."""
        return keys.shape[2] - query.shape[2]

    # --- Precision ----------------------------------------------------------------------------------------------------

    @property
    def working_dtype(self) -> Any:
        return np.float64 if self.dtype == "float64" else np.float32

    def stored(self, result: Array) -> Array:
        """Return a result as the dtype holds it; NumPy has no bfloat16, so it is float32 with a short fraction."""
        return to_bfloat16(result) if self.dtype == "bfloat16" else result.astype(self.dtype)


class Blockwise(Reference):
    """The same, with keys in blocks and a softmax that is corrected as it goes along (Flash Attention)."""

    block_size = 64

    def output(self, call: Call) -> Array:
        scores, values = self.scores(call), self.grouped(call, call.value)
        highest, total, result = self.beginning(call)
        for start in range(0, call.lengths[1], self.block_size):
            block = slice(start, start + self.block_size)
            highest, total, result = self.updated(highest, total, result, scores[..., block], values[:, :, block])
        return result / np.where(total > 0, total, 1)

    def beginning(self, call: Call) -> tuple[Array, Array, Array]:
        """Return each row's highest score, sum of weights and sum of weighted values, before any key."""
        highest = np.full((*call.query.shape[:3], 1), -np.inf, self.working_dtype)
        return highest, np.zeros_like(highest), np.zeros_like(call.query)

    def updated(
        self, highest: Array, total: Array, result: Array, scores: Array, values: Array
    ) -> tuple[Array, Array, Array]:
        """Return the three after one more block of keys."""
        new = np.maximum(highest, scores.max(axis=-1, keepdims=True, initial=-np.inf))
        base = np.where(np.isfinite(new), new, 0)
        correction, weights = np.exp(highest - base), np.exp(scores - base)
        return new, total * correction + weights.sum(axis=-1, keepdims=True), result * correction + weights @ values


def to_bfloat16(x: Array) -> Array:
    """Return float32 values that bfloat16 holds: the upper 16 bits, rounded to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return np.where(np.isfinite(x), rounded.astype(np.uint32).view(np.float32), x).astype(np.float32)
