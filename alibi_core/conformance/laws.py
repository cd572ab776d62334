"""The laws of ALiBi: each is a family of cases, the smallest first, in which results must be exact to rounding.

Cases that need a feature which the adapter lacks are passed over. The law ``combined`` would find most mistakes. Laws
of single features exist so that a report says which feature is wrong, with a counterexample that uses no other feature.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import alibi_core
from alibi_core._slopes import slope_values
from alibi_core.conformance.adapter import MOST_TOKENS
from alibi_core.conformance.caller import GRADIENTS, CallError, DepartureError, decoded
from alibi_core.conformance.case import (
    COTANGENTS,
    FEWER,
    FORMS,
    GATES,
    PER_BATCH,
    SMALL,
    SQUARE,
    Case,
    Sizes,
    draw_case,
    option_values,
)
from alibi_core.conformance.data import DATA
from alibi_core.conformance.oracle import UNIT_ROUNDOFF, Answer
from alibi_core.conformance.reference import TENSORS, make_bias
from alibi_core.conformance.trial import Trial

# Few sizes, because compiling each takes long, the smallest first; in most, all axes have different lengths.
PLAIN = (Sizes(1, 1, 1, (1, 1), 1), Sizes(1, 1, 1, (2, 2), 1), SQUARE)
MORE = Sizes(2, 3, 1, (11, 5), 3)
UNEQUAL = (Sizes(1, 1, 1, (1, 2), 1), Sizes(2, 5, 1, (1, 13), 2), FEWER, MORE)
GROUPED = (Sizes(1, 2, 2, (2, 2), 1), Sizes(2, 1, 2, (7, 7), 3), Sizes(1, 3, 2, (7, 7), 8))
# Long enough for several blocks of 64 keys or more, and for horizons shorter than the row.
LONG = Sizes(2, 3, 1, (150, 150), 4)
GATED = (PLAIN[1], SQUARE, GROUPED[-1], LONG)
LONGER = (
    Sizes(2, 2, 2, (150, 150), 4),
    Sizes(1, 3, 1, (70, 200), 3),
    Sizes(2, 1, 2, (201, 90), 5),
    Sizes(1, 2, 3, (2, 260), 4),
)
# Heads, queries and keys of a bias, the smallest first; the last has positions that bfloat16 would round.
BIAS_SIZES = (
    *((1, 1, 1), (3, 1, 2), (2, 2, 1), (8, 2, 3), (3, 3, 2), (12, 7, 7), (1, 16, 16), (5, 17, 17)),
    *((2, 1, 13), (3, 5, 11), (8, 11, 5), (12, 16, 9), (2, 17, 1), (3, 300, 300)),
)


Check = Callable[[Trial], Any]


@dataclass(frozen=True)
class Law:
    """A statement, and its check, for adapters that have ``function`` and the features ``needs``."""

    name: str
    statement: str
    function: str
    needs: frozenset[str]
    check: Check


def holding(hold: Callable[[Trial, Case], None], cases: Callable[[Trial], Iterable[Case]]) -> Check:
    """Return a check of all cases that the adapter offers, each by ``hold``."""

    def check(trial: Trial) -> None:
        for case in cases(trial):
            if trial.offers(case):
                hold(trial, case)

    return check


def law(function: str, *needs: str, hold: Any = None) -> Callable[[Callable[[Trial], Any]], Law]:
    """Return a decorator that turns a check, or with ``hold`` a generator of cases, into a law.

    Its name and docstring become the law's name and statement.
    """

    def made(body: Callable[[Trial], Any]) -> Law:
        check = body if hold is None else holding(hold, body)
        return Law(body.__name__, (body.__doc__ or "").rstrip("."), function, frozenset(needs), check)

    return made


# --- Slopes and bias --------------------------------------------------------------------------------------------------


@law("slopes")
def slopes(trial: Trial) -> None:
    """Slopes are those of the contract, for 1 to 128 heads."""
    for num_heads in range(1, 129):
        actual = trial.caller.slopes(num_heads)
        exact = np.asarray(slope_values(num_heads, contract=trial.offer.contract))
        trial.compare("slopes", f"num_heads={num_heads}", actual, Answer(exact, exact * slopes_error(trial, num_heads)))


def slopes_error(trial: Trial, num_heads: int) -> float:
    """Return the relative error budget of slopes.

    The power may be off by about one unit in the last place, and its storage by another. Exponents that are not dyadic
    are rounded first, by up to ``u`` times their size, at most 8. In float64 the base may be rounded before it is
    raised to powers of up to ``2 * num_heads``; in float32 only BLOOM's contract rounds it.
    """
    contract = trial.offer.contract
    if trial.offer.dtype == "float64" and contract in ("exact", "geometric"):
        return (4 + 8 * math.log(2) + 2 * num_heads) * UNIT_ROUNDOFF["float64"]
    return (4 + 8 * math.log(2) * (contract == "geometric")) * UNIT_ROUNDOFF["float32"]


def bias_answer(trial: Trial, num_heads: int, q_len: int, kv_len: int, is_causal: bool) -> Answer:
    """Return the exact bias; the budget allows rounding of slopes, of their product with distances, and of storage."""
    contract = trial.offer.contract
    if contract in ("exact", "geometric"):
        exact = make_bias((), np.asarray(slope_values(num_heads, contract=contract)), q_len, kv_len, is_causal)
    else:
        exact = np.asarray(alibi_core.bias(num_heads, q_len, kv_len, contract=contract), np.float64)
    relative = slopes_error(trial, num_heads) + 2 * UNIT_ROUNDOFF[trial.offer.dtype]
    return Answer(exact, np.where(np.isfinite(exact), np.abs(exact) * relative, 0))


def check_bias(trial: Trial, *, is_causal: bool) -> None:
    """Check the bias for several sizes."""
    for num_heads, q_len, kv_len in BIAS_SIZES:
        q_len = q_len if "lengths" in trial.features else kv_len
        actual = trial.caller.bias(num_heads, q_len, kv_len, is_causal)
        answer = bias_answer(trial, num_heads, q_len, kv_len, is_causal)
        inputs = f"num_heads={num_heads}, q_len={q_len}, kv_len={kv_len}, is_causal={is_causal}"
        trial.compare("bias", inputs, actual, answer)


@law("bias")
def causal_bias(trial: Trial) -> None:
    """The causal bias is minus slope times distance, and minus infinity ahead."""
    check_bias(trial, is_causal=True)


@law("bias", "symmetric")
def symmetric_bias(trial: Trial) -> None:
    """The symmetric bias is minus slope times distance on both sides."""
    check_bias(trial, is_causal=False)


# --- Attention, feature by feature ------------------------------------------------------------------------------------

attention_law = functools.partial(law, "attention", hold=Trial.attention)
nowhere_law = functools.partial(law, "attention", hold=functools.partial(Trial.attention, nowhere=True))


def further_cases(feature: str) -> Iterator[Case]:
    """Yield additional cases of a feature, beside the values of its option."""
    case = Case(SQUARE)
    if feature == "causal":  # heads without a slope among others
        yield case.with_arrays(slopes=np.asarray([0.0, 0.25, 0.0]))
    if feature == "offset":  # before all keys; one for each batch entry; and 0, which code may take for "not given"
        yield from (Case(SQUARE, q_offset=-3), Case(SQUARE, q_offset=PER_BATCH), Case(FEWER, q_offset=0))
    if feature == "mask":  # a masked key whose score is about 30,000 above the others
        query, key = case.arrays["query"] + 16, case.arrays["key"].copy()
        shown = np.ones((2, 1, 1, 7), dtype=bool)
        key[:, :, 3], shown[..., 3] = 1000, False
        yield case.with_arguments("causal", {"mask": shown}).with_arrays(query=query, key=key)


# Each kind of positions, each distance, each law and each form; not each combination, to save compilation.
POINT_CASES = (
    *(Case(SQUARE, form, points=("line", "manhattan", "linear")) for form in FORMS[:2]),
    Case(SQUARE, points=("times", "manhattan", "sqrt")),
    Case(SQUARE, "symmetric", points=("times", "manhattan", "log")),
    Case(SQUARE, "symmetric", points=("grid", "manhattan", "linear")),
    Case(SQUARE, "symmetric", points=("grid", "chebyshev", "log")),
    Case(SQUARE, "symmetric", points=("space", "euclidean", "sqrt")),
    Case(SQUARE, "symmetric", points=("class token", "euclidean", "linear")),
    Case(SQUARE, "symmetric", points=("class token", "chebyshev", "linear")),
    Case(FEWER, points=("times", "manhattan", "linear")),
    Case(SQUARE, points=("times", "manhattan", "linear"), masking="by query"),
)
CAUSAL, SYMMETRIC, AHEAD = FORMS[:1], FORMS[1:2], FORMS[2:]
BOTH = CAUSAL + SYMMETRIC


def feature_law(
    feature: str,
    statement: str,
    sizes: tuple[Sizes, ...] = PLAIN,
    forms: tuple[str, ...] = CAUSAL,
    name: str = "",
    **options: tuple[Any, ...],
) -> Law:
    """Return the law of a feature, by default of all values of its option; it needs the feature unless ``"causal"``."""

    def cases(trial: Trial) -> Iterator[Case]:
        own = {feature, "batch_offsets", "far"} if feature == "offset" else {feature}
        tried = options or option_values(frozenset(own) & trial.features) or {"seed": (0,)}
        values = [{"form": form, option: x} for form in forms for option, found in tried.items() for x in found]
        values = [x for x in values if trial.offers(Case(SQUARE, **x))]
        own_sizes = sizes + UNEQUAL * (feature not in ("causal", "grouped", "lengths"))
        ordered = sorted((x for x in own_sizes if trial.offers(Case(x))), key=lambda x: x.elements)
        # Small sizes are tried with every value. Larger sizes share the values among them, to save compilation.
        small, large = ([x for x in ordered if (x.elements <= SMALL) is is_small] for is_small in (True, False))
        yield from trial.seeded(Case(size, **x) for size in small for x in values)
        number = max(len(large), len(values))
        yield from trial.seeded(Case(large[i % len(large)], **values[i % len(values)]) for i in range(number))
        yield from further_cases(feature)

    needs = {feature} - {"causal"} | ({"symmetric"} if feature == "asymmetric" else set())
    return Law(name or feature, statement, "attention", frozenset(needs), holding(Trial.attention, cases))


def gate_law(name: str, statement: str, *kinds: str) -> Law:
    """Return the law of forget gates of these kinds."""
    return feature_law("log_gates", statement, GATED, name=name, gates=kinds)


# fmt: off
FEATURE_LAWS = (
    feature_law("causal", "Causal attention is exact to rounding"),
    feature_law("lengths", "The last query is at the last key, however many there are of each", UNEQUAL),
    feature_law("offset", "A query's position is q_offset plus its index"),
    feature_law("symmetric", "Without a causal mask, distance counts on both sides alike", forms=SYMMETRIC),
    feature_law("asymmetric", "Future keys have the slopes future_slopes, which may be 0", forms=AHEAD),
    feature_law("grouped", "Query head h reads key/value head h // (num_heads // num_kv_heads)", GROUPED),
    feature_law("window", "Keys farther away than window_size are hidden, on either side, and no others", forms=BOTH),
    feature_law("segments", "A query sees the keys of its own segment, and no others, whatever the ids, also where a "
                "segment continues after others", forms=BOTH),
    feature_law("mask", "Masked keys weigh nothing, however large their scores, and no other key is affected",
                forms=BOTH),
    feature_law("batch_slopes", "Each batch entry has slopes of its own"),
    feature_law("scale", "Scores are multiplied by the scale, and the bias is not"),
    gate_law("constant_gates", "Constant gates are ALiBi, beside slopes or in place of them", "constant"),
    gate_law("open_gates", "A gate of 0 forgets nothing", "open"),
    gate_law("closed_gates", "A closed gate hides the past from its token and all later ones", "closed"),
    gate_law("late_gates", "A gate changes nothing for the queries before it", "late"),
    gate_law("large_gates", "Sums of gates are exact, however much was forgotten before them", "large", "huge"),
)
# fmt: on


@attention_law("points")
def points(trial: Trial) -> Iterator[Case]:
    """Between positions, slopes multiply the law of the distance, and a token without a position is near all others."""
    yield from trial.seeded(POINT_CASES)


@attention_law("log_gates")
def gates(trial: Trial) -> Iterator[Case]:
    """The score of a key is lowered by the gates after it up to the query, but those of masked tokens."""
    yield from trial.seeded(Case(size, gates="strong") for size in (UNEQUAL[1], LONGER[1], LONGER[3]))
    changes: tuple[dict[str, Any], ...] = (
        *({"packing": x} for x in ("same", "mixed")),
        *({"masking": x} for x in ("by key", "by query", "by head")),
        *({"q_offset": x} for x in (-3, 0, 13, PER_BATCH)),
        *({"window_size": 3}, {"slopes_per_batch": True}),
    )
    yield from (Case(SQUARE, gates=kind, **x) for x in changes for kind in ("strong", "closed"))
    yield _rising({"log_gates": np.full((1, 1, 600), np.float32(-0.3))}, slope=0.0)  # in low precision, too


@attention_law()
def combined(trial: Trial) -> Iterator[Case]:
    """All features that are offered work together."""
    yield from trial.drawn((*PLAIN[1:], *UNEQUAL[1:], *GROUPED[1:], Sizes(2, 3, 2, (5, 11), 3)))
    # Pairs of features that mask keys: a key is masked if either masks it.
    hiding: list[dict[str, Any]] = [{"window_size": 3}, {"packing": "pair"}, {"masking": "by query"}]
    for pair, form in zip(itertools.combinations(hiding, 2), (*FORMS[:2], FORMS[0]), strict=True):
        yield Case(Sizes(2, 3, 1, (13, 13), 5), form, **(pair[0] | pair[1]))
    yield Case(GROUPED[-1], masking="by head")
    # All axes of one length, for implementations that recognise axes by their lengths.
    yield from (Case(Sizes(3, 3, 1, (3, 3), 3), masking=masking) for masking in ("by head", None))


# --- Attention where it is hard ---------------------------------------------------------------------------------------


def even_case(trial: Trial, form: str = "causal", **options: Any) -> Case:
    """Return a case with rows of several blocks, in which all keys have similar weights."""
    case = Case(LONG, form, seed=trial.seed, **options)
    slopes = (np.linspace(0, 1, case.num_heads) / 150).astype(np.float32).astype(np.float64)
    return case.with_arrays(query=case.arrays["query"] / 10, slopes=slopes)


@attention_law()
def long(trial: Trial) -> Iterator[Case]:
    """Rows of several blocks are exact, however far away the keys that weigh most are."""
    for n in (63, 64, 65, 127, 128, 129):  # around the ends of blocks
        yield large_case(Sizes(1, 1, 1, (n, n), 4), trial.seed)
    yield from (Case(LONG, data=name) for name in DATA)
    yield from (Case(sizes) for sizes in LONGER)
    # Segments: for some queries the first blocks are fully masked, for others middle blocks.
    yield Case(LONG, packing="same")
    ids = np.repeat(np.asarray([[5, -1, 5]] * 2, np.int32), 50, axis=1)
    yield even_case(trial).with_arguments("causal", {"segment_ids": ids})
    yield Case(LONG, scaling=0.0625, seed=trial.seed)
    # Masks and windows must apply in all blocks. Slopes are so flat that every key matters.
    for form in FORMS[:2]:
        yield from (even_case(trial, form, masking=name) for name in ("by query", "by key", "by head"))
        yield from (even_case(trial, form, window_size=n) for n in (63, 64, 100))
    # All scores are around -200: exp underflows unless the row's maximum is subtracted.
    case = Case(LONG)
    yield case.with_arrays(query=case.arrays["query"] / 10 + 10, key=case.arrays["key"] / 10 - 10)
    yield from trial.drawn((LONG, *LONGER), 0.5, frozenset({"offset", "segments"}), data=("normal", *DATA))


# Kernels change paths beyond 8, 16, 32, 64 heads or batch entries, 64, 128, 256 features, 256, 512, 1024, 2048 tokens,
# and with few queries. There is a case beyond each limit, but few cases in all, to save compilation. Further paths
# exist for lengths that are multiples of the block size, and for features that do not fill the last block.
LARGE = (
    Sizes(9, 9, 1, (20, 20), 75),
    Sizes(1, 2, 9, (300, 300), 139),
    Sizes(65, 1, 17, (3, 3), 8),
    Sizes(1, 65, 1, (9, 9), 264),
    Sizes(2, 1, 3, (3, 1100), 16),
    Sizes(1, 1, 1, (2100, 2100), 8),
    Sizes(1, 8, 1, (128, 128), 64),
    Sizes(1, 12, 1, (256, 256), 128),
    Sizes(2, 8, 4, (64, 64), 80),
)
LARGEST = Sizes(1, 2, 1, (3, 20_011), 8)
LARGE_GRADIENTS = (
    Sizes(9, 3, 11, (20, 20), 139),
    Sizes(1, 12, 1, (128, 128), 64),
    Sizes(1, 2, 4, (256, 256), 128),
    Sizes(2, 1, 4, (64, 64), 80),
    Sizes(1, 2, 1, (1100, 1100), 8),
)


def large_cases(trial: Trial, all_sizes: tuple[Sizes, ...]) -> Iterator[Case]:
    """Yield cases of these sizes; without grouped heads, with as many key/value heads as query heads."""
    for sizes in all_sizes:
        if "grouped" not in trial.features:
            sizes = dataclasses.replace(sizes, num_kv_heads=sizes.num_kv_heads * sizes.group, group=1)
        yield large_case(sizes, trial.seed)


def large_case(sizes: Sizes, seed: int, form: str = "causal") -> Case:
    """Return a case in which every key matters for some heads, and other heads have short horizons."""
    case = Case(sizes, form, seed=seed)
    tensors = {name: case.arrays[name] / case.arrays[name].std() for name in TENSORS}
    # Penalties of the farthest key, by head; then slopes are scaled so that no two heads are equal.
    falls = np.resize([4.0, 0.3 * sizes.lengths[1], 1.0, 0.0], case.num_heads) / sizes.lengths[1]
    slopes = falls * np.linspace(1, 1.5, case.num_heads)
    return case.with_arrays(**tensors, slopes=slopes.astype(np.float32).astype(np.float64))


@attention_law()
def large(trial: Trial) -> Iterator[Case]:
    """Attention is exact to rounding with many batch entries, heads, features or tokens, too."""
    yield from large_cases(trial, LARGE + (LARGEST,) * trial.is_thorough)
    form = "symmetric" if "symmetric" in trial.features else "causal"
    yield large_case(LARGE_GRADIENTS[-1], trial.seed, form)
    # Kernels may skip padding for each text, or for texts of equal length together.
    yield Case(Sizes(3, 1, 1, (1400, 1400), 4), form, masking="padding", seed=trial.seed)


LONG_LINE = Sizes(1, 1, 1, (600, 600), 4)


def _rising(arguments: dict[str, Any], slope: float) -> Case:
    """Return a case whose scores rise by 0.30078125 with each token back, exact in bfloat16: beside a fall by 0.3."""
    back = np.arange(600.0)[:, None]
    key = np.concatenate([-(back // 256) * 256, -(back % 256), back * 0, back * 0], axis=1)
    halves = np.repeat(back // 300, 4, axis=1)
    tensors = {"query": np.full((1, 1, 600, 4), 2 * 0.30078125), "key": key[None, None], "value": halves[None, None]}
    case = Case(LONG_LINE).with_arguments("causal", arguments) if arguments else Case(LONG_LINE)
    return case.with_arrays(**tensors, slopes=np.asarray([slope]))


@attention_law()
def precision(trial: Trial) -> Iterator[Case]:
    """A step of the bias counts at any distance: positions, distances, bias and sums have float32's digits at least."""
    yield from (Case(LONG_LINE, seed=seed, data="no_queries") for seed in range(2))
    yield _rising({}, slope=float(np.float32(0.3)))
    # Products of features add up to 256 before they cancel; the remainder, which matters, is small.
    case = Case(Sizes(1, 1, 1, (40, 40), 64), seed=1)
    key = np.concatenate([case.arrays["key"][..., :32] / 8 + 4, case.arrays["key"][..., 32:] / 8 - 4], axis=-1)
    tensors = {"query": case.arrays["query"] * 0 + 2, "key": key, "value": np.resize([0.0, 1.0], key.shape)}
    yield case.with_arrays(**tensors, slopes=np.zeros(1))
    # Adjacent far keys get equal weights if a step of the bias is lost; their ratio should be exp(1/2).
    value = np.resize([0.0, 1.0], 4096)[None, None, :, None]
    tensors = {"query": np.zeros((1, 1, 1, 1)), "key": value * 0, "value": value}
    far = Case(Sizes(1, 1, 1, (1, 4096), 1)).with_arguments("causal", {"q_offset": 40_000})
    yield far.with_arrays(**tensors, slopes=np.asarray([0.5]))
    # In low precision a sum of 4,096 equal weights stops growing, and one of 3,500 drifts, also by blocks of 16 to 64.
    for q_offset in (4095, 3499):
        even = far.with_arguments("causal", {"q_offset": q_offset})
        yield even.with_arrays(**tensors | {"value": value * 0 + 1}, slopes=np.zeros(1))


