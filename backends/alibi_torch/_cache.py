"""Keys and values of the tokens seen so far, for decoding."""

from __future__ import annotations

import array_api_compat.torch as xp
import torch
from torch import Tensor

from alibi_core._checks import floating_dtype, positive_int


class KVCache:
    """A key/value cache of fixed capacity that appends in place.

    Attributes:
        key: ``[batch_size, num_kv_heads, max_length, head_dim]``; the first ``length`` positions are in use.
        value: Likewise.
        length: Tokens held.
    """

    def __init__(
        self,
        batch_size: int,
        num_kv_heads: int,
        max_length: int,
        head_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = (
            positive_int("batch_size", batch_size),
            positive_int("num_kv_heads", num_kv_heads),
            positive_int("max_length", max_length),
            positive_int("head_dim", head_dim),
        )
        if dtype is not None:
            floating_dtype(xp, "dtype", dtype)
        self.key, self.value = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        self.length = 0

    @property
    def max_length(self) -> int:
        """Capacity, in tokens."""
        return self.key.shape[2]

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of further tokens and return those of all tokens so far.

        Args:
            key: ``[batch_size, num_kv_heads, new, head_dim]``.
            value: Likewise.

        Returns:
            Views of the cache, ``[batch_size, num_kv_heads, length, head_dim]`` each. They are valid until the next
            :meth:`append`, as far as gradients are concerned; decode under ``torch.no_grad()``.

        Raises:
            TypeError: If an argument is no tensor of four axes.
            ValueError: If the cache is full, or holds another batch, dtype or device.
        """
        batch_size, num_kv_heads, max_length, head_dim = self.key.shape
        for name, tensor in (("key", key), ("value", value)):
            if not isinstance(tensor, Tensor) or tensor.ndim != 4:
                raise TypeError(f"{name} must be a tensor of four axes, got {getattr(tensor, 'shape', tensor)}")
            if (tensor.dtype, tensor.device) != (self.key.dtype, self.key.device):
                raise ValueError(
                    f"{name} must be {self.key.dtype} on {self.key.device} as the cache is, "
                    f"got {tensor.dtype} on {tensor.device}"
                )
            expected = (batch_size, num_kv_heads, key.shape[2], head_dim)
            if tuple(tensor.shape) != expected:
                raise ValueError(
                    f"{name} must have shape {expected} (batch_size, num_kv_heads, length, head_dim) to fit the cache, "
                    f"got {tuple(tensor.shape)}"
                )
        end = self.length + key.shape[2]
        if end > max_length:
            raise ValueError(
                f"cache must have room for {key.shape[2]} more tokens, got max_length {max_length} with "
                f"{self.length} in use; make it longer with make_cache"
            )
        self.key[:, :, self.length : end] = key
        self.value[:, :, self.length : end] = value
        self.length = end
        return self.key[:, :, :end], self.value[:, :, :end]
