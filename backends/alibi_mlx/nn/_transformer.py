"""A transformer whose only sense of position is ALiBi."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx import nn

from alibi_core.backend.checks import explains_keywords
from alibi_core.backend.models import AlibiConfig, check_config, check_input
from alibi_mlx.nn._layer import AlibiAttention, unless_refused

AttentionFactory = Callable[[AlibiConfig], nn.Module]


def alibi_attention(config: AlibiConfig) -> AlibiAttention:
    """Return the attention layer that ``config`` describes, which clips, norms and scales if that says so."""
    layer = AlibiAttention(**config.attention_options)
    layer.clip_qkv, layer.query_factor = config.clip_qkv, config.query_factor
    if config.qk_norm:
        layer.q_norm, layer.k_norm = (norm_layer(config, len(x.weight)) for x in (layer.q_proj, layer.k_proj))
    return layer


def scaled(x: mx.array, factor: float) -> mx.array:
    """Return ``x`` multiplied by ``factor``."""
    return x if factor == 1 else x * factor


def norm_layer(config: AlibiConfig, features: int | None = None) -> nn.Module:
    """Return a norm of so many features (default ``embed_dim``) as ``config`` describes it."""
    features = features or config.embed_dim
    if config.norm == "rms_norm":
        return nn.RMSNorm(features, eps=config.norm_epsilon)
    return nn.LayerNorm(features, eps=config.norm_epsilon, bias=config.norm_bias)


class Gated(nn.Module):
    """The activation of the first half of the features, times the second half."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def __call__(self, x: mx.array) -> mx.array:
        """Return ``[..., hidden]`` of ``x``, ``[..., 2 * hidden]``."""
        gate, up = mx.split(x, 2, axis=-1)
        return self.activation(gate) * up


def activation_layer(config: AlibiConfig) -> nn.Module:
    """Return the activation of feed-forward layers, gated if ``config`` says so."""
    makers = {"gelu": nn.GELU, "gelu_tanh": lambda: nn.GELU("precise"), "silu": nn.SiLU, "relu": nn.ReLU}
    activation = makers[config.activation]()
    return Gated(activation) if config.gated else activation


class AlibiTransformer(nn.Module):
    """Transform vectors into vectors by blocks of ALiBi attention, each on normed input, then a final norm.

    Nothing else in the model knows of positions, so it takes inputs of any length: longer ones than
    ``config.max_len`` are the point. Post-norm blocks norm their output instead, and no norm follows them. Parameters
    have the names that they have in PyTorch, so that a state dict saved as safetensors loads with ``load_weights``, and
    back.

    Args:
        config: Shape of the model.
        attention: Makes each block's attention layer, a module called as ``layer(x, mask=..., segment_ids=...,
            cache=...)``. Default ``alibi_mlx.AlibiAttention``.

    Example:
        >>> model = AlibiTransformer(AlibiConfig(num_layers=1))
        >>> model(mx.random.normal((8, 100, 256))).shape
        (8, 100, 256)

    References:
        Press, Smith, Lewis: Train Short, Test Long (arXiv 2108.12409). Xiong et al.: On Layer Normalization in the
        Transformer Architecture (arXiv 2002.04745), for pre-norm.
    """

    def __init__(self, config: AlibiConfig, *, attention: AttentionFactory | None = None) -> None:
        super().__init__()
        self.config = check_config(config)
        self.blocks = [Block(config, attention or alibi_attention) for _ in range(config.num_layers)]
        self.norm = nn.Identity() if config.is_post_norm else norm_layer(config)

    @explains_keywords
    def __call__(
        self,
        x: mx.array,
        *,
        mask: mx.array | None = None,
        segment_ids: mx.array | tuple[mx.array, mx.array] | None = None,
        caches: Sequence[Any] | None = None,
    ) -> mx.array:
        """Return ``x`` transformed.

        Args:
            x: ``[batch, length, embed_dim]``.
            mask: Booleans that broadcast to ``[batch, num_heads, length, kv_len]``, True where a query may attend.
            segment_ids: ``[batch, length]`` integers; tokens attend only where theirs are equal. With caches, a pair
                (of ``x``, of all tokens).
            caches: One key-value cache a block, as :meth:`make_caches` returns them.

        Returns:
            ``[batch, length, embed_dim]``.

        Raises:
            TypeError: If ``x`` is no array, or ``caches`` are no sequence.
            ValueError: If ``x`` has another shape, or there is not one cache a block.
        """
        check_input(self.config, x, caches, len(self.blocks))
        with unless_refused(caches or ()):  # what one block refuses is not to stay in those before it
            for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
                x = block(x, mask=mask, segment_ids=segment_ids, cache=cache)
        return self.norm(x)

    def make_caches(self, batch_size: int | None = None, max_length: int | None = None) -> list[Any]:
        """Return an empty key-value cache for each block; its sizes are those of its first keys unless given."""
        return [block.attention.make_cache(batch_size, max_length) for block in self.blocks]


class Block(nn.Module):
    """Add to each token what attention finds among the others, and what a feed-forward layer makes of that."""

    def __init__(self, config: AlibiConfig, attention: AttentionFactory) -> None:
        super().__init__()
        self.kind = config.block
        self.attention_norm = norm_layer(config)
        self.attention = attention(config)
        if self.kind != "shared_norm":
            self.feed_forward_norm = norm_layer(config)
        if self.kind == "double_post_norm":
            self.second_attention_norm = norm_layer(config)
        # A list, not nn.Sequential, which would put a "layers" into the names that PyTorch does not have.
        self.feed_forward = [
            nn.Linear(config.embed_dim, config.up_dim, bias=config.has_up_bias),
            activation_layer(config),
            nn.Linear(config.hidden_dim, config.embed_dim, bias=config.feed_forward_bias),
            nn.Dropout(config.dropout),
        ]

    def __call__(
        self,
        x: mx.array,
        *,
        mask: mx.array | None,
        segment_ids: mx.array | tuple[mx.array, mx.array] | None,
        cache: Any | None,
    ) -> mx.array:
        """Return ``x``, ``[batch, length, embed_dim]``, with both layers' contributions added."""
        if self.kind in ("post_norm", "double_post_norm"):
            attended = self.attention_norm(x + self.attention(x, mask=mask, segment_ids=segment_ids, cache=cache))
            if self.kind == "double_post_norm":
                attended = self.second_attention_norm(x + attended)
            return self.feed_forward_norm(attended + self._fed_forward(attended))
        normed = self.attention_norm(x)
        attended = self.attention(normed, mask=mask, segment_ids=segment_ids, cache=cache)
        if self.kind == "shared_norm":
            return x + attended + self._fed_forward(normed)
        if self.kind == "parallel":
            return x + attended + self._fed_forward(self.feed_forward_norm(x))
        x = (normed if self.kind == "normed_residual" else x) + attended
        normed = self.feed_forward_norm(x)
        return (normed if self.kind == "normed_residual" else x) + self._fed_forward(normed)

    def _fed_forward(self, x: mx.array) -> mx.array:
        for layer in self.feed_forward:
            x = layer(x)
        return x
