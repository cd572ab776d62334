"""A transformer whose only positional information is ALiBi."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from alibi_core.backend import models
from alibi_core.backend.models import AlibiConfig
from alibi_mlx.nn._layer import KEYS, AlibiAttention, Dropout
from alibi_mlx.nn._weights import SavesLayers

AttentionFactory = Callable[[AlibiConfig], nn.Module]


class AlibiTransformer(SavesLayers, models.BaseTransformer):
    """Transform ``[batch, length, embed_dim]`` by blocks of ALiBi attention, at any length.

    Args:
        config: Shape of the model.
        attention: A factory that takes ``config`` and returns a block's attention layer, which is called as
            ``layer(x, mask=..., segment_ids=..., cache=...)``. Default ``alibi_mlx.AlibiAttention``.

    Example:
        >>> import mlx.core as mx
        >>> model = AlibiTransformer(AlibiConfig(num_layers=1))
        >>> model(mx.random.normal((8, 100, 256))).shape
        (8, 100, 256)
    """

    def __init__(self, config: AlibiConfig, *, attention: AttentionFactory | None = None) -> None:
        super().__init__()
        self._build(Parts(config, attention))

    def make_caches(self, batch_size: int | None = None, max_length: int | None = None) -> list[Any]:
        """Return an empty key/value cache for each block; sizes that are not given come from the first keys."""
        return [block.attention.make_cache(batch_size, max_length) for block in self.blocks]


class Block(nn.Module, models.BaseBlock):
    """Attention and a feed-forward layer."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self._build(parts)

    def _checkpointed(self, run: Callable[..., mx.array], x: mx.array) -> mx.array:
        if not self.training:
            return run(self, x)
        keys: list[mx.array] = []
        modes = itertools.chain((keys,), map(iter, itertools.repeat(keys)))  # drawn once, then drawn again
        held = self.trainable_parameters()
        flat = dict(tree_flatten(held))

        def again(x: mx.array, *weights: mx.array) -> mx.array:
            mode = next(modes)
            token, before = KEYS.set(mode), mx.random.state[0]
            self.update(tree_unflatten(list(zip(flat, weights, strict=True))))
            try:
                y = run(self, x)
            finally:
                self.update(held)
                KEYS.reset(token)
            if mode is not keys and mx.random.state[0] is not before:
                raise NotImplementedError(
                    "gradient_checkpointing must be False where a block draws random numbers of its own, got True; "
                    "only config.dropout draws the same again"
                )
            return y

        function = mx.custom_function(again)

        @function.vjp
        def differentiate(inputs: Any, gradient: mx.array, _: mx.array) -> tuple[mx.array, ...]:
            # MLX orders lazy work itself, and may compute all blocks of mx.checkpoint again at once. Here a block waits
            # for its gradient, and the gradient of the block before waits for those of this block's weights.
            x, *weights = inputs if isinstance(inputs, tuple) else (inputs,)
            by_x, *by_weights = mx.vjp(again, [*mx.depends([x], [gradient]), *weights], [gradient])[1]
            return *mx.depends([by_x], by_weights), *by_weights

        return function(x, *flat.values())


class Parts(models.BaseParts):
    """Factory of the MLX modules of a model."""

    attention_layer = AlibiAttention
    listed = list

    def linear(self, features: int, to: int, bias: bool) -> nn.Module:
        return nn.Linear(features, to, bias=bias)

    def layer_norm(self, features: int) -> nn.Module:
        return nn.LayerNorm(features, eps=self.config.norm_epsilon, bias=self.config.norm_bias)

    def rms_norm(self, features: int) -> nn.Module:
        return nn.RMSNorm(features, eps=self.config.norm_epsilon)

    def activation(self) -> nn.Module:
        makers = {"gelu": nn.GELU, "gelu_tanh": lambda: nn.GELU("precise"), "silu": nn.SiLU, "relu": nn.ReLU}
        return makers[self.config.activation]()

    def dropout(self) -> nn.Module:
        return Dropout(self.config.dropout)

    def embedding(self, count: int) -> nn.Module:
        return nn.Embedding(count, self.config.embed_dim)

    def block(self) -> Block:
        return Block(self)

    def transformer(self) -> AlibiTransformer:
        return AlibiTransformer(self.config, attention=self.factory)
