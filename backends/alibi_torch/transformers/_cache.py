"""Caches of ``transformers`` whose layers append keys and values in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

from alibi_torch._dispatch import needs_gradients
from alibi_torch._internals import in_transform
from alibi_torch.transformers._state import not_accelerated

SPARE_TOKENS = 16  # A new buffer has capacity for this many more tokens, or for 25 % more if that is larger.
COPIED_BYTES = 2**17  # Below this many bytes of keys, torch.cat is faster than managing a buffer.


class GrowingLayer(DynamicLayer):
    """A layer of a ``DynamicCache`` with spare capacity, so that appending a token copies only that token.

    As in a ``DynamicLayer``, ``keys`` and ``values`` are tensors of all tokens, and may be replaced from outside.
    """

    alibi_buffer: _Buffer | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values, and return the keys and values of all tokens."""
        # Under a compiler or transform, tensors have no data_ptr, which _Buffer.takes compares.
        is_traced = torch.compiler.is_compiling() or in_transform()
        is_small = not self.is_initialized or self.keys.nbytes < COPIED_BYTES
        if needs_gradients(key_states, value_states) or is_traced or is_small:
            self.alibi_buffer = None
            return super().update(key_states, value_states, *args, **kwargs)
        if self.alibi_buffer is None or not self.alibi_buffer.takes(self.keys, self.values, key_states):
            self.alibi_buffer = _Buffer(self.keys, self.values, key_states)
        self.keys, self.values = self.alibi_buffer.append(key_states, value_states)
        return self.keys, self.values

    def reset(self) -> None:
        """Remove all tokens. Work-around: before transformers 5.20, a reset only fills keys and values with zeros."""
        self.keys = self.values = self.alibi_buffer = None
        self.is_initialized = False
        super().reset()


class _Buffer:
    """Memory for the keys and values of one layer; the first ``length`` tokens are in use.

    After a copy, two caches may share a buffer. The second to append finds ``length`` changed and makes a new buffer.
    """

    def __init__(self, keys: Tensor, values: Tensor, new: Tensor) -> None:
        self.length = keys.shape[2]
        needed = self.length + new.shape[2]
        shape = *new.shape[:2], needed + max(SPARE_TOKENS, needed // 4), new.shape[3]
        dtype = torch.promote_types(keys.dtype, new.dtype)  # as torch.cat
        self.tensors = [new.new_empty(shape, dtype=dtype) for _ in range(2)]
        for tensor, held in zip(self.tensors, (keys, values), strict=True):
            tensor[:, :, : self.length] = held

    def takes(self, keys: Tensor, values: Tensor, new: Tensor) -> bool:
        """Whether these tensors are views of this buffer's tokens, and new keys fit after them."""
        buffer = self.tensors[0]
        is_ours = [x.data_ptr() for x in self.tensors] == [x.data_ptr() for x in (keys, values)]
        is_ours = is_ours and keys.shape[:3] == (*buffer.shape[:2], self.length)  # False after another cache appended
        # A tensor made in inference mode cannot be written outside of it.
        is_frozen = buffer.is_inference() and not torch.is_inference_mode_enabled()
        has_room = self.length + new.shape[2] <= buffer.shape[2]
        return is_ours and has_room and not is_frozen and torch.promote_types(buffer.dtype, new.dtype) == buffer.dtype

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values after the tokens in use, and return views of all tokens."""
        start, self.length = self.length, self.length + key.shape[2]
        for tensor, new in zip(self.tensors, (key, value), strict=True):
            tensor[:, :, start : self.length] = new
        keys, values = (x[:, :, : self.length] for x in self.tensors)
        return keys, values


class AlibiCache(Cache):
    """A cache for an accelerated model that appends in place.

    A ``DynamicCache`` copies all keys at each token, and a ``StaticCache`` needs a maximum length. The model and its
    ``generate`` accept this cache in their place.

    Args:
        model: The accelerated model.

    Raises:
        ValueError: If the model is not accelerated.

    Example:
        >>> import torch
        >>> from transformers import BloomConfig, BloomForCausalLM
        >>> from alibi_torch.transformers import accelerate
        >>> model = BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=4)).eval()
        >>> cache = AlibiCache(accelerate(model))
        >>> logits = model(torch.tensor([[7, 8, 9]]), cache=cache, use_cache=True).logits
        >>> cache.get_seq_length()
        3
    """

    def __init__(self, model: Any) -> None:
        layers = [x for x in model.modules() if hasattr(x, "alibi_slopes")]
        if not layers:
            raise not_accelerated(model)
        if [x.layer_idx for x in layers] != list(range(len(layers))):
            raise ValueError(
                f"model must hold the layers of one accelerated model, in order, got {len(layers)} that are numbered "
                f"{[x.layer_idx for x in layers]}; make a cache for each model in it"
            )
        super().__init__(layers=[GrowingLayer() for _ in layers])


def append(cache: Any, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Append keys and values of new tokens to a layer of a cache, and return the keys and values of all its tokens."""
    layer = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
    # An offloaded cache moves `keys` and `values` between devices; their buffer would stay in device memory.
    if type(layer) is DynamicLayer and not torch.compiler.is_compiling() and not getattr(cache, "offloading", False):
        layer.__class__ = GrowingLayer
    return cache.update(key, value, layer_idx)


def unknown_cache(cache: Any) -> str | None:
    """Return the name of an unsupported cache; None if its keys are those of all tokens, in order."""
    if not isinstance(cache, Cache):
        return type(cache).__name__
    for kind in [type(layer) for layer in cache.layers] or [cache.layer_class_to_replicate]:
        if kind not in (DynamicLayer, GrowingLayer, StaticLayer):
            return f"{type(cache).__name__} with {getattr(kind, '__name__', kind)}"
    return None
