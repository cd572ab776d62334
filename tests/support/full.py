"""What `make test` leaves out: parameters marked ``full``, of which the first are run by it, too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first_of(parameters: Iterable[Any], keep: int = 1) -> list[Any]:
    """Return all the parameters, those after the first ``keep`` marked ``full``."""
    found = list(parameters)
    return found[:keep] + [in_full(x) for x in found[keep:]]


def in_full(parameter: Any) -> Any:
    """Return a parameter marked ``full``: a value, a tuple of several, or a ``pytest.param``."""
    parameter = as_parameter(parameter)
    return parameter._replace(marks=(*parameter.marks, pytest.mark.full))


def without_jax(backends: Iterable[Any]) -> list[Any]:
    """Return backends, JAX marked ``full``: for what it would compile for long."""
    return without("jax", backends)


def without(name: str, parameters: Iterable[Any]) -> list[Any]:
    """Return parameters, those of the framework of this name, with which their ids begin, marked ``full``."""
    return [in_full(x) if x.id.partition("-")[0] == name else x for x in parameters]


def once_in_jax(backends: Iterable[Any], cases: Any, keep: int = 1) -> list[Any]:
    """Return each case with each backend; JAX, which compiles each anew, has all but the first ``keep`` in ``full``.

    Backends are parameters with the ids of frameworks, or their names; cases may be named, in a dictionary.
    """
    named = cases if isinstance(cases, dict) else {str(case): case for case in cases}
    found = []
    for index, (name, case) in enumerate(named.items()):
        for backend in map(as_parameter, backends):
            framework = backend.id or backend.values[0]
            parameter = pytest.param(
                *backend.values, *as_parameter(case).values, id=f"{name}-{framework}", marks=backend.marks
            )
            found.append(in_full(parameter) if framework == "jax" and index >= keep else parameter)
    return found


def as_parameter(value: Any) -> Any:
    """Return a parameter as ``pytest.param`` makes them."""
    if hasattr(value, "marks"):
        return value
    return pytest.param(*(value if isinstance(value, tuple) else (value,)))
