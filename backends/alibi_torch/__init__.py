"""ALiBi attention, layers and models for PyTorch."""

import importlib
from typing import Any

from alibi_core.backend.checks import install_hint as _install_hint

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"alibi_torch needs PyTorch; {_install_hint('torch')}") from error

from alibi_torch._attention import attention
from alibi_torch._explain import Explanation, explain
from alibi_torch._explain_model import ModelExplanation, explain_model
from alibi_torch.caches import KVCache
from alibi_torch.nn import (
    AlibiAttention,
    AlibiBias,
    AlibiConfig,
    AlibiEncoder,
    AlibiLanguageModel,
    AlibiMultiheadAttention,
    AlibiTransformer,
    load_checkpoint,
    load_weights,
    save_weights,
)

__all__ = [
    "AlibiAttention",
    "AlibiBias",
    "AlibiConfig",
    "AlibiEncoder",
    "AlibiLanguageModel",
    "AlibiMultiheadAttention",
    "AlibiTransformer",
    "Explanation",
    "KVCache",
    "ModelExplanation",
    "attention",
    "explain",
    "explain_model",
    "load_checkpoint",
    "load_weights",
    "save_weights",
]


def __getattr__(name: str) -> Any:
    """Import submodules with extra dependencies on first access."""
    if name in ("transformers", "sentence_transformers"):
        return importlib.import_module(f"alibi_torch.{name}")
    raise AttributeError(f"module 'alibi_torch' has no attribute {name!r}")
