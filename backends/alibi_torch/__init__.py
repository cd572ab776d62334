"""ALiBi attention, layers and models for PyTorch."""

import importlib
from typing import Any

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("alibi_torch needs PyTorch; install with pip install 'alibi-core[torch]'") from error

from alibi_torch._attention import attention
from alibi_torch._explain import Explanation, explain
from alibi_torch.caches._evicting import EvictingKVCache
from alibi_torch.caches._kv_cache import KVCache
from alibi_torch.nn._bias import AlibiBias
from alibi_torch.nn._checkpoint import load_checkpoint
from alibi_torch.nn._language_model import AlibiLanguageModel
from alibi_torch.nn._layer import AlibiAttention
from alibi_torch.nn._transformer import AlibiConfig, AlibiTransformer

__all__ = [
    "AlibiAttention",
    "AlibiBias",
    "AlibiConfig",
    "AlibiLanguageModel",
    "AlibiTransformer",
    "EvictingKVCache",
    "Explanation",
    "KVCache",
    "attention",
    "explain",
    "load_checkpoint",
]


def __getattr__(name: str) -> Any:
    """Import ``alibi_torch.transformers`` when it is asked for: it needs more than PyTorch."""
    if name == "transformers":
        return importlib.import_module("alibi_torch.transformers")
    raise AttributeError(f"module 'alibi_torch' has no attribute {name!r}")
