"""Multi-head self-attention with ALiBi, as a PyTorch module."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from alibi_core.backend import models
from alibi_core.backend.checks import explains_keywords, one_of
from alibi_torch._attention import IMPLEMENTATIONS, attention
from alibi_torch._dispatch import autocast_dtype, no_autocast
from alibi_torch.caches import KVCache
from alibi_torch.nn._slopes import KeepsSlopes


class AlibiAttention(KeepsSlopes, models.BaseAttention):
    """Multi-head self-attention whose only positional information is ALiBi.

    Parameters are ``q_proj``, ``k_proj``, ``v_proj`` and ``out_proj`` (``nn.Linear``), with the same names in every
    backend, so that files of :func:`alibi_torch.save_weights` load into any of them. Fixed slopes are a buffer outside
    of the state dict, whose metadata name them, the heads, direction and window; ``load_state_dict`` compares these.
    Learnable slopes are the parameter ``log_slopes``; its exponential is always positive. Sinks are the parameter
    ``sinks``. All stay float32 when the module is cast to a lower precision.

    Args:
        embed_dim, num_heads, num_kv_heads, bias, is_causal, learnable_slopes: As fields of :class:`AlibiConfig`.
        window_size, dropout, distance, law, forget_gate, sinks: As fields of :class:`AlibiConfig`.
        head_dim: Features per head. Default ``embed_dim // num_heads``.
        slopes: ``[num_heads]`` slopes, a PyTorch or NumPy array. Default: the canonical slopes. A tensor-parallel shard
            passes its slice of the global slopes, ``alibi_core.slopes(n)[first:last]``.
        future_slopes: ``[num_heads]`` slopes for keys after the query, for an asymmetric encoder.
        implementation: As in :func:`alibi_torch.attention`: the name of an implementation, or None.
        device: Device of the parameters.
        dtype: Dtype of the projections.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If sizes do not divide or a value is out of range.

    Example:
        >>> layer = AlibiAttention(64, 8, num_kv_heads=2)
        >>> layer(torch.randn(3, 10, 64)).shape
        torch.Size([3, 10, 64])
    """

    _xp = torch
    _attention = staticmethod(attention)

    @explains_keywords
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        is_causal: bool = True,
        slopes: Any | None = None,
        future_slopes: Any | None = None,
        learnable_slopes: bool = False,
        window_size: int | None = None,
        dropout: float = 0.0,
        distance: str = "manhattan",
        law: str = "linear",
        forget_gate: bool = False,
        sinks: bool = False,
        implementation: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if implementation is not None:
            one_of("implementation", implementation, IMPLEMENTATIONS)
        self._build(
            partial(nn.Linear, bias=bias, device=device, dtype=dtype),
            implementation,
            embed_dim,
            num_heads,
            num_kv_heads,
            head_dim,
            is_causal=is_causal,
            slopes=slopes,
            future_slopes=future_slopes,
            learnable_slopes=learnable_slopes,
            window_size=window_size,
            dropout=dropout,
            bias=bias,
            distance=distance,
            law=law,
            forget_gate=forget_gate,
            sinks=sinks,
        )
        if forget_gate:
            self.forget_proj = nn.Linear(embed_dim, num_heads, device=device, dtype=torch.float32)
        if sinks:
            self.sinks = nn.Parameter(torch.zeros(num_heads, device=device, dtype=torch.float32))
        self.clip_qkv, self.query_factor, self.q_norm, self.k_norm = None, 1.0, None, None
        self.dropout = nn.Dropout(dropout) if dropout > 0 else None  # a module's call takes as long as a check
        self._register_slopes(device, learnable=learnable_slopes)

    forward = models.BaseAttention.__call__

    def _log_gates(self, tokens: Tensor) -> Tensor:
        with no_autocast(tokens.device.type):
            return super()._log_gates(tokens)

    def _attend_to(self, cache: KVCache, *arguments: Any) -> tuple[Tensor, None]:
        if not isinstance(cache, KVCache):
            raise TypeError(f"cache must be an alibi_torch.KVCache, got {type(cache).__name__}; see make_cache")
        return super()._attend_to(cache, *arguments)

    def make_cache(self, batch_size: int, max_length: int) -> KVCache:
        """Return an empty cache for ``batch_size`` sequences of up to ``max_length`` tokens.

        Its dtype is the dtype that keys will have: that of the parameters, or autocast's under autocast.
        """
        weight, device = self.k_proj.weight, self._current_slopes.device
        dtype = autocast_dtype(device.type)
        if dtype is None:  # a quantized projection has a packed or integer weight, and its output the default dtype
            has_dtype = isinstance(weight, Tensor) and weight.is_floating_point()
            dtype = weight.dtype if has_dtype else torch.get_default_dtype()
        return KVCache(batch_size, self.shape.num_kv_heads, max_length, self.shape.head_dim, device=device, dtype=dtype)

    extra_repr = models.BaseAttention._sizes_and_options
