"""Five language models that differ only in their position method."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alibi_torch.nn import AlibiConfig, AlibiLanguageModel

VOCAB_SIZE = 256  # bytes
METHODS = ("alibi", "gates", "sinusoidal", "rotary", "none")
BASE = 10_000.0  # The base of the geometric series of wavelengths, in both papers.


def build(method: str, config: AlibiConfig, seed: int) -> AlibiLanguageModel:
    """Return an untrained model.

    Models with the same seed have the same initial weights, whatever the method; forget gates have weights of their
    own besides.
    """
    torch.manual_seed(seed)
    if method in ("alibi", "gates"):
        model = AlibiLanguageModel(config, VOCAB_SIZE)
        if method == "alibi":
            return model
        gated = AlibiLanguageModel(replace(config, forget_gate=True), VOCAB_SIZE)
        gated.load_state_dict(dict(model.state_dict()), strict=False)  # a plain dict does not ask for the same slopes
        return gated
    if method == "sinusoidal":
        return SinusoidalLanguageModel(config, VOCAB_SIZE, attention=CausalAttention)
    return AlibiLanguageModel(config, VOCAB_SIZE, attention=partial(CausalAttention, rotary=method == "rotary"))


class SinusoidalLanguageModel(AlibiLanguageModel):
    """Add the encoding of each absolute position to the token's embedding.

    Embeddings are multiplied by ``sqrt(embed_dim)``, as in the paper, which gives them unit variance; sines and cosines
    have a mean square of one half, so both have a similar magnitude.
    """

    def embed(self, tokens: Tensor) -> Tensor:
        """Return embeddings with positions added, ``[batch, length, embed_dim]``."""
        return super().embed(tokens) + sinusoids(tokens.shape[1], self.config.embed_dim).to(tokens.device)


class CausalAttention(nn.Module):
    """Multi-head causal attention without a bias, with the same parameters as ``AlibiAttention``."""

    def __init__(self, config: AlibiConfig, *, rotary: bool = False) -> None:
        super().__init__()
        self.head_dim, self.rotary = config.head_dim, rotary
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(config.embed_dim, config.embed_dim, bias=config.bias) for _ in range(4)
        )

    def forward(self, x: Tensor, *, mask: None = None, segment_ids: None = None, cache: None = None) -> Tensor:
        """Attend within ``x``, ``[batch, length, embed_dim]``; the other arguments are always None here."""
        query, key, value = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [batch, heads, length, head_dim]
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.rotary:
            query, key = rotate(query), rotate(key)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out_proj(attended.transpose(1, 2).flatten(2))


def sinusoids(length: int, embed_dim: int) -> Tensor:
    """Return ``sin(p / BASE**(2i / embed_dim))`` in features ``2i`` and its cosine in ``2i + 1``, for position ``p``.

    ``[length, embed_dim]``, float32: Vaswani et al., "Attention Is All You Need", section 3.5, arXiv 1706.03762.
    """
    angles = _angles(length, embed_dim)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2).float()


def rotate(x: Tensor) -> Tensor:
    """Rotate each pair of features by an angle that grows with the position, ``p / BASE**(2i / head_dim)``.

    Pair ``i`` is features ``i`` and ``i + head_dim / 2`` of ``[..., length, head_dim]``. A query's product with a key
    then depends on the difference of their positions: Su et al., "RoFormer", section 3.2.2, arXiv 2104.09864.
    """
    angles = _angles(x.shape[-2], x.shape[-1])
    cos, sin = angles.cos().to(x.device, x.dtype), angles.sin().to(x.device, x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def _angles(length: int, features: int) -> Tensor:
    """Return ``[length, features / 2]`` angles in radians.

    In float64, since float32 is off by 1e-3 at position 16,384, and on the CPU, since not every device has float64.
    """
    positions = torch.arange(length, dtype=torch.float64)
    rates = BASE ** -(torch.arange(0, features, 2, dtype=torch.float64) / features)
    return positions[:, None] * rates
