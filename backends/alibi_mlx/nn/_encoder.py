"""An encoder on the ALiBi transformer: tokens in, embeddings of texts out."""

from __future__ import annotations

import mlx.core as mx

from alibi_core.backend import models
from alibi_core.backend.models import AlibiConfig
from alibi_mlx.nn._transformer import AttentionFactory, Parts
from alibi_mlx.nn._weights import SavesLayers


class AlibiEncoder(SavesLayers, models.BaseEncoder):
    """Embed texts of any length as vectors: each token sees the tokens before and after it.

    ``encode`` does not support ``mx.compile``.

    Args:
        config: Shape of the model; must not be causal.
        vocab_size: Number of different tokens.
        attention: As in :class:`AlibiTransformer`: a factory of attention layers.

    Raises:
        TypeError: If ``vocab_size`` is no integer.
        ValueError: If ``vocab_size`` is below 1, or ``config`` describes a decoder.

    Example:
        >>> model = AlibiEncoder(AlibiConfig(num_layers=1, is_causal=False, dropout=0.0), vocab_size=256)
        >>> texts = mx.array([list(b"train short"), list(b"test long..")])
        >>> model(texts).shape
        (2, 11, 256)
        >>> model.encode(texts, lengths=[11, 9]).shape
        (2, 256)
    """

    _xp = mx

    def __init__(self, config: AlibiConfig, vocab_size: int, *, attention: AttentionFactory | None = None) -> None:
        super().__init__()
        self._build(Parts(config, attention), vocab_size, is_causal=False)

    def _most_packed(self, tokens: mx.array) -> int:
        return models.MOST_PACKED["cpu" if mx.default_device() == mx.cpu else "accelerator"]
