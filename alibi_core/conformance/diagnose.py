"""Diagnosis: what an implementation does in place of ALiBi, in words.

Probes are asked one after the other, the plainest first. Where the mistakes found so far do not explain an answer, each
mistake of the table is tried on top of them, then each pair: everywhere, or under one condition that the probe meets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from alibi_core.conformance import reference
from alibi_core.conformance.adapter import Offer
from alibi_core.conformance.caller import Caller, CallError, DepartureError
from alibi_core.conformance.case import TENSORS, Case, Sizes
from alibi_core.conformance.laws import all_gradients, large_case
from alibi_core.conformance.mistakes import CATALOGUE
from alibi_core.conformance.oracle import U32, UNIT_ROUNDOFF, Values, excess
from alibi_core.conformance.reference import CONDITIONS, Active, Mistake
from alibi_core.conformance.report import Diagnosis
from alibi_core.conformance.trial import Trial

Found = list[tuple[Mistake, str | None]]
SECONDS = 4.0  # of computing, for the search of pairs
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
    form = "symmetric" if {"symmetric", "asymmetric"} & set(needs.split()) else "causal"
    arguments |= {"is_causal": False} if form == "symmetric" else {}
    sizes = Sizes(batch, 6 // group, group, lengths, head_dim)
    described = Case(sizes, scaling=arguments.get("scale"), slopes_per_batch=arrays["slopes"].ndim > 1)
    return described.with_arguments(form, arguments).with_arrays(**arrays)


@dataclass(eq=False)
class Probe:
    """What an adapter answered, and how to compute what mistakes would answer.

    Attributes:
        found: The results, by name.
        compute: What an implementation with some mistakes answers.
        conditions: That some of the calls meet.
        tolerance: How far a result may be off, as a share of its largest element, or
        by_element: of each element.
    """

    found: dict[str, Values]
    compute: Callable[[Active], dict[str, Values]]
    conditions: frozenset[str]
    tolerance: float
    by_element: bool = False
    _kept: dict[tuple[Any, ...], dict[str, Values]] = field(default_factory=dict)

    def answers(self, mistakes: Active) -> dict[str, Values]:
        """Return what an implementation with these mistakes would answer."""
        key = tuple((x.name, where) for x, where in mistakes if where is None or where in self.conditions)
        if key not in self._kept:
            self._kept[key] = self.compute(mistakes)
        return self._kept[key]

    def fits(self, mistakes: Active) -> bool:
        """Return whether these mistakes, and no others, explain the answer."""
        answers = self.answers(mistakes)
        return all(
            is_close(x, answers[name], self.tolerance, by_element=self.by_element) for name, x in self.found.items()
        )


def is_close(found: Values, expected: Values, tolerance: float, *, by_element: bool = False) -> bool:
    """Return whether all elements are the same, but for a share of the largest, or of each."""
    finite = np.isfinite(expected)
    if found.shape != expected.shape or not np.array_equal(finite, np.isfinite(found)):
        return False
    if not np.array_equal(np.isnan(expected), np.isnan(found)):
        return False
    sizes = np.abs(expected[finite])
    return bool(
        (
            np.abs(found[finite] - expected[finite]) <= tolerance * (sizes if by_element else sizes.max(initial=1e-30))
        ).all()
    )


def tolerance_of(case: Case, offer: Offer, features: frozenset[str]) -> float:
    """Return how far results may be off that are computed otherwise, as a share of the largest."""
    query, key = (np.abs(case.arrays[name]).max(initial=0) for name in ("query", "key"))
    scores = abs(case.scale) * query * key * case.sizes.head_dim
    if "far" not in features:  # then the bias may be counted from any token
        farthest = np.max(np.abs(case.arguments.get("q_offset", 0))) + max(case.sizes.lengths)
        scores += farthest * case.arrays["slopes"].max(initial=0)
    u = UNIT_ROUNDOFF["float64"] if offer.dtype == "float64" else U32
    return float(32 * u * (16 + scores) + 8 * UNIT_ROUNDOFF[offer.dtype] + 4 * offer.tolerance)


def observe(
    conditions: Iterable[str],
    compute: Callable[[Active], Any],
    call: Callable[[], Any],
    share: float,
    *,
    by_element: bool = False,
) -> Iterator[Probe]:
    """Yield the probe of what a call answers; nothing if it comes to nothing."""
    try:
        yield Probe(call(), compute, frozenset(conditions), share, by_element)
    except CallError:
        return


def attention_probes(caller: Caller, function: str, features: frozenset[str]) -> Iterator[Probe]:
    """Yield the answers of ``attention``, or of ``attention_grad``, to the probes that are offered."""
    offer = caller.offer
    for needs, lengths, options in PROBES:
        far = np.max(options.get("q_offset", 0)) > 1000
        if function == "attention_grad" and ("shown" in options or far or max(lengths) > 65):
            continue
        if not features.issuperset(needs.split()) or (not offer.has_slopes and "slopes" in options):
            continue
        if lengths[0] != lengths[1] and "lengths" not in features:
            lengths = (11, 11)
        yield from case_probe(caller, function, features, make_case(offer, needs, lengths, options))


def case_probe(caller: Caller, function: str, features: frozenset[str], case: Case) -> Iterator[Probe]:
    """Yield the answer of ``attention`` or ``attention_grad`` to a case."""
    arguments = reference.call_of(case, caller.offer.dtype)
    conditions = reference.Computation((), {}, **arguments).conditions
    share = tolerance_of(case, caller.offer, features)
    if function == "attention":
        yield from observe(
            conditions,
            lambda mistakes: {"output": reference.attend(reference.Computation(mistakes, {}, **arguments))},
            lambda: {"output": caller.attention(case)},
            share,
        )
        return
    names = all_gradients(Trial(caller, features, 1, 0))
    yield from observe(
        conditions,
        lambda mistakes: reference.differentiate(reference.Computation(mistakes, {}, **arguments)),
        lambda: {name: x for name, x in caller.gradients(case).items() if name in names},
        8 * share,
    )


def state_probes(caller: Caller, features: frozenset[str]) -> Iterator[Probe]:
    """Yield the answers to calls of the same lengths that differ in one thing, each asked again in the end."""
    offer = caller.offer
    changes: dict[str, dict[str, Any]] = {
        "symmetric": {},
        "window": {"window_size": 2},
        "scale": {"scale": 0.2},
        "offset": {"q_offset": 2},
        "mask": {},
    }
    for feature, turn in itertools.product(("", *(x for x in changes if x in features)), (1, -1)):
        length = 20 + caller.calls % 40  # which no earlier call had, most likely
        first = make_case(offer, "", (length, length), {"slopes": FLAT} if offer.has_slopes else {})
        arguments = changes.get(feature, {})
        if feature == "mask":
            shown = np.random.default_rng(1).random((2, 1, length, length)) < 0.6
            arguments = {"mask": shown | np.eye(length, dtype=bool)}
        second = make_case(offer, feature, (length, length), arguments)
        cases = (first, second)[::turn] + (first, second)[::turn][:1]
        calls = [reference.call_of(case, offer.dtype) for case in cases]

        def compute(mistakes: Active, calls: Any = calls) -> dict[str, Values]:
            state: dict[Any, Any] = {}
            run = [reference.attend(reference.Computation(mistakes, state, **x)) for x in calls]
            return {str(i): x for i, x in enumerate(run)}

        def call(cases: Any = cases) -> dict[str, Values]:
            return {str(i): caller.attention(case) for i, case in enumerate(cases)}

        share = max(tolerance_of(case, offer, features) for case in cases)
        conditions = frozenset().union(*(reference.Computation((), {}, **x).conditions for x in calls))
        yield from observe(conditions, compute, call, share)


def decoding_probes(caller: Caller, features: frozenset[str]) -> Iterator[Probe]:
    """Yield the answers of decoding: of one sequence, in several steps, then of two by turns."""
    offer = caller.offer
    plain = [
        make_case(offer, "", (8, 8), x) for x in ({"shown": True}, {}, {"group": 2} if "grouped" in features else {})
    ]
    slopes = {"slopes": np.asarray(FLAT, np.float32).astype(np.float64)} if offer.has_slopes else {}
    other = plain[1].with_arrays(**{name: plain[1].arrays[name][:, :, ::-1].copy() for name in TENSORS}, **slopes)
    length = 140
    long = make_case(offer, "", (length, length), {"slopes": FLAT} if offer.has_slopes else {})
    tries: list[tuple[list[Case], list[Sequence[int]]]] = [([case], [STEPS[0]]) for case in plain]
    tries += [([plain[1]], [steps]) for steps in STEPS[1:]]
    tries += [([plain[1], other], [STEPS[0], STEPS[0]]), ([long], [(length - 12, *(1,) * 9, 3)])]
    for cases, steps in tries:
        calls = [reference.call_of(case, offer.dtype) for case in cases]

        def compute(mistakes: Active, calls: Any = calls, steps: Any = steps) -> dict[str, Values]:
            return decoded(mistakes, calls, steps)

        def call(cases: Any = cases, steps: Any = steps) -> dict[str, Values]:
            return {f"{x.number} {x.start}": x.output for x in caller.decoded(cases, steps)}

        conditions = {"first step", "later steps", "single steps", "chunks"} | (
            {"grouped"} if cases[0].sizes.group > 1 else set()
        )
        share = tolerance_of(cases[0], offer, features)
        yield from observe(conditions, compute, call, share)


def decoded(mistakes: Active, calls: Any, steps: Sequence[Sequence[int]]) -> dict[str, Values]:
    """Return what decoding of sequences by turns gives, by sequence and first token of the step."""
    found, state, caches, ends = {}, dict[Any, Any](), [None] * len(calls), [0] * len(calls)
    for turn, (number, call) in itertools.product(range(max(map(len, steps))), enumerate(calls)):
        start, end = ends[number], ends[number] + steps[number][turn]
        query, key, value = (call[name][:, :, start:end] for name in TENSORS)
        slopes = call["slopes"] if not call["shares_slopes"] else call["slopes"][0]
        output, caches[number] = reference.decode_step(mistakes, state, query, key, value, slopes, caches[number])
        found[f"{number} {start}"], ends[number] = output, end
    return found


def list_probes(caller: Caller, function: str, features: frozenset[str]) -> Iterator[Probe]:
    """Yield the slopes, or the bias, of an adapter."""
    contract, u = caller.offer.contract, U32 if caller.offer.dtype != "float64" else UNIT_ROUNDOFF["float64"]
    if function == "slopes":
        for heads in (tuple(n for n in HEADS if n & (n - 1) == 0), HEADS):

            def lists(mistakes: Active, heads: Any = heads) -> dict[str, Values]:
                return {str(n): reference.make_slopes(mistakes, n, contract) for n in heads}

            def call_lists(heads: Any = heads) -> dict[str, Values]:
                return {str(n): caller.slopes(n) for n in heads}

            yield from observe((), lists, call_lists, 2.0**-20, by_element=True)
        return
    forms = (True, False) if "symmetric" in features else (True,)
    for is_causal, lengths in itertools.product(forms, ((7, 7), (4, 11), (11, 5), (1, 9), (130, 130), (2, 511))):
        if lengths[0] != lengths[1] and "lengths" not in features:
            continue

        def biases(mistakes: Active, lengths: Any = lengths, is_causal: Any = is_causal) -> dict[str, Values]:
            return {
                "bias": reference.make_bias(
                    mistakes, reference.make_slopes(mistakes, 12, contract), lengths[0], lengths[1], is_causal
                )
            }

        def call_bias(lengths: Any = lengths, is_causal: Any = is_causal) -> dict[str, Values]:
            return {"bias": caller.bias(12, lengths[0], lengths[1], is_causal)}

        conditions = {"causal" if is_causal else "symmetric", "square" if lengths[0] == lengths[1] else "lengths"}
        conditions |= {"one query"} if lengths[0] == 1 else set()
        yield from observe(
            conditions, biases, call_bias, 32 * u + 2 * UNIT_ROUNDOFF[caller.offer.dtype], by_element=True
        )


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
    probes: list[Probe] = []
    if function == "attention":
        states = list(state_probes(caller, features))
        if states and any(not x.fits([]) and is_right_first(x) for x in states):
            found = search(states, candidates(function))
            if any(x.name.startswith("stale ") for x, _ in found):
                return [sentence_of(*x) for x in found]
        probes = list(attention_probes(caller, function, features)) + states
    elif function == "attention_grad":
        probes = list(attention_probes(caller, function, features))
    elif function == "decode_step":
        probes = list(decoding_probes(caller, features))
    else:
        probes = list(list_probes(caller, function, features))
    for _, failure in failures:  # large ones take too long to be computed in many ways
        case = failure.case
        if case is not None and function.startswith("attention") and case.num_heads * np.prod(case.sizes.lengths) < 3e5:
            probes += case_probe(caller, function, features, case)
    found = search(probes, candidates(function))
    said = [sentence_of(*x) for x in found]
    unexplained = [(law, x) for law, x in failures if not _explains(caller, function, features, found, x)]
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


def is_right_first(probe: Probe) -> bool:
    """Return whether the first of several calls is answered rightly."""
    return is_close(probe.found["0"], probe.answers([])["0"], probe.tolerance)


def _explains(caller: Caller, function: str, features: frozenset[str], found: Active, failure: DepartureError) -> bool:
    if not found:
        return False
    case = failure.case
    if case is None or not function.startswith("attention") or "," in failure.inputs.partition(", then ")[2]:
        return True
    if case.num_heads * np.prod(case.sizes.lengths) >= 3e5:
        return True
    return all(x.fits(found) for x in case_probe(caller, function, features, case))


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
