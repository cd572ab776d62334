"""BLOOM, MPT and Falcon of ``transformers`` sped up in place; ALiBi for its other models."""

from typing import Any as _Any

from alibi_core.backend.checks import install_hint as _install_hint

try:
    import transformers as _transformers
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"alibi_torch.transformers needs transformers; {_install_hint('transformers')}"
    ) from error

from alibi_torch.transformers._accelerate import accelerate, restore
from alibi_torch.transformers._state import paths


def _missing(what: str, error: ImportError) -> _Any:
    """Return a function that raises: a version of transformers lacks a private name that ``what`` needs."""

    def unavailable(*_: _Any, **__: _Any) -> None:
        raise ValueError(
            f"transformers must have what {what} needs, got {_transformers.__version__} ({error}); take a version that "
            "the page on transformers names"
        )

    return unavailable


try:
    from alibi_torch.transformers._cache import AlibiCache
except ImportError as _error:
    AlibiCache = _missing("AlibiCache", _error)  # type: ignore[misc]
try:
    from alibi_torch.transformers._with_alibi import with_alibi
except ImportError as _error:  # transformers then refuses attn_implementation="alibi"
    with_alibi = _missing("with_alibi", _error)

__all__ = ["AlibiCache", "accelerate", "paths", "restore", "with_alibi"]
