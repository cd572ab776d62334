"""ALiBi attention and its layer for MLX."""

try:
    import mlx.core as _mlx  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("alibi_mlx needs MLX; install with pip install 'alibi-core[mlx]'") from error

from alibi_mlx._attention import attention
from alibi_mlx._cache import KVCache
from alibi_mlx._layer import AlibiAttention

__all__ = ["AlibiAttention", "KVCache", "attention"]
