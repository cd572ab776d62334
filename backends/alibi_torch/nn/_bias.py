"""The bias as a module that caches the last bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import alibi_core
from alibi_core.backend.checks import explains_keywords, non_negative_int
from alibi_core.backend.models import LayerShape
from alibi_torch.nn._slopes import KeepsSlopes


class AlibiBias(KeepsSlopes):
    """Builds the ALiBi bias; rebuilds it only when lengths, dtype or device change.

    Use it in models that compute scores themselves. :func:`alibi_torch.attention` needs no bias.

    Args:
        num_heads: Number of heads.
        is_causal: Mask keys after the query. Otherwise the bias is symmetric.
        slopes: ``[num_heads]`` slopes, a PyTorch or NumPy array, not negative; used as float32. Default: the slopes of
            ``scheme``.
        scheme: As in :func:`alibi_core.slopes`: the name of a scheme; must be None when ``slopes`` are given.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If the slopes are misshapen, negative or not finite, or given together with a scheme.

    Example:
        >>> AlibiBias(2, slopes=torch.tensor([1.0, 0.5]))(2, 3)
        tensor([[[-1.0000,  0.0000,    -inf],
                 [-2.0000, -1.0000,  0.0000]],
        <BLANKLINE>
                [[-0.5000,  0.0000,    -inf],
                 [-1.0000, -0.5000,  0.0000]]])
    """

    @explains_keywords
    def __init__(
        self, num_heads: int, *, is_causal: bool = True, slopes: Any | None = None, scheme: str | None = None
    ) -> None:
        super().__init__()
        if slopes is not None and scheme is not None:
            raise ValueError(f"scheme must be None when slopes are given, got {scheme!r}")
        if slopes is None:
            slopes = alibi_core.slopes(num_heads, scheme=scheme or "canonical")
        self.shape = LayerShape.check(num_heads, num_heads, is_causal=is_causal, slopes=slopes)
        self.is_causal = is_causal
        self._register_slopes(slopes.device if isinstance(slopes, Tensor) else torch.get_default_device())
        self._built: tuple[Tensor, tuple[object, ...], Tensor] | None = None  # slopes, key, bias

    def forward(self, q_len: int, kv_len: int | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
        """Return the bias of ``q_len`` queries over ``kv_len`` keys; the last query is at the last key.

        Args:
            q_len: Number of queries, in tokens.
            kv_len: Number of keys, in tokens. Default ``q_len``.
            dtype: Dtype of the bias. Default: the dtype of the slopes.

        Returns:
            ``[num_heads, q_len, kv_len]`` on the device of the slopes; do not change it in place.
        """
        non_negative_int("q_len", q_len)  # as cache keys, True and 1.0 would equal 1
        if kv_len is not None:
            non_negative_int("kv_len", kv_len)
        if torch.compiler.is_compiling():  # no cache: the compiler fuses the bias into other loops
            return alibi_core.bias(self.slopes, q_len, kv_len, is_causal=self.is_causal, dtype=dtype)
        # Inference mode is part of the key: a bias made in it cannot be used with autograd.
        slopes, built = self.slopes, self._built  # read once: other threads write it
        key = (q_len, kv_len, dtype, slopes.device, torch.is_inference_mode_enabled())
        if built is None or built[0] is not slopes or built[1] != key:
            bias = alibi_core.bias(slopes, q_len, kv_len, is_causal=self.is_causal, dtype=dtype)
            self._built = built = slopes, key, bias
        return built[2]
