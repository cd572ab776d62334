"""ALiBi attention, layers and models for MLX."""

from alibi_core.backend.checks import install_hint as _install_hint

try:
    import mlx.core as _mlx  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"alibi_mlx needs MLX; {_install_hint('mlx')}") from error

from alibi_core.backend import Explanation
from alibi_mlx._attention import attention
from alibi_mlx._explain import explain
from alibi_mlx.caches import KVCache
from alibi_mlx.nn import (
    AlibiAttention,
    AlibiConfig,
    AlibiEncoder,
    AlibiLanguageModel,
    AlibiTransformer,
    load_checkpoint,
)

__all__ = [
    "AlibiAttention",
    "AlibiConfig",
    "AlibiEncoder",
    "AlibiLanguageModel",
    "AlibiTransformer",
    "Explanation",
    "KVCache",
    "attention",
    "explain",
    "load_checkpoint",
]
