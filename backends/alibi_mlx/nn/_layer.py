"""Multi-head self-attention with ALiBi, as an MLX module."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from alibi_core.backend import models
from alibi_core.backend.checks import boolean_mask, explains_keywords, is_int, namespace_of, one_of
from alibi_mlx._attention import IMPLEMENTATIONS, attention
from alibi_mlx.caches import KVCache
from alibi_mlx.nn._weights import SavesLayers

# The random keys of dropout in a block with gradient checkpointing: a list where they are drawn, an iterator where the
# block is computed again.
KEYS: ContextVar[list[mx.array] | Iterator[mx.array] | None] = ContextVar("KEYS", default=None)


class Dropout(nn.Dropout):
    """Dropout that drops the same again where a block is computed again: MLX's own would draw anew."""

    def __init__(self, p: float) -> None:
        super().__init__(p)
        self.kept = 1 - p

    def __call__(self, x: mx.array) -> mx.array:
        """Return ``x`` with some features 0 in training, and the others larger."""
        keys = KEYS.get()
        if keys is None or self.kept == 1 or not self.training:
            return super().__call__(x)
        if isinstance(keys, list):
            keys.append(key := mx.random.split(mx.random.state[0])[1])  # the key that MLX would draw with
            mx.random.uniform()  # now its state is what dropout makes of it
        else:
            key = next(keys)
        return mx.random.bernoulli(self.kept, x.shape, key=key) * x * (1 / self.kept)


class Precise(nn.Module):
    """A module whose slopes, gates and sinks stay float32: in low precision they would be wrong by a percent."""

    def __setitem__(self, name: str, value: Any) -> None:
        # Casts of a module assign new parameters here. If one is the old one rounded, keep the old one.
        if name in ("log_slopes", "sinks", "weight", "bias") and value.dtype != mx.float32:
            value = mx.where(self[name].astype(value.dtype) == value, self[name], value.astype(mx.float32))
        super().__setitem__(name, value)


class Gate(Precise, nn.Linear):
    """The linear map to the logits of forget gates."""


