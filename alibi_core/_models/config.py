"""The shape of a transformer, in any framework."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from alibi_core._arrays import checks

BLOCKS = ("sequential", "normed_residual", "parallel", "shared_norm")
ACTIVATIONS = ("gelu", "gelu_tanh")
_SWITCHES = ("causal", "bias", "feed_forward_bias", "norm_bias", "embedding_norm", "scale_embedding", "tied_head")


@dataclass(frozen=True)
class AlibiConfig:
    """The shape of an ALiBi transformer.

    Args:
        num_layers: Number of blocks, each an attention layer and a feed-forward layer.
        d_model: Features a token.
        num_heads: Attention heads; must divide ``d_model``.
        max_len: Length the model is trained at, in tokens. A record, never a limit: longer inputs are what ALiBi is
            for.
        dropout: Probability, while training, that a feature of a layer's output is dropped; at least 0, below 1.
        causal: True for a decoder, whose tokens see those before them; False for an encoder with symmetric bias.
        expansion_factor: Width of the feed-forward layers, in multiples of ``d_model``.
        num_kv_heads: Key and value heads; must divide ``num_heads``. Default ``num_heads``.
        bias: Whether the attention layers' projections add a bias vector.
        block: How attention and feed-forward layer are put together. ``"sequential"``: one after the other, each on
            the norm of what came before and added to it. ``"normed_residual"``: likewise, but added to that norm.
            ``"parallel"``: both on the block's input, each with a norm of its own. ``"shared_norm"``: both on one norm
            of it.
        activation: Of the feed-forward layers: ``"gelu"``, or ``"gelu_tanh"``, its approximation by ``tanh``.
        feed_forward_dim: Width of the feed-forward layers. Default ``expansion_factor * d_model``.
        feed_forward_bias: Whether the feed-forward layers add bias vectors.
        norm_bias: Whether layer norms do.
        norm_epsilon: What layer norms add to the variance.
        slopes: One slope a head, not negative. Default: the canonical ones.
        scale: Factor of the scores. Default ``head_dim ** -0.5``. The bias is not scaled.
        clip_qkv: What queries, keys and values are clipped to, on either side of 0. Default: they are not.
        embedding_norm: Whether a language model normalises its embeddings.
        scale_embedding: Whether a language model multiplies its embeddings by ``sqrt(d_model)``.
        tied_head: Whether a language model reads out logits with the matrix that embeds its tokens.

    Raises:
        TypeError: If a field is of the wrong kind.
        ValueError: If a value is out of range or does not divide what it must.

    Example:
        >>> AlibiConfig(num_layers=2, causal=False).head_dim
        32
    """

    num_layers: int = 6
    d_model: int = 256
    num_heads: int = 8
    max_len: int = 256
    dropout: float = 0.1
    causal: bool = True
    expansion_factor: int = 1
    num_kv_heads: int | None = None
    bias: bool = False
    block: str = "sequential"
    activation: str = "gelu"
    feed_forward_dim: int | None = None
    feed_forward_bias: bool = True
    norm_bias: bool = True
    norm_epsilon: float = 1e-5
    slopes: tuple[float, ...] | None = None
    scale: float | None = None
    clip_qkv: float | None = None
    embedding_norm: bool = False
    scale_embedding: bool = True
    tied_head: bool = True

    def __post_init__(self) -> None:
        for name in ("num_layers", "d_model", "num_heads", "max_len", "expansion_factor"):
            checks.positive_int(name, getattr(self, name))
        for name in _SWITCHES:
            checks.boolean(name, getattr(self, name))
        checks.one_of("block", self.block, BLOCKS)
        checks.one_of("activation", self.activation, ACTIVATIONS)
        checks.positive_number("norm_epsilon", self.norm_epsilon)
        for name in ("scale", "clip_qkv"):
            if getattr(self, name) is not None:
                checks.positive_number(name, getattr(self, name))
        if not 0 <= checks.real_number("dropout", self.dropout) < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout}")
        if self.d_model % self.num_heads:
            raise ValueError(f"d_model must be a multiple of num_heads ({self.num_heads}), got {self.d_model}")
        if self.num_kv_heads is not None and self.num_heads % checks.positive_int("num_kv_heads", self.num_kv_heads):
            raise ValueError(f"num_kv_heads must divide num_heads ({self.num_heads}), got {self.num_kv_heads}")
        if self.feed_forward_dim is not None:
            checks.positive_int("feed_forward_dim", self.feed_forward_dim)
        if self.slopes is not None:
            self._check_slopes(self.slopes)

    def _check_slopes(self, slopes: tuple[float, ...]) -> None:
        if not isinstance(slopes, tuple):
            raise TypeError(f"slopes must be a tuple of numbers, got {type(slopes).__name__}")
        if len(slopes) != self.num_heads:
            raise ValueError(f"slopes must be one a head ({self.num_heads}), got {len(slopes)}")
        for slope in slopes:
            checks.non_negative_number("slopes", slope)

    @property
    def head_dim(self) -> int:
        """Features a head."""
        return self.d_model // self.num_heads

    @property
    def hidden_dim(self) -> int:
        """Width of the feed-forward layers."""
        return self.expansion_factor * self.d_model if self.feed_forward_dim is None else self.feed_forward_dim

    @property
    def query_factor(self) -> float:
        """What queries are multiplied by, so that a scale of ``head_dim ** -0.5`` comes to ``scale``."""
        return 1.0 if self.scale is None else self.scale * math.sqrt(self.head_dim)

    @property
    def attention_options(self) -> dict[str, Any]:
        """The arguments of every backend's ``AlibiAttention``, slopes as a NumPy array."""
        return {
            "embed_dim": self.d_model,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "bias": self.bias,
            "is_causal": self.causal,
            "slopes": None if self.slopes is None else np.asarray(self.slopes, np.float32),
            "dropout": self.dropout,
        }
