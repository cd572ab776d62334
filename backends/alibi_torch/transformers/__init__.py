"""BLOOM, MPT and Falcon of ``transformers`` sped up in place; ALiBi for its other models."""

from alibi_core.backend.checks import install_hint as _install_hint

try:
    import transformers as _transformers  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"alibi_torch.transformers needs transformers; {_install_hint('transformers')}"
    ) from error

from alibi_torch.transformers._accelerate import accelerate, restore
from alibi_torch.transformers._cache import AlibiCache
from alibi_torch.transformers._state import paths
from alibi_torch.transformers._with_alibi import with_alibi

__all__ = ["AlibiCache", "accelerate", "paths", "restore", "with_alibi"]