@nowhere_law("nowhere")
def nowhere(trial: Trial) -> Iterator[Case]:
    """A query that sees no key gives zeros."""
    shown = np.ones((2, 1, 7, 7), dtype=bool)
    shown[0, :, 3] = shown[1] = False
    cases: tuple[tuple[Sizes, dict[str, Any]], ...] = (
        (Sizes(1, 1, 1, (2, 1), 1), {}),
        (MORE, {}),
        (PLAIN[0], {"q_offset": -2}),
        (SQUARE, {"q_offset": -9}),
        (SQUARE, {"q_offset": 20, "window_size": 3}),
        (SQUARE, {"mask": shown}),
    )
    yield from (Case(sizes, seed=1).with_arguments("causal", arguments) for sizes, arguments in cases)


@nowhere_law("empty")
def empty(trial: Trial) -> Iterator[Case]:
    """Without queries the output is empty, without keys it is zeros, of the right shape."""
    yield from (Case(Sizes(2, 3, 1, lengths, 5)) for lengths in ((0, 0), (0, 5), (3, 0)))


@law("attention")
def independent(trial: Trial) -> None:
    """No call depends on earlier calls: not on their slopes, their form or their data."""
    plain = Case(Sizes(2, 3, 1, (8, 8), 4), seed=trial.seed)  # sizes of no other law, so that nothing is cached
    changes: tuple[tuple[str, tuple[Any, ...]], ...] = (
        ("form", FORMS[1:]),
        ("window_size", (1, 4)),
        ("scaling", (0.25, 1.0)),
        ("q_offset", (2, 5)),
    )
    pairs = [(plain, plain)]
    for name, values in changes:
        found = [dataclasses.replace(plain, **{name: value}) for value in values]
        found = [case for case in found if trial.offers(case)]
        pairs += itertools.pairwise((plain, *found, plain)) if found else ()
    rng, forms = random.Random(trial.seed), [x for x in FORMS if trial.offers(dataclasses.replace(plain, form=x))]
    options = trial.features & {"window", "scale", "offset"}
    drawn = [draw_case(rng.choice, (plain.sizes,), forms, options) for _ in range(10)]
    pairs += [(rng.choice(drawn), rng.choice(drawn)) for _ in range(trial.examples // 2)]
    for number, pair in enumerate(pairs):
        cases = [dataclasses.replace(case, seed=trial.seed + 2 * number + i) for i, case in enumerate(pair)]
        for case in (*cases, cases[0]):
            try:
                trial.attention(case)
            except (DepartureError, CallError) as error:
                error.inputs = ", then ".join(map(str, cases))
                raise


# --- Gradients --------------------------------------------------------------------------------------------------------


def all_gradients(trial: Trial) -> tuple[str, ...]:
    """Return the names of the gradients that the adapter offers."""
    has_slopes = trial.offer.takes("attention_grad", "slopes")
    names = GRADIENTS if "slope_gradients" in trial.features else TENSORS
    return tuple(name for name in names if has_slopes or "slopes" not in name)


def hold_gradients(trial: Trial, case: Case, names: tuple[str, ...] = ()) -> None:
    """Check the gradients of these names in a case, by default all that the adapter offers."""
    trial.gradients(case, names or all_gradients(trial))


gradient_law = functools.partial(law, "attention_grad", hold=hold_gradients)


def drawn_gradients(trial: Trial, share: float, **more: Any) -> Iterator[Case]:
    """Yield drawn short cases for gradients."""
    yield from trial.drawn((*PLAIN[1:], FEWER, GROUPED[-1]), share, trial.features - {"far"}, **more)


def short_gradients(trial: Trial) -> Iterator[Case]:
    """Yield plain cases, then drawn cases: half as many if ``some_gradients`` draws cases, too."""
    yield from trial.seeded(Case(size) for size in PLAIN[1:])
    yield from drawn_gradients(trial, 0.5 if "some_gradients" in trial.features else 1)


@law("attention_grad", hold=functools.partial(hold_gradients, names=TENSORS))
def gradients(trial: Trial) -> Iterator[Case]:
    """The gradients of query, key and value are exact to rounding."""
    yield from short_gradients(trial)
    yield from (Case(SQUARE, masking=masking, seed=1) for masking in ("by query", "by key"))


@law("attention_grad", "slope_gradients", hold=functools.partial(hold_gradients, names=GRADIENTS[3:5]))
def slope_gradients(trial: Trial) -> Iterator[Case]:
    """The gradients of slopes, on both sides, are exact to rounding."""
    yield from short_gradients(trial)
    yield Case(SQUARE, slopes_per_batch=True)


@gradient_law()
def long_gradients(trial: Trial) -> Iterator[Case]:
    """All gradients are exact to rounding in rows of several blocks, too."""
    yield from (Case(LONG, data=name) for name in DATA)
    yield from (Case(LONG, masking="by query"), Case(LONG, window_size=64), Case(LONG, packing="same"))
    yield from trial.drawn((LONG, *LONGER), 0.5, frozenset(), data=("normal", *DATA))


@gradient_law("points")
def point_gradients(trial: Trial) -> Iterator[Case]:
    """All gradients are exact to rounding between positions of the caller's own, which have none."""
    yield from POINT_CASES


@gradient_law("log_gates")
def gate_gradients(trial: Trial) -> Iterator[Case]:
    """All gradients are exact to rounding with gates, the gradients of gates too."""
    yield from (Case(size, gates=kind, seed=trial.seed) for size in (*GATED, FEWER) for kind in GATES)
    yield from (Case(SQUARE, gates="strong", masking=masking) for masking in ("by key", "by query"))


@gradient_law()
def large_gradients(trial: Trial) -> Iterator[Case]:
    """All gradients are exact to rounding with many batch entries, heads, features or tokens, too."""
    yield from large_cases(trial, LARGE_GRADIENTS)


ASKED = Sizes(2, 2, 1, (150, 150), 8)  # rows of several blocks: compilers may treat them differently from short rows


@gradient_law()
def cotangents(trial: Trial) -> Iterator[Case]:
    """All gradients are exact to rounding where grad_output is ones or zeros, or nothing but one row or one element."""
    yield from (Case(ASKED, seed=trial.seed, cotangent=cotangent) for cotangent in COTANGENTS)


@gradient_law("some_gradients")
def some_gradients(trial: Trial) -> Iterator[Case]:
    """The gradients of some arguments alone are exact to rounding, whatever grad_output is."""
    names = [name for name in all_gradients(trial) if name in (*TENSORS, "slopes")]
    asked = (*((name,) for name in names), *itertools.combinations(names, 2), TENSORS)
    for wrt in asked:
        for cotangent in ("ones", "random", "one row", "one element") if len(wrt) == 1 else ("ones",):
            yield Case(ASKED, seed=trial.seed, cotangent=cotangent, wrt=wrt)
    if "slopes" in names:
        yield Case(SQUARE, "asymmetric", seed=trial.seed, wrt=("future_slopes",))
    if "slope_gradients" in trial.features:
        yield Case(SQUARE, gates="strong", seed=trial.seed, wrt=("log_gates",))
    yield from drawn_gradients(trial, 0.25, wrt=asked, cotangent=COTANGENTS)


# --- Decoding ---------------------------------------------------------------------------------------------------------


@law("decode_step")
def decoding(trial: Trial) -> None:
    """Decoding in steps equals attention to the whole, and sequences do not mix."""
    whole = ((7,), (3, 1, 3), (1, 3, 3), (3, 1, 1, 1, 1), (1,) * 7)  # few lengths of steps: each is compiled
    tries = [(PLAIN[1], steps) for steps in ((2,), (1, 1))] + [(SQUARE, steps) for steps in whole]
    tries += [(GROUPED[-1], steps) for steps in whole[1:]] if "grouped" in trial.features else []
    for sizes, steps in tries:
        for seed in (0, 2 + trial.seed):
            decode(trial, [Case(sizes, seed=seed + i) for i in range(2)], [steps, steps])


# Tokens in a step: part of a page, a page, and a prefill that ends within a page. Few, because each is compiled.
CHUNKS = (17, 64, 100)


@law("decode_step")
def long_decoding(trial: Trial) -> None:
    """Decoding equals attention to the whole after several hundred tokens, too, however many come at a time."""
    heads = (2, 2) if "grouped" in trial.features else (3, 1)
    sizes = Sizes(2, *heads, (MOST_TOKENS, MOST_TOKENS), 32)
    usual, recalling, rng = Case(sizes, seed=trial.seed), recalled(sizes, trial.seed), random.Random(trial.seed)
    decode(trial, [recalling], [(1,) * MOST_TOKENS])
    firsts: list[tuple[int, ...]] = [(64, 64, 1, 64), (100, 1, 17, 100, 17, 100, 64, 100, 17)]
    decode(trial, [recalling, usual], [filled_steps(first, rng) for first in firsts])
    for _ in range(round(trial.examples / 20) if trial.is_thorough else 0):
        decode(trial, [usual, recalling], [filled_steps((), rng) for _ in range(2)])


@law("decode_step", "continuations")
def continuations(trial: Trial) -> None:
    """Two sequences may continue from one cache, as in beam search."""
    for steps in ((1, 1, 1), (3, 2, 1), (30, 1, 19)):  # the shared beginning, and two further steps in turn
        first, other = (Case(dataclasses.replace(SQUARE, lengths=(sum(steps),) * 2), seed=seed) for seed in (0, 1))
        arrays = {
            name: np.concatenate([first.arrays[name][:, :, : steps[0]], other.arrays[name][:, :, steps[0] :]], axis=2)
            for name in TENSORS
        }
        cases = [first, other.with_arrays(**arrays, slopes=first.arrays["slopes"])]
        decode(trial, cases, [steps, steps], shares_first=True)


def recalled(sizes: Sizes, seed: int) -> Case:
    """Return a sequence in which each query attends to few keys, near and far, so that every key matters.

    Every 32nd key is equal, and successive queries of a head match different keys. A lost or moved key changes the
    output much, also in low precision.
    """
    case = Case(sizes, seed=seed)
    (q_len, kv_len), width = sizes.lengths, sizes.head_dim
    size = 4 * width**0.25  # a product of two, scaled, is 16
    sought = np.arange(q_len) * 3 + 8 * np.arange(case.num_heads)[:, None]
    query, key = (size * np.eye(width)[x % width] for x in (sought, np.arange(kv_len)))
    slopes = np.resize(np.asarray([0, 2**-9, 0.03, 0.4], np.float32), case.num_heads).astype(np.float64)
    tensors = {name: np.broadcast_to(x, case.arrays[name].shape).copy() for name, x in (("query", query), ("key", key))}
    return case.with_arrays(**tensors, value=case.arrays["value"], slopes=slopes)


def filled_steps(first: tuple[int, ...], rng: random.Random) -> tuple[int, ...]:
    """Return steps that begin with ``first``, then random single tokens and chunks, up to MOST_TOKENS in all."""
    steps = list(first)
    while (rest := MOST_TOKENS - sum(steps)) > 0:
        chunk = rng.choice((*CHUNKS, 0))
        steps += [chunk] if 0 < chunk <= rest else [1] * min(rng.randint(1, 20), rest)
    return tuple(steps)


def decode(trial: Trial, cases: list[Case], steps: list[tuple[int, ...]], *, shares_first: bool = False) -> None:
    """Decode the sequences in turn, each in its steps, and compare the output of each step with the exact one."""
    cases = [trial.fitted(case) for case in cases]
    answers = [trial.exact(case).output for case in cases]
    for number, start, end, actual, own in decoded(trial.caller, cases, steps, shares_first=shares_first):
        runs = ((step, len(list(same))) for step, same in itertools.groupby(own))
        words = " + ".join(f"{count} x {step}" if count > 1 else str(step) for step, count in runs)
        inputs = f"{cases[number]}, tokens {start} to {end - 1} of sequence {number}, in steps of {words}"
        inputs += "; all continue from the first step" if shares_first else ""
        answer = Answer(answers[number].value[:, :, start:end], answers[number].budget[:, :, start:end])
        trial.compare("decode_step", inputs, actual, answer, cases[number], f"tokens {start}:{end}")


# --- Conduct ----------------------------------------------------------------------------------------------------------


def is_answered(trial: Trial, function: str, case: Case) -> bool:
    """Call a function of the adapter with a case, and return whether the result is right."""
    is_causal = case.arguments.get("is_causal", True)
    calls: dict[str, Callable[[], Any]] = {
        "slopes": lambda: trial.caller.slopes(case.num_heads),
        "bias": lambda: trial.caller.bias(case.num_heads, *case.sizes.lengths, is_causal),
        "attention": lambda: trial.attention(case),
        "attention_grad": lambda: trial.gradients(case, TENSORS),
        "decode_step": lambda: decode(trial, [case], [(3, 4)]),
    }
    with contextlib.suppress(DepartureError):  # other laws report wrong results
        calls[function]()
        return True
    return False


@law("any")
def conduct(trial: Trial) -> None:
    """Calls accept arrays of any strides, leave them unchanged, and return arrays of their dtype."""
    offences = trial.caller.offences
    swapped = dataclasses.replace(trial, caller=dataclasses.replace(trial.caller, tokens_first=True))
    case = Case(SQUARE, seed=trial.seed)
    for name in trial.offer.functions:
        if is_answered(trial, name, case) and not is_answered(swapped, name, case):
            sentence = f"{name} is wrong where arrays are not contiguous: made as [batch, length, heads, head_dim]"
            offences.setdefault(f"{name} strides", f"{sentence}, with axes 1 and 2 swapped")
    for offence in offences.values():
        raise CallError("returned", offence)


LAWS = (
    *(slopes, causal_bias, symmetric_bias),
    *FEATURE_LAWS,
    *(gates, points, combined, long, large, precision, nowhere, empty, independent),
    *(gradients, slope_gradients, gate_gradients, point_gradients),
    *(long_gradients, large_gradients, cotangents, some_gradients),
    *(decoding, long_decoding, continuations, conduct),
)
