"""ALiBi attention for JAX, and layers for Flax."""

from alibi_core.backend.checks import install_hint as _install_hint

try:
    import flax as _flax  # noqa: F401
    import jax as _jax  # noqa: F401
    import safetensors as _safetensors  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"alibi_jax needs JAX, Flax and safetensors, and found no {error.name}; {_install_hint('jax')}"
    ) from error

from alibi_core.backend import Explanation
from alibi_jax._attention import attention
from alibi_jax._explain import explain
from alibi_jax._tpu import TPU
from alibi_jax.caches import KVCache
from alibi_jax.nn import (
    AlibiAttention,
    AlibiConfig,
    AlibiEncoder,
    AlibiLanguageModel,
    AlibiTransformer,
    attention_fn,
    load_checkpoint,
    load_weights,
    save_weights,
)

__all__ = [
    "TPU",
    "AlibiAttention",
    "AlibiConfig",
    "AlibiEncoder",
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
