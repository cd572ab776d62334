"""Multi-head self-attention with ALiBi, as an MLX module."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx import nn

from alibi_core.backend.checks import explains_keywords, is_int, namespace_of, one_of
from alibi_core.backend.models import LayerShape
from alibi_mlx._attention import IMPLEMENTATIONS, attention
from alibi_mlx.caches import KVCache


class AlibiAttention(nn.Module):
    """Multi-head self-attention whose only notion of position is ALiBi.

    Parameters are ``q_proj``, ``k_proj``, ``v_proj`` and ``out_proj`` (``nn.Linear``), under the same names in every
    backend, so that what ``save_weights`` writes as safetensors loads into any of them. Fixed slopes are no parameter
    and not saved; learnable ones are the parameter ``log_slopes``, whose exponential stays positive whatever the
    optimizer does. Both stay float32 under ``set_dtype``.

    Args:
        embed_dim: Features of input and output.
        num_heads: Query heads.
        num_kv_heads: Key/value heads, a divisor of ``num_heads``. Default ``num_heads``.
        head_dim: Features a head. Default ``embed_dim // num_heads``.
        bias: Give the four projections a bias term.
        is_causal: Decoder (True) or encoder (False).
        slopes: ``[num_heads]`` slopes, an MLX or NumPy array. Default: the canonical ones. A tensor-parallel shard
            passes its slice of the global ones, ``alibi_core.slopes(n)[first:last]``.
        future_slopes: ``[num_heads]`` slopes for keys after the query, for an asymmetric encoder.
        learnable_slopes: Train the slopes, starting from ``slopes``.
        window_size: Mask keys farther than this many tokens: with 4 a query sees 5 keys, its own among them.
        dropout: Probability of zeroing a feature of the output while training.
        implementation: As for :func:`alibi_mlx.attention`.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If sizes do not divide or a value is out of range.

    Example:
        >>> layer = AlibiAttention(64, 8, num_kv_heads=2)
        >>> layer(mx.random.normal((3, 10, 64))).shape
        (3, 10, 64)
    """

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
        self.q_proj = nn.Linear(embed_dim, shape.num_heads * shape.head_dim, bias=bias)
        self.k_proj = nn.Linear(embed_dim, shape.num_kv_heads * shape.head_dim, bias=bias)
        self.v_proj = nn.Linear(embed_dim, shape.num_kv_heads * shape.head_dim, bias=bias)
        self.out_proj = nn.Linear(shape.num_heads * shape.head_dim, embed_dim, bias=bias)
        # What a model may do to projected queries, keys and values. Here, and not in the projections, so that
        # quantizers and adapters may put others in their place.
        self.clip_qkv: float | None = None
        self.query_factor = 1.0
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        self.dropout = nn.Dropout(dropout)

        # MLX takes arrays under names with an underscore for no parameters.
        given = None if slopes is None else mx.array(slopes)
        initial = shape.fixed_slopes(namespace_of(xp=mx), given)
        self._slopes = None if learnable_slopes else initial
        self._future_slopes = None if future_slopes is None else mx.array(future_slopes).astype(mx.float32)
        if learnable_slopes:
            self.log_slopes = mx.log(initial)

    @property
    def slopes(self) -> mx.array:
        """The slopes in use, ``[num_heads]`` float32."""
        return mx.exp(self.log_slopes) if self._slopes is None else self._slopes

    @explains_keywords
    def __call__(
        self,
        x: mx.array,
        *,
        mask: mx.array | None = None,
        segment_ids: mx.array | tuple[mx.array, mx.array] | None = None,
        cache: Any | None = None,
        context: mx.array | None = None,
        q_offset: int | mx.array | None = None,
        lengths: mx.array | None = None,
    ) -> mx.array:
        """Attend within ``x``, from ``x`` to the tokens in ``cache`` and ``x``, or from ``x`` to those of ``context``.

        Args:
            x: ``[batch, length, embed_dim]``.
            mask: Booleans, True where a query may look, that broadcast to ``[batch, num_heads, length, kv_len]``,
                where ``kv_len`` counts the cached tokens too.
            segment_ids: ``[batch, length]`` integers, for packed sequences; with a cache, a pair (of ``x``, of all
                tokens).
            cache: From :meth:`make_cache`, or any object with ``offset`` and ``update_and_fetch`` as mlx-lm's
                ``KVCache`` has them; the tokens of ``x`` are added to it. Causal layers only.
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
        source = self.shape.source_of_keys(x, mx, context=context, q_offset=q_offset, cache=cache, lengths=lengths)
        query, key, value = self._heads_of(x, source)
        rules: dict[str, Any] = {"segment_ids": segment_ids, "window_size": self.window_size, "mask": mask}
        rules["implementation"] = self.implementation
        if cache is None:
            direction: dict[str, Any] = {
                "is_causal": self.is_causal,
                "future_slopes": self._future_slopes,
                "q_offset": q_offset,
            }
            attended = attention(query, key, value, self.slopes, **direction, **rules)
        elif not self.is_causal:
            raise ValueError("cache must be None when is_causal=False (earlier tokens would have to look again)")
        elif isinstance(cache, KVCache):
            own = {} if lengths is None else {"lengths": lengths}
            with unless_refused([cache]):
                cache.append(key, value, **own)
                attended = cache.attend(query, self.slopes, **rules, **own)
        elif lengths is not None:
            raise ValueError(f"lengths must be None but with the caches of make_cache, got a {type(cache).__name__}")
        else:
            attended = self._attend_to_foreign(cache, query, key, value, rules)
        return self.dropout(self.out_proj(mx.flatten(attended.swapaxes(1, 2), -2)))

    def make_cache(self, batch_size: int | None = None, max_length: int | None = None) -> KVCache:
        """Return an empty cache, for any number of sequences and tokens unless they are given.

        Args:
            batch_size: Sequences.
            max_length: Tokens that the cache can hold.
        """
        return KVCache(batch_size=batch_size, max_length=max_length)

    def _heads_of(self, x: mx.array, source: mx.array) -> Iterator[mx.array]:
        """Yield query, key and value, ``[batch, heads, length, head_dim]``."""
        parts = (
            (x, self.q_proj, self.q_norm, self.query_factor),
            (source, self.k_proj, self.k_norm, 1.0),
            (source, self.v_proj, None, 1.0),
        )
        for given, proj, norm, factor in parts:
            y = proj(given)
            if self.clip_qkv is not None:
                y = mx.clip(y, -self.clip_qkv, self.clip_qkv)
            if norm is not None:
                y = norm(y)
            if factor != 1:
                y = y * factor
            yield mx.unflatten(y, -1, (-1, self.shape.head_dim)).swapaxes(1, 2)

    def _attend_to_foreign(
        self, cache: Any, query: mx.array, key: mx.array, value: mx.array, rules: dict[str, Any]
    ) -> mx.array:
        if not hasattr(cache, "update_and_fetch") or not hasattr(cache, "offset"):
            raise TypeError(f"cache must have offset and update_and_fetch, as KVCache has, got {type(cache).__name__}")
        held, padding = cache.offset, padding_of(cache)
        key, value = cache.update_and_fetch(key, value)
        # Distances are counted from the last key back: the cache must not have dropped, moved or encoded any.
        is_whole = isinstance(key, mx.array) and is_int(cache.offset) and cache.offset == key.shape[-2]
        if padding is None and not is_whole:
            raise ValueError(
                "cache must return every key in order, as KVCache does (rotating and quantized caches of mlx-lm do "
                f"not), got {type(cache).__name__} with offset {cache.offset}"
            )
        try:
            if padding is not None:
                sees = (mx.arange(key.shape[-2]) >= padding[:, None])[:, None, None]
                rules["mask"] = sees if rules["mask"] is None else sees & rules["mask"]
            return attention(query, key, value, self.slopes, **rules)
        except Exception:
            if padding is None:
                cache.offset = held
            else:
                cache.trim(query.shape[2])
            raise

    def __setitem__(self, name: str, value: Any) -> None:
        # However a module is cast, the new parameters come in here. Slopes of low precision would be off by a percent
        # and too coarse to train: keep the value that was rounded, and take what else comes as float32.
        if name == "log_slopes" and value.dtype != mx.float32:
            value = mx.where(self[name].astype(value.dtype) == value, self[name], value.astype(mx.float32))
        super().__setitem__(name, value)

    def _extra_repr(self) -> str:
        sizes = f"embed_dim={self.shape.embed_dim}, num_heads={self.shape.num_heads}"
        return f"{sizes}, num_kv_heads={self.shape.num_kv_heads}, is_causal={self.is_causal}"


def padding_of(cache: Any) -> mx.array | None:
    """Return how many slots before each text are padding, in mlx-lm's cache of a batch; None for other caches."""
    theirs = sys.modules.get("mlx_lm.models.cache")
    return cache.left_padding if theirs is not None and isinstance(cache, theirs.BatchKVCache) else None


@contextmanager
def unless_refused(caches: Iterable[Any]) -> Iterator[None]:
    """Let caches of this library keep the tokens that are added meanwhile, unless an error is raised."""
    own = [cache for cache in caches if isinstance(cache, KVCache)]
    rows = [getattr(cache, "lengths", None) for cache in own]
    held = [cache.length if x is None else x for cache, x in zip(own, rows, strict=True)]
    try:
        yield
    except Exception:
        for cache, length in zip(own, held, strict=True):
            cache.truncate(length)
        raise
