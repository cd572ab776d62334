"""A transformer whose only sense of position is ALiBi, as Flax NNX modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from alibi_core.backend.checks import explains_keywords
from alibi_core.backend.models import AlibiConfig, check_config, check_input
from alibi_jax.nn._layer import AlibiAttention

AttentionFactory = Callable[..., nnx.Module]
ACTIVATIONS = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
}


def alibi_attention(config: AlibiConfig, **options: Any) -> AlibiAttention:
    """Return the attention layer that ``config`` describes; options are ``dtype``, ``param_dtype`` and ``rngs``.

    It clips, norms and scales queries, keys and values, if ``config`` says so.
    """
    layer = AlibiAttention(**config.attention_options, **options)
    layer.clip_qkv, layer.query_factor = config.clip_qkv, config.query_factor
    if config.qk_norm:
        sizes = layer.q_proj.out_features, layer.k_proj.out_features
        layer.q_norm, layer.k_norm = (norm_layer(config, size, **options) for size in sizes)
    return layer


def scaled(x: jax.Array, factor: float) -> jax.Array:
    """Return ``x`` multiplied by ``factor``."""
    return x if factor == 1 else x * factor


def is_traced(*trees: Any) -> bool:
    """Whether any array of these is traced, as under ``jax.jit``, so that nobody knows its values."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(trees))


def norm_layer(config: AlibiConfig, features: int | None = None, **options: Any) -> nnx.Module:
    """Return a norm of so many features (default ``embed_dim``) as ``config`` describes it."""
    features = features or config.embed_dim
    if config.norm == "rms_norm":
        return nnx.RMSNorm(features, epsilon=config.norm_epsilon, **options)
    # The fast variance is a difference of squares, which loses digits where the mean is large.
    form = {"epsilon": config.norm_epsilon, "use_bias": config.norm_bias, "use_fast_variance": False}
    return nnx.LayerNorm(features, **form, **options)


class AlibiTransformer(nnx.Module):
    """Transform vectors into vectors by blocks of ALiBi attention, each on normed input, then a final norm.

    Nothing else in the model knows of positions, so it takes inputs of any length: longer ones than
    ``config.max_len`` are the point. Post-norm blocks norm their output instead, and no norm follows them.

    Args:
        config: Shape of the model.
        attention: Makes each block's attention layer from ``config`` and the options ``dtype``, ``param_dtype`` and
            ``rngs``: a module called as ``layer(x, mask=..., segment_ids=..., cache=...)``, which returns the output,
            or with a cache the pair of output and longer cache. Default ``alibi_jax.AlibiAttention``.
        dtype: Dtype of the computation. Default: that of input and parameters, promoted.
        param_dtype: Dtype of the parameters.
        rngs: Where the initial parameters and dropout come from.

    Example:
        >>> model = AlibiTransformer(AlibiConfig(num_layers=1), rngs=nnx.Rngs(0))
        >>> model(jnp.ones((8, 100, 256))).shape
        (8, 100, 256)

    References:
        Press, Smith, Lewis: Train Short, Test Long (arXiv 2108.12409). Xiong et al.: On Layer Normalization in the
        Transformer Architecture (arXiv 2002.04745), for pre-norm.
    """

    def __init__(
        self,
        config: AlibiConfig,
        *,
        attention: AttentionFactory | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.config = check_config(config)
        self.blocks = nnx.List(Block(config, attention or alibi_attention, **options) for _ in range(config.num_layers))
        self.norm = None if config.is_post_norm else norm_layer(config, **options)

    @explains_keywords
    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
        caches: Sequence[Any] | None = None,
    ) -> jax.Array | tuple[jax.Array, list[Any]]:
        """Return ``x`` transformed.

        Args:
            x: ``[batch, length, embed_dim]``.
            mask: Booleans that broadcast to ``[batch, num_heads, length, kv_len]``, True where a query may attend;
                with caches, ``kv_len`` is their ``max_length``.
            segment_ids: ``[batch, length]`` integers; tokens attend only where theirs are equal. With caches, a pair
                (of ``x``, of all ``max_length`` slots).
            caches: One key-value cache a block, as :meth:`make_caches` or the call before returns them.

        Returns:
            ``[batch, length, embed_dim]``; with caches, the pair of that and the longer caches.

        Raises:
            TypeError: If ``x`` is no array, or ``caches`` are no sequence.
            ValueError: If ``x`` has another shape, or there is not one cache a block.
        """
        check_input(self.config, x, caches, len(self.blocks))
        longer = []
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            x, cache = block(x, mask=mask, segment_ids=segment_ids, cache=cache)
            longer.append(cache)
        if self.norm is not None:
            x = self.norm(x)
        return x if caches is None else (x, longer)

    def make_caches(self, batch_size: int, max_length: int) -> list[Any]:
        """Return an empty key-value cache for each block, with room for ``max_length`` tokens a sequence."""
        return [block.attention.make_cache(batch_size, max_length) for block in self.blocks]


