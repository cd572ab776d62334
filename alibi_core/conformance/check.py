"""Check an adapter: find out what it offers, hold it to the laws, and say what it does where it breaks them."""

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

PROFILES = {"quick": 20, "thorough": 400}  # cases that a law tries where it has a choice


def check(
    adapter: Any,
    *,
    profile: str = "quick",
    seed: int = 0,
    time_limit: float = 60.0,
    laws: Iterable[str] | None = None,
    on_law: Callable[[str, LawReport | None], None] | None = None,
) -> Report:
    """Hold an implementation of ALiBi to its laws.

    Each law tries cases, the smallest first, and compares what the adapter makes of them with float64 within an error
    budget that follows from the adapter's dtype. The first case that breaks a law is reported, and what the
    implementation does instead, in words.

    Args:
        adapter: An object with any of the functions of :class:`alibi_core.conformance.Adapter`.
        profile: ``"quick"`` (some 20 cases a law, rows of up to 4,096 keys) or ``"thorough"`` (400, and 20,000 keys).
        seed: Of the cases; the same seed makes the same ones.
        time_limit: Seconds that one call may take.
        laws: Names of the laws to check. Default, all.
        on_law: Called with each law's name before it is tried, and with its report after.

    Returns:
        The report; ``report.passed`` says whether the adapter is what it means to be.

    Raises:
        TypeError: If the adapter offers nothing, or an argument is of the wrong kind.
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
    chosen = LAWS if laws is None else [by_name[checks.one_of("laws", name, tuple(by_name))] for name in laws]
    start = time.monotonic()
    caller = Caller(offer, checks.positive_number("time_limit", min(time_limit, threading.TIMEOUT_MAX)))
    # The exact answers underflow as they should, whatever the user's NumPy makes of that; the adapter's thread has its
    # own settings.
    with np.errstate(all="ignore"), contextlib.closing(caller):
        features, refusals = find_features(caller)
        reports: list[LawReport] = []
        failures: dict[str, list[tuple[int, str, DepartureError | CallError]]] = {}
        for law in chosen:
            if on_law is not None:
                on_law(law.name, None)
            trial = Trial(caller, offer.offered_by(law.function, features), examples, seed)
            report, error = try_law(law, trial, refusals)
            if error is not None:
                failures.setdefault(law.function, []).append((len(reports), law.statement, error))
            reports.append(report)
            if on_law is not None:
                on_law(law.name, report)
        for function, broken in failures.items():
            errors = [(statement, error) for _, statement, error in broken]
            found = diagnose(caller, function, offer.offered_by(function, features), errors)
            for index, *_ in broken:
                reports[index] = replace(reports[index], diagnoses=found)
    seconds = time.monotonic() - start
    ordered = tuple(sorted(features))
    return Report(offer.name, offer.dtype, offer.contract, ordered, profile, seed, tuple(reports), seconds)


def try_law(law: Law, trial: Trial, refusals: dict[str, str]) -> tuple[LawReport, DepartureError | CallError | None]:
    """Return what came of a law, and the error of the first case that breaks it."""
    offer = trial.offer
    if law.function != "any" and law.function not in offer.functions:
        reason = f"the adapter has no {law.function}"
        return LawReport(law.name, law.statement, "not offered", reason), None
    missing = sorted(law.needs - trial.features)
    if missing:
        unless_refused = "not declared: {0}" if offer.declared is not None else "{1} has no parameter for {2}"
        reason = "; ".join(refusals.get(x, unless_refused.format(x, law.function, FEATURES[x])) for x in missing)
        return LawReport(law.name, law.statement, "not offered", reason), None
    if trial.caller.hung and law.function != "any":
        return LawReport(law.name, law.statement, "not run", f"earlier, {trial.caller.hung}"), None
    start, calls, error = time.monotonic(), trial.caller.calls, None
    try:
        law.check(trial)
    except (DepartureError, CallError) as raised:
        error = raised.with_traceback(None)  # which keeps the arrays of its frames
    seconds, calls = time.monotonic() - start, trial.caller.calls - calls
    example = None if error is None else Counterexample.of(error)
    status: Any = "passed" if error is None else "failed"
    return LawReport(law.name, law.statement, status, "", calls, trial.share, seconds, example), error


def find_features(caller: Caller) -> tuple[frozenset[str], dict[str, str]]:
    """Return what an adapter offers, and why it does not offer the rest.

    An adapter offers what it declares. One that declares nothing offers what its parameters allow and what a call does
    not refuse; a call that crashes is a law's to report.
    """
    offer, possible = caller.offer, caller.offer.possible
    others = f"; it has {', '.join(offer.unknown)}, which the kit never passes" if offer.unknown else ""
    refusals = {
        feature: f"not declared: {feature}"
        if offer.declared is not None or feature in TO_DECLARE
        else f"{offer.judged} has no parameter for {FEATURES[feature]}{others}"
        for feature in set(FEATURES) - possible
    }
    if offer.declared is None or "some_gradients" in offer.declared:
        refusals |= {"some_gradients": "attention_grad has no parameter wrt"} if "some_gradients" in refusals else {}
    if offer.declared is not None:
        return possible, refusals
    found, trial = set(possible), Trial(caller, possible, 1, 0)
    for feature in sorted(possible & set(_PROBES)):
        case = trial.fitted(_PROBES[feature])
        (q_len, kv_len), is_causal = case.sizes.lengths, case.arguments.get("is_causal", True)
        try:
            if offer.judged == "attention":
                caller.attention(case)
            elif offer.judged == "attention_grad":
                caller.gradients(case)
            elif offer.judged == "bias" and kv_len > 0:
                caller.bias(case.num_heads, q_len, kv_len, is_causal)
        except CallError as error:
            if error.kind == "refused":
                found.discard(feature)
                refusals[feature] = str(error)
    if "symmetric" not in found:
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
    "empty": _probe(Sizes(2, 3, 1, (0, 0), 5)),
}
