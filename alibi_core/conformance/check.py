"""Check an adapter: detect its features, check it against the laws, and diagnose broken ones."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from alibi_core._arrays import checks
from alibi_core.conformance.adapter import FEATURES, TO_DECLARE, Offer
from alibi_core.conformance.caller import Caller, CallError, DepartureError
from alibi_core.conformance.case import Case, Sizes
from alibi_core.conformance.diagnose import diagnose
from alibi_core.conformance.laws import FEWER, GROUPED, LAWS, SQUARE, Law
from alibi_core.conformance.report import Counterexample, LawReport, Report
from alibi_core.conformance.trial import Trial

PROFILES = {"quick": 20, "thorough": 400}  # number of drawn cases a law


def check(
    adapter: Any,
    *,
    profile: str = "quick",
    seed: int = 0,
    time_limit: float = 60.0,
    laws: Iterable[str] | None = None,
    on_law: Callable[[str, LawReport | None], None] | None = None,
) -> Report:
    """Check an implementation of ALiBi against its laws.

    Each law tries cases, the smallest first, and compares the adapter's results with exact results in float64, within
    an error budget that follows from the adapter's dtype. The report names the first case that breaks each law, and
    says what the implementation computes instead.

    Args:
        adapter: An object with any of the functions of :class:`alibi_core.conformance.Adapter`.
        profile: ``"quick"`` (about 20 cases a law, rows of up to 4,096 keys) or ``"thorough"`` (400, and 20,000 keys).
        seed: Seed of the cases; the same seed gives the same cases.
        time_limit: Seconds that one call may take.
        laws: Names of the laws to check. Default: all.
        on_law: Called with each law's name and None before it is tried, and with its name and report afterwards.

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
    if isinstance(laws, str):
        raise TypeError(f"laws must be a collection of names, got the string {laws!r}")
    by_name = {law.name: law for law in LAWS}
    names = tuple(by_name) if laws is None else [checks.one_of("laws", name, tuple(by_name)) for name in laws]
    start = time.monotonic()
    caller = Caller(offer, checks.positive_number("time_limit", min(time_limit, threading.TIMEOUT_MAX)))
    # Exact results may underflow: ignore the user's NumPy error settings.
    with np.errstate(all="ignore"), contextlib.closing(caller):
        features, refusals = find_features(caller)
        reports: dict[str, LawReport] = {}
        failures: dict[str, list[tuple[Law, DepartureError | CallError]]] = {}
        for name in names:
            if on_law is not None:
                on_law(name, None)
            law = by_name[name]
            trial = Trial(caller, offer.offered_by(law.function, features), examples, seed)
            reports[name], error = try_law(law, trial, refusals)
            if error is not None:
                failures.setdefault(law.function, []).append((law, error))
            if on_law is not None:
                on_law(name, reports[name])
        # One diagnosis for each function, from all laws that it breaks.
        for function, broken in failures.items():
            errors = [(law.statement, error) for law, error in broken]
            found = diagnose(caller, function, offer.offered_by(function, features), errors)
            reports |= {law.name: replace(reports[law.name], diagnoses=found) for law, _ in broken}
    seconds, ordered = time.monotonic() - start, tuple(sorted(features))
    return Report(offer.name, offer.dtype, offer.contract, ordered, profile, seed, tuple(reports.values()), seconds)


def try_law(law: Law, trial: Trial, refusals: dict[str, str]) -> tuple[LawReport, DepartureError | CallError | None]:
    """Check one law: return its report, and the error of the first case that breaks it."""
    offer, report = trial.offer, LawReport(law.name, law.statement, "not offered")
    if law.function != "any" and law.function not in offer.functions:
        return replace(report, reason=f"the adapter has no {law.function}"), None
    if missing := sorted(law.needs - trial.features):
        unless_refused = "not declared: {0}" if offer.declared is not None else "{1} has no parameter for {2}"
        reasons = (refusals.get(x, unless_refused.format(x, law.function, FEATURES[x])) for x in missing)
        return replace(report, reason="; ".join(reasons)), None
    # After a hang no further call is possible.
    if trial.caller.hung and law.function != "any":
        return replace(report, status="not run", reason=f"earlier, {trial.caller.hung}"), None
    start, calls, error = time.monotonic(), trial.caller.calls, None
    try:
        law.check(trial)
    except (DepartureError, CallError) as raised:
        error = raised.with_traceback(None)  # a traceback keeps the arrays of its frames alive
    report = replace(report, calls=trial.caller.calls - calls, share=trial.share, seconds=time.monotonic() - start)
    if error is None:
        return replace(report, status="passed"), None
    return replace(report, status="failed", counterexample=Counterexample.of(error)), error


def find_features(caller: Caller) -> tuple[frozenset[str], dict[str, str]]:
    """Return the features of an adapter, and the reasons why it lacks the others.

    If features are declared, these are the result. Otherwise an adapter has a feature if its parameters allow it and a
    trial call does not refuse it. A trial call that crashes counts as offered, so that a law reports the crash.
    """
    offer, found = caller.offer, set(caller.offer.possible)
    others = f"; it has {', '.join(offer.unknown)}, which the kit never passes" if offer.unknown else ""
    refusals = {
        feature: f"not declared: {feature}"
        if offer.declared is not None or feature in TO_DECLARE
        else f"{offer.judged} has no parameter for {words}{others}"
        for feature, words in FEATURES.items()
        if feature not in found
    }
    if offer.declared is None or "some_gradients" in offer.declared:
        refusals |= {"some_gradients": "attention_grad has no parameter wrt"} if "some_gradients" in refusals else {}
    trial = Trial(caller, frozenset(found))
    # Try one call for each feature that is not declared.
    calls: dict[str, Callable[[Case], Any]] = {
        "attention": caller.attention,
        "attention_grad": caller.gradients,
        "bias": lambda case: caller.bias(case.num_heads, *case.sizes.lengths, case.arguments.get("is_causal", True)),
    }
    for feature in sorted(found & set(_PROBES)) if offer.declared is None and offer.judged in calls else ():
        case = trial.fitted(_PROBES[feature])
        if offer.judged == "bias" and 0 in case.sizes.lengths:
            continue
        try:
            calls[offer.judged](case)
        except CallError as error:
            if error.kind == "refused":
                found.discard(feature)
                refusals[feature] = str(error)
    if offer.declared is None and "symmetric" not in found:
        found.discard("asymmetric")
    return frozenset(found), refusals


def _probe(sizes: Sizes, **arguments: Any) -> Case:
    form = "causal" if arguments.get("is_causal", True) else "symmetric"
    return Case(sizes).with_arguments(form, arguments)


_IDS = np.zeros((2, 7), np.int32)
_PROBES = {
    "lengths": _probe(FEWER),
    "offset": _probe(SQUARE, q_offset=2),
    "symmetric": _probe(SQUARE, is_causal=False),
    "asymmetric": _probe(SQUARE, is_causal=False, future_slopes=np.ones(3, np.float32)),
    "grouped": _probe(GROUPED[-1]),
    "window": _probe(SQUARE, window_size=2),
    "segments": _probe(SQUARE, segment_ids=(_IDS, _IDS)),
    "mask": _probe(SQUARE, mask=np.ones((2, 1, 7, 7), dtype=bool)),
    "scale": _probe(SQUARE, scale=0.25),
    "points": _probe(SQUARE, positions=(np.zeros((2, 7), np.int32),) * 2, distance="manhattan", law="linear"),
    "empty": _probe(Sizes(2, 3, 1, (0, 0), 5)),
}