class AlibiAttention(Precise, SavesLayers, models.BaseAttention):
    """Multi-head self-attention whose only positional information is ALiBi.

    Parameters are ``q_proj``, ``k_proj``, ``v_proj`` and ``out_proj`` (``nn.Linear``), with the same names in every
    backend, so that safetensors files of ``save_weights`` load into any of them. Fixed slopes are no parameter and are
    not saved. Learnable slopes are the parameter ``log_slopes``; its exponential is always positive. A forget gate is
    ``forget_proj``, sinks are the parameter ``sinks``. All of them stay float32 under ``set_dtype``.

    A cache may be any object with ``offset`` and ``update_and_fetch``, such as mlx-lm's ``KVCache``; with a forget gate
    it must be one of :meth:`make_cache`.

    Args:
        embed_dim, num_heads, num_kv_heads, bias, is_causal, learnable_slopes: As fields of :class:`AlibiConfig`.
        window_size, dropout, distance, law, forget_gate, sinks: As fields of :class:`AlibiConfig`.
        head_dim: Features per head. Default ``embed_dim // num_heads``.
        slopes: ``[num_heads]`` slopes, an MLX or NumPy array. Default: the canonical slopes. A tensor-parallel shard
            passes its slice of the global slopes, ``alibi_core.slopes(n)[first:last]``.
        future_slopes: ``[num_heads]`` slopes for keys after the query, for an asymmetric encoder.
        implementation: As in :func:`alibi_mlx.attention`: the name of an implementation, or None.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If sizes do not divide or a value is out of range.

    Example:
        >>> layer = AlibiAttention(64, 8, num_kv_heads=2)
        >>> layer(mx.random.normal((3, 10, 64))).shape
        (3, 10, 64)
    """

    _xp = mx
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
    ) -> None:
        super().__init__()
        if implementation is not None:
            one_of("implementation", implementation, IMPLEMENTATIONS)
        self._build(
            partial(nn.Linear, bias=bias),
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
            self.forget_proj = Gate(embed_dim, num_heads)
        if sinks:
            self.sinks = mx.zeros(num_heads)
        self.clip_qkv, self.query_factor, self.q_norm, self.k_norm = None, 1.0, None, None
        self.dropout = Dropout(dropout)
        # MLX does not treat arrays as parameters if their names begin with an underscore.
        self._future_slopes = None if future_slopes is None else mx.array(self.shape.future_slopes)
        slopes = np.array(self.shape.slopes, np.float32)  # no values of MLX to evaluate in each call
        self._fixed_slopes = None if learnable_slopes else slopes
        if learnable_slopes:
            self.log_slopes = mx.log(mx.array(slopes))

    @property
    def slopes(self) -> mx.array:
        """The slopes in use, ``[num_heads]`` float32."""
        return mx.exp(self.log_slopes) if self._fixed_slopes is None else mx.array(self._fixed_slopes)

    @property
    def _current_slopes(self) -> Any:
        return self.slopes if self._fixed_slopes is None else self._fixed_slopes

    @property
    def future_slopes(self) -> mx.array | None:
        """The slopes for keys after the query, ``[num_heads]`` float32; None if they equal ``slopes``."""
        return self._future_slopes

    def _attend_to(
        self,
        cache: Any,
        query: mx.array,
        key: mx.array,
        value: mx.array,
        rules: dict[str, Any],
        counts: dict[str, Any],
        gates: dict[str, Any],
    ) -> tuple[mx.array, None]:
        if isinstance(cache, KVCache):
            return super()._attend_to(cache, query, key, value, rules, counts, gates)
        if counts:
            raise ValueError(f"lengths must be None but with the caches of make_cache, got a {type(cache).__name__}")
        if gates:
            raise ValueError(f"cache must be one of make_cache, to hold forget gates, got a {type(cache).__name__}")
        if not hasattr(cache, "update_and_fetch") or not hasattr(cache, "offset"):
            raise TypeError(f"cache must have offset and update_and_fetch, as KVCache has, got {type(cache).__name__}")
        held, padding = cache.offset, padding_of(cache)
        key, value = cache.update_and_fetch(key, value)
        # Distances count back from the last key, so the cache must not have dropped, reordered or quantized keys, nor
        # return trimmed ones, as ConcatenateKVCache of mlx-lm (0.32.2) does.
        is_whole = isinstance(key, mx.array) and is_int(cache.offset)
        is_whole = is_whole and cache.offset == key.shape[-2] == held + query.shape[2]
        if padding is None and not is_whole:
            raise ValueError(
                "cache must return every key in order, and no trimmed ones, as KVCache does (rotating, quantized and "
                f"concatenating caches of mlx-lm do not), got {type(cache).__name__} with offset {cache.offset}"
            )
        try:
            if padding is not None:
                sees = (mx.arange(key.shape[-2]) >= padding[:, None])[:, None, None]  # [batch, 1, 1, kv_len]
                if rules["mask"] is not None:
                    batch, num_heads, q_len, _ = query.shape
                    scores = {"num_heads": num_heads, "q_len": q_len, "kv_len": key.shape[-2]}
                    sees = sees & boolean_mask(namespace_of(query), rules["mask"], {"batch": batch}, scores)
                rules["mask"] = sees
            return attention(query, key, value, self._current_slopes, **rules), None
        except Exception:
            # Remove the appended tokens, so that a failed call leaves the cache unchanged.
            if padding is None:
                cache.offset = held
            else:
                cache.trim(query.shape[2])
            raise

    def make_cache(self, batch_size: int | None = None, max_length: int | None = None) -> KVCache:
        """Return an empty cache.

        Args:
            batch_size: Number of sequences. Default: that of the first keys.
            max_length: Capacity, in tokens. Default: unlimited.
        """
        return KVCache(batch_size, self.shape.num_kv_heads, max_length, self.shape.head_dim)

    def _extra_repr(self) -> str:
        return self._sizes_and_options()


def padding_of(cache: Any) -> mx.array | None:
    """Return the number of padding slots before each text in mlx-lm's ``BatchKVCache``; None for other caches."""
    theirs = sys.modules.get("mlx_lm.models.cache")
    return cache.left_padding if theirs is not None and isinstance(cache, theirs.BatchKVCache) else None
