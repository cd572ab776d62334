"""A transformer whose only positional information is ALiBi."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from alibi_core.backend import models
from alibi_core.backend.models import AlibiConfig
from alibi_torch.nn._layer import AlibiAttention

AttentionFactory = Callable[[AlibiConfig], nn.Module]


class AlibiTransformer(nn.Module, models.BaseTransformer):
    """Transform ``[batch, length, embed_dim]`` by blocks of ALiBi attention, at any length.

    Args:
        config: Shape of the model.
        attention: A factory that takes ``config`` and returns a block's attention layer, which is called as
            ``layer(x, mask=..., segment_ids=..., cache=...)``. Default ``alibi_torch.AlibiAttention``.

    Example:
        >>> import torch
        >>> model = AlibiTransformer(AlibiConfig(num_layers=1))
        >>> model(torch.randn(8, 100, 256)).shape
        torch.Size([8, 100, 256])
    """

    def __init__(self, config: AlibiConfig, *, attention: AttentionFactory | None = None) -> None:
        super().__init__()
        self._build(Parts(config, attention))

    forward = models.BaseTransformer.__call__


class Block(nn.Module, models.BaseBlock):
    """Attention and a feed-forward layer."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self._build(parts)

    forward = models.BaseBlock.__call__


class TokenEmbedding(nn.Embedding):
    """An embedding whose matrix also computes logits, inside of ``forward``, whose hooks may fetch and remove it."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the rows of integers ``[...]``, or the logits ``[..., num_embeddings]`` of vectors."""
        return F.linear(x, self.weight) if x.is_floating_point() else super().forward(x)


class Parts(models.BaseParts):
    """Factory of the PyTorch modules of a model."""

    attention_layer = AlibiAttention
    listed = nn.ModuleList

    def linear(self, features: int, to: int, bias: bool) -> nn.Module:
        return nn.Linear(features, to, bias=bias)

    def layer_norm(self, features: int) -> nn.Module:
        return nn.LayerNorm(features, eps=self.config.norm_epsilon, bias=self.config.norm_bias)

    def rms_norm(self, features: int) -> nn.Module:
        return nn.RMSNorm(features, eps=self.config.norm_epsilon)

    def activation(self) -> nn.Module:
        makers = {"gelu": nn.GELU, "gelu_tanh": lambda: nn.GELU("tanh"), "silu": nn.SiLU, "relu": nn.ReLU}
        return makers[self.config.activation]()

    def dropout(self) -> nn.Module:
        return nn.Dropout(self.config.dropout)

    def embedding(self, count: int) -> nn.Module:
        kind = TokenEmbedding if self.config.is_causal and self.config.tied_head else nn.Embedding
        table = kind(count, self.config.embed_dim)
        nn.init.normal_(table.weight, std=self.config.embed_dim**-0.5)
        return table

    def block(self) -> Block:
        return Block(self)

    def transformer(self) -> AlibiTransformer:
        return AlibiTransformer(self.config, attention=self.factory)
