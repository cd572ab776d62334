"""Check an adapter: detect its features, check it against the laws, and diagnose broken ones."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from alibi_core._arrays import checks
from alibi_core._contracts import CONTRACTS
from alibi_core.conformance.adapter import FUNCTIONS, Offer
from alibi_core.conformance.caller import Caller, CallError, DepartureError
from alibi_core.conformance.case import FEATURES, OFFERS, TO_DECLARE
from alibi_core.conformance.diagnose import diagnose
from alibi_core.conformance.laws import LAWS, Law, is_answered
from alibi_core.conformance.report import Counterexample, Diagnosis, LawReport, Report
from alibi_core.conformance.trial import Trial

PROFILES = {"quick": 20, "thorough": 400}  # number of drawn cases a law


def check(
    adapter: Any,
    *,
    profile: str = "quick",
    seed: int = 0,
    laws: Iterable[str] | None = None,
    on_law: Callable[[str, Report], object] | None = None,
) -> Report:
    """Check an implementation of ALiBi against its laws.

    Each law tries cases, the smallest first, and compares the adapter's results with exact results in float64, within
    an error budget that follows from the adapter's dtype. The report names the first case that breaks each law, and
    says what the implementation computes instead.

    Args:
        adapter: An object with any of the functions of :class:`alibi_core.conformance.Adapter`.
        profile: ``"quick"`` (about 20 cases a law, rows of up to 4,096 keys) or ``"thorough"`` (400, and 20,000 keys).
        seed: Seed of the cases; the same seed gives the same cases.
        laws: Names of the laws to check. Default: all.
        on_law: Called before each law with its name, and with the report on the laws before it, not yet diagnosed.

    Returns:
        The report; ``report.passed`` says whether the adapter keeps the laws of its contract.

    Raises:
        TypeError: If the adapter has none of the functions, or an argument is of the wrong kind.
        ValueError: If an attribute of the adapter, or an argument, has a wrong value.

    Example:
        >>> import numpy as np
        >>> from types import SimpleNamespace
        >>> report = check(SimpleNamespace(slopes=lambda n: np.float32(2) ** (-8 * np.arange(n, dtype=np.float32) / n)))
        >>> report.passed, report.failed[0].name
        (False, 'slopes')
    """
    offer = Offer.of(adapter)
    examples = PROFILES[checks.one_of("profile", profile, tuple(PROFILES))]
    seed = checks.non_negative_int("seed", seed)
    by_name = {law.name: law for law in LAWS}
    names = tuple(by_name) if laws is None else checks.some_of("laws", laws, tuple(by_name))
    about: dict[str, Any] = {"name": offer.name, "dtype": offer.dtype, "contract": offer.contract}
    about |= {"profile": profile, "seed": seed}
    start, caller = time.monotonic(), Caller(offer)
    reports: dict[str, LawReport] = {}
    failures: dict[str, list[tuple[Law, DepartureError | CallError]]] = {}
    # Exact results may underflow: ignore the user's NumPy error settings.
    with np.errstate(all="ignore"):
        refusals_of = functools.cache(functools.partial(find_refusals, caller))

        def features_of(function: str) -> frozenset[str]:
            return offer.features_of(function) - refusals_of(function).keys()

        for name in names:
            if on_law is not None:
                on_law(name, Report(**about, features=(), laws=tuple(reports.values())))
            law = by_name[name]
            function = law.function if law.function in FUNCTIONS else offer.main
            trial = Trial(caller, features_of(function), examples, seed)
            reports[name], error = try_law(law, trial, refusals_of(function))
            if error is not None:
                failures.setdefault(law.function, []).append((law, error))
        # One diagnosis for each function, from all laws that it breaks.
        for function, broken in failures.items():
            errors = [(law.statement, error) for law, error in broken]
            found = diagnose(caller, function, features_of(function), errors)
            if function == "slopes" and found[0].key == "unexplained":
                found = whose_slopes(caller, by_name["slopes"]) or found
            reports |= {law.name: replace(reports[law.name], diagnoses=found) for law, _ in broken}
    seconds, ordered = time.monotonic() - start, tuple(sorted(features_of(offer.main)))
    return Report(**about, features=ordered, laws=tuple(reports.values()), seconds=seconds)


def try_law(law: Law, trial: Trial, refusals: dict[str, str]) -> tuple[LawReport, DepartureError | CallError | None]:
    """Check one law: return its report, and the error of the first case that breaks it."""
    offer, report = trial.offer, LawReport(law.name, law.statement, "not offered")
    if law.function != "any" and law.function not in offer.functions:
        return replace(report, reason=f"the adapter has no {law.function}"), None

    def reason(feature: str) -> str:
        if offer.declared is not None or feature in TO_DECLARE:
            return f"not declared: {feature}"
        return f"{law.function} has no parameter for {FEATURES[feature]}"

    if missing := sorted(law.needs - trial.features):
        return replace(report, reason="; ".join(refusals.get(x, reason(x)) for x in missing)), None
    start, calls, error = time.monotonic(), trial.caller.calls, None
    try:
        law.check(trial)
    except (DepartureError, CallError) as raised:
        error = raised.with_traceback(None)  # a traceback keeps the arrays of its frames alive
    report = replace(report, calls=trial.caller.calls - calls, share=trial.share, seconds=time.monotonic() - start)
    if error is None and report.calls == 0:
        return replace(report, reason="each of its cases needs a further feature"), None
    if error is None:
        return replace(report, status="passed"), None
    return replace(report, status="failed", counterexample=Counterexample.of(error)), error


def whose_slopes(caller: Caller, law: Law) -> tuple[Diagnosis, ...]:
    """Return the contract whose slopes the adapter has, if it is another than the declared one."""
    for contract in CONTRACTS:
        other = Caller(replace(caller.offer, contract=contract))
        report, _ = try_law(law, Trial(other, frozenset(), examples=1, seed=0), {})
        if report.status == "passed":
            sentence = f"They are those of the {contract} contract: declare contract = {contract!r} if that is meant."
            return (Diagnosis(f"{contract} slopes", sentence),)
    return ()


def find_refusals(caller: Caller, function: str) -> dict[str, str]:
    """Return the features that a function of the adapter refuses though its parameters allow them, with its words.

    A trial call that crashes counts as offered, so that a law reports the crash. Declared features are not tried.
    """
    offer, refusals = caller.offer, dict[str, str]()
    if offer.declared is not None or function not in offer.functions.keys() - {"slopes"}:
        return {}
    features = offer.features_of(function)
    for feature in sorted(features) if function != "decode_step" else ["grouped"]:
        if (case := OFFERS[feature].probe) is None:
            continue
        try:
            is_answered(Trial(caller, features), function, case)
        except CallError as error:
            refusals |= {feature: str(error)} if error.kind == "refused" else {}
    return refusals
