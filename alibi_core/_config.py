"""The shape of a transformer, in any framework."""

from __future__ import annotations

from dataclasses import dataclass

from alibi_core import _checks


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

    def __post_init__(self) -> None:
        for name in ("num_layers", "d_model", "num_heads", "max_len", "expansion_factor"):
            _checks.positive_int(name, getattr(self, name))
        for name in ("causal", "bias"):
            _checks.boolean(name, getattr(self, name))
        if not 0 <= _checks.real_number("dropout", self.dropout) < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout}")
        if self.d_model % self.num_heads:
            raise ValueError(f"d_model must be a multiple of num_heads ({self.num_heads}), got {self.d_model}")
        if self.num_kv_heads is not None and self.num_heads % _checks.positive_int("num_kv_heads", self.num_kv_heads):
            raise ValueError(f"num_kv_heads must divide num_heads ({self.num_heads}), got {self.num_kv_heads}")

    @property
    def head_dim(self) -> int:
        """Features a head."""
        return self.d_model // self.num_heads
