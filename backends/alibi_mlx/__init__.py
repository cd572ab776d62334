"""ALiBi attention, layers and models for MLX."""

try:
    import mlx.core as _mlx  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("alibi_mlx needs MLX; install with pip install 'alibi-core[mlx]'") from error

from alibi_core._explanation import Explanation
from alibi_core._models.config import AlibiConfig
from alibi_mlx._attention import attention
from alibi_mlx._explain import explain
from alibi_mlx.caches._evicting import EvictingKVCache
from alibi_mlx.caches._kv_cache import KVCache
from alibi_mlx.nn._checkpoint import load_checkpoint
from alibi_mlx.nn._language_model import AlibiLanguageModel
from alibi_mlx.nn._layer import AlibiAttention
from alibi_mlx.nn._transformer import AlibiTransformer

__all__ = [
    "AlibiAttention",
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
