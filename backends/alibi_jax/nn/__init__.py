"""Layers and models for Flax, and saving and loading of their weights."""

from alibi_core.backend.models import AlibiConfig
from alibi_jax.nn._attention_fn import attention_fn
from alibi_jax.nn._checkpoint import load_checkpoint
from alibi_jax.nn._encoder import AlibiEncoder
from alibi_jax.nn._language_model import AlibiLanguageModel
from alibi_jax.nn._layer import AlibiAttention
from alibi_jax.nn._transformer import AlibiTransformer
from alibi_jax.nn._weights import load_weights, save_weights

__all__ = [
    "AlibiAttention",
    "AlibiConfig",
    "AlibiEncoder",
    "AlibiLanguageModel",
    "AlibiTransformer",
    "attention_fn",
    "load_checkpoint",
    "load_weights",
    "save_weights",
]
