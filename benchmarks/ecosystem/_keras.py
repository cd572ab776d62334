"""keras-hub: ``AlibiBias`` in the attention that its BLOOM has, ``BloomAttention``, with PyTorch under Keras.

keras-hub asks for TensorFlow when it is installed, and for none when it is imported: ``pip install --no-deps``.
"""

from __future__ import annotations

import os
import warnings
from functools import partial
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import torch
from keras_hub.layers import AlibiBias
from keras_hub.src.models.bloom.bloom_attention import BloomAttention
from torch import Tensor

from benchmarks.ecosystem._torch import TorchAdapter, Values, hidden, to_numpy

if keras.backend.backend() != "torch":
    raise ImportError(f"keras must be imported with KERAS_BACKEND=torch, got {keras.backend.backend()}")

CACHE_LENGTH = 32  # of the keys that its cache has room for, as generate() makes it before it begins


class KerasHub(TorchAdapter):
    """Counts from the last key, a row for all queries, in the compute dtype."""

    features: frozenset[str] = frozenset()

    def slopes(self, num_heads: int) -> Values:
        return -self.key_bias(num_heads, 2)[:, 0]

    def key_bias(self, num_heads: int, kv_len: int) -> Values:
        """Return what the layer adds to scores of 0, ``[num_heads, kv_len]``."""
        scores = torch.zeros(1, num_heads, 1, kv_len, dtype=self.torch_dtype)
        return to_numpy(AlibiBias(dtype=self.dtype)(scores)[0, :, 0])

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        q_len, kv_len = query.shape[2], key.shape[2]
        if q_len > kv_len:
            raise NotImplementedError("no queries before the first key")
        return self.call(query, key, value, ~hidden(q_len, kv_len))

    def call(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor, **options: Any) -> Any:
        """Return the result of its attention, whose projections give back query, key and value."""
        batch, num_heads, q_len, head_dim = query.shape
        if key.shape[1] != num_heads:
            raise NotImplementedError("as many key/value heads as query heads")
        layer = self.layer(num_heads, head_dim)
        for name, tensor in {"_query_dense": query, "_key_dense": key, "_value_dense": value}.items():
            object.__setattr__(layer, name, partial(_given, tensor.transpose(1, 2)))
        object.__setattr__(layer, "_output_dense", lambda features: features)
        features = query.new_zeros(batch, q_len, num_heads * head_dim)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*softmax over axis")  # of a single key
            result = layer(features, attention_mask=visible[None], **options)
        result, *rest = result if isinstance(result, tuple) else (result,)
        result = result.unflatten(2, (num_heads, head_dim)).transpose(1, 2)
        return (result, *rest) if rest else result

    def layer(self, num_heads: int, head_dim: int) -> BloomAttention:
        """Return its attention."""
        layer = BloomAttention(num_heads, dtype=self.dtype)
        layer.build((None, None, num_heads * head_dim))
        return layer

    def decode_step(self, query: Values, key: Values, value: Values, cache: Any) -> Any:
        """Write into its cache, which has room for more keys than there are yet: those are masked."""
        tensors = [self.tensor(x) for x in (query, key, value)]
        batch, num_heads, q_len, head_dim = query.shape
        kept, index = (torch.zeros(batch, 2, CACHE_LENGTH, num_heads, head_dim), 0) if cache is None else cache
        positions = torch.arange(index, index + q_len)[:, None]
        visible = torch.arange(CACHE_LENGTH) <= positions
        with torch.no_grad():
            result, kept = self.call(*tensors, visible, cache=kept.to(self.torch_dtype), cache_update_index=index)
        return to_numpy(result), (kept, index + q_len)


def _given(tensor: Tensor, features: Tensor) -> Tensor:
    return tensor
