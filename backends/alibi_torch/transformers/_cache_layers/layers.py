"""Keys and values of one layer's tokens so far, in the caches of transformers."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, StaticLayer

from alibi_torch._cpu import SIZES, KeyNorms, norm_bounds
from alibi_torch._internals import in_transform
from alibi_torch.caches import BLOCK
from alibi_torch.transformers._rules import Rules, is_short

ROOM = 16  # tokens, at least, that a growing cache makes room for at a time


def extended(cache: Any, layer_idx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, rules: Rules) -> Tensor:
    """Append keys and values of further tokens to a cache, and return the attention of those tokens over all."""
    layer = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
    if isinstance(layer, AttendingLayer):
        return layer.attend(query, key, value, mask, rules)
    key, value = as_held(layer, key, value)
    past = cache.get_seq_length(layer_idx)
    if torch.compiler.is_compiling():  # a tensor, in a cache of fixed size, stays one
        past = past.clone() if isinstance(past, Tensor) else past
        keys, values = cache.update(key, value, layer_idx)
        return rules.attend(query, keys, values, mask, past, None)
    past = int(past)
    # What is offloaded is the tensors that others know of; memory with room in it would stay on the device.
    if type(layer) is DynamicLayer and not getattr(cache, "offloading", False):
        layer.__class__ = GrowingLayer
    # Of many queries the plan takes better bounds by itself.
    wants_norms = query.shape[2] <= SIZES.few and not is_short(query, key, past + key.shape[2])
    known = _KnownNorms.of(layer, past) if wants_norms else None
    keys, values = cache.update(key, value, layer_idx)
    if known is None:
        return rules.attend(query, keys, values, mask, past, None)
    norms = known.extended(cache.layers[layer_idx], keys[:, :, : past + key.shape[2]])
    return rules.attend(query, keys, values, mask, past, norms)


def as_held(layer: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat heads for a cache that somebody filled with one for each query head, as PEFT's prefixes are."""
    held = getattr(layer, "keys", None)
    if held is None or held.ndim < 4 or held.shape[1] <= key.shape[1]:
        return key, value
    times = held.shape[1] // key.shape[1]
    return key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)


def unknown_cache(cache: Any) -> str | None:
    """Return the name of a cache whose keys may not be those of all tokens, in order; None for one whose are."""
    if not isinstance(cache, Cache):
        return type(cache).__name__
    kinds = [type(layer) for layer in cache.layers] or [cache.layer_class_to_replicate]
    known = (DynamicLayer, GrowingLayer, StaticLayer)
    for kind in kinds:
        if kind not in known and not (isinstance(kind, type) and issubclass(kind, AttendingLayer)):
            return f"{type(cache).__name__} with {getattr(kind, '__name__', kind)}"
    return None


class AttendingLayer(CacheLayerMixin):
    """A layer that does not hold the keys of all tokens, and so computes attention itself."""

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, rules: Rules) -> Tensor:
        """Append keys and values, and return the attention of their tokens over all."""


