"""Diagnosis: what an implementation does in place of ALiBi, in words.

Probes are asked one after the other, the plainest first. Where the mistakes found so far do not explain an answer, each
mistake of the table is tried on top of them, then each pair: everywhere, or under one condition that the probe meets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np

from alibi_core.conformance import reference
from alibi_core.conformance.adapter import Offer
from alibi_core.conformance.caller import Caller, CallError, DepartureError, decoded
from alibi_core.conformance.case import TENSORS, Case, Sizes
from alibi_core.conformance.laws import all_gradients, large_case
from alibi_core.conformance.mistakes import CATALOGUE
from alibi_core.conformance.oracle import U32, UNIT_ROUNDOFF, Values, excess
from alibi_core.conformance.reference import CONDITIONS, Active, Mistake, Simulation
from alibi_core.conformance.report import Diagnosis
from alibi_core.conformance.trial import Trial

Found = list[tuple[Mistake, str | None]]
SECONDS = 12.0  # of computing, for the search; the slowest of the known mistakes takes 5 to 8
HEADS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 24, 32, 40, 71, 112)
# Neither sorted nor powers of two, nor any that bfloat16 holds, so that no two ways to take them agree.
STEEP, FLAT = (0.3, 0.061, 0.7, 0.11, 1.1, 0.023), (0.03, 0.007, 0.0011, 0.11, 0.3, 0.0023)
FUTURE = np.asarray([0.2, 0.5, 0.05, 0.9, 0.013, 0.33])
_rng = np.random.default_rng(5)
MASK = (_rng.random((2, 6, 7, 7)) < 0.6) | np.eye(7, dtype=bool)
IDS = np.asarray(((0, 0, 0, 1, 1, 2, 2), (3, 3, 5, 5, 5, 5, 0)), np.int32)
LONG_IDS = np.asarray(((0, 0, 0, 1, 1, 1, 2, 2, 2), (3, 3, 5, 5, 5, 5, 5, 0, 0)), np.int32)
NOWHERE_IDS = tuple(np.asarray([x] * 2, np.int32) for x in ((0, 1, 1, 1, 4, 4, 4), (0, 0, 1, 1, 2, 2, 2)))

# Which features a probe needs, its lengths, and what is special: ``shown`` has one-hot values and no queries, so that
# the output is the weights. Under "-" stand those for adapters whose lengths must be equal.
_SHOWN = {"shown": True}
HIDING: tuple[tuple[str, tuple[int, int], dict[str, Any]], ...] = (
    ("window", (13, 13), {"window_size": 3}),
    ("window", (5, 5), {"window_size": 0}),
    ("segments", (7, 7), {"segment_ids": (IDS, IDS)}),
    ("mask", (7, 7), {"mask": MASK}),
    *(("mask", (7, 7), {"mask": MASK[:, :1], "size": x}) for x in (60.0, 600.0, 6000.0)),
)
PROBES: tuple[tuple[str, tuple[int, int], dict[str, Any]], ...] = (
    ("", (7, 7), _SHOWN | {"slopes": 0.0}),
    ("", (7, 7), _SHOWN),
    ("", (7, 7), _SHOWN | {"size": 1.0}),
    ("", (7, 7), {}),
    ("", (7, 7), {"size": 60.0}),  # scores whose exponentials overflow
    ("", (1, 1), {}),
    ("scale", (7, 7), {"scale": 0.2}),
    ("scale", (7, 7), {"scale": 0.0}),
    ("batch_slopes", (7, 7), {"slopes": (STEEP, FLAT)}),
    ("lengths", (4, 11), {}),
    ("lengths", (1, 9), {}),
    ("lengths symmetric", (1, 9), {}),
    ("offset", (5, 11), {"q_offset": 3}),
    ("offset", (1, 9), {"q_offset": 4}),
    *(("offset", (5, 11), {"q_offset": x}) for x in (0, 20, 3003, 40_000)),
    ("batch_offsets", (5, 11), {"q_offset": np.asarray([2, 9], np.int32)}),
    ("symmetric", (7, 7), _SHOWN),
    ("symmetric", (7, 7), {}),
    ("symmetric lengths", (4, 11), {}),
    ("symmetric offset", (5, 11), {"q_offset": 3}),
    ("symmetric offset", (7, 7), {"q_offset": -2}),
    ("asymmetric", (7, 7), {"future_slopes": FUTURE}),
    ("asymmetric", (7, 7), {"future_slopes": FUTURE * 0}),
    ("grouped", (7, 7), {"group": 2}),
    ("grouped lengths", (4, 11), {"group": 2}),
    *((form + feature, lengths, options) for form in ("", "symmetric ") for feature, lengths, options in HIDING),
    ("window offset", (5, 11), {"q_offset": 2, "window_size": 2}),
    ("window segments", (7, 7), {"segment_ids": (IDS, IDS), "window_size": 1}),
    ("segments lengths", (4, 9), {"segment_ids": (LONG_IDS[:, -4:], LONG_IDS)}),
    ("nowhere lengths", (9, 5), {}),
    ("nowhere offset", (7, 7), {"q_offset": -2}),
    ("nowhere mask", (7, 7), {"mask": np.broadcast_to(np.arange(7)[:, None] != 4, (2, 1, 7, 7))}),
    ("nowhere segments", (7, 7), {"segment_ids": NOWHERE_IDS}),
    ("lengths", (3, 511), _SHOWN | {"slopes": FLAT}),
    ("lengths", (5, 511), {"slopes": FLAT}),
    *(("lengths", (2, n), {"slopes": FLAT}) for n in (1000, 2100)),
    *(("", (9, 9), {"head_dim": n}) for n in (75, 139, 264)),
    *(("lengths", (4, n), {"slopes": FLAT}) for n in (49, 65, 97, 129)),
    ("", (65, 65), {"slopes": FLAT}),
    ("", (130, 130), {"slopes": FLAT}),
    ("symmetric", (130, 130), {"slopes": FLAT}),
    ("far offset", (5, 11), {"q_offset": 1_000_000}),
)
BIASES = ((7, 7), (4, 11), (11, 5), (1, 9), (130, 130), (2, 511))
STEPS = ((3, 1, 1, 2, 1), (1,) * 8, (2, 3, 3))


def make_case(offer: Offer, needs: str, lengths: tuple[int, int], options: dict[str, Any]) -> Case:
    """Return the case of a probe."""
    arguments, batch, group = dict(options), 2, options.get("group", 1)
    shown, slopes = arguments.pop("shown", False), arguments.pop("slopes", STEEP)
    size = arguments.pop("size", 0.0 if shown else 1.0)
    arguments.pop("group", None)
    (q_len, kv_len), head_dim = lengths, arguments.pop("head_dim", 64 if shown and lengths[1] > 8 else 8)
    if shown and kv_len > head_dim:
        batch = -(-kv_len // head_dim)
    rng = np.random.default_rng(q_len * 1000 + kv_len)
    arrays = {
        name: rng.standard_normal((batch, heads, length, head_dim))
        for name, heads, length in (
            *(("query", 6, q_len), ("key", 6 // group, kv_len), ("value", 6 // group, kv_len)),
            ("cotangent", 6, q_len),
        )
    }
    arrays["query"] *= size
    if shown:  # each batch entry shows the weights of some keys
        first = np.arange(batch)[:, None] * head_dim * (kv_len > head_dim)
        eye = np.arange(kv_len)[:, None] == (first + np.arange(head_dim))[:, None]
        arrays["value"] = np.broadcast_to(eye[:, None] * 1.0, arrays["value"].shape).copy()
    own = np.broadcast_to(slopes, (*np.shape(slopes)[:-1], 6)) if np.ndim(slopes) else np.full(6, slopes)
    if not offer.has_slopes:
        own = reference.make_slopes((), 6, offer.contract)
    arrays["slopes"] = own.astype(np.float32).astype(np.float64)
    is_causal = arguments.pop("is_causal", not {"symmetric", "asymmetric"} & set(needs.split()))
    form = "causal" if is_causal else "symmetric"
    arguments |= {} if is_causal else {"is_causal": False}
    sizes = Sizes(batch, 6 // group, group, lengths, head_dim)
    described = Case(sizes, scaling=arguments.get("scale"), slopes_per_batch=arrays["slopes"].ndim > 1)
    return described.with_arguments(form, arguments).with_arrays(**arrays)


@dataclass(eq=False)
class Probe:
    """A question, and what an adapter answers.

    Attributes:
        ask: Asks a caller of the adapter, or a simulation of mistakes.
        conditions: Those that some of the calls meet.
        simulate: Makes a simulation of mistakes.
        tolerance: How far a result may be off, as a share of its largest element, or
        by_element: of each element.
    """

    ask: Callable[[Any], dict[str, Values]]
    conditions: frozenset[str]
    simulate: Callable[[Active], Simulation]
    tolerance: float
    by_element: bool = False
    found: dict[str, Values] = field(default_factory=dict)
    _kept: dict[tuple[Any, ...], dict[str, Values]] = field(default_factory=dict)

    def answers(self, mistakes: Active) -> dict[str, Values]:
        """Return what an implementation with these mistakes would answer."""
        key = tuple((x.name, where) for x, where in mistakes if where is None or where in self.conditions)
        if key not in self._kept:
            self._kept[key] = self.ask(self.simulate(mistakes))
        return self._kept[key]

    def fits(self, mistakes: Active) -> bool:
        """Return whether these mistakes, and no others, explain the answer."""
        answers = self.answers(mistakes)
        return all(self.is_close(x, answers[name]) for name, x in self.found.items())

    def is_close(self, found: Values, expected: Values) -> bool:
        """Return whether all elements are the same, but for the tolerance."""
        finite = np.isfinite(expected)
        same = found.shape == expected.shape and np.array_equal(finite, np.isfinite(found))
        if not same or not np.array_equal(np.isnan(expected), np.isnan(found)):
            return False
        sizes = np.abs(expected[finite])
        allowed = self.tolerance * (sizes if self.by_element else sizes.max(initial=1e-30))
        return bool((np.abs(found[finite] - expected[finite]) <= allowed).all())


@dataclass(frozen=True)
class Prober:
    """Asks an adapter.

    Attributes:
        caller: Of the adapter.
        features: What it offers.
    """

    caller: Caller
    features: frozenset[str]

    def probe(
        self, ask: Callable[[Any], Any], *cases: Case, share: float = 0.0, conditions: Iterable[str] = ()
    ) -> Iterator[Probe]:
        """Yield the probe that asks this; nothing if it comes to nothing."""
        offer = self.caller.offer
        met = set(conditions).union(*(conditions_of(reference.call_of(x, offer.dtype)) for x in cases))
        tolerance = share or max(tolerance_of(case, offer, self.features) for case in cases)
        probe = Probe(ask, frozenset(met), lambda x: Simulation(x, offer.dtype, offer.contract), tolerance, bool(share))
        with contextlib.suppress(CallError):
            probe.found = ask(self.caller)
            yield probe

    def short(self, function: str) -> Iterator[Probe]:
        """Yield the answers of ``attention``, or of ``attention_grad``, to the table of probes."""
        offer = self.caller.offer
        for needs, lengths, options in PROBES:
            far = np.max(options.get("q_offset", 0)) > 1000
            if function == "attention_grad" and ("shown" in options or far or max(lengths) > 65):
                continue
            if not self.features.issuperset(needs.split()) or (not offer.has_slopes and "slopes" in options):
                continue
            if lengths[0] != lengths[1] and "lengths" not in self.features:
                lengths = (11, 11)
            yield from self.of_case(function, make_case(offer, needs, lengths, options))

    def of_case(self, function: str, case: Case) -> Iterator[Probe]:
        """Yield the answer of ``attention`` or ``attention_grad`` to a case."""
        names = all_gradients(Trial(self.caller, self.features, 1, 0))
        for probe in self.probe(
            lambda x: (
                {"output": x.attention(case)}
                if function == "attention"
                else {name: y for name, y in x.gradients(case).items() if name in names}
            ),
            case,
        ):
            probe.tolerance *= 1 if function == "attention" else 8
            yield probe

    def states(self) -> Iterator[Probe]:
        """Yield the answers to calls of the same lengths that differ in one thing, the first asked again in the end."""
        offer = self.caller.offer
        changes: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
            "": ({"slopes": FLAT} if offer.has_slopes else {}, {}),
            "symmetric": ({}, {"is_causal": False}),
            "window": ({"window_size": 5}, {"window_size": 2}),
            "scale": ({}, {"scale": 0.2}),
            "offset": ({}, {"q_offset": 2}),
            "mask": ({}, {}),
        }
        for feature, turn in itertools.product([x for x in changes if x in {"", *self.features}], (1, -1)):
            length = 20 + self.caller.calls % 40  # which no earlier call had, most likely
            options = changes[feature]
            if feature == "mask":
                shown = np.random.default_rng(1).random((2, 2, 1, length, length)) < 0.6
                options = (
                    {"mask": shown[0] | np.eye(length, dtype=bool)},
                    {"mask": shown[1] | np.eye(length, dtype=bool)},
                )
            pair = [make_case(offer, "", (length, length), x) for x in options][::turn]

            def ask(x: Any, cases: tuple[Case, ...] = (*pair, pair[0])) -> dict[str, Values]:
                return {str(i): x.attention(case) for i, case in enumerate(cases)}

            yield from self.probe(ask, *pair)

    def decoding(self) -> Iterator[Probe]:
        """Yield the answers of decoding: of one sequence, in several steps, then of two by turns."""
        offer = self.caller.offer
        grouped = {"group": 2} if "grouped" in self.features else {}
        plain = [make_case(offer, "", (8, 8), x) for x in ({"shown": True}, {}, grouped)]
        slopes = {"slopes": np.asarray(FLAT, np.float32).astype(np.float64)} if offer.has_slopes else {}
        other = plain[1].with_arrays(**{name: plain[1].arrays[name][:, :, ::-1].copy() for name in TENSORS}, **slopes)
        long = make_case(offer, "", (140, 140), {"slopes": FLAT} if offer.has_slopes else {})
        tries: list[tuple[list[Case], list[Sequence[int]]]] = [([case], [STEPS[0]]) for case in plain]
        tries += [([plain[1]], [steps]) for steps in STEPS[1:]]
        tries += [([plain[1], other], [STEPS[0], STEPS[0]]), ([long], [(128, *(1,) * 9, 3)])]
        for cases, steps in tries:

            def ask(x: Any, cases: Any = cases, steps: Any = steps) -> dict[str, Values]:
                return {f"{y.number} {y.start}": y.output for y in decoded(x, cases, steps)}

            yield from self.probe(ask, *cases, conditions=("first step", "later steps", "single steps", "chunks"))

    def lists(self, function: str) -> Iterator[Probe]:
        """Yield the slopes, or the bias, of an adapter."""
        u = UNIT_ROUNDOFF["float64"] if self.caller.offer.dtype == "float64" else U32
        if function == "slopes":
            for heads in (tuple(n for n in HEADS if n & (n - 1) == 0), HEADS):

                def lists(x: Any, heads: Any = heads) -> dict[str, Values]:
                    return {str(n): x.slopes(n) for n in heads}

                yield from self.probe(lists, share=2.0**-20)
            return
        for is_causal, (q_len, kv_len) in itertools.product((True, False), BIASES):
            met = {"causal" if is_causal else "symmetric", "square" if q_len == kv_len else "lengths"}
            if (is_causal or "symmetric" in self.features) and ("square" in met or "lengths" in self.features):

                def bias(x: Any, sizes: Any = (12, q_len, kv_len, is_causal)) -> dict[str, Values]:
                    return {"bias": x.bias(*sizes)}

                share = 32 * u + 2 * UNIT_ROUNDOFF[self.caller.offer.dtype]
                yield from self.probe(bias, share=share, conditions=met | ({"one query"} if q_len == 1 else set()))


def conditions_of(arguments: dict[str, Any]) -> frozenset[str]:
    """Return the conditions that a call meets."""
    return reference.Computation((), {}, **arguments).conditions


def tolerance_of(case: Case, offer: Offer, features: frozenset[str]) -> float:
    """Return how far results may be off that are computed otherwise, as a share of the largest."""
    query, key = (np.abs(case.arrays[name]).max(initial=0) for name in ("query", "key"))
    scores = abs(case.scale) * query * key * case.sizes.head_dim
    if "far" not in features:  # then the bias may be counted from any token
        farthest = np.max(np.abs(case.arguments.get("q_offset", 0))) + max(case.sizes.lengths)
        scores += farthest * case.arrays["slopes"].max(initial=0)
    u = UNIT_ROUNDOFF["float64"] if offer.dtype == "float64" else U32
    return float(32 * u * (16 + scores) + 8 * UNIT_ROUNDOFF[offer.dtype] + 4 * offer.tolerance)


# --- The search -------------------------------------------------------------------------------------------------------


def candidates(function: str) -> list[Mistake]:
    """Return the mistakes that may be found in a function."""
    found = [x for x in CATALOGUE.values() if not x.is_noisy]
    return [x for x in found if x.name != "signed: key-only"] if function == "bias" else found


def search(probes: Sequence[Probe], catalogue: Sequence[Mistake]) -> Found:
    """Return the mistakes that explain as many probes as possible, each with its condition, in their order."""
    found: Found = []
    explained: list[Probe] = []
    end = time.thread_time() + SECONDS
    for number, probe in enumerate(probes):
        later = probes[number + 1 :]
        best = found if probe.fits(found) else _best(probe, explained, later, found, catalogue, end, number)
        if best is not None:
            found = best
            explained.append(probe)
    return found


def _best(
    probe: Probe,
    before: Sequence[Probe],
    later: Sequence[Probe],
    found: Found,
    catalogue: Sequence[Mistake],
    end: float,
    number: int,
) -> Found | None:
    """Return the mistakes found so far and one or two more, which explain a probe and all before it."""
    if time.thread_time() > end:
        return None
    plain = probe.answers(found)
    relevant = [x for x in catalogue if not _same(probe.answers([*found, (x, None)]), plain)]
    wheres = (None, *sorted(probe.conditions))
    failing = sum(not x.fits(found) for x in later)
    for size in (1, 2):
        options: list[Found] = []
        for chosen in itertools.combinations(relevant, size):
            if time.thread_time() > end:
                break
            if size > 1 and not probe.fits([*found, *((x, None) for x in chosen)]):
                continue
            for where in itertools.product(wheres, repeat=size):
                tried = [*found, *zip(chosen, where, strict=True)]
                if probe.fits(tried) and all(x.fits(tried) for x in before):
                    options.append(tried)
                    break
        best, most = None, -1
        for tried in sorted(options, key=lambda x: sum(where is not None for _, where in x)):
            count = sum(x.fits(tried) for x in later)
            # For a condition, or once something is unexplained, a single probe is too little to go by.
            is_sure = count > len(later) - failing
            is_plain = all(where is None for _, where in tried[len(found) :]) and len(before) == number
            if count > most and (is_sure or is_plain):
                best, most = tried, count
        if best is not None:
            return best
    return None


def _same(one: dict[str, Values], other: dict[str, Values]) -> bool:
    return all(np.array_equal(one[name], other[name], equal_nan=True) for name in one)


def sentence_of(mistake: Mistake, where: str | None) -> Diagnosis:
    """Return the diagnosis of a mistake, with its condition."""
    if where is None:
        return Diagnosis(mistake.name, mistake.sentence)
    ending, beginning = CONDITIONS[where]
    words = mistake.sentence
    words = (
        words if words.startswith(("mask ", "scale ", "window_size", "segment_ids")) else words[0].lower() + words[1:]
    )
    return Diagnosis(f"{mistake.name} {ending}", f"{beginning}, {words}")


# --- What is said -----------------------------------------------------------------------------------------------------


def diagnose(
    caller: Caller, function: str, features: frozenset[str], errors: Sequence[tuple[str, DepartureError | CallError]]
) -> tuple[Diagnosis, ...]:
    """Return what a function of the adapter does instead of ALiBi.

    Args:
        caller: Of the adapter.
        function: One of ``FUNCTIONS``, or ``"any"``.
        features: What it offers.
        errors: The statements of the laws that are broken, each with the error of the first case that breaks it.
    """
    found = [Diagnosis(x.kind, str(x)) for _, x in errors if isinstance(x, CallError)]
    misshapen = [x for x in found if x.key == "misshapen"]
    if misshapen:  # all else follows from this
        return tuple(misshapen[:1])
    departures = [(statement, x) for statement, x in errors if isinstance(x, DepartureError)]
    if departures and not caller.hung:
        with np.errstate(all="ignore"):
            found += _named(caller, function, features, departures)
    return tuple(dict.fromkeys(found))


def _named(
    caller: Caller, function: str, features: frozenset[str], failures: Sequence[tuple[str, DepartureError]]
) -> list[Diagnosis]:
    if function == "attention" and (slip := slip_of(caller)):
        return [slip]
    missing = [x.remark for _, x in failures if x.actual is None]
    if missing:
        return [Diagnosis("gradient missing", f"{x}.") for x in dict.fromkeys(missing)]
    if (
        function == "attention_grad"
        and (found_ := [_in_some_calls(caller, features, x) for _, x in failures])
        and all(found_)
    ):
        return [Diagnosis("gradients in some calls", x) for x in dict.fromkeys(found_)]
    prober = Prober(caller, features)
    probes: list[Probe] = []
    if function == "attention":
        states = list(prober.states())
        if any(not x.fits([]) and x.is_close(x.found["0"], x.answers([])["0"]) for x in states):
            found = search(states, candidates(function))
            if any(x.name.startswith("stale ") for x, _ in found):
                return [sentence_of(*x) for x in found]
        probes = [*prober.short(function), *states]
    elif function == "attention_grad":
        probes = list(prober.short(function))
    else:
        probes = list(prober.decoding() if function == "decode_step" else prober.lists(function))
    for _, failure in failures:
        if function.startswith("attention") and is_quick(failure.case):
            probes += prober.of_case(function, failure.case)
    found = search(probes, candidates(function))
    said = [sentence_of(*x) for x in found]
    unexplained = [(law, x) for law, x in failures if not _explains(prober, function, found, x)]
    if unexplained:
        said.append(Diagnosis("unexplained", off_by(caller, function, features, *unexplained[0])))
    return said


_COTANGENTS = {
    **{"ones": "all ones", "zeros": "all zeros", "one row": "zero but for one row"},
    "one element": "zero but for one element",
}


def _in_some_calls(caller: Caller, features: frozenset[str], failure: DepartureError) -> str:
    """Return what must be asked for, or what ``grad_output`` must be, for gradients to be wrong; empty if nothing."""
    trial, case = Trial(caller, features, 1, 0), failure.case

    def is_right(**changes: Any) -> bool:
        with contextlib.suppress(DepartureError, CallError):
            assert case is not None
            trial.gradients(dataclasses.replace(case, **changes), all_gradients(trial))
            return True
        return False

    if case is None or (case.wrt is None and case.cotangent == "random") or not is_right(wrt=None, cotangent="random"):
        return ""
    by_all, by_random = is_right(wrt=None), is_right(cotangent="random")
    conditions = []
    if case.wrt is not None and (by_all or not by_random):
        conditions.append(f"no gradients but those of {' and '.join(case.wrt)} are asked for")
    if case.cotangent != "random" and (by_random or not by_all):
        conditions.append(f"grad_output is {_COTANGENTS[case.cotangent]}")
    wrong = "NaN" if failure.remark == "NaN" else "wrong"
    return f"The gradient of {failure.part} is {wrong} where {' and '.join(conditions)}."


def is_quick(case: Case | None) -> TypeGuard[Case]:
    """Return whether a case is small enough to be computed in many ways."""
    return case is not None and case.num_heads * math.prod(case.sizes.lengths) < 3e5


def _explains(prober: Prober, function: str, found: Active, failure: DepartureError) -> bool:
    """Return whether mistakes explain a failure; any do where that takes long, or earlier calls matter."""
    if found and function.startswith("attention") and ", then " not in failure.inputs and is_quick(failure.case):
        return all(x.fits(found) for x in prober.of_case(function, failure.case))
    return bool(found)


def slip_of(caller: Caller) -> Diagnosis | None:
    """Return how the output shows that no attention was computed, or not the same twice."""
    case = make_case(caller.offer, "", (7, 7), {})
    try:
        output, again = caller.attention(case), caller.attention(case)
    except CallError as error:
        axes = "Query, key and value are [batch, num_heads, length, head_dim], slopes are [num_heads]."
        sentence = str(error) if error.kind == "misshapen" else f"A plain causal call comes to nothing. {axes}"
        return Diagnosis("not computed", sentence)
    for name in TENSORS:
        if np.array_equal(output, caller.tensor(case.arrays[name])):
            return Diagnosis("not computed", f"The output is {name}, as it was given: no attention is computed.")
    if not output.any():
        with_more = make_case(caller.offer, "", (130, 130), {})
        try:
            if not caller.attention(with_more).any():
                return Diagnosis("not computed", "The output is 0 throughout: nothing is written to it.")
        except CallError:
            return None
    share = 64 * max(caller.offer.tolerance, UNIT_ROUNDOFF[caller.offer.dtype])
    if not np.allclose(output, again, rtol=share, atol=share, equal_nan=True):
        return Diagnosis("not repeatable", "The same call gives different results: something is drawn, or never set.")
    return None


AXES = {
    "head_dim": "features a head",
    "batch": "batch entries",
    "num_kv_heads": "heads",
    "group": "query heads to a key/value head",
    "lengths": "tokens",
}


def off_by(caller: Caller, function: str, features: frozenset[str], law: str, failure: DepartureError) -> str:
    """Return where a function is off that no known mistake explains: the law, the sizes, and by how much."""
    size = ""
    if failure.case is not None and function.startswith("attention") and max_axis(failure.case.sizes) > 8:
        size = from_which_size(caller, function, features, failure)
    actual, expected = failure.actual, failure.expected
    if failure.remark:
        amount = f"the result is {failure.remark}" if failure.remark == "NaN" else f"it is {failure.remark}"
    else:
        assert actual is not None
        share = float(excess(actual, expected).max(initial=0))
        error = float(np.nanmax(np.abs(actual - expected.value), initial=0))
        largest = float(np.nanmax(np.abs(np.where(np.isfinite(expected.value), expected.value, 0)), initial=1e-30))
        amount = (
            f"results are off by up to {error / largest:.2g} of the largest, {share:.3g} times what rounding explains"
        )
        for dtype in ("float16", "bfloat16"):
            if 0.4 < error / largest / UNIT_ROUNDOFF[dtype] < 4 and caller.offer.dtype in ("float32", "float64"):
                amount += f", about as much as rounding to {dtype}"
                break
    part = f"the gradient of {failure.part}: " if function == "attention_grad" and failure.part else ""
    inputs = f" ({failure.inputs})" if failure.inputs else ""
    return (
        f"Not so: {law[0].lower()}{law[1:]}. {size}{part}{amount}{inputs}.".replace(". the", ". The")
        .replace(". results", ". Results")
        .replace(". it is", ". It is")
    )


def max_axis(sizes: Sizes) -> int:
    """Return the longest of the axes."""
    return max(sizes.batch, sizes.num_kv_heads, sizes.group, *sizes.lengths, sizes.head_dim)


def from_which_size(caller: Caller, function: str, features: frozenset[str], failure: DepartureError) -> str:
    """Return from which size of an axis on results are wrong, in words; empty where no axis decides it."""
    trial, case = Trial(caller, features, 1, 0), failure.case
    assert case is not None

    def is_right(axis: str, number: int) -> bool:
        q_len, kv_len = case.sizes.lengths
        value: Any = (number if q_len == kv_len else min(q_len, number), number) if axis == "lengths" else number
        form = case.form if case.form in ("causal", "symmetric") else "causal"
        tried = large_case(dataclasses.replace(case.sizes, **{axis: value}), case.seed, form)
        try:
            trial.attention(tried) if function == "attention" else trial.gradients(tried, all_gradients(trial))
        except (DepartureError, CallError):
            return False
        return True

    for axis, words in AXES.items():
        right, wrong = 6, case.sizes.lengths[1] if axis == "lengths" else getattr(case.sizes, axis)
        if wrong <= 8 or not is_right(axis, right) or is_right(axis, wrong):
            continue
        # At powers of two first, for that is where code ends, and from the smallest one, for large cases take long.
        tries = [number for power in range(3, 12) for number in (2**power, 2**power + 1)]
        while wrong - right > 1:
            number = next((x for x in tries if right < x < wrong), (right + wrong) // 2)
            right, wrong = (number, wrong) if is_right(axis, number) else (right, number)
        words = words if axis != "num_kv_heads" or case.sizes.group == 1 else "key/value heads"
        if not is_right(axis, wrong + 1):
            return f"With more than {right} {words}, "
        block = next((n for n in (8, 16, 32, 64, 128, 256) if wrong % n <= 1 and not is_right(axis, wrong + n)), 0)
        if block and is_right(axis, wrong + block - 1):
            beyond = " and one more" if wrong % block else ""
            return f"With a multiple of {block}{beyond} {words}, "
        return f"With {wrong} {words}, but not with one more or fewer, "
    return ""
