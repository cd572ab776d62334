"""Models of ``transformers`` with ALiBi: BLOOM, MPT and Falcon sped up in place, BERT given ALiBi."""

try:
    import transformers as _transformers  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "alibi_torch.transformers needs transformers; install with pip install 'alibi-core[transformers]'"
    ) from error

from alibi_torch.transformers._accelerate import accelerate, restore
from alibi_torch.transformers._alibi_cache import AlibiCache
from alibi_torch.transformers._encoder import with_alibi
from alibi_torch.transformers._paths import paths

__all__ = ["AlibiCache", "accelerate", "paths", "restore", "with_alibi"]
