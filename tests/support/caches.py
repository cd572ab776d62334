"""The caches of all backends behind one face: NumPy in, NumPy out, heads first, changed in place."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support.frameworks import FRAMEWORK, Framework


@dataclass
class Cache:
    """A cache of one backend."""

    framework: Framework
    inner: Any
    dtype: str

    @property
    def is_functional(self) -> bool:
        return self.framework.name == "jax"

    def tensor(self, values: Any) -> Any:
        """Return values, heads first, as the backend takes them; what is no floating NumPy array as it is."""
        if not isinstance(values, np.ndarray) or values.dtype != np.float64:
            return values
        swapped = np.swapaxes(values, 1, 2) if self.is_functional and values.ndim == 4 else values
        return self.framework.array(swapped, self.dtype)

    def append(self, key: Any, value: Any, lengths: np.ndarray | None = None) -> None:
        own = {} if lengths is None else {"lengths": self.framework.array(lengths)}
        result = self.inner.append(self.tensor(key), self.tensor(value), **own)
        self.inner = result if self.is_functional else self.inner

    def attend(self, query: Any, slopes: Any = None, **rules: Any) -> np.ndarray:
        """Return attention in float64; a mask or segments of the tokens held are padded to all slots where need be."""
        slopes = self.framework.array(np.asarray(slopes)) if isinstance(slopes, tuple) else slopes
        if self.is_functional and isinstance(rules.get("mask"), np.ndarray):
            rules["mask"] = self._to_all_slots(rules["mask"])
        if self.is_functional and isinstance(rules.get("segment_ids"), tuple):
            rules["segment_ids"] = rules["segment_ids"][0], self._to_all_slots(rules["segment_ids"][1])
        result = self.framework.numpy(self.inner.attend(self.tensor(query), slopes, **self.framework.placed(rules)))
        return np.swapaxes(result, 1, 2) if self.is_functional else result

    def _to_all_slots(self, values: np.ndarray) -> np.ndarray:
        return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, max(self.inner.max_length - values.shape[-1], 0))])

    def truncate(self, length: Any) -> None:
        result = self.inner.truncate(length)
        self.inner = result if self.is_functional else self.inner

    def select_batch(self, indices: list[int], dtype: Any = np.int32) -> None:
        result = self.inner.select_batch(self.framework.array(np.asarray(indices, dtype)))
        self.inner = result if self.is_functional else self.inner

    @property
    def length(self) -> int:
        return int(np.max(np.asarray(self.inner.length)))

    @property
    def lengths(self) -> Any:
        """How many tokens each row holds, or all of them do."""
        is_one = self.is_functional or self.inner.lengths is None
        return np.asarray(self.inner.length if is_one else self.inner.lengths).tolist()

    @property
    def key_norms(self) -> np.ndarray:
        """The bounds of the blocks in use, ``[batch, num_kv_heads, blocks]``."""
        return self.framework.numpy(self.inner.key_norms)[:, :, : -(-self.length // 128)]


def keeping(name: str, sizes: tuple[int, int, int, int], dtype: str = "float32") -> Cache:
    """Return a ``KVCache`` of so many sequences, key/value heads, tokens, and features a head."""
    framework, cache_class = FRAMEWORK[name], importlib.import_module(f"alibi_{name}").KVCache
    batch_size, num_kv_heads, max_length, head_dim = sizes
    if name == "mlx":  # which takes the rest from the first keys
        return Cache(framework, cache_class(batch_size=batch_size, max_length=max_length), dtype)
    make = cache_class if name == "torch" else cache_class.make
    inner = make(batch_size, num_kv_heads, max_length, head_dim, dtype=getattr(framework.xp, dtype))
    return Cache(framework, inner, dtype)
