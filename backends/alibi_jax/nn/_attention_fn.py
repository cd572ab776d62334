"""ALiBi for Flax's own attention modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from alibi_core.backend.checks import broadcastable, is_int
from alibi_jax._attention import attention
from alibi_jax._dispatch import Implementation, checked


def attention_fn(
    slopes: int | jax.Array | None = None,
    *,
    is_causal: bool = True,
    future_slopes: jax.Array | None = None,
    window_size: int | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> Callable[..., jax.Array]:
    """Return a function for ``nn.MultiHeadDotProductAttention(attention_fn=...)`` that computes ALiBi attention.

    It serves Flax Linen, and ``nnx.MultiHeadAttention``, whose ``attention_fn`` takes the same arguments. The function
    keeps Flax's conventions: a mask may have any dtype, nonzero for visible keys, and low-precision tensors are first
    cast to the module's ``dtype``. It differs in three ways: the softmax is always at least float32, a query that sees
    no key gives zeros, and dropout is drawn for each weight, also with ``broadcast_dropout``. Dropout and a further
    bias need the implementation ``"dense"``.

    ``decode=True`` works with causal attention: one query attends to a cache whose unused slots are masked. The
    function assumes that the query is at its last visible key; any later position gives the same softmax.

    Args:
        slopes: ``[num_heads]``, or an int for that many canonical slopes. Default: the canonical slopes for the
            module's number of heads.
        is_causal: Mask keys after the query, in addition to the module's mask.
        future_slopes: With ``is_causal=False``, the slopes for keys after the query. Default ``slopes`` (symmetric).
        window_size: Mask keys farther away than this many tokens: with 4, a query sees 5 keys, including its own.
        scale: Factor of the scores. Default ``head_dim ** -0.5``.
        implementation: As in :func:`alibi_jax.attention`: the name of an implementation, or None.

    Returns:
        A function of query ``[..., q_len, num_heads, head_dim]``, key and value, and the keyword arguments that Flax
        passes; its result has the shape of query. It raises NotImplementedError for options that it does not support: a
        ``precision`` or an einsum from the module, sowing of weights, and ``is_causal=False`` or ``window_size`` if the
        lengths of query and key differ (Flax does not pass the positions of queries). Otherwise it raises the errors of
        :func:`alibi_jax.attention`.

    Raises:
        TypeError: If ``implementation`` is neither a string nor a :class:`TPU`.
        ValueError: If ``implementation`` is unknown.

    Example:
        >>> import flax.linen as nn
        >>> layer = nn.MultiHeadDotProductAttention(num_heads=2, attention_fn=attention_fn())
        >>> layer.init_with_output(jax.random.key(0), jnp.ones((1, 3, 8)))[0].shape
        (1, 3, 8)
    """
    checked(implementation)
    slopes = slopes if slopes is None or is_int(slopes) else jnp.asarray(slopes)
    future_slopes = None if future_slopes is None else jnp.asarray(future_slopes)
    always_causal = is_causal

    # Linen passes only arguments that it finds in the signature, so unsupported ones must be listed to be refused.
    def alibi_attention(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        force_fp32_for_softmax: bool = True,
        einsum_dot_general: Any = None,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
        is_causal: bool = False,
    ) -> jax.Array:
        """Attend as :func:`alibi_jax.attention` does, with the arguments of ``flax.linen.dot_product_attention``."""
        refused = {
            "precision": (precision, "set it with jax.default_matmul_precision"),
            "module": (module, "call it with sow_weights=False; alibi_jax.attention returns weights, if asked"),
            "einsum_dot_general": (einsum_dot_general, "the products cannot be replaced"),
            "qk_attn_weights_einsum": (qk_attn_weights_einsum, "the products cannot be replaced"),
            "attn_weights_value_einsum": (attn_weights_value_einsum, "the products cannot be replaced"),
        }
        for name, (given, remedy) in refused.items():
            if given is not None:
                raise NotImplementedError(f"{name} must be None with ALiBi attention, got one; {remedy}")
        causal = always_causal or is_causal
        q_len, kv_len = query.shape[-3], key.shape[-3]
        if q_len != kv_len and (window_size is not None or not causal):
            raise NotImplementedError(
                f"q_len and kv_len must be equal with is_causal=False or a window_size, got {q_len} and {kv_len}: Flax "
                "does not say where its queries stand; use alibi_jax.attention with q_offset, or "
                "alibi_jax.AlibiAttention with a cache"
            )
        dtype = jnp.result_type(query, key, value) if dtype is None else dtype
        query, key, value = (x.astype(dtype) for x in (query, key, value))
        mask = None if mask is None else mask.astype(bool)
        return attention(
            query,
            key,
            value,
            slopes,
            is_causal=causal,
            future_slopes=future_slopes,
            q_offset=_last_visible(mask, query, kv_len) if mask is not None and q_len == 1 else None,
            window_size=window_size,
            mask=mask,
            scale=scale,
            added_bias=bias,
            dropout=0.0 if deterministic else dropout_rate,
            dropout_key=dropout_rng,
            implementation=implementation,
        )

    return alibi_attention


def _last_visible(mask: jax.Array, query: jax.Array, kv_len: int) -> jax.Array:
    """Return the position ``[*batch]`` of the last key that the single query sees in any head, 0 if there is none.

    Masks and a fixed-size cache do not determine the query's position. Counting distances from the end of the cache
    would add a constant to the row, which cancels in softmax but costs float32 digits of the scores.
    """
    *batch, q_len, num_heads, _ = query.shape
    shape = (*batch, num_heads, q_len, kv_len)
    broadcastable("mask", mask.shape, shape, "..., num_heads, q_len, kv_len")
    visible = jnp.broadcast_to(mask, shape)
    return jnp.max(jnp.where(visible, jnp.arange(kv_len), 0), axis=(-3, -2, -1), initial=0)