class Block(nnx.Module):
    """Add to each token what attention finds among the others, and what a feed-forward layer makes of that."""

    def __init__(self, config: AlibiConfig, attention: AttentionFactory, **options: Any) -> None:
        self.kind = config.block
        self.attention_norm = norm_layer(config, **options)
        self.attention = attention(config, **options)
        if self.kind != "shared_norm":
            self.feed_forward_norm = norm_layer(config, **options)
        if self.kind == "double_post_norm":
            self.second_attention_norm = norm_layer(config, **options)
        # The layers have the indices that they have in PyTorch, whose names files hold.
        layers = [
            nnx.Linear(config.embed_dim, config.up_dim, use_bias=config.has_up_bias, **options),
            Activation(config.activation, config.gated),
            nnx.Linear(config.hidden_dim, config.embed_dim, use_bias=config.feed_forward_bias, **options),
        ]
        if config.dropout > 0:
            layers.append(nnx.Dropout(config.dropout, rngs=options["rngs"]))
        self.feed_forward = nnx.List(layers)

    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None,
        segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None,
        cache: Any | None,
    ) -> tuple[jax.Array, Any | None]:
        """Return ``x``, ``[batch, length, embed_dim]``, with both layers' contributions added, and the longer cache."""
        if self.kind in ("post_norm", "double_post_norm"):
            return self._post_norm(x, mask=mask, segment_ids=segment_ids, cache=cache)
        normed = self.attention_norm(x)
        attended, cache = self._attended(normed, mask=mask, segment_ids=segment_ids, cache=cache)
        if self.kind == "shared_norm":
            return x + attended + self._fed_forward(normed), cache
        if self.kind == "parallel":
            return x + attended + self._fed_forward(self.feed_forward_norm(x)), cache
        x = (normed if self.kind == "normed_residual" else x) + attended
        normed = self.feed_forward_norm(x)
        return (normed if self.kind == "normed_residual" else x) + self._fed_forward(normed), cache

    def _attended(self, x: jax.Array, *, cache: Any | None, **rules: Any) -> tuple[jax.Array, Any | None]:
        attended = self.attention(x, cache=cache, **rules)
        return (attended, None) if cache is None else attended

    def _post_norm(self, x: jax.Array, **rules: Any) -> tuple[jax.Array, Any | None]:
        attended, cache = self._attended(x, **rules)
        attended = self.attention_norm(x + attended)
        if self.kind == "double_post_norm":
            attended = self.second_attention_norm(x + attended)
        return self.feed_forward_norm(attended + self._fed_forward(attended)), cache

    def _fed_forward(self, x: jax.Array) -> jax.Array:
        for layer in self.feed_forward:
            x = layer(x)
        return x


class Activation(nnx.Module):
    """An activation; gated, that of the first half of the features, times the second half."""

    def __init__(self, name: str, gated: bool) -> None:
        self.name, self.gated = name, gated

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return ``[..., hidden]`` of ``x``, ``[..., hidden]`` or, gated, ``[..., 2 * hidden]``."""
        if self.gated:
            gate, up = jnp.split(x, 2, axis=-1)
            return ACTIVATIONS[self.name](gate) * up
        return ACTIVATIONS[self.name](x)
