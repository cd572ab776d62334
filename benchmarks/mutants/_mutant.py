"""A mutant is an adapter with one mistake; what comes of holding one to the laws."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from alibi_core.conformance import FEATURES, MISTAKES, Diagnosis, Mistaken, check
from benchmarks.mutants.reference import Reference

LISTS, CALLS = ("slopes", "bias"), ("attention", "attention_grad", "decode_step")
BF16, FP16 = "bfloat16", "float16"
TIME_LIMIT = 10.0  # seconds that one call may take: one of them never returns
NOT_FAR = frozenset(FEATURES) - {"far"}


@dataclass(frozen=True)
class Mutant:
    """An adapter with one mistake.

    Attributes:
        name: Of its class, or of the mistake in the catalogue.
        mistake: In one line.
        adapter: Makes the adapter; each trial takes a new one.
        laws: Those by which it ought to be killed, some or all.
        expected: Regular expression of what a diagnosis has to say to be right; it is found in any case of letters.
            Empty where the kit may but say where results are wrong, or take long.
        key: That of the diagnosis that is right, where the mistake is one of the catalogue.
    """

    name: str
    mistake: str
    adapter: Callable[[], Any]
    laws: tuple[str, ...]
    expected: str = ""
    key: str = ""

    @property
    def is_diagnosable(self) -> bool:
        """Whether the kit is held to naming the mistake."""
        return bool(self.expected or self.key)

    def is_named_by(self, diagnosis: Diagnosis) -> bool:
        """Return whether a diagnosis names the mistake."""
        if diagnosis.key == "unexplained" or not self.is_diagnosable:  # it says but where results are wrong
            return False
        if self.key:
            return diagnosis.key.startswith(self.key)
        return bool(re.search(self.expected, diagnosis.sentence, re.IGNORECASE))


def mutant(*laws: str, expected: str = "") -> Callable[[type[Reference]], Mutant]:
    """Make a class a mutant, whose mistake its docstring tells."""

    def made(adapter: type[Reference]) -> Mutant:
        mistake = (adapter.__doc__ or "").strip().rstrip(".")
        return Mutant(adapter.__name__, mistake, adapter, laws, expected)

    return made


def instead(
    base: type[Reference], method: str, *laws: str, expected: str = ""
) -> Callable[[Callable[..., Any]], Mutant]:
    """Make a function a mutant: the adapter ``base`` with it for a method. Its docstring tells the mistake."""

    def made(function: Callable[..., Any]) -> Mutant:
        name = "".join(word.capitalize() for word in function.__name__.split("_"))
        return varied(base, method, name, function.__doc__ or "", function, *laws, expected=expected)

    return made


def varied(
    base: type[Reference], method: str, name: str, mistake: str, function: Any, *laws: str, expected: str = ""
) -> Mutant:
    """Return the mutant of a name: the adapter ``base`` with a function, or a value, for what is called ``method``."""
    return mutant(*laws, expected=expected)(type(name, (base,), {method: function, "__doc__": mistake}))


def variants(
    base: type[Reference], method: str, *laws: str, rows: Mapping[str, tuple[str, Any]], expected: str = ""
) -> tuple[Mutant, ...]:
    """Return mutants by their names: each row has the mistake, and the function that is ``method`` then."""
    return tuple(varied(base, method, name, *row, *laws, expected=expected) for name, row in rows.items())


def sized(base: type[Reference], size: int, *laws: str, expected: str = "") -> Mutant:
    """Return a mutant whose mistake, that of ``base``, depends on a size."""
    name, mistake = f"{base.__name__.strip('_')}{size}", (base.__doc__ or "").format(size=size)
    return varied(base, "size", name, mistake, size, *laws, expected=expected)


def catalogued(
    mistake: str,
    laws: str,
    *others: str,
    functions: Collection[str] = (),
    told: str | None = "",
    dtype: str = "float32",
    features: Collection[str] | None = None,
) -> Mutant:
    """Make a mistake of the catalogue a mutant.

    Args:
        mistake: Its name, of ``MISTAKES``.
        laws: Those by which it ought to be killed.
        others: More that is done, and not to be named.
        functions: Which functions make it. Default, all.
        told: By what other name the kit is to call it; None if it need not. Default, its own.
        dtype: As in ``Mistaken``.
        features: As in ``Mistaken``.
    """
    options = {"functions": functions} if functions else {}
    adapter = partial(Mistaken, mistake, *others, dtype=dtype, features=features, **options)
    where = f" ({', '.join([dtype] * (dtype != 'float32') + [*functions])})" if functions != CALLS else ""
    name = f"{mistake}{where}" if dtype == "float32" else f"{mistake} ({dtype})"
    key = "" if told is None else told or mistake.partition(":")[0]
    return Mutant(" and ".join([name, *others]), MISTAKES[mistake], adapter, tuple(laws.split()), key=key)


@dataclass(frozen=True)
class Outcome:
    """What came of one mutant.

    Attributes:
        mutant: Its name.
        mistake: In one line.
        killed_by: The laws that it breaks.
        diagnoses: What the kit says that it does.
        is_right: Whether a diagnosis names the mistake.
        seconds: That the check took.
    """

    mutant: str
    mistake: str
    killed_by: tuple[str, ...]
    diagnoses: tuple[str, ...]
    is_right: bool
    seconds: float


def tried(mutant: Mutant, *, laws: Iterable[str] | None = None, profile: Any = "quick") -> Outcome:
    """Hold a mutant to laws, all by default, in a profile of the kit."""
    report = check(mutant.adapter(), profile=profile, laws=laws, time_limit=TIME_LIMIT)
    sentences = tuple(x.sentence for x in report.diagnoses)
    is_right = any(mutant.is_named_by(x) for x in report.diagnoses)
    killed_by = tuple(law.name for law in report.failed)
    return Outcome(mutant.name, mutant.mistake, killed_by, sentences, is_right, report.seconds)
