"""Diagnosis: what an implementation does in place of ALiBi, in words."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from alibi_core.conformance._adapter import Offer
from alibi_core.conformance._cases import UNIT_ROUNDOFF
from alibi_core.conformance._diagnosis import bias as _bias
from alibi_core.conformance._diagnosis import decoding as _decoding
from alibi_core.conformance._diagnosis import gradients as _gradients
from alibi_core.conformance._diagnosis._departures import (
    ATTENTION,
    CONTRACTS,
    FAR_AWAY,
    FORWARD_RIGHT,
    FUTURE_RIGHT,
    GRADIENTS,
    Departure,
)
from alibi_core.conformance._diagnosis._observations import (
    GRADIENT_PROBES,
    LONG,
    LONG_ROWS,
    SHORT,
    SQUARE,
    Observation,
    cases_of,
    make_case,
    observe,
    observed_failures,
)
from alibi_core.conformance._diagnosis._readings import GradientReading, Reading
from alibi_core.conformance._diagnosis.circumstances import TOKENS, WIDTHS, beyond_sizes, stale
from alibi_core.conformance._diagnosis.measure import described, estimates, like_rounding
from alibi_core.conformance._diagnosis.search import LOW, Estimates, Search, contract_that_explains, rounded_scores
from alibi_core.conformance._diagnosis.slopes import diagnose_slopes
from alibi_core.conformance._report import Diagnosis
from alibi_core.conformance._trial import Caller, CallError, DepartureError

GRADIENT_NAMES = ("query", "key", "value", "slopes")
SECONDS = 4.0  # for the search, beside the adapter's own time
MOST_FAILURES = 6


def diagnose(
    caller: Caller, function: str, features: frozenset[str], failures: Sequence[DepartureError] = ()
) -> list[Diagnosis]:
    """Return what a function of the adapter does instead of ALiBi, nothing where no departure is found.

    Args:
        caller: Of the adapter.
        function: One of ``FUNCTIONS``.
        features: What it offers.
        failures: Calls that failed, to be explained too.
    """
    all_failures = failures  # of those without tokens no search learns anything
    failures = [x for x in failures if x.case is None or 0 not in x.case.sizes.lengths]
    diagnosed = {
        "slopes": lambda: _told(diagnose_slopes(caller)),
        "bias": lambda: _of_bias(caller, features),
        "attention": lambda: _of_attention(caller, features, failures),
        "attention_grad": lambda: _of_gradients(caller, features, failures),
        "decode_step": lambda: _of_decoding(caller, features, failures),
    }
    try:
        with np.errstate(all="ignore"):
            found = diagnosed[function]()
            if "far" not in features:  # then a bias may be counted from any token of the row
                found = [x for x in found if x.key != FAR_AWAY]
            if all_failures and not (found or failures):
                return [Diagnosis("no zeros", "Queries that have no keys get something other than zeros.")]
            return found or list(_measured(failures))
    except Exception as error:  # whatever an adapter returns, the rest of a report is worth having
        return [Diagnosis("unexplained", f"The diagnosis itself failed: {type(error).__name__}: {error}")]


def _measured(failures: Sequence[DepartureError]) -> Iterator[Diagnosis]:
    """Yield how far off the failed calls are, where no departure is found."""
    errors = []
    for x in failures:
        if x.actual is not None and x.actual.shape == x.expected.value.shape:
            error = np.abs(x.actual - x.expected.value)
            worst = np.nanmax(error / x.expected.budget, initial=0)
            errors.append((worst, np.nanmax(error, initial=0) / np.nanmax(np.abs(x.expected.value), initial=1e-30)))
    if errors:
        worst, share = max(errors)
        sentence = (
            f"Nothing known explains it: {failures[0].function} is off by up to {worst:.3g} times what rounding "
            f"explains, {share:.2g} of its largest number{like_rounding(share)}."
        )
        yield Diagnosis("unexplained", sentence)


def _searched(
    observations: list[Any],
    catalogue: Iterable[Departure],
    base: Any,
    estimates: Estimates = lambda observation, current: (),
    contracts: Iterable[Departure] = CONTRACTS,
) -> Search:
    """Return a search that has explained these observations as far as it can."""
    search = Search(tuple(catalogue), base, estimates, time.thread_time() + SECONDS)
    if not contract_that_explains(search, observations, contracts):
        search.run(observations)
    return search


def _of_attention(caller: Caller, features: frozenset[str], failures: Sequence[DepartureError]) -> list[Diagnosis]:
    if not _is_repeatable(caller):
        return [Diagnosis("not repeatable", "The same call gives different results: something is drawn, or never set.")]
    if not_computed := _not_computed(caller):
        return [Diagnosis("not computed", not_computed)]
    if failures and (beyond := beyond_sizes(caller, "attention", features, failures, WIDTHS)):
        return beyond
    cases = cases_of(caller.offer, features, (*SHORT, *LONG_ROWS))
    observations = _made(observe(caller, case, rows) for case, rows in cases)
    base = base_reading(caller.offer)
    kept = stale(caller, features, lambda _: base)
    if kept:
        observations = list(_of_lengths_of_their_own(observations))
    else:
        observations += list(observed_failures(failures, caller))[:MOST_FAILURES]
    # Under a causal mask alone, no form of the bias says anything of future keys.
    catalogue = [x for x in ATTENTION if "symmetric" in features or x.key != "signed"]
    search = _searched(observations, catalogue, base, estimates)
    if search.unexplained and not kept:
        kept = stale(caller, features, lambda x: search.reading(search.found, x))
    if failures and not (kept or search.found):
        beyond = beyond_sizes(caller, "attention", features, failures, TOKENS)
        if beyond:
            return beyond
    return _told(kept) + told(search, silent=bool(kept))


def _not_computed(caller: Caller) -> str:
    """Return how the output shows that no attention was computed; empty where it does not."""
    case = make_case(caller.offer, SQUARE)
    try:
        output = caller.attention(case)
    except CallError as error:
        axes = "Query, key and value are [batch, num_heads, length, head_dim], slopes are [num_heads]."
        return str(error) if error.kind == "misshapen" else f"A plain causal call comes to nothing. {axes}"
    for name in ("query", "key", "value"):
        if np.array_equal(output, caller.tensor(case.arrays[name])):
            return f"The output is {name}, as it was given: no attention is computed."
    # A kernel that drops blocks may return zeros for short rows, and is diagnosed further.
    longer = () if output.any() else _made([observe(caller, make_case(caller.offer, (LONG, LONG)))])
    is_zero = any(not x.results["output"].any() for x in longer)
    return "The output is 0 throughout: nothing is written to it." if is_zero else ""


def _is_repeatable(caller: Caller) -> bool:
    """Return whether equal calls have equal results, at least nearly: sums may be in another order."""
    found = _made(observe(caller, make_case(caller.offer, SQUARE)) for _ in range(2))
    if len(found) < 2:
        return True
    one, other = (x.results["output"] for x in found)
    share = max(caller.offer.tolerance, UNIT_ROUNDOFF[caller.offer.dtype])
    return bool(np.allclose(one, other, rtol=64 * share, atol=64 * share, equal_nan=True))


def _of_lengths_of_their_own(observations: Iterable[Observation]) -> Iterator[Observation]:
    """Yield the first observation of each pair of lengths, which no earlier call can have disturbed."""
    seen: set[tuple[int, int]] = set()
    for observation in observations:
        if observation.case.sizes.lengths not in seen:
            seen.add(observation.case.sizes.lengths)
            yield observation


def _of_gradients(caller: Caller, features: frozenset[str], failures: Sequence[DepartureError]) -> list[Diagnosis]:
    base = base_reading(caller.offer, GradientReading)
    if failures and (found := _gradients.circumstances(caller, failures, base)):
        return found
    if failures and (found := beyond_sizes(caller, "attention_grad", features, failures, WIDTHS)):
        return found
    cases = cases_of(caller.offer, features, GRADIENT_PROBES)
    has_slopes = "slope_gradients" in features
    observations = _made(_gradients.observe_gradients(caller, x, slopes=has_slopes) for x, _ in cases)
    results = observations[0].results if observations else GRADIENT_NAMES
    names = [name for name in GRADIENT_NAMES[: 3 + has_slopes] if name not in results]
    sentence = f"attention_grad returns no gradient of {' and '.join(names)}."
    missing = [Diagnosis("gradient missing", sentence)] if names else []
    if names not in ([], ["slopes"]):  # nothing else could be told
        return missing
    search = _searched(observations, GRADIENTS, base)
    is_recomputed = any(x.departure.key == FORWARD_RIGHT for x in search.found)
    result = [x for x in told(search) if x.key != FORWARD_RIGHT]
    if failures and not (result or missing):
        beyond = beyond_sizes(caller, "attention_grad", features, failures, TOKENS)
        return beyond or _told(rounded_scores(search, observations))
    if is_recomputed:
        result = [dataclasses.replace(x, sentence=f"In the gradients alone: {x.sentence}") for x in result]
    return missing + result


def _of_decoding(caller: Caller, features: frozenset[str], failures: Sequence[DepartureError]) -> list[Diagnosis]:
    base = base_reading(caller.offer)
    mixed = _decoding.mixed_up(caller, lambda _: base)
    if mixed:  # then no other sequence tells anything
        return _told(mixed)
    observations = _decoding.observations(caller, features)
    search = _searched(observations, _decoding.DECODING, base, estimates)
    if search.unexplained:
        mixed = _decoding.mixed_up(caller, lambda x: search.reading(search.found, x))
    result = _told(mixed) + told(search, silent=bool(mixed))
    return result or (_told(rounded_scores(search, observations)) if failures else [])


def _of_bias(caller: Caller, features: frozenset[str]) -> list[Diagnosis]:
    observations = list(_bias.observed_biases(caller, features))
    contract = caller.offer.contract
    odd = _bias.transposed(observations) if contract in ("exact", "geometric") else []
    if odd:
        return _told(odd)
    odd = _bias.finite_where_hidden(observations)
    if odd:
        observations = [_hidden_again(x) for x in observations]
    search = _searched(observations, _bias.BIAS, _bias.base_bias(contract), contracts=_bias.CONTRACTS)
    return _told(odd) + told(search)


def _hidden_again(observation: Any) -> Any:
    """Return a bias with minus infinity where keys should be hidden."""
    hidden = np.isneginf(observation.answers(Reading())["bias"].value)
    results = {"bias": np.where(hidden, -np.inf, observation.results["bias"])}
    return dataclasses.replace(observation, results=results, _cache={})


def base_reading(offer: Offer, reading: type[Reading] = Reading) -> Any:
    """Return how an adapter should be read: those that are given slopes are given all of their contract."""
    if offer.contract == "falcon" and not offer.has_slopes:
        return reading(slope_dtype="bfloat16", rounding=("falcon", "bfloat16"), factor="bias scaled")
    if offer.contract == "bloom" and not offer.has_slopes and offer.dtype in LOW:
        return reading(rounding=("key-only bias", offer.dtype))
    return reading()


def told(search: Search, *, silent: bool = False) -> list[Diagnosis]:
    """Return what a search found and, unless silent, measurements of the first observation that it cannot explain."""
    result = [x for x in _told(x.told for x in search.found) if not x.key.startswith(FUTURE_RIGHT.key)]
    rest = [x for x in search.unexplained if not x.is_noise_of(search.reading(search.found, x))]
    if rest and not silent:
        observation = rest[0]
        sentences = described(observation, search.reading(search.found, observation))
        is_nan = any("is NaN" in x for x in sentences)
        result.append(Diagnosis("NaN" if is_nan else "unexplained", " ".join(sentences)))
    return result


def _told(departures: Iterable[Departure]) -> list[Diagnosis]:
    return list(dict.fromkeys(Diagnosis(x.key, x.sentence) for x in departures))


def _made(observations: Iterable[Any]) -> list[Any]:
    return [x for x in observations if x is not None]
