"""Layers, models, the bias as a module, and saving and loading of weights.

Input: configurations, tensors and checkpoints. Output: modules with trainable parameters.
"""

from alibi_torch.nn._bias import AlibiBias
from alibi_torch.nn._checkpoint import load_checkpoint
from alibi_torch.nn._encoder import AlibiEncoder
from alibi_torch.nn._language_model import AlibiLanguageModel
from alibi_torch.nn._layer import AlibiAttention
from alibi_torch.nn._multihead import AlibiMultiheadAttention
from alibi_torch.nn._transformer import AlibiConfig, AlibiTransformer
from alibi_torch.nn._weights import load_weights, save_weights

__all__ = [
    "AlibiAttention",
    "AlibiBias",
    "AlibiConfig",
    "AlibiEncoder",
    "AlibiLanguageModel",
    "AlibiMultiheadAttention",
    "AlibiTransformer",
    "load_checkpoint",
    "load_weights",
    "save_weights",
]
