"""The shape of a transformer, in any framework."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np

from alibi_core._arrays import checks, explains_keywords
from alibi_core._models.attention_layer import LayerShape

POST_NORM_BLOCKS = ("post_norm", "double_post_norm")
BLOCKS = ("sequential", "normed_residual", "parallel", "shared_norm", *POST_NORM_BLOCKS)
ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu")
NORMS = ("layer_norm", "rms_norm")


def _check_slopes(name: str, slopes: Any) -> None:
    if not isinstance(slopes, tuple):
        values = {"list": f"; give tuple({name})", "ndarray": f"; give tuple({name}.tolist())"}
        how = values.get(type(slopes).__name__, "")
        raise TypeError(f"{name} must be a tuple of numbers, got {type(slopes).__name__}{how}")
    for slope in slopes:
        checks.non_negative_number(name, slope)


_WRONG_WAY = {
    True: "is_causal must be True for a language model, got False (an encoder sees the answer)",
    False: "is_causal must be False for an encoder, got True (AlibiLanguageModel is for decoders)",
}
# The checks of fields that are given. Others are booleans, or arguments of attention layers, which check their own.
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("num_layers", "embed_dim", "num_heads", "max_len", "expansion_factor"), checks.positive_int),
    "feed_forward_dim": checks.positive_int,
    "token_types": checks.non_negative_int,
    **dict.fromkeys(("norm_epsilon", "scale", "clip_qkv", "embedding_scale", "logit_scale"), checks.positive_number),
    **dict.fromkeys(("slopes", "future_slopes"), _check_slopes),
    "block": partial(checks.one_of, choices=BLOCKS),
    "activation": partial(checks.one_of, choices=ACTIVATIONS),
    "norm": partial(checks.one_of, choices=NORMS),
    "up_bias": checks.boolean,
}


@dataclass(frozen=True)
class AlibiConfig:
    """The shape of an ALiBi transformer, with the argument names of the attention layers.

    Args:
        num_layers: Number of blocks, each an attention layer and a feed-forward layer.
        embed_dim: Features a token.
        num_heads: Attention heads; must divide ``embed_dim``.
        max_len: Length that the model is trained at, in tokens. It is a record, never a limit: ALiBi is made for longer
            inputs.
        dropout: Probability, while training, that a feature of a layer's output is dropped; at least 0, below 1.
        is_causal: True for a decoder, whose tokens see earlier tokens only; False for an encoder with symmetric bias.
        expansion_factor: Width of the feed-forward layers, in multiples of ``embed_dim``.
        num_kv_heads: Key and value heads; must divide ``num_heads``. Default ``num_heads``.
        bias: Whether the attention layers' projections add a bias vector.
        block: Order of attention layer, feed-forward layer and norms. ``"sequential"``: ``x += layer(norm(x))``, first
            attention, then feed-forward. ``"normed_residual"``: the same order, but ``x = norm(x) + layer(norm(x))``.
            ``"parallel"``: the output of both layers is added to the block's input; each layer has its own norm.
            ``"shared_norm"``: the same, but both layers share one norm. ``"post_norm"``: ``x = norm(x + layer(x))``,
            first attention, then feed-forward. ``"double_post_norm"``: the same, but the normed sum of attention is
            added to the block's input once more and normed again, before feed-forward.
        activation: Activation of the feed-forward layers: ``"gelu"``, ``"gelu_tanh"`` (its approximation by ``tanh``),
            ``"silu"`` or ``"relu"``.
        gated: Whether the feed-forward layers are gated: the activation of one projection times another projection
            (SwiGLU with ``"silu"``). In the first weight the rows of the gate come first.
        feed_forward_dim: Width of the feed-forward layers. Default ``expansion_factor * embed_dim``.
        feed_forward_bias: Whether the feed-forward layers add bias vectors.
        up_bias: Whether the first projection of the feed-forward layers adds a bias vector. Default
            ``feed_forward_bias``.
        qk_norm: Whether queries and keys are normed, over the features of all heads together.
        norm: ``"layer_norm"``, or ``"rms_norm"``, which subtracts no mean and has no bias.
        norm_bias: Whether layer norms add bias vectors.
        norm_epsilon: Number that norms add to the variance.
        slopes: One slope a head, not negative. Default: the canonical slopes.
        scale: Factor of the scores. Default ``head_dim ** -0.5``. The bias is not scaled.
        clip_qkv: Bound that queries, keys and values are clipped to, from ``-clip_qkv`` to ``clip_qkv``. Default: no
            clipping.
        embedding_norm: Whether a language model normalises its embeddings.
        embedding_scale: Factor of a language model's embeddings. Default ``sqrt(embed_dim)``.
        logit_scale: Factor of a language model's logits.
        tied_head: Whether a language model computes logits with the matrix of token embeddings.
        token_types: Number of token types of an encoder; 0 for none.
        future_slopes: One slope a head for keys after the query, for an asymmetric encoder. Default: ``slopes``.
        learnable_slopes: Whether slopes are trained, starting from ``slopes``.
        forget_gate: Whether each token decides how much of the tokens before it is forgotten: one linear map to a logit
            a head, in float32, whose ``log_sigmoid`` are the ``log_gates`` of attention. Slopes are then 0, unless they
            are given. Causal attention only.
        sinks: Whether each head of attention has a learned sink, a float32 logit that begins at 0.
        window_size, distance, law: As in :func:`alibi_core.attention`.
        implementation: As in the backend's ``attention``, which checks it: the name of an implementation.
        gradient_checkpointing: Whether training keeps only the inputs of blocks for the backward pass, which computes
            each block again. Results and gradients are the same. Calls with caches keep everything.

    Raises:
        TypeError: If a field is of the wrong kind.
        ValueError: If a value is out of range, or does not divide a size that it must divide.

    Example:
        >>> AlibiConfig(num_layers=2, is_causal=False).head_dim
        32
    """

    num_layers: int = 6
    embed_dim: int = 256
    num_heads: int = 8
    max_len: int = 256
    dropout: float = 0.1
    is_causal: bool = True
    expansion_factor: int = 4
    num_kv_heads: int | None = None
    bias: bool = False
    block: str = "sequential"
    activation: str = "gelu"
    gated: bool = False
    feed_forward_dim: int | None = None
    feed_forward_bias: bool = True
    up_bias: bool | None = None
    qk_norm: bool = False
    norm: str = "layer_norm"
    norm_bias: bool = True
    norm_epsilon: float = 1e-5
    slopes: tuple[float, ...] | None = None
    scale: float | None = None
    clip_qkv: float | None = None
    embedding_norm: bool = False
    embedding_scale: float | None = None
    logit_scale: float = 1.0
    tied_head: bool = True
    token_types: int = 0
    future_slopes: tuple[float, ...] | None = None
    learnable_slopes: bool = False
    forget_gate: bool = False
    sinks: bool = False
    window_size: int | None = None
    distance: str = "manhattan"
    law: str = "linear"
    implementation: Any = None
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            check: Callable[..., Any] | None = checks.boolean if field.type == "bool" else _CHECKS.get(field.name)
            value, may_be_none = getattr(self, field.name), "None" in str(field.type)
            if check is not None and not (may_be_none and value is None):
                check(field.name, value)
        if self.embed_dim % self.num_heads:
            raise ValueError(f"embed_dim must be a multiple of num_heads ({self.num_heads}), got {self.embed_dim}")
        # The attention layer checks its own arguments; the backend checks the implementation.
        options = self.attention_options
        del options["implementation"]
        LayerShape.check(**options)

    @property
    def head_dim(self) -> int:
        """Features a head."""
        return self.embed_dim // self.num_heads

    @property
    def hidden_dim(self) -> int:
        """Width of the feed-forward layers."""
        return self.expansion_factor * self.embed_dim if self.feed_forward_dim is None else self.feed_forward_dim

    @property
    def up_dim(self) -> int:
        """Output features of the first projection of the feed-forward layers, the gate included."""
        return 2 * self.hidden_dim if self.gated else self.hidden_dim

    @property
    def has_up_bias(self) -> bool:
        """Whether the first projection of the feed-forward layers adds a bias vector."""
        return self.feed_forward_bias if self.up_bias is None else self.up_bias

    @property
    def is_post_norm(self) -> bool:
        """Whether blocks norm their output, so that no norm follows the last block."""
        return self.block in POST_NORM_BLOCKS

    @property
    def embedding_factor(self) -> float:
        """Factor of the embeddings."""
        return math.sqrt(self.embed_dim) if self.embedding_scale is None else self.embedding_scale

    @property
    def query_factor(self) -> float:
        """Factor of the queries that turns the default scale, ``head_dim ** -0.5``, into ``scale``."""
        return 1.0 if self.scale is None else self.scale * math.sqrt(self.head_dim)

    @property
    def attention_options(self) -> dict[str, Any]:
        """The arguments of every backend's ``AlibiAttention``, slopes as a NumPy array."""
        arrays: dict[str, Any] = {
            name: None if values is None else np.asarray(values, np.float32)
            for name, values in (("slopes", self.slopes), ("future_slopes", self.future_slopes))
        }
        names = ["embed_dim", "num_heads", "num_kv_heads", "bias", "is_causal", "learnable_slopes", "window_size"]
        names += ["dropout", "distance", "law", "forget_gate", "sinks", "implementation"]
        return arrays | {name: getattr(self, name) for name in names}


AlibiConfig.__init__ = explains_keywords(AlibiConfig.__init__)  # type: ignore[method-assign]


def check_config(config: Any, *, is_causal: bool | None = None) -> AlibiConfig:
    """Check that ``config`` is an AlibiConfig, with the model's ``is_causal`` if that is given; return it."""
    if not isinstance(config, AlibiConfig):
        raise TypeError(f"config must be an AlibiConfig, got {checks.shown(config)}")
    if is_causal is not None and config.is_causal is not is_causal:
        raise ValueError(_WRONG_WAY[is_causal])
    return config
