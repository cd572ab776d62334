"""ALiBi attention for JAX, and layers for Flax."""

try:
    import flax as _flax  # noqa: F401
    import jax as _jax  # noqa: F401
    import safetensors as _safetensors  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"alibi_jax needs JAX, Flax and safetensors, and found no {error.name}; "
        "install with pip install 'alibi-core[jax]'"
    ) from error

from alibi_core._explanation import Explanation
from alibi_core._models.config import AlibiConfig
from alibi_jax._attention import attention
from alibi_jax._explain import explain
from alibi_jax._gpu.passes import GPU
from alibi_jax._tpu.shape import TPU
from alibi_jax.caches._kv_cache import KVCache
from alibi_jax.nn._attention_fn import attention_fn
from alibi_jax.nn._checkpoint import load_checkpoint
from alibi_jax.nn._language_model import AlibiLanguageModel
from alibi_jax.nn._layer import AlibiAttention
from alibi_jax.nn._transformer import AlibiTransformer
from alibi_jax.nn._weights import load_weights, save_weights

__all__ = [
    "GPU",
    "TPU",
    "AlibiAttention",
    "AlibiConfig",
    "AlibiLanguageModel",
    "AlibiTransformer",
    "Explanation",
    "KVCache",
    "attention",
    "attention_fn",
    "explain",
    "load_checkpoint",
    "load_weights",
    "save_weights",
]
