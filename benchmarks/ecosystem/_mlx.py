"""``mlx.nn.ALiBi``: the scores, the module, softmax in float32, the values; as its documentation has it used."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

Values = np.ndarray[Any, Any]


class MlxNn:
    """The module, on the CPU. All that it adds has the dtype of the scores."""

    features = frozenset({"lengths", "offset", "symmetric", "mask"})

    def __init__(self, dtype: str, contract: str) -> None:
        self.dtype, self.contract = dtype, contract

    def slopes(self, num_heads: int) -> Values:
        with mx.stream(mx.cpu):
            return _numpy(nn.ALiBi.create_alibi_slope(num_heads, getattr(mx, self.dtype))[:, 0, 0])

    def bias(self, num_heads: int, q_len: int, kv_len: int, is_causal: bool) -> Values:
        with mx.stream(mx.cpu):
            scores, offset = mx.zeros((1, num_heads, q_len, kv_len), dtype=getattr(mx, self.dtype)), kv_len - q_len
            return _numpy(nn.ALiBi()(scores, offset=offset, mask=self.hiding(q_len, kv_len, offset, is_causal))[0])

    def attention(
        self, query: Values, key: Values, value: Values, is_causal: bool, q_offset: Any, mask: Values | None = None
    ) -> Values:
        with mx.stream(mx.cpu):
            return _numpy(self.attend(*self.tensors(query, key, value), is_causal, q_offset, mask))

    def attention_grad(
        self,
        query: Values,
        key: Values,
        value: Values,
        grad_output: Values,
        is_causal: bool,
        q_offset: Any,
        mask: Values | None = None,
    ) -> Any:
        def function(query: mx.array, key: mx.array, value: mx.array) -> mx.array:
            return self.attend(query, key, value, is_causal, q_offset, mask)

        with mx.stream(mx.cpu):
            _, gradients = mx.vjp(function, self.tensors(query, key, value), self.tensors(grad_output))
            return tuple(map(_numpy, gradients))

    def decode_step(self, query: Values, key: Values, value: Values, cache: Any) -> Any:
        if cache is not None:  # as a model's cache: keys and values one after the other
            key, value = (np.concatenate(pair, axis=2) for pair in zip(cache, (key, value), strict=True))
        offset = key.shape[2] - query.shape[2]
        return self.attention(query, key, value, True, offset), (key, value)

    def attend(
        self, query: mx.array, key: mx.array, value: mx.array, is_causal: bool, q_offset: Any, mask: Values | None
    ) -> mx.array:
        """Return the attention of MLX's arrays."""
        hiding = self.hiding(query.shape[2], key.shape[2], q_offset, is_causal, mask)
        scores = (query / math.sqrt(query.shape[-1])) @ key.swapaxes(-1, -2)
        scores = nn.ALiBi()(scores, offset=int(q_offset), mask=hiding)
        return mx.softmax(scores, axis=-1, precise=True) @ value

    def hiding(self, q_len: int, kv_len: int, q_offset: Any, is_causal: bool, mask: Values | None = None) -> mx.array:
        """Return what hides keys, 0 or minus infinity."""
        shown = np.ones((q_len, kv_len), dtype=bool)
        if is_causal:
            shown &= np.arange(kv_len) <= q_offset + np.arange(q_len)[:, None]
        shown = shown if mask is None else shown & mask
        return mx.where(mx.array(shown), 0.0, -math.inf).astype(getattr(mx, self.dtype))

    def tensors(self, *arrays: Values) -> list[mx.array]:
        """Return arrays of the adapter's dtype."""
        return [mx.array(np.ascontiguousarray(x)).astype(getattr(mx, self.dtype)) for x in arrays]


def _numpy(array: mx.array) -> Values:
    return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)
