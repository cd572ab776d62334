"""What a mutant is: an adapter with one mistake, the laws that it breaks, and the words that name the mistake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.mutants.reference import Reference


@dataclass(frozen=True)
class Mutant:
    """An adapter with one mistake.

    Attributes:
        name: Of its class.
        mistake: In one line.
        adapter: The class; each trial takes a new object.
        laws: Those by which it ought to be killed, some or all.
        expected: Regular expression of what a diagnosis has to say to be right; it is found in any case of letters.
        is_diagnosable: Whether tests hold the kit to naming the mistake; elsewhere it may but say where results are
            wrong, or take long.
    """

    name: str
    mistake: str
    adapter: type[Reference]
    laws: tuple[str, ...]
    expected: str
    is_diagnosable: bool


def mutant(*laws: str, expected: str, is_diagnosable: bool = True) -> Callable[[type[Reference]], Mutant]:
    """Make a class a mutant, whose mistake its docstring tells."""

    def made(adapter: type[Reference]) -> Mutant:
        mistake = (adapter.__doc__ or "").strip().rstrip(".")
        return Mutant(adapter.__name__, mistake, adapter, laws, expected, is_diagnosable)

    return made
