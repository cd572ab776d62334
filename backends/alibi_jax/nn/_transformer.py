"""A transformer whose only positional information is ALiBi, as Flax NNX modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from alibi_core.backend import models
from alibi_core.backend.models import AlibiConfig
from alibi_jax.nn._layer import AlibiAttention

AttentionFactory = Callable[..., nnx.Module]
ACTIVATIONS = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
}


class AlibiTransformer(nnx.Module, models.BaseTransformer):
    """Transform ``[batch, length, embed_dim]`` by blocks of ALiBi attention, at any length.

    Args:
        config: Shape of the model.
        attention: A factory that takes ``config`` and the options ``dtype``, ``param_dtype`` and ``rngs`` and returns a
            block's attention layer. The layer is called as ``layer(x, mask=..., segment_ids=..., cache=...)``; with a
            cache it returns the pair of output and longer cache. Default ``alibi_jax.AlibiAttention``.
        dtype, param_dtype, rngs: As in :class:`AlibiAttention`.

    Example:
        >>> model = AlibiTransformer(AlibiConfig(num_layers=1), rngs=nnx.Rngs(0))
        >>> model(jnp.ones((8, 100, 256))).shape
        (8, 100, 256)
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
        self._build(Parts(config, attention, dtype=dtype, param_dtype=param_dtype, rngs=rngs))


class Block(nnx.Module, models.BaseBlock):
    """Attention and a feed-forward layer."""

    def __init__(self, parts: Parts) -> None:
        self._build(parts)

    def _checkpointed(self, run: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
        if not is_traced(nnx.state(self), x):  # so nothing is differentiated
            return run(self, x)
        if any(not layer.deterministic for _, layer in nnx.iter_modules(self) if isinstance(layer, nnx.Dropout)):
            return nnx.remat(lambda block, x: run(block, x))(self, x)
        # Flax's remat writes all state back, which it must not where a model comes from outside of a transformation.
        return jax.checkpoint(partial(run, self))(x)


class Activation(nnx.Module):
    """An activation, by its name in ``AlibiConfig``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the activation of ``x``."""
        return ACTIVATIONS[self.name](x)


class Parts(models.BaseParts):
    """Factory of the Flax modules of a model."""

    attention_layer = AlibiAttention
    listed = nnx.List

    def linear(self, features: int, to: int, bias: bool) -> nnx.Module:
        return nnx.Linear(features, to, use_bias=bias, **self.options)

    def layer_norm(self, features: int) -> nnx.Module:
        # The fast variance is a difference of squares, which loses digits if the mean is large.
        form = {"epsilon": self.config.norm_epsilon, "use_bias": self.config.norm_bias, "use_fast_variance": False}
        return nnx.LayerNorm(features, **form, **self.options)

    def rms_norm(self, features: int) -> nnx.Module:
        return nnx.RMSNorm(features, epsilon=self.config.norm_epsilon, **self.options)

    def activation(self) -> nnx.Module:
        return Activation(self.config.activation)

    def dropout(self) -> nnx.Module | None:
        return nnx.Dropout(self.config.dropout, rngs=self.options["rngs"]) if self.config.dropout > 0 else None

    def embedding(self, count: int) -> nnx.Module:
        init = nnx.initializers.normal(self.config.embed_dim**-0.5)
        return nnx.Embed(count, self.config.embed_dim, embedding_init=init, **self.options)

    def block(self) -> Block:
        return Block(self)

    def transformer(self) -> AlibiTransformer:
        return AlibiTransformer(self.config, attention=self.factory, **self.options)


def is_traced(*trees: Any) -> bool:
    """Whether any array of these is traced, as under ``jax.jit``, so that its values cannot be read."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(trees))
