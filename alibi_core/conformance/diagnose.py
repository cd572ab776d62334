"""Diagnosis: the mistakes that explain the results of an implementation.

Probes are answered in order, the simplest first. If the mistakes found so far do not explain an answer, each mistake of
the catalogue is added to them, then each pair: in all calls, or under one condition that the probe meets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from alibi_core.conformance import reference
from alibi_core.conformance.adapter import Offer
from alibi_core.conformance.caller import Caller, CallError, DepartureError, decoded
from alibi_core.conformance.case import Case, Sizes
from alibi_core.conformance.laws import all_gradients
from alibi_core.conformance.mistaken import simulated
from alibi_core.conformance.mistakes import CATALOGUE
from alibi_core.conformance.oracle import U32, UNIT_ROUNDOFF, excess
from alibi_core.conformance.reference import CONDITIONS, STEP_CONDITIONS, TENSORS, Active, Mistake, Values
from alibi_core.conformance.report import Diagnosis
from alibi_core.conformance.trial import Trial

Found = list[tuple[Mistake, str | None]]
Answers = dict[str, Values]
MOST_UNEXPLAINED = 3, 15  # after so many probes without an explanation, pairs are no longer tried, then no mistake is
# Above this many simulated scores, pairs are no longer tried; single mistakes up to five times as many.
WORK = 12_500_000
CALL = 500  # fixed cost of a simulated call, in scores
HEADS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 24, 32, 40, 71, 112)
# Not sorted, no powers of two, not exact in bfloat16: any wrong use of slopes changes the result.
STEEP, FLAT = (0.3, 0.061, 0.7, 0.11, 1.1, 0.023), (0.03, 0.007, 0.0011, 0.11, 0.3, 0.0023)
FUTURE = np.asarray([0.2, 0.5, 0.05, 0.9, 0.013, 0.33])
_rng = np.random.default_rng(5)
MASK = (_rng.random((2, 6, 7, 7)) < 0.6) | np.eye(7, dtype=bool)
IDS = np.asarray(((0, 0, 0, 1, 1, 2, 2), (3, 3, -3, -3, 5, 5, 0)), np.int32)
LONG_IDS = np.asarray(((0, 0, 0, 1, 1, 1, 2, 2, 2), (3, 3, 5, 5, 5, 5, 5, 0, 0)), np.int32)
NOWHERE_IDS = tuple(np.asarray([x] * 2, np.int32) for x in ((0, 1, 1, 1, 4, 4, 4), (0, 0, 1, 1, 2, 2, 2)))

# The probes of attention and gradients, the simplest first: (q_len, kv_len), and further arguments of make_case.
SYMMETRIC: dict[str, Any] = {"is_causal": False}
HIDING: tuple[tuple[tuple[int, int], dict[str, Any]], ...] = (
    ((13, 13), {"window_size": 3}),
    ((5, 5), {"window_size": 0}),
    ((7, 7), {"segment_ids": (IDS, IDS)}),
    ((7, 7), {"mask": MASK}),
    *(((7, 7), {"mask": MASK[:, :1], "size": x}) for x in (60.0, 600.0, 6000.0)),
)
PROBES: tuple[tuple[tuple[int, int], dict[str, Any]], ...] = (
    ((7, 7), {"size": 0.0, "slopes": 0.0}),
    ((7, 7), {"size": 0.0}),
    ((7, 7), {}),
    ((7, 7), {"size": 60.0}),  # scores whose exponentials overflow
    ((1, 1), {}),
    ((7, 7), {"scale": 0.2}),
    ((7, 7), {"scale": 0.0}),
    ((7, 7), {"slopes": (STEEP, FLAT)}),
    ((4, 11), {}),
    ((1, 9), {}),
    ((1, 9), SYMMETRIC),
    ((5, 11), {"q_offset": 3}),
    ((1, 9), {"q_offset": 4}),
    *(((7, 7), {"q_offset": x}) for x in (-2, 3, 20, 3003, 40_000)),
    ((5, 11), {"q_offset": 0}),
    ((7, 7), {"q_offset": np.asarray([2, 9], np.int32)}),
    ((7, 7), SYMMETRIC | {"size": 0.0}),
    ((7, 7), SYMMETRIC),
    ((4, 11), SYMMETRIC),
    *(((7, 7), SYMMETRIC | {"q_offset": x}) for x in (-2, 3)),
    *(((7, 7), SYMMETRIC | {"future_slopes": x}) for x in (FUTURE, FUTURE * 0)),
    ((7, 7), {"group": 2}),
    ((4, 11), {"group": 2}),
    *((lengths, form | options) for form in ({}, SYMMETRIC) for lengths, options in HIDING),
    ((7, 7), {"q_offset": 2, "window_size": 2}),
    ((7, 7), {"segment_ids": (IDS, IDS), "window_size": 1}),
    ((4, 9), {"segment_ids": (LONG_IDS[:, -4:], LONG_IDS)}),
    ((9, 5), {}),
    ((7, 7), {"q_offset": 20, "window_size": 3}),
    ((7, 7), {"mask": np.broadcast_to(np.arange(7)[:, None] != 4, (2, 1, 7, 7))}),
    ((7, 7), {"segment_ids": NOWHERE_IDS}),
    ((3, 511), {"size": 0.0, "slopes": FLAT}),
    *(((x, n), {"slopes": FLAT}) for x, n in ((5, 511), (2, 1000), (2, 2100))),
    *(((9, 9), {"head_dim": n}) for n in (75, 139, 264)),
    *(((4, n), {"slopes": FLAT}) for n in (49, 65, 97, 129)),
    *(((n, n), {"slopes": FLAT}) for n in (65, 130)),
    ((130, 130), SYMMETRIC | {"slopes": FLAT}),
    *(((7, 7), SYMMETRIC | {"points": ("times", "manhattan", x)}) for x in ("linear", "log")),
    *(((7, 7), SYMMETRIC | {"points": (x, "euclidean", "linear")}) for x in ("space", "class token")),
    *((lengths, {"gates": "strong"}) for lengths in ((7, 7), (4, 7))),
    ((7, 7), {"gates": "large", "slopes": FLAT}),
    ((5, 11), {"q_offset": 1_000_000}),
)
BIASES = ((7, 7), (4, 11), (11, 5), (1, 9), (130, 130), (2, 523))
STEPS = ((3, 1, 1, 3, 1), (1,) * 9, (2, 4, 3))  # 9 tokens: no multiple of a block


def make_case(
    offer: Offer,
    lengths: tuple[int, int],
    *,
    slopes: Any = STEEP,
    size: float = 1.0,
    num_heads: int = 6,
    group: int = 1,
    head_dim: int = 8,
    points: tuple[str, str, str] | None = None,
    gates: str | None = None,
    **arguments: Any,
) -> Case:
    """Return the case of a probe: queries times ``size``, and slopes, repeated if there are more heads."""
    own = np.resize(np.asarray(slopes, np.float32), (*np.shape(slopes)[:-1], num_heads))
    if not offer.has_slopes:
        own = reference.make_slopes((), num_heads, offer.contract).astype(np.float32)
    sizes = Sizes(2, num_heads // group, group, lengths, head_dim)
    options: dict[str, Any] = {"scaling": arguments.get("scale"), "points": points, "gates": gates}
    drawn = Case(sizes, **options, slopes_per_batch=own.ndim > 1, seed=sum(lengths))
    arrays = {name: drawn.arrays[name] / drawn.arrays[name].std() for name in (*TENSORS, "cotangent")}
    arrays |= {"query": arrays["query"] * size, "slopes": own.astype(np.float64)}
    form = "causal" if arguments.get("is_causal", True) else "symmetric"
    return drawn.with_arguments(form, drawn.arguments | arguments).with_arrays(**arrays)


@dataclass(eq=False)
class Probe:
    """Calls of an adapter, and its answers.

    ``ask`` makes the calls, by a caller of the adapter or by a simulation of mistakes, which computes ``scores``
    scores; ``conditions`` are the conditions that the calls meet. A result may be off by ``tolerance``, a share of its
    largest element, or, with ``by_element``, of each element.
    """

    ask: Callable[[Any], Answers]
    offer: Offer
    conditions: frozenset[str]
    calls: int
    scores: int
    tolerance: float
    by_element: bool
    found: Answers
    _simulated: dict[tuple[Any, ...], Answers] = field(default_factory=dict)

    def answers(self, mistakes: Active) -> Answers:
        """Return the answers of an implementation with these mistakes, simulated and cached."""
        made = [(x.name, where) for x, where in mistakes if where is None or where in self.conditions]
        # A condition that the only call meets makes no difference.
        key = tuple((name, where if self.calls > 1 else None) for name, where in made)
        if key not in self._simulated:
            answers = self.ask(simulated(mistakes, self.offer))
            first = next(iter(self._simulated.values()), answers)  # most mistakes change nothing: one copy, for memory
            self._simulated[key] = first if _same(first, answers) else answers
        return self._simulated[key]

    @property
    def work_done(self) -> int:
        """The number of simulated scores, among them the fixed cost of calls."""
        return (CALL * self.calls + self.scores) * len(self._simulated)

    def fits(self, mistakes: Active) -> bool:
        """Return whether these mistakes, and no others, explain the answer."""
        answers = self.answers(mistakes)
        return all(self.is_close(x, answers[name]) for name, x in self.found.items())

    def is_close(self, found: Values, expected: Values) -> bool:
        """Return whether all elements are equal within the tolerance."""
        finite = np.isfinite(expected)
        same = found.shape == expected.shape and np.array_equal(finite, np.isfinite(found))
        if not same or not np.array_equal(np.isnan(expected), np.isnan(found)):
            return False
        sizes = np.abs(expected[finite])
        allowed = self.tolerance * (sizes if self.by_element else sizes.max(initial=1e-30))
        return bool((np.abs(found[finite] - expected[finite]) <= allowed).all())


def probe(
    trial: Trial,
    ask: Callable[[Any], Answers],
    *cases: Case,
    share: float = 0.0,
    conditions: Iterable[str] = (),
    calls: int = 1,
) -> list[Probe]:
    """Return the probe of ``ask``, which makes ``calls`` calls a case; an empty list if a call fails."""
    offer, met, calls = trial.offer, set(conditions), calls * max(1, len(cases))
    for case in cases:
        met |= reference.Computation((), {}, **case.call(offer.dtype)).conditions
    tolerance = share or max(tolerance_of(case, trial) for case in cases)
    with contextlib.suppress(CallError):
        found = ask(trial.caller)
        scores = sum(x.sizes.batch * x.num_heads * math.prod(x.sizes.lengths) for x in cases)
        scores += 0 if cases else sum(x.size for x in found.values())  # those of a bias, or slopes
        return [Probe(ask, offer, frozenset(met), calls, scores, tolerance, share > 0, found)]
    return []


def of_cases(trial: Trial, function: str, *cases: Case) -> list[Probe]:
    """Return the probe of ``attention`` in these cases in order, or those of ``attention_grad`` in one case.

    The gradients of slopes and gates are a probe of their own: they may be wrong beside a mistake that explains the
    others.
    """
    if function == "attention":
        return probe(trial, lambda x: {str(i): x.attention(case) for i, case in enumerate(cases)}, *cases)
    (case,), names = cases, all_gradients(trial)
    made = probe(trial, lambda x: {name: y for name, y in x.gradients(case).items() if name in names}, case)
    # A gradient takes thrice the time of a result.
    made = [dataclasses.replace(x, tolerance=8 * x.tolerance, scores=3 * (x.scores + CALL)) for x in made]
    probes = list[Probe]()
    for x, by_slopes in itertools.product(made, (False, True)):
        found = {name: y for name, y in x.found.items() if (name not in TENSORS) is by_slopes}
        shared: dict[str, Any] = {"calls": 0, "scores": 0} if by_slopes else {}  # both have the first one's simulations
        probes += [dataclasses.replace(x, found=found, **shared)] if found else []
    return probes


def short_probes(trial: Trial, function: str) -> list[Probe]:
    """Return the probes of the table ``PROBES``, for ``attention`` or ``attention_grad``."""
    probes: list[Probe] = []
    for lengths, options in PROBES:
        is_far = np.max(options.get("q_offset", 0)) > 1000
        if function == "attention_grad" and (options.get("size") == 0 or is_far or max(lengths) > 65):
            continue
        if "slopes" in options and not trial.offer.has_slopes:
            continue
        case = make_case(trial.offer, lengths, **options)
        sees = np.isfinite(trial.exact(case).bias).any(axis=-1).all()
        if trial.offers(case) and (sees or "nowhere" in trial.features):
            probes += of_cases(trial, function, case)
    return probes


def state_probes(trial: Trial) -> list[Probe]:
    """Return probes of state kept between calls: two calls that differ in one argument, then the first again."""
    probes, rng = list[Probe](), np.random.default_rng(1)
    for number, turn in itertools.product(range(6), (1, -1)):
        n = 20 + trial.caller.calls % 40  # probably a new length, so that nothing is cached for it
        masks = (rng.random((2, 2, 1, n, n)) < 0.6) | np.eye(n, dtype=bool)
        heads = {"num_heads": 13 if turn > 0 else 14}  # numbers of no other case: slopes may be cached by it alone
        changes: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
            (heads | ({"slopes": FLAT} if trial.offer.has_slopes else {}), heads),
            ({}, SYMMETRIC),
            ({"window_size": 5}, {"window_size": 2}),
            ({}, {"scale": 0.2}),
            ({}, {"q_offset": 2}),
            ({"mask": masks[0]}, {"mask": masks[1]}),
        )
        cases = [make_case(trial.offer, (n, n), **options) for options in changes[number]][::turn]
        if all(map(trial.offers, cases)):
            probes += of_cases(trial, "attention", *cases, cases[0])
    return probes


def decoding_probes(trial: Trial) -> list[Probe]:
    """Return probes of decoding: one sequence in several steps, then two sequences in turn."""
    offer, probes = trial.offer, list[Probe]()
    flat: dict[str, Any] = {"slopes": FLAT} if offer.has_slopes else {}
    plain, in_groups = (make_case(offer, (9, 9), group=n) for n in (1, 2 if "grouped" in trial.features else 1))
    other, long = make_case(offer, (9, 9), **flat), make_case(offer, (140, 140), **flat)
    other = other.with_arrays(**{name: plain.arrays[name][:, :, ::-1].copy() for name in TENSORS})
    tries: list[tuple[list[Case], Sequence[int]]] = [([case], STEPS[0]) for case in (plain, in_groups)]
    tries += [([plain], steps) for steps in STEPS[1:]]
    tries += [([plain, other], STEPS[0]), ([long], (125, *(1,) * 9, 3)), ([long], (65, 1, 1, 58, *(1,) * 6))]
    for cases, steps in tries:

        def ask(x: Any, cases: Any = cases, steps: Any = steps) -> Answers:
            steps = [steps] * len(cases)
            return {f"{number} {start}": y for number, start, _, y, _ in decoded(x, cases, steps)}

        conditions = STEP_CONDITIONS.keys() - {"grouped"}
        probes += probe(trial, ask, *cases, conditions=conditions, calls=2 * len(steps))
    return probes


def slope_probes(trial: Trial) -> list[Probe]:
    """Return probes of slopes, numbers of heads that are powers of two first."""
    numbers = [[n for n in HEADS if n & (n - 1) == 0], HEADS]
    asked = [lambda x, heads=heads: {str(n): x.slopes(n) for n in heads} for heads in numbers]
    return [made for ask in asked for made in probe(trial, ask, share=2.0**-20)]


def bias_probes(trial: Trial) -> list[Probe]:
    """Return probes of the bias."""
    unit, probes = UNIT_ROUNDOFF[trial.offer.dtype], list[Probe]()
    for is_causal, (q_len, kv_len) in itertools.product((True, False), BIASES):
        met = {"causal" if is_causal else "symmetric", "square" if q_len == kv_len else "lengths"}
        met |= {"one query"} if q_len == 1 else set()
        if met - {"causal", "square", "one query"} <= trial.features:

            def ask(x: Any, sizes: Any = (12, q_len, kv_len, is_causal)) -> Answers:
                return {"bias": x.bias(*sizes)}

            probes += probe(trial, ask, share=32 * min(unit, U32) + 2 * unit, conditions=met)
    return probes


def probes_of(trial: Trial, function: str) -> list[Probe]:
    """Return all probes of a function, the simplest first."""
    made = {"slopes": slope_probes, "bias": bias_probes, "decode_step": decoding_probes}
    return made[function](trial) if function in made else short_probes(trial, function)


def tolerance_of(case: Case, trial: Trial) -> float:
    """Return the allowed difference between two correct computations of a case, relative to the largest element."""
    query, key = (np.abs(case.arrays[name]).max(initial=0) for name in ("query", "key"))
    scores, dtype = abs(case.scale) * query * key * case.sizes.head_dim, trial.offer.dtype
    if "far" not in trial.features:  # then the bias may be counted from any token
        farthest = np.max(np.abs(case.arguments.get("q_offset", 0))) + max(case.sizes.lengths)
        scores += farthest * case.arrays["slopes"].max(initial=0)
    u = UNIT_ROUNDOFF["float64"] if dtype == "float64" else U32
    return float(32 * u * (16 + scores) + 8 * UNIT_ROUNDOFF[dtype] + 4 * trial.offer.tolerance)


# --- The search -------------------------------------------------------------------------------------------------------


def candidates(function: str) -> list[Mistake]:
    """Return the mistakes to try for a function."""
    found = [x for x in CATALOGUE.values() if not x.is_noisy]
    return [x for x in found if x.name != "signed: key-only"] if function == "bias" else found


def search(probes: Sequence[Probe], catalogue: Sequence[Mistake]) -> Found:
    """Return the mistakes that explain as many probes as possible, each with its condition, in the order of probes."""
    found: Found = []
    explained: list[Probe] = []
    for number, probe in enumerate(probes):
        best = found if probe.fits(found) else None
        if best is None and number - len(explained) < MOST_UNEXPLAINED[1]:
            best = _best(probes, number, explained, found, catalogue)
        if best is not None:
            found = best
            explained.append(probe)
    return found


def _best(
    probes: Sequence[Probe], number: int, before: Sequence[Probe], found: Found, catalogue: Sequence[Mistake]
) -> Found | None:
    """Return ``found`` plus one or two mistakes that explain this probe and all explained before; None if none do."""

    def is_spent(limit: int) -> bool:
        return sum(x.work_done for x in probes) > limit

    probe, later = probes[number], probes[number + 1 :]
    plain = probe.answers(found)
    # Only mistakes that change this probe's answer can explain it.
    relevant = [x for x in catalogue if not is_spent(5 * WORK) and not _same(probe.answers([*found, (x, None)]), plain)]
    failing = sum(not x.fits(found) for x in later)
    for size in (1, 2) if number - len(before) < MOST_UNEXPLAINED[0] else (1,):
        options: list[Found] = []
        for chosen in itertools.combinations(relevant, size):
            # Stop pairs at a fixed amount of work, the same on every machine.
            if size > 1 and is_spent(WORK):
                break
            if size > 1 and not probe.fits([*found, *((x, None) for x in chosen)]):
                continue
            for where in itertools.product((None, *sorted(probe.conditions)), repeat=size):
                tried = [*found, *zip(chosen, where, strict=True)]
                if probe.fits(tried) and all(x.fits(tried) for x in before):
                    options.append(tried)
                    break
        # Prefer mistakes that explain most of the later probes; unconditional ones come first among equals.
        best, most = None, -1
        for tried in sorted(options, key=lambda x: sum(where is not None for _, where in x)):
            count = sum(x.fits(tried) for x in later)
            # One probe is too little evidence for a mistake under a condition, or after an unexplained probe: then the
            # mistake must also explain a later probe that fails otherwise. After an unexplained probe, it must explain
            # most of the failing probes that it changes, before and after: a few agree by chance.
            is_sure = count > len(later) - failing
            if is_sure and len(before) < number:
                others = [x for x in probes if not (x is probe or x.fits(found))]
                changed = [x for x in others if not _same(x.answers(tried), x.answers(found))]
                is_sure = 2 * sum(x.fits(tried) for x in changed) > len(changed)
            is_plain = all(where is None for _, where in tried[len(found) :]) and len(before) == number
            if count > most and (is_sure or is_plain):
                best, most = tried, count
        if best is not None:
            return best
    return None


def _same(one: Answers, other: Answers) -> bool:
    return all(np.array_equal(one[name], other[name], equal_nan=True) for name in one)


def sentence_of(mistake: Mistake, where: str | None) -> Diagnosis:
    """Return the diagnosis of a mistake, with its condition."""
    if where is None:
        return Diagnosis(mistake.name, mistake.sentence)
    words, (condition, _) = mistake.sentence, (CONDITIONS | STEP_CONDITIONS)[where]
    if not words.startswith("NaN"):
        words = words[0].lower() + words[1:]
    return Diagnosis(f"{mistake.name} {condition}", f"{condition[0].upper()}{condition[1:]}, {words}")


# --- Sentences --------------------------------------------------------------------------------------------------------


def diagnose(
    caller: Caller, function: str, features: frozenset[str], errors: Sequence[tuple[str, DepartureError | CallError]]
) -> tuple[Diagnosis, ...]:
    """Return the diagnoses of one function of the adapter.

    ``errors`` are the statements of the broken laws, each with the error of the first case that breaks it.
    """
    found = [Diagnosis(x.kind, str(x)) for _, x in errors if isinstance(x, CallError)]
    departures = [(statement, x) for statement, x in errors if isinstance(x, DepartureError)]
    found += _named(Trial(caller, features), function, departures) if departures else []
    return tuple(dict.fromkeys(found))


def _named(trial: Trial, function: str, failures: Sequence[tuple[str, DepartureError]]) -> list[Diagnosis]:
    states = state_probes(trial) if function == "attention" else []
    # Right at first and wrong later, in either order of two calls: look for state before anything else.
    is_wrong_later = [not x.fits([]) and x.is_close(x.found["0"], x.answers([])["0"]) for x in states]
    if any(map(all, itertools.pairwise(is_wrong_later))):
        found = search(states, candidates(function))
        if any(x.name.startswith("stale ") for x, _ in found):
            return [sentence_of(*x) for x in found]
    tried = [(law, x, _probes_of_failure(trial, function, x)) for law, x in failures]
    probes = probes_of(trial, function) + states + [probe for *_, own in tried for probe in own]
    found = search(probes, candidates(function))
    said = [sentence_of(*x) for x in found]
    unexplained = [x[:2] for x in tried if not found or not all(probe.fits(found) for probe in x[2] or probes)]
    if unexplained:
        said.append(Diagnosis("unexplained", off_by(trial, function, *unexplained[0])))
    return said


def _probes_of_failure(trial: Trial, function: str, failure: DepartureError) -> list[Probe]:
    """Return the probe of a failing case; large cases, and failures after earlier calls, are not simulated."""
    case = failure.case
    if case is None or not function.startswith("attention") or ", then " in failure.inputs:
        return []
    is_small = case.num_heads * math.prod(case.sizes.lengths) < 3e5
    return of_cases(trial, function, case) if is_small else []


def off_by(trial: Trial, function: str, law: str, failure: DepartureError) -> str:
    """Return the sentence about a failure that no known mistake explains: the law, the sizes, and the error."""
    what = f"The gradient of {failure.part} is" if function == "attention_grad" else "Results are"
    amount = failure.remark
    if not amount:
        expected, unit = failure.expected.value, UNIT_ROUNDOFF[trial.offer.dtype]
        share, finite = float(excess(failure.actual, failure.expected).max(initial=0)), np.isfinite(expected)
        error, largest = (float(np.abs(x[finite]).max(initial=0)) for x in (failure.actual - expected, expected))
        error, of_what = (error / largest, "of the largest") if largest else (error, "where 0 is right")
        amount = f"off by up to {error:.2g} {of_what}, {share:.3g} times what rounding explains"
        # An error of about one unit of a lower precision suggests rounding to it.
        low = [x for x, u in UNIT_ROUNDOFF.items() if u > unit and 0.1 < error / u < 4]
        amount += f", about as much as rounding to {' or '.join(low)}" if low else ""
    return f"Not so: {law[0].lower()}{law[1:]}. {what} {amount} ({failure.inputs})."
