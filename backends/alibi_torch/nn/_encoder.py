"""An encoder on the ALiBi transformer: tokens in, embeddings of texts out."""

from __future__ import annotations

import torch
from torch import Tensor

from alibi_core.backend import models
from alibi_torch._internals import skipped_by_compilers
from alibi_torch.nn._transformer import AlibiConfig, AttentionFactory, Checkpointing, Parts


class AlibiEncoder(Checkpointing, models.BaseEncoder):
    """Embed texts of any length as vectors: each token sees the tokens before and after it.

    Args:
        config: Shape of the model; must not be causal.
        vocab_size: Number of different tokens.
        attention: As in :class:`AlibiTransformer`: a factory of attention layers.

    Raises:
        TypeError: If ``vocab_size`` is no integer.
        ValueError: If ``vocab_size`` is below 1, or ``config`` describes a decoder.

    Example:
        >>> model = AlibiEncoder(AlibiConfig(num_layers=1, is_causal=False, dropout=0.0), vocab_size=256)
        >>> texts = torch.tensor([list(b"train short"), list(b"test long..")])
        >>> model(texts).shape
        torch.Size([2, 11, 256])
        >>> model.encode(texts, lengths=[11, 9]).shape
        torch.Size([2, 256])
    """

    _xp = torch

    def __init__(self, config: AlibiConfig, vocab_size: int, *, attention: AttentionFactory | None = None) -> None:
        super().__init__()
        self._build(Parts(config, attention), vocab_size, is_causal=False)

    forward = models.BaseEncoder.__call__
    # Compilers skip the work of the host. Under inference mode PyTorch 2.13 cannot guard the NumPy arrays in it.
    _packed = skipped_by_compilers(models.BaseEncoder._packed)
    _pooled = skipped_by_compilers(models.BaseEncoder._pooled)

    def _most_packed(self, tokens: Tensor) -> int:
        return models.MOST_PACKED["cpu" if tokens.device.type == "cpu" else "accelerator"]
