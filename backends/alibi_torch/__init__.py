"""ALiBi attention, layers and models for PyTorch."""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("alibi_torch needs PyTorch; install with pip install 'alibi-core[torch]'") from error

from alibi_torch._attention import attention
from alibi_torch._bias import AlibiBias
from alibi_torch._cache import KVCache
from alibi_torch._evicting_cache import EvictingKVCache
from alibi_torch._explain import Explanation, explain
from alibi_torch._language_model import AlibiLanguageModel
from alibi_torch._layer import AlibiAttention
from alibi_torch._transformer import AlibiConfig, AlibiTransformer

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
]
