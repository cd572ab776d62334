"""A transformer whose only positional information is ALiBi."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from alibi_core.backend import models
from alibi_core.backend.checks import positive_int
from alibi_core.backend.models import AlibiConfig
from alibi_torch.nn._layer import AlibiAttention

AttentionFactory = Callable[[AlibiConfig], nn.Module]


class Checkpointing(nn.Module):
    """Gradient checkpointing, by the names that trainers of ``transformers`` and ``sentence-transformers`` call."""

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, *, every_n_layers: int = 1, **options: Any
    ) -> None:
        """Switch ``config.gradient_checkpointing`` on: the backward pass of training computes each block again.

        Gradients are the same bits; a training step takes about a third more time.

        Args:
            gradient_checkpointing_kwargs: Arguments of ``torch.utils.checkpoint.checkpoint``. Default:
                ``{"use_reentrant": False}``.
            every_n_layers: Treat only every so many-th block in this way.
            **options: Other options of trainers, such as ``offload``, which must be false.

        Raises:
            NotImplementedError: If a trainer asks for another option.

        Example:
            >>> model = AlibiTransformer(AlibiConfig(num_layers=2))
            >>> model.gradient_checkpointing_enable()
        """
        every_n_layers = positive_int("every_n_layers", every_n_layers)
        for name, option in options.items():
            if option:
                raise NotImplementedError(f"{name} must be False in gradient checkpointing, got {option!r}")
        for index, block in enumerate(x for x in self.modules() if isinstance(x, Block)):
            block.is_checkpointed = index % every_n_layers == 0
            block.checkpoint_options = {"use_reentrant": False} | (gradient_checkpointing_kwargs or {})

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Call :meth:`gradient_checkpointing_enable`, by its new name in ``transformers``."""
        self.gradient_checkpointing_enable(activation_checkpointing_kwargs, **options)

    def gradient_checkpointing_disable(self) -> None:
        """Switch ``config.gradient_checkpointing`` off: keep all activations of blocks for the backward pass."""
        for block in self.modules():
            if isinstance(block, Block):
                block.is_checkpointed = False


class AlibiTransformer(Checkpointing, models.BaseTransformer):
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

    checkpoint_options: Mapping[str, Any] = {"use_reentrant": False}  # of torch.utils.checkpoint.checkpoint

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self._build(parts)

    forward = models.BaseBlock.__call__

    def _checkpointed(self, run: Callable[..., Tensor], x: Tensor) -> Tensor:
        if not (self.training and torch.is_grad_enabled()):
            return run(self, x)
        return checkpoint(run, self, x, **self.checkpoint_options)


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
