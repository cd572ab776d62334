"""Structural types: what the core asks of an array and of an array namespace."""

from __future__ import annotations

from typing import Any, Protocol

# A namespace is a module (or anything like one) with the functions of the array API standard. Modules have no
# useful structural type, so the alias only says what is meant.
Namespace = Any
DType = Any
Device = Any


class Array(Protocol):
    """The attributes by which an argument is recognised as an array of the array API standard."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def ndim(self) -> int: ...
    @property
    def dtype(self) -> DType: ...
