"""Names of arguments: the cache's name, which depends on the version of ``transformers``, and a method's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

# transformers 5.24 renamed ``past_key_values`` to ``cache``; the blocks and attention layers of BLOOM and Falcon use
# ``layer_past``.
CACHE_NAMES = ("cache", "past_key_values", "layer_past")


def cache_of(given: Any) -> Any:
    """Return the cache among a call's arguments or a model's outputs, by name; None if there is none."""
    return next((given[name] for name in CACHE_NAMES if name in given and given[name] is not None), None)


def positional_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a method's arguments that may be passed by position, without ``self``."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    return tuple(x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD)


def by_name(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by name."""
    given = dict(zip(names, args, strict=False)) | kwargs
    if len(given) < len(args) + len(kwargs):
        raise TypeError(f"arguments must be given once each, got {len(args)} of {names} and {', '.join(kwargs)}")
    return given


def with_own_cache_name(names: tuple[str, ...], given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with the cache renamed to the name that the method uses."""
    own = next((name for name in CACHE_NAMES if name in names), None)
    if own is None or own in given:
        return given
    return {own if name in CACHE_NAMES else name: x for name, x in given.items()}
