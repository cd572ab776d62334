"""A transformer whose only sense of position is ALiBi, and a language model on top of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from alibi_core.backend import AlibiConfig, explains_keywords
from alibi_torch.caches import KVCache
from alibi_torch.nn._layer import AlibiAttention

AttentionFactory = Callable[[AlibiConfig], nn.Module]


def alibi_attention(config: AlibiConfig) -> AlibiAttention:
    """Return the attention layer that ``config`` describes."""
    return finished(AlibiAttention(**config.attention_options), config)


def finished(layer: AlibiAttention, config: AlibiConfig) -> AlibiAttention:
    """Return an attention layer with projections that clip and scale as ``config`` says, if it does."""
    if config.clip_qkv is not None or config.scale is not None:
        for name, factor in (("q_proj", config.query_factor), ("k_proj", 1.0), ("v_proj", 1.0)):
            before = getattr(layer, name)
            options = {"bias": config.bias, "clip": config.clip_qkv, "factor": factor}
            setattr(layer, name, Projection(before.in_features, before.out_features, **options))
    return layer


class Projection(nn.Linear):
    """A linear layer whose output is clipped to ``clip`` on either side of 0, then multiplied by ``factor``."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, clip: float | None, factor: float) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.clip, self.factor = clip, factor

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``, ``[..., in_features]``, projected to ``[..., out_features]``."""
        y = super().forward(x)
        if self.clip is not None:
            y = y.clamp(-self.clip, self.clip)
        return y if self.factor == 1 else y * self.factor


def layer_norm(config: AlibiConfig) -> nn.LayerNorm:
    """Return a layer norm as ``config`` describes it."""
    return nn.LayerNorm(config.embed_dim, eps=config.norm_epsilon, bias=config.norm_bias)


class AlibiTransformer(nn.Module):
    """Transform vectors into vectors by blocks of ALiBi attention, each on normed input, then a final norm.

    Nothing else in the model knows of positions, so it takes inputs of any length: longer ones than
    ``config.max_len`` are the point.

    Args:
        config: Shape of the model.
        attention: Makes each block's attention layer, a module called as ``layer(x, mask=..., segment_ids=...,
            cache=...)``. Default ``alibi_torch.AlibiAttention``.

    Example:
        >>> import torch
        >>> model = AlibiTransformer(AlibiConfig(num_layers=1))
        >>> model(torch.randn(8, 100, 256)).shape
        torch.Size([8, 100, 256])

    References:
        Press, Smith, Lewis: Train Short, Test Long (arXiv 2108.12409). Xiong et al.: On Layer Normalization in the
        Transformer Architecture (arXiv 2002.04745), for pre-norm.
    """

    def __init__(self, config: AlibiConfig, *, attention: AttentionFactory | None = None) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(Block(config, attention or alibi_attention) for _ in range(config.num_layers))
        self.norm = layer_norm(config)

    @explains_keywords
    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        caches: Sequence[Any] | None = None,
    ) -> Tensor:
        """Return ``x`` transformed.

        Args:
            x: ``[batch, length, embed_dim]``.
            mask: Booleans that broadcast to ``[batch, num_heads, length, kv_len]``, True where a query may attend.
            segment_ids: ``[batch, length]`` integers; tokens attend only where theirs are equal.
            caches: One key-value cache a block, as :meth:`make_caches` returns them.

        Returns:
            ``[batch, length, embed_dim]``, of the dtype of ``x``.

        Raises:
            ValueError: If ``x`` has another shape, or there is not one cache a block.
        """
        if x.ndim != 3 or x.shape[-1] != self.config.embed_dim:
            raise ValueError(
                f"x must have shape (batch, length, embed_dim {self.config.embed_dim}), got {tuple(x.shape)}"
            )
        if caches is not None and len(caches) != len(self.blocks):
            raise ValueError(f"caches must be one a block ({len(self.blocks)}), got {len(caches)}")
        held = [
            (cache, cache.length if cache.lengths is None else cache.lengths)
            for cache in caches or ()
            if isinstance(cache, KVCache)
        ]
        try:
            for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
                x = block(x, mask=mask, segment_ids=segment_ids, cache=cache)
        except Exception:
            for cache, length in held:
                cache.truncate(length)  # what one block refused is not to stay in the caches of those before it
            raise
        return self.norm(x)

    def make_caches(self, batch_size: int, max_length: int, **options: Any) -> list[Any]:
        """Return an empty key-value cache for each block, with room for ``max_length`` tokens a sequence.

        Options are those of the attention layers' ``make_cache``.
        """
        return [block.attention.make_cache(batch_size, max_length, **options) for block in self.blocks]


class Block(nn.Module):
    """Add to each token what attention finds among the others, and what a feed-forward layer makes of that."""

    def __init__(self, config: AlibiConfig, attention: AttentionFactory) -> None:
        super().__init__()
        self.kind, hidden = config.block, config.hidden_dim
        self.attention_norm = layer_norm(config)
        self.attention = attention(config)
        if self.kind != "shared_norm":
            self.feed_forward_norm = layer_norm(config)
        self.feed_forward = nn.Sequential(
            nn.Linear(config.embed_dim, hidden, bias=config.feed_forward_bias),
            nn.GELU("tanh" if config.activation == "gelu_tanh" else "none"),
            nn.Linear(hidden, config.embed_dim, bias=config.feed_forward_bias),
            nn.Dropout(config.dropout),
        )

    def forward(self, x: Tensor, *, mask: Tensor | None, segment_ids: Tensor | None, cache: Any | None) -> Tensor:
        """Return ``x``, ``[batch, length, embed_dim]``, with both layers' contributions added."""
        normed = self.attention_norm(x)
        attended = self.attention(normed, mask=mask, segment_ids=segment_ids, cache=cache)
        if self.kind == "shared_norm":
            return x + attended + self.feed_forward(normed)
        if self.kind == "parallel":
            return x + attended + self.feed_forward(self.feed_forward_norm(x))
        x = (normed if self.kind == "normed_residual" else x) + attended
        normed = self.feed_forward_norm(x)
        return (normed if self.kind == "normed_residual" else x) + self.feed_forward(normed)
