"""Multi-head self-attention with ALiBi, as a Flax NNX module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from alibi_core.backend import checks
from alibi_core.backend.checks import explains_keywords, namespace_of
from alibi_core.backend.models import LayerShape
from alibi_jax._attention import attention
from alibi_jax._call import floating_dtype
from alibi_jax._dispatch import Implementation, checked
from alibi_jax.caches import KVCache


class AlibiAttention(nnx.Module):
    """Multi-head self-attention whose only notion of position is ALiBi.

    Parameters (``nnx.Param``) are those of ``q_proj``, ``k_proj``, ``v_proj`` and ``out_proj`` (``nnx.Linear``);
    :func:`alibi_jax.save_weights` writes them under the names that all backends share. Fixed slopes are constants of
    the module, no part of its state. Learnable ones are the parameter ``log_slopes``, whose exponential stays positive
    whatever the optimizer does. Both are float32 whatever ``dtype`` and ``param_dtype`` are.

    Args:
        embed_dim: Features of input and output.
        num_heads: Query heads.
        num_kv_heads: Key/value heads, a divisor of ``num_heads``. Default ``num_heads``.
        head_dim: Features a head. Default ``embed_dim // num_heads``.
        bias: Give the four projections a bias term.
        is_causal: Decoder (True) or encoder (False).
        slopes: ``[num_heads]`` slopes, from NumPy or JAX, known when the layer is made. Default: the canonical ones.
            A tensor-parallel shard passes its slice of the global ones, ``alibi_core.slopes(n)[first:last]``.
        future_slopes: ``[num_heads]`` slopes for keys after the query, for an asymmetric encoder.
        learnable_slopes: Train the slopes, starting from ``slopes``.
        window_size: Mask keys farther than this many tokens: with 4 a query sees 5 keys, its own among them.
        dropout: Probability of zeroing a feature of the output while training. ``layer.train()`` and ``layer.eval()``
            switch it; a new layer is training.
        implementation: As for :func:`alibi_jax.attention`.
        dtype: Dtype of the computation. Default: that of input and parameters, promoted.
        param_dtype: Dtype of the projections' parameters.
        rngs: Where the initial parameters and dropout come from.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If sizes do not divide, a value is out of range, or slopes are traced.

    Example:
        >>> layer = AlibiAttention(64, 8, num_kv_heads=2, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((3, 10, 64))).shape
        (3, 10, 64)

        One call serves prefill and decoding, which goes on from the cache that comes back:

        >>> output, cache = layer(jnp.ones((3, 9, 64)), cache=layer.make_cache(3, max_length=12))
        >>> output, cache = layer(jnp.ones((3, 1, 64)), cache=cache)
        >>> output.shape, int(cache.length)
        ((3, 1, 64), 10)
    """

    # Flax takes what a module sets to None for no place of a submodule.
    q_norm: nnx.Module | None = None
    k_norm: nnx.Module | None = None

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
        slopes: np.ndarray | jax.Array | None = None,
        future_slopes: np.ndarray | jax.Array | None = None,
        learnable_slopes: bool = False,
        window_size: int | None = None,
        dropout: float = 0.0,
        implementation: Implementation | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        slopes, future_slopes = slope_values_of("slopes", slopes), slope_values_of("future_slopes", future_slopes)
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
        checked(implementation)
        if rngs is None or isinstance(rngs, int | jax.Array):
            raise TypeError(f"rngs must be flax.nnx.Rngs, got {rngs!r}; nnx.Rngs(0) makes one")
        for name, given in (("dtype", dtype), ("param_dtype", param_dtype)):
            if given is not None:
                floating_dtype(name, given)
        self.is_causal, self.window_size, self.implementation = is_causal, window_size, implementation
        self.dtype, self.param_dtype = dtype, param_dtype
        options = {"use_bias": bias, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.q_proj = nnx.Linear(embed_dim, shape.num_heads * shape.head_dim, **options)
        self.k_proj = nnx.Linear(embed_dim, shape.num_kv_heads * shape.head_dim, **options)
        self.v_proj = nnx.Linear(embed_dim, shape.num_kv_heads * shape.head_dim, **options)
        self.out_proj = nnx.Linear(shape.num_heads * shape.head_dim, embed_dim, **options)
        # What a model may do to projected queries, keys and values. Here, and not in the projections, so that
        # quantizers and adapters may put others in their place.
        self.clip_qkv: float | None = None
        self.query_factor = 1.0
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout > 0 else None

        initial = shape.fixed_slopes(np, slopes)
        self.log_slopes = nnx.Param(jnp.asarray(np.log(initial))) if learnable_slopes else None
        # Python numbers: neither an optimizer nor a cast of all arrays to a lower precision can reach them.
        self._slopes = None if learnable_slopes else tuple(initial.tolist())
        self._future_slopes = None if future_slopes is None else tuple(future_slopes.tolist())

    @property
    def slopes(self) -> jax.Array:
        """The slopes in use, ``[num_heads]`` float32."""
        if self.log_slopes is None:
            return jnp.asarray(self._slopes, jnp.float32)
        return jnp.exp(self.log_slopes[...].astype(jnp.float32))

    @property
    def future_slopes(self) -> jax.Array | None:
        """The slopes for keys after the query, ``[num_heads]`` float32; None if they are not set apart."""
        return None if self._future_slopes is None else jnp.asarray(self._future_slopes, jnp.float32)

    @explains_keywords
    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
        cache: KVCache | None = None,
        context: jax.Array | None = None,
        q_offset: int | jax.Array | None = None,
        lengths: jax.Array | None = None,
    ) -> jax.Array | tuple[jax.Array, KVCache]:
        """Attend within ``x``, from ``x`` to the tokens in ``cache`` and ``x``, or from ``x`` to those of ``context``.

        Args:
            x: ``[batch, length, embed_dim]``.
            mask: Booleans, True where a query may look, that broadcast to ``[batch, num_heads, length, kv_len]``.
                ``kv_len`` is ``length``, or ``max_length`` with a cache, whose slots count from its first token;
                unfilled ones are masked anyway.
            segment_ids: ``[batch, length]`` integers, for packed sequences. With a cache, a pair of them, for the
                queries and for all ``max_length`` slots.
            cache: From :meth:`make_cache`, or from the call before. Causal layers only.
            context: ``[batch, kv_len, embed_dim]``, another sequence that keys and values are made of, where it is not
                ``x``. Distances are those of ``alibi_core.bias(length, kv_len)``: by default the last tokens of both
                have one position. No cache goes with it.
            q_offset: With a ``context``, the position of the first token of ``x``, as for ``attention``.
            lengths: With a ``cache``, ``[batch]`` integers: how many tokens of each row of ``x`` count, where prompts
                of different lengths are padded behind.

        Returns:
            ``[batch, length, embed_dim]``; with a cache, the pair of that and the cache with the tokens of ``x``
            appended. Nothing can be raised where the cache's length is traced (under ``jax.jit``, say), so there, an
            overflow makes the output NaN, then and ever after.

        Raises:
            TypeError: If an argument is of the wrong kind.
            ValueError: If a shape is wrong, the cache is full or does not fit, or a layer that is not causal gets one.
        """
        source = self.shape.source_of_keys(x, jnp, context=context, q_offset=q_offset, cache=cache, lengths=lengths)
        query, key, value = self._heads_of(x, source)
        own = {} if lengths is None else {"lengths": lengths}
        if cache is not None:
            if not self.is_causal:
                raise ValueError("cache must be None when is_causal=False (earlier tokens would have to look again)")
            cache = _appended(cache, key, value, **own)
        rules = {"segment_ids": segment_ids, "mask": mask}
        attended = self._attended(query, key, value, cache, q_offset=q_offset, **rules, **own)
        output = self.out_proj(attended.reshape(*x.shape[:2], self.shape.num_heads * self.shape.head_dim))
        if self.dropout is not None:
            output = self.dropout(output)
        return output if cache is None else (output, cache)

    def _heads_of(self, x: jax.Array, source: jax.Array) -> Iterator[jax.Array]:
        """Yield query, key and value, ``[batch, length, heads, head_dim]``."""
        parts = (
            (x, self.q_proj, self.q_norm, self.query_factor),
            (source, self.k_proj, self.k_norm, 1.0),
            (source, self.v_proj, None, 1.0),
        )
        for given, proj, norm, factor in parts:
            y = proj(given)
            if self.clip_qkv is not None:
                y = jnp.clip(y, -self.clip_qkv, self.clip_qkv)
            if norm is not None:
                y = norm(y)
            if factor != 1:
                y = y * factor
            yield y.reshape(*y.shape[:2], y.shape[-1] // self.shape.head_dim, self.shape.head_dim)

    def _attended(
        self, query: jax.Array, key: jax.Array, value: jax.Array, cache: Any, *, q_offset: Any, **rules: Any
    ) -> jax.Array:
        """Return attention to the keys, or to the cache that has them: ``[batch, length, num_heads, head_dim]``."""
        rules |= {"window_size": self.window_size, "implementation": self.implementation}
        if cache is not None:
            return cache.attend(query, self.slopes, **rules)
        direction = {"is_causal": self.is_causal, "future_slopes": self.future_slopes}
        return attention(query, key, value, self.slopes, q_offset=q_offset, **direction, **rules)

    def make_cache(self, batch_size: int, max_length: int) -> KVCache:
        """Return an empty cache for ``batch_size`` sequences of up to ``max_length`` tokens.

        Args:
            batch_size: Sequences.
            max_length: Tokens that the cache can hold.
        """
        dtype = self.param_dtype if self.dtype is None else self.dtype
        return KVCache.make(batch_size, self.shape.num_kv_heads, max_length, self.shape.head_dim, dtype=dtype)


def _appended(cache: KVCache, key: jax.Array, value: jax.Array, **own: jax.Array) -> KVCache:
    """Return a layer's cache with further tokens, ``[batch, new, num_kv_heads, head_dim]``, and their ``lengths``."""
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache must be an alibi_jax.KVCache, as make_cache returns it, got {type(cache).__name__}")
    if key.dtype != (held := cache.key.dtype):
        raise ValueError(
            f"cache must have the dtype of the layer's keys, {key.dtype}, got {held}; give the layer a dtype if its "
            "input has another than its parameters"
        )
    return cache.append(key, value, **own)


def slope_values_of(name: str, slopes: Any | None) -> np.ndarray | None:
    """Return slopes that a module is given as constants of it, float64, in which no value becomes another."""
    if slopes is None:
        return None
    namespace_of(checks.array(name, slopes))
    try:
        values = np.asarray(slopes)
    except jax.errors.TracerArrayConversionError:
        raise ValueError(
            f"{name} must be known when the layer is made, got a traced array; pass a NumPy array"
        ) from None
    return np.asarray(checks.floating_array(namespace_of(xp=jnp), name, values), np.float64)
