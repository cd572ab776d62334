"""Layers and models for MLX, and loading of checkpoints."""

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
