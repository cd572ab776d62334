"""Multi-head self-attention with ALiBi, as a Flax NNX module."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from alibi_core.backend import models
from alibi_core.backend.checks import explains_keywords
from alibi_jax._attention import attention
from alibi_jax._call import floating_dtype
from alibi_jax._dispatch import Implementation, checked
from alibi_jax.caches import KVCache


class AlibiAttention(nnx.Module, models.BaseAttention):
    """Multi-head self-attention whose only positional information is ALiBi.

    Parameters (``nnx.Param``) are those of ``q_proj``, ``k_proj``, ``v_proj`` and ``out_proj`` (``nnx.Linear``);
    :func:`alibi_jax.save_weights` writes them with the names that all backends share. Fixed slopes are constants of the
    module, not part of its state. Learnable slopes are the parameter ``log_slopes``; its exponential is always
    positive. Forget gates have a further ``nnx.Linear``, ``forget_proj``, sinks the parameter ``sinks``. All these are
    float32 whatever ``dtype`` and ``param_dtype`` are.

    Caches are immutable: a call with a cache returns the pair of its output and the longer cache. If the cache's
    length is traced (under ``jax.jit``, for example), an overflow cannot raise; the output is NaN from then on.

    Args:
        embed_dim, num_heads, num_kv_heads, bias, is_causal, learnable_slopes: As fields of :class:`AlibiConfig`.
        window_size, dropout, distance, law, forget_gate, sinks: As fields of :class:`AlibiConfig`.
        head_dim: Features per head. Default ``embed_dim // num_heads``.
        slopes: ``[num_heads]`` slopes, a NumPy or JAX array, not traced. Default: the canonical slopes. A
            tensor-parallel shard passes its slice of the global slopes, ``alibi_core.slopes(n)[first:last]``.
        future_slopes: ``[num_heads]`` slopes for keys after the query, for an asymmetric encoder.
        implementation: As in :func:`alibi_jax.attention`: the name of an implementation, or None.
        dtype: Dtype of the computation. Default: the promoted dtype of input and parameters.
        param_dtype: Dtype of the projections' parameters.
        rngs: Random number generators for the initial parameters and dropout.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If sizes do not divide, a value is out of range, or slopes are traced.

    Example:
        >>> layer = AlibiAttention(64, 8, num_kv_heads=2, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((3, 10, 64))).shape
        (3, 10, 64)

        Prefill and decoding use the same call; decoding continues with the returned cache:

        >>> output, cache = layer(jnp.ones((3, 9, 64)), cache=layer.make_cache(3, max_length=12))
        >>> output, cache = layer(jnp.ones((3, 1, 64)), cache=cache)
        >>> output.shape, int(cache.length)
        ((3, 1, 64), 10)
    """

    _xp = jnp
    _attention = staticmethod(attention)
    _is_length_first = True
    # Declared on the class, because nnx does not accept a submodule for an attribute that was first set to None.
    clip_qkv, query_factor, q_norm, k_norm = None, 1.0, None, None

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
        distance: str = "manhattan",
        law: str = "linear",
        forget_gate: bool = False,
        sinks: bool = False,
        implementation: Implementation | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        checked(implementation)
        if rngs is None or isinstance(rngs, int | jax.Array):
            raise TypeError(f"rngs must be flax.nnx.Rngs, got {rngs!r}; nnx.Rngs(0) makes one")
        for name, given in (("dtype", dtype), ("param_dtype", param_dtype)):
            if given is not None:
                floating_dtype(name, given)
        self.dtype, self.param_dtype = dtype, param_dtype
        self._build(
            partial(nnx.Linear, use_bias=bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs),
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
            self.forget_proj = nnx.Linear(embed_dim, num_heads, dtype=jnp.float32, rngs=rngs)
        if sinks:
            self.sinks = nnx.Param(jnp.zeros(num_heads, jnp.float32))
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout > 0 else None
        self.log_slopes = nnx.Param(jnp.log(jnp.asarray(self.shape.slopes, jnp.float32))) if learnable_slopes else None

    @property
    def slopes(self) -> jax.Array:
        """The slopes in use, ``[num_heads]`` float32."""
        if self.log_slopes is None:
            return jnp.asarray(self.shape.slopes, jnp.float32)
        return jnp.exp(self.log_slopes[...].astype(jnp.float32))

    @property
    def future_slopes(self) -> jax.Array | None:
        """The slopes for keys after the query, ``[num_heads]`` float32; None if they equal ``slopes``."""
        values = self.shape.future_slopes
        return None if values is None else jnp.asarray(values, jnp.float32)

    def _attend_to(
        self,
        cache: KVCache,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        rules: Any,
        counts: Any,
        gates: dict[str, jax.Array],
    ) -> tuple[jax.Array, KVCache]:
        if not isinstance(cache, KVCache):
            raise TypeError(f"cache must be an alibi_jax.KVCache, as make_cache returns it, got {type(cache).__name__}")
        if key.dtype != (held := cache.keys.dtype):
            raise ValueError(
                f"cache must have the dtype of the layer's keys, {key.dtype}, got {held}; give the layer a dtype if "
                "its input has another than its parameters"
            )
        cache = cache.append(key, value, **counts, **gates)
        return cache.attend(query, self.slopes, **rules, **counts), cache

    def make_cache(self, batch_size: int, max_length: int) -> KVCache:
        """Return an empty cache for ``batch_size`` sequences of up to ``max_length`` tokens.

        Args:
            batch_size: Number of sequences.
            max_length: Capacity of the cache, in tokens.
        """
        dtype = self.param_dtype if self.dtype is None else self.dtype
        gate_heads = self.shape.num_heads if hasattr(self, "forget_proj") else None
        sizes = self.shape.num_kv_heads, max_length, self.shape.head_dim
        return KVCache(batch_size, *sizes, dtype=dtype, gate_heads=gate_heads)
