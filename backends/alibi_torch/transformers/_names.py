"""Names that ``transformers`` changes from version to version, in one place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

# 5.24 renamed ``past_key_values`` to ``cache``; blocks and some attention modules have always said ``layer_past``.
CACHE_NAMES = ("cache", "past_key_values", "layer_past")


def cache_of(given: Any) -> Any:
    """Return the cache among a call's arguments or a model's outputs, by name; None if there is none."""
    return next((given[name] for name in CACHE_NAMES if name in given and given[name] is not None), None)


def with_cache_name(names: tuple[str, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments with a cache under the name that a method takes, whichever it was given by."""
    own = next((name for name in CACHE_NAMES if name in names), None)
    return {
        own if own is not None and name in CACHE_NAMES and name not in names else name: x for name, x in kwargs.items()
    }


def positional_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a method's arguments that may be given by position, without ``self``."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    return tuple(x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD)


def by_name(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by name."""
    return dict(zip(names, args, strict=False)) | kwargs


def with_argument(
    names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any], name: str, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments with one of them replaced, in the place where it was given; else by name."""
    place = names.index(name)
    if place < len(args):
        return (*args[:place], value, *args[place + 1 :]), kwargs
    return args, kwargs | {name: value}
