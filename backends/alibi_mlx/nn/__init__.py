"""Layers and models for MLX, and how checkpoints load into them.

In go configurations, arrays and checkpoints. Out come modules with trainable parameters.
"""

from alibi_core.backend.models import AlibiConfig
from alibi_mlx.nn._checkpoint import load_checkpoint
from alibi_mlx.nn._encoder import AlibiEncoder
from alibi_mlx.nn._language_model import AlibiLanguageModel
from alibi_mlx.nn._layer import AlibiAttention
from alibi_mlx.nn._transformer import AlibiTransformer

__all__ = [
    "AlibiAttention",
    "AlibiConfig",
    "AlibiEncoder",
    "AlibiLanguageModel",
    "AlibiTransformer",
    "load_checkpoint",
]