class _KnownNorms:
    """Bounds of the norms of keys in a layer of transformers' caches, as long as nobody else changes its keys.

    Attributes:
        values: ``[batch, num_kv_heads, blocks]``; None while nothing is known.
        length: Of the keys that they are of, in tokens.
    """

    def __init__(self, values: Tensor | None = None, length: int = 0, keys: Tensor | None = None) -> None:
        self.values, self.length = values, length
        self._keys: Any = None if keys is None else weakref.ref(keys)
        self._version = -1 if keys is None else keys._version

    @classmethod
    def of(cls, layer: Any, past: int) -> _KnownNorms:
        """Return what is known of a layer's first ``past`` keys."""
        known = getattr(layer, "alibi_norms", None)
        if known is None or known._keys is None or known.length != past or known._keys() is not layer.keys:
            return cls()
        return known if layer.keys._version == known._version else cls()

    def extended(self, layer: Any, keys: Tensor) -> KeyNorms:
        """Return bounds of all of a layer's keys, having measured those that are new, for it to remember."""
        batch, heads, length, _ = keys.shape
        with torch.no_grad():
            new = norm_bounds(keys[:, :, self.length :])
            values = new.new_zeros(batch, heads, -(-length // BLOCK))
            if self.values is not None:
                values[..., : self.values.shape[-1]] = self.values
            index = torch.arange(self.length, length, device=new.device) // BLOCK
            values.scatter_reduce_(2, index.expand_as(new), new, "amax")
        if not layer.keys.is_inference():  # whose changes cannot be told
            layer.alibi_norms = _KnownNorms(values, length, layer.keys)
        return KeyNorms(values, BLOCK)

    def __reduce__(self) -> tuple[Any, ...]:
        return _KnownNorms, ()  # a copy's keys are others


class GrowingLayer(DynamicLayer):
    """A layer of a ``DynamicCache`` that has room for more behind its keys, so that a token need not copy them all.

    To others it is what it was: ``keys`` and ``values`` are of all tokens, and may be replaced.

    Attributes:
        copied: Bytes of keys, up to which they are copied all the same, as that takes less time.
    """

    copied = 2**17

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values, and return those of all tokens."""
        wants_gradients = torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad)
        # What compiles or transforms functions cannot look where memory lies.
        is_traced = torch.compiler.is_compiling() or in_transform()
        if wants_gradients or is_traced or not self.is_initialized or self.keys.nbytes < self.copied:
            self.alibi_room = None
            return super().update(key_states, value_states, *args, **kwargs)
        room, length = getattr(self, "alibi_room", None), self.get_seq_length()
        if room is None or not room.follows(self.keys, self.values, length) or not room.holds(key_states, length):
            room = _Room(self.keys, self.values, key_states, length)
        self.alibi_room = room
        self.keys, self.values = room.append(key_states, value_states, length)
        return self.keys, self.values

    def reset(self) -> None:
        """Forget all tokens, as transformers does by now; earlier versions kept as many zeros."""
        self.keys = self.values = self.alibi_room = None
        self.is_initialized = False
        super().reset()


def is_frozen(tensor: Tensor) -> bool:
    """Whether a tensor must not be written to: it is of an inference mode that has ended, or gradients need it."""
    return tensor.requires_grad or (tensor.is_inference() and not torch.is_inference_mode_enabled())


class _Room:
    """Memory for keys and values, some of it in use, by whoever was the last to append to it."""

    def __init__(self, keys: Tensor, values: Tensor, like: Tensor, length: int) -> None:
        batch, heads, new, _ = like.shape
        self.size = length + new + max(ROOM, (length + new) // 4)
        dtype = torch.promote_types(keys.dtype, like.dtype)  # as torch.cat
        self.tensors = [like.new_empty(batch, heads, self.size, like.shape[3], dtype=dtype) for _ in range(2)]
        for tensor, held in zip(self.tensors, (keys, values), strict=True):
            tensor[:, :, :length] = held
        self.used = length

    def follows(self, keys: Tensor, values: Tensor, length: int) -> bool:
        """Whether these are the first ``length`` tokens in here, and nobody has appended others to them."""
        starts = [x.data_ptr() for x in self.tensors] == [x.data_ptr() for x in (keys, values)]
        if is_frozen(self.tensors[0]):
            return False
        return starts and self.used == length and keys.shape[:2] == self.tensors[0].shape[:2]

    def holds(self, new: Tensor, length: int) -> bool:
        """Whether there is room for these too, in a dtype that does not round them."""
        dtype = self.tensors[0].dtype
        return length + new.shape[2] <= self.size and torch.promote_types(dtype, new.dtype) == dtype

    def append(self, key: Tensor, value: Tensor, length: int) -> tuple[Tensor, Tensor]:
        end = length + key.shape[2]
        for tensor, new in zip(self.tensors, (key, value), strict=True):
            tensor[:, :, length:end] = new
        self.used = end
        keys, values = (x[:, :, :end] for x in self.tensors)
        return keys, values
