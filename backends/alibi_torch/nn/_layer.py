"""Multi-head self-attention with ALiBi, as a PyTorch module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor, nn

from alibi_core.backend.checks import explains_keywords, one_of
from alibi_core.backend.models import LayerShape
from alibi_torch._attention import IMPLEMENTATIONS, attention
from alibi_torch.caches import KVCache, autocast_dtype
from alibi_torch.nn._slopes import KeepsSlopes, register_layer_slopes


class AlibiAttention(KeepsSlopes):
    """Multi-head self-attention whose only notion of position is ALiBi.

    Parameters are ``q_proj``, ``k_proj``, ``v_proj`` and ``out_proj`` (``nn.Linear``), under the same names in every
    backend, so that a state dict saved as safetensors loads into any of them. Fixed slopes are a buffer that is not
    saved; learnable ones are the parameter ``log_slopes``, whose exponential stays positive whatever the optimizer
    does. Both stay float32 when the module is cast to a lower precision.

    Args:
        embed_dim: Features of input and output.
        num_heads: Query heads.
        num_kv_heads: Key/value heads, a divisor of ``num_heads``. Default ``num_heads``.
        head_dim: Features a head. Default ``embed_dim // num_heads``.
        bias: Give the four projections a bias term.
        is_causal: Decoder (True) or encoder (False).
        slopes: ``[num_heads]`` slopes, a PyTorch or NumPy array. Default: the canonical ones. A tensor-parallel shard
            passes its slice of the global ones, ``alibi_core.slopes(n)[first:last]``.
        future_slopes: ``[num_heads]`` slopes for keys after the query, for an asymmetric encoder.
        learnable_slopes: Train the slopes, starting from ``slopes``.
        window_size: Mask keys farther than this many tokens: with 4 a query sees 5 keys, its own among them.
        dropout: Probability of zeroing a feature of the output while training.
        implementation: As for :func:`alibi_torch.attention`.
        device: Where the parameters live.
        dtype: Dtype of the projections.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If sizes do not divide or a value is out of range.

    Example:
        >>> layer = AlibiAttention(64, 8, num_kv_heads=2)
        >>> layer(torch.randn(3, 10, 64)).shape
        torch.Size([3, 10, 64])
    """

    slopes: Tensor | None
    future_slopes: Tensor | None

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
        implementation: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape = LayerShape.check(
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
        )
        if implementation is not None:
            one_of("implementation", implementation, IMPLEMENTATIONS)
        self.is_causal, self.window_size, self.implementation = is_causal, window_size, implementation
        factory = {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, shape.num_heads * shape.head_dim, **factory)
        self.k_proj = nn.Linear(embed_dim, shape.num_kv_heads * shape.head_dim, **factory)
        self.v_proj = nn.Linear(embed_dim, shape.num_kv_heads * shape.head_dim, **factory)
        self.out_proj = nn.Linear(shape.num_heads * shape.head_dim, embed_dim, **factory)
        # What a model may do to projected queries, keys and values. Here, and not in the projections, so that
        # quantizers and adapters may put others in their place.
        self.clip_qkv: float | None = None
        self.query_factor = 1.0
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        self.dropout = nn.Dropout(dropout)
        register_layer_slopes(self, shape, slopes, future_slopes, learnable=learnable_slopes)

    @explains_keywords
    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
        cache: KVCache | None = None,
        context: Tensor | None = None,
        q_offset: int | Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Attend within ``x``, from ``x`` to the tokens in ``cache`` and ``x``, or from ``x`` to those of ``context``.

        Args:
            x: ``[batch, length, embed_dim]``.
            mask: Booleans, True where a query may look, that broadcast to ``[batch, num_heads, length, kv_len]``,
                where ``kv_len`` counts the cached tokens too.
            segment_ids: ``[batch, length]`` integers, for packed sequences; with a cache, a pair (of ``x``, of all
                tokens).
            cache: From :meth:`make_cache`; the tokens of ``x`` are appended to it. Causal layers only.
            context: ``[batch, kv_len, embed_dim]``, another sequence that keys and values are made of, where it is not
                ``x``. Distances are those of ``alibi_core.bias(length, kv_len)``: by default the last tokens of both
                have one position. No cache goes with it.
            q_offset: With a ``context``, the position of the first token of ``x``, as for ``attention``.
            lengths: With a ``cache``, ``[batch]`` integers: how many tokens of each row of ``x`` count, where prompts
                of different lengths are padded behind.

        Returns:
            ``[batch, length, embed_dim]``, of the dtype of the projections' output.

        Raises:
            TypeError: If an argument is of the wrong kind.
            ValueError: If a shape is wrong, the cache does not fit, or the layer is not causal and gets a cache.
        """
        source = self.shape.source_of_keys(x, xp, context=context, q_offset=q_offset, cache=cache, lengths=lengths)
        query, key, value = self._heads_of(x, source)
        slopes = self.current_slopes
        rules: dict[str, Any] = {"segment_ids": segment_ids, "window_size": self.window_size, "mask": mask}
        rules["implementation"] = self.implementation
        if cache is None:
            direction: dict[str, Any] = {
                "is_causal": self.is_causal,
                "future_slopes": self.future_slopes,
                "q_offset": q_offset,
            }
            attended = attention(query, key, value, slopes, **direction, **rules)
        else:
            attended = self._attend_to(cache, query, key, value, slopes, rules, lengths)
        return self.dropout(self.out_proj(attended.transpose(1, 2).flatten(2)))

    def _heads_of(self, x: Tensor, source: Tensor) -> Iterator[Tensor]:
        """Yield query, key and value, ``[batch, heads, length, head_dim]``."""
        parts = (
            (x, self.q_proj, self.q_norm, self.query_factor),
            (source, self.k_proj, self.k_norm, 1.0),
            (source, self.v_proj, None, 1.0),
        )
        for given, proj, norm, factor in parts:
            y = proj(given)
            if self.clip_qkv is not None:
                y = y.clamp(-self.clip_qkv, self.clip_qkv)
            if norm is not None:
                y = norm(y)
            if factor != 1:
                y = y * factor
            yield y.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)

    def _attend_to(
        self,
        cache: KVCache,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        slopes: Tensor,
        rules: dict[str, Any],
        lengths: Tensor | None,
    ) -> Tensor:
        if not self.is_causal:
            raise ValueError("cache must be None when is_causal=False (earlier tokens would have to look again)")
        if not isinstance(cache, KVCache):
            raise TypeError(f"cache must be an alibi_torch.KVCache, got {type(cache).__name__}; see make_cache")
        held = cache.length if cache.lengths is None else cache.lengths
        own = {} if lengths is None else {"lengths": lengths}
        cache.append(key, value, **own)
        try:
            return cache.attend(query, slopes, **rules, **own)
        except Exception:
            cache.truncate(held)  # a call that was refused leaves no tokens behind
            raise

    def make_cache(self, batch_size: int, max_length: int) -> KVCache:
        """Return an empty cache for ``batch_size`` sequences of up to ``max_length`` tokens.

        Its dtype is that of the keys to come: the parameters', or autocast's where the cache is made under autocast.

        Args:
            batch_size: Sequences.
            max_length: Tokens that the cache can hold.
        """
        weight, slopes = self.k_proj.weight, self.current_slopes
        sizes = batch_size, self.shape.num_kv_heads, max_length, self.shape.head_dim
        dtype = autocast_dtype(slopes.device.type)
        if dtype is None:  # a quantized projection holds its weight packed, or as integers, and gives the default dtype
            has_dtype = isinstance(weight, Tensor) and weight.is_floating_point()
            dtype = weight.dtype if has_dtype else torch.get_default_dtype()
        return KVCache(*sizes, device=slopes.device, dtype=dtype)

    def extra_repr(self) -> str:
        """Return the sizes, for ``print(module)``."""
        sizes = f"embed_dim={self.shape.embed_dim}, num_heads={self.shape.num_heads}"
        return f"{sizes}, num_kv_heads={self.shape.num_kv_heads}, is_causal={self.is_causal}"
