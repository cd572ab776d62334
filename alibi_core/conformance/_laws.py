"""The laws of ALiBi: each a family of cases in which an implementation must be exact to rounding.

Laws of a single feature (``causal``, ``lengths``, ``symmetric``, ``asymmetric``, ``grouped``, ``segments``,
``batch_slopes``, ``scale``, ``nowhere``) find little that ``combined`` would not. They are apart so that a report says
which feature is wrong and which are right, from counterexamples that have nothing else in them; and ``independent`` is
there to say so where the mistake is not in a call but between two.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

import alibi_core
from alibi_core._slopes import slope_values
from alibi_core.conformance._adapter import MOST_TOKENS
from alibi_core.conformance._cases import (
    COTANGENTS,
    DATA,
    FORMS,
    LONGER,
    PER_BATCH,
    SEEDS,
    UNIT_ROUNDOFF,
    Answer,
    Case,
    Family,
    Rules,
    Sizes,
    penalties,
)
from alibi_core.conformance._trial import TENSORS, CallError, DepartureError, Trial

# Few, for compilers take their time over each; in most, each axis has a length of its own.
PLAIN = (Sizes(1, 1, 1, (1, 1), 1), Sizes(2, 3, 1, (7, 7), 5))
UNEQUAL = (Sizes(2, 2, 1, (5, 11), 3), Sizes(1, 5, 1, (1, 13), 2), Sizes(2, 3, 1, (11, 5), 3))
GROUPED = (Sizes(1, 3, 2, (7, 7), 8), Sizes(2, 1, 2, (7, 7), 3))
UNEQUAL_GROUPED = (Sizes(2, 3, 2, (5, 11), 3),)
# Heads, queries and keys of a bias, the smallest first, and in the end one long enough for positions to be rounded.
BIAS_SIZES = (
    *((1, 1, 1), (3, 1, 2), (2, 2, 1), (8, 2, 3), (3, 3, 2), (12, 7, 7), (1, 16, 16), (5, 17, 17)),
    *((2, 1, 13), (3, 5, 11), (8, 11, 5), (12, 16, 9), (2, 17, 1), (3, 300, 300)),
)


@dataclass(frozen=True)
class Law:
    """A family of cases.

    Attributes:
        name: As reports call it.
        statement: What is true of an implementation that passes.
        function: Of the adapter; it is held to the law if it offers this, and
        needs: these features.
        check: Raises if the law is broken.
    """

    name: str
    statement: str
    function: str
    needs: frozenset[str]
    check: Callable[[Trial], None]


def law(function: str, *needs: str) -> Callable[[Callable[[Trial], None]], Law]:
    """Make a check a law, with the name of the check, and with its docstring for a statement."""

    def made(check: Callable[[Trial], None]) -> Law:
        return Law(check.__name__, (check.__doc__ or "").rstrip("."), function, frozenset(needs), check)

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
    """Return how far slopes may be off, relatively.

    A power is off by a unit in the last place or so, and storing it by another. Exponents that are no dyadic numbers
    are rounded before, by as much as ``u`` times their size, at most 8. In float64 the base may be rounded before it is
    raised to powers of up to ``2 * num_heads``, which is lost in rounding to float32; in float32 that is BLOOM's way.
    """
    contract = trial.offer.contract
    if trial.offer.dtype == "float64" and contract in ("exact", "geometric"):
        return (4 + 8 * math.log(2) + 2 * num_heads) * UNIT_ROUNDOFF["float64"]
    return (4 + 8 * math.log(2) * (contract == "geometric")) * UNIT_ROUNDOFF["float32"]


def bias_answer(trial: Trial, num_heads: int, q_len: int, kv_len: int, is_causal: bool) -> Answer:
    """Return the exact bias: slopes, their product with the distance, and its storage may be rounded."""
    contract = trial.offer.contract
    if contract in ("exact", "geometric"):
        rules = Rules(np.asarray(slope_values(num_heads, contract=contract)), kv_len - q_len, is_causal)
        exact = penalties(rules, 1, num_heads, q_len, kv_len)[0]
    else:
        exact = np.asarray(alibi_core.bias(num_heads, q_len, kv_len, contract=contract), np.float64)
    relative = slopes_error(trial, num_heads) + 2 * UNIT_ROUNDOFF[trial.offer.dtype]
    return Answer(exact, np.where(np.isfinite(exact), np.abs(exact) * relative, 0))


def check_bias(trial: Trial, *, is_causal: bool) -> None:
    def body(drawn: tuple[int, int, int]) -> None:
        num_heads, q_len, kv_len = drawn
        q_len = q_len if "lengths" in trial.features else kv_len
        actual = trial.caller.bias(num_heads, q_len, kv_len, is_causal)
        answer = bias_answer(trial, num_heads, q_len, kv_len, is_causal)
        inputs = f"num_heads={num_heads}, q_len={q_len}, kv_len={kv_len}, is_causal={is_causal}"
        trial.compare("bias", inputs, actual, answer)

    for sizes in BIAS_SIZES:
        body(sizes)
    if trial.is_thorough:
        trial.for_all(st.tuples(st.sampled_from([1, 2, 3, 8, 12]), st.integers(1, 17), st.integers(1, 17)), body)


@law("bias")
def causal_bias(trial: Trial) -> None:
    """The causal bias is minus slope times distance, and minus infinity ahead."""
    check_bias(trial, is_causal=True)


@law("bias", "symmetric")
def symmetric_bias(trial: Trial) -> None:
    """The symmetric bias is minus slope times distance on both sides."""
    check_bias(trial, is_causal=False)


# --- Attention, feature by feature ------------------------------------------------------------------------------------


def check_attention(
    trial: Trial, sizes: tuple[Sizes, ...], *uses: str, forms: tuple[str, ...] = ("causal",), share: float = 1
) -> None:
    """Hold attention to cases of these sizes and forms that use these features, so far as they are offered."""
    if "lengths" in uses and "lengths" in trial.features:
        sizes = (*sizes, *UNEQUAL)
    offered = frozenset(uses) & trial.features
    trial.for_cases(Family(sizes, forms, offered), trial.attention, share=share)


def both_directions(trial: Trial) -> tuple[str, ...]:
    return ("causal", "symmetric") if "symmetric" in trial.features else ("causal",)


@law("attention")
def causal(trial: Trial) -> None:
    """Causal attention is exact to rounding."""
    check_attention(trial, PLAIN)


@law("attention", "lengths")
def lengths(trial: Trial) -> None:
    """The last query is at the last key, however many there are of each."""
    trial.for_cases(Family(UNEQUAL), trial.attention)


@law("attention", "offset")
def offset(trial: Trial) -> None:
    """A query's position is q_offset plus its index."""
    check_attention(trial, PLAIN, "offset", "lengths", "batch_offsets", "far")
    if "batch_offsets" in trial.features:
        trial.attention(Case(PLAIN[1], q_offset=PER_BATCH))
    if "lengths" in trial.features:  # 0 is an offset like any other
        trial.attention(Case(UNEQUAL[0], q_offset=0))


@law("attention", "symmetric")
def symmetric(trial: Trial) -> None:
    """Without a causal mask, distance counts on both sides alike."""
    check_attention(trial, PLAIN, "lengths", forms=("symmetric",))


@law("attention", "symmetric", "asymmetric")
def asymmetric(trial: Trial) -> None:
    """Keys to come have slopes of their own, which may be 0."""
    check_attention(trial, PLAIN, "lengths", forms=("asymmetric", "clamped"))


@law("attention", "grouped")
def grouped(trial: Trial) -> None:
    """Query head h reads key/value head h // (num_heads // num_kv_heads)."""
    trial.for_cases(Family(GROUPED), trial.attention)


@law("attention", "window")
def window(trial: Trial) -> None:
    """Keys farther away than window_size are hidden, on either side, and no others."""
    check_attention(trial, PLAIN, "window", forms=both_directions(trial), share=0.5)


@law("attention", "segments")
def segments(trial: Trial) -> None:
    """A query sees the keys of its own segment, and no others, whatever the ids and wherever it goes on."""
    check_attention(trial, PLAIN, "segments", "lengths", forms=both_directions(trial))
    for form in both_directions(trial):
        trial.attention(packed(Case(PLAIN[1], seed=1), form, (2, -7, -7, 2, 40, 40, -7)))


def packed(case: Case, form: str, ids: tuple[int, ...]) -> Case:
    """Return a case whose tokens have these segment ids, as often as they are given, each entry one further on."""
    runs = np.repeat(ids, -(-case.sizes.lengths[1] // len(ids)))[: case.sizes.lengths[1]]
    rows = np.stack([np.roll(runs, entry) for entry in range(case.sizes.batch)]).astype(np.int32)
    is_causal = {"is_causal": False} if form == "symmetric" else {}
    return case.with_arguments(form, {"segment_ids": rows, **is_causal})


@law("attention", "mask")
def mask(trial: Trial) -> None:
    """What is hidden by a mask counts nothing, however large, and what is not, is not moved."""
    check_attention(trial, PLAIN, "mask", "lengths", forms=both_directions(trial), share=0.5)
    # A key that scores 30,000 or so more than others, and is hidden.
    case = Case(PLAIN[1])
    query, key = case.arrays["query"] + 16, case.arrays["key"].copy()
    shown = np.ones((2, 1, 1, 7), dtype=bool)
    key[:, :, 3], shown[..., 3] = 1000, False
    trial.attention(case.with_arguments("causal", {"mask": shown}).with_arrays(query=query, key=key))


@law("attention", "batch_slopes")
def batch_slopes(trial: Trial) -> None:
    """Each batch entry has slopes of its own."""
    check_attention(trial, PLAIN, "batch_slopes")


@law("attention", "scale")
def scale(trial: Trial) -> None:
    """Scores are multiplied by the scale, and the bias is not."""
    check_attention(trial, PLAIN, "scale", share=0.5)


@law("attention")
def combined(trial: Trial) -> None:
    """All that is offered works together."""
    sizes = PLAIN + UNEQUAL * ("lengths" in trial.features) + GROUPED * ("grouped" in trial.features)
    sizes += UNEQUAL_GROUPED * ({"lengths", "grouped"} <= trial.features)
    trial.for_cases(Family(sizes, forms_of(trial), trial.features), trial.attention)
    if {"grouped", "mask"} <= trial.features:
        trial.attention(Case(GROUPED[0], masking="by head"))
    # All axes alike, for those who tell them by their lengths.
    trial.attention(Case(Sizes(3, 3, 1, (3, 3), 3), masking="by head" if "mask" in trial.features else None))


def forms_of(trial: Trial) -> tuple[str, ...]:
    """Return the forms of attention that are offered."""
    forms = FORMS if "asymmetric" in trial.features else FORMS[:2]
    return forms if "symmetric" in trial.features else FORMS[:1]


# --- Attention where it is hard ---------------------------------------------------------------------------------------


def long_sizes(trial: Trial) -> tuple[Sizes, ...]:
    found = [x for x in LONGER if x.lengths[0] == x.lengths[1] or "lengths" in trial.features]
    return (Sizes(2, 3, 1, (150, 150), 4), *(x for x in found if x.group == 1 or "grouped" in trial.features))


def even_case(trial: Trial, form: str = "causal", **options: Any) -> Case:
    """Return a case with rows of several blocks, in which all keys weigh about the same."""
    case = Case(long_sizes(trial)[0], form, seed=trial.seed, **options)
    slopes = (np.linspace(0, 1, case.num_heads) / 150).astype(np.float32).astype(np.float64)
    return case.with_arrays(query=case.arrays["query"] / 10, slopes=slopes)


@law("attention")
def long(trial: Trial) -> None:
    """Rows of several blocks are exact, whichever keys weigh most, and however far away those are."""
    uses = trial.features & {"offset", "segments"}
    for name in DATA:
        trial.attention(Case(long_sizes(trial)[0], data=name))
    for sizes in long_sizes(trial)[1:]:
        trial.attention(Case(sizes))
    if "segments" in trial.features:  # some queries see nothing of the first blocks, others of those between
        trial.attention(Case(long_sizes(trial)[0], packing="same"))
        trial.attention(packed(even_case(trial), "causal", (5, -1, 5)))
    # Masks and windows go on behind the first block, too. No key is too far away to count.
    for form in both_directions(trial):
        for name in ("by query", "by key", "by head") if "mask" in trial.features else ():
            trial.attention(even_case(trial, form, masking=name))
        for window_size in (63, 64, 100) if "window" in trial.features else ():
            trial.attention(even_case(trial, form, window_size=window_size))
    # All scores are around -200: a weight underflows, unless it is taken relative to the row's highest.
    case = Case(long_sizes(trial)[0])
    trial.attention(case.with_arrays(query=case.arrays["query"] / 10 + 10, key=case.arrays["key"] / 10 - 10))
    trial.for_cases(Family(long_sizes(trial), forms_of(trial), uses, ("normal", *DATA)), trial.attention, share=0.5)


# Kernels have other paths, and tables other pages, beyond 8, 16, 32, 64 heads or batch entries, 64, 128, 256 features,
# 256, 512, 1024, 2048 tokens, and with few queries: some case is beyond each, and few are, for compilers' sake. They
# have others where blocks come out even, which is what most people use.
LARGE = (
    Sizes(9, 9, 1, (20, 20), 72),
    Sizes(1, 2, 9, (300, 300), 136),
    Sizes(65, 1, 17, (3, 3), 8),
    Sizes(1, 65, 1, (9, 9), 264),
    Sizes(2, 1, 3, (3, 1100), 16),
    Sizes(1, 1, 1, (2100, 2100), 8),
    Sizes(1, 8, 1, (128, 128), 64),
    Sizes(1, 12, 1, (256, 256), 128),
    Sizes(2, 8, 4, (64, 64), 80),
)
WIDTHS = ("head_dim", "batch", "num_kv_heads", "group")
LARGE_GRADIENTS = (
    Sizes(9, 3, 11, (20, 20), 136),
    Sizes(1, 12, 1, (128, 128), 64),
    Sizes(1, 2, 4, (256, 256), 128),
    Sizes(2, 1, 4, (64, 64), 80),
    Sizes(1, 2, 1, (1100, 1100), 8),
)


def large_cases(trial: Trial, all_sizes: tuple[Sizes, ...]) -> Iterator[Case]:
    """Yield cases of these sizes, as far as they are offered."""
    for sizes in all_sizes:
        if sizes.group > 1 and "grouped" not in trial.features:
            sizes = dataclasses.replace(sizes, num_kv_heads=sizes.num_kv_heads * sizes.group, group=1)
        if sizes.lengths[0] == sizes.lengths[1] or "lengths" in trial.features:
            yield large_case(sizes, trial.seed)


def large_case(sizes: Sizes, seed: int, form: str = "causal") -> Case:
    """Return a case in which no key of some heads is too far away to count, and others have horizons."""
    case = Case(sizes, form, seed=seed)
    tensors = {name: case.arrays[name] / case.arrays[name].std() for name in TENSORS}
    # The penalty of the farthest key is 4 in the first head, and so on; no two heads have the same slope.
    falls = np.resize([4.0, 0.3 * sizes.lengths[1], 1.0, 0.0], case.num_heads) / sizes.lengths[1]
    slopes = falls * np.linspace(1, 1.5, case.num_heads)
    return case.with_arrays(**tensors, slopes=slopes.astype(np.float32).astype(np.float64))


def narrowed(case: Case, body: Callable[[Case], None]) -> None:
    """Run ``body`` on a large case; if it raises, raise the error of one with a single large axis, if there is one."""
    try:
        body(case)
    except DepartureError:
        sizes = case.sizes
        short = dataclasses.replace(PLAIN[1], lengths=(min(7, sizes.lengths[0]), 7))
        single = [dataclasses.replace(short, **{name: getattr(sizes, name)}) for name in WIDTHS]
        for one in (*single, Sizes(1, 1, 1, sizes.lengths, 4)):
            with contextlib.suppress(CallError):
                body(large_case(one, case.seed, case.form))
        raise


@law("attention")
def large(trial: Trial) -> None:
    """Attention is exact to rounding with many batch entries, heads, features or tokens, too."""
    for case in large_cases(trial, LARGE):
        narrowed(case, trial.attention)
    form = "symmetric" if "symmetric" in trial.features else "causal"
    narrowed(large_case(LARGE_GRADIENTS[-1], trial.seed, form), trial.attention)
    if "mask" in trial.features:  # padding may be left out text by text, or texts of one length together
        trial.attention(Case(Sizes(3, 1, 1, (1400, 1400), 4), form, masking="padding", seed=trial.seed))


@law("attention")
def precision(trial: Trial) -> None:
    """A step of the bias counts at any distance: positions, distances and bias have float32's digits at least."""
    for seed in range(2):
        trial.attention(Case(Sizes(1, 1, 1, (600, 600), 4), seed=seed, data="no_queries"))
    # Scores rise by 0.30078125, a number that bfloat16 holds, with each token back, and the bias falls by 0.3.
    case = Case(Sizes(1, 1, 1, (600, 600), 4))
    back = np.arange(600.0)[:, None]
    key = np.concatenate([-(back // 256) * 256, -(back % 256), back * 0, back * 0], axis=1)
    halves = np.repeat(back // 300, 4, axis=1)
    tensors = {"query": np.full((1, 1, 600, 4), 2 * 0.30078125), "key": key[None, None], "value": halves[None, None]}
    trial.attention(case.with_arrays(**tensors, slopes=np.asarray([np.float32(0.3)], np.float64)))
    if {"lengths", "offset"} <= trial.features:
        # Neighbours among far keys weigh the same if a step of the bias is lost, where exp(1/2) should be between.
        value = np.resize([0.0, 1.0], 4096)[None, None, :, None]
        tensors = {"query": np.zeros((1, 1, 1, 1)), "key": value * 0, "value": value}
        far = Case(Sizes(1, 1, 1, (1, 4096), 1)).with_arguments("causal", {"q_offset": 40_000})
        trial.attention(far.with_arrays(**tensors, slopes=np.asarray([0.5])))


@law("attention", "nowhere")
def nowhere(trial: Trial) -> None:
    """A query that may look nowhere gives zeros."""
    cases: list[tuple[dict[str, Any], Sizes]] = []
    if "offset" in trial.features:
        cases.append(({"q_offset": -9}, PLAIN[1]))
    if "mask" in trial.features:
        shown = np.ones((2, 1, 7, 7), dtype=bool)
        shown[0, :, 3] = shown[1] = False
        cases.append(({"mask": shown}, PLAIN[1]))
    if "lengths" in trial.features:
        cases.append(({}, UNEQUAL[2]))
    for arguments, sizes in cases:
        case = Case(sizes, seed=1).with_arguments("causal", arguments)
        trial.attention(case, nowhere=True)


@law("attention", "empty")
def empty(trial: Trial) -> None:
    """Where there are no queries or no keys, there is nothing, or zeros, of the right shape."""
    for q_len, kv_len in ((0, 0), (0, 5), (3, 0)):
        if q_len == kv_len or "lengths" in trial.features:
            case = Case(Sizes(2, 3, 1, (q_len, kv_len), 5))
            trial.attention(case, nowhere=True)


@law("attention")
def independent(trial: Trial) -> None:
    """No call depends on those before it: not on their slopes, their form or their data."""

    def body(cases: tuple[Case, Case]) -> None:
        for case in (*cases, cases[0]):
            trial.attention(case)

    uses = trial.features & {"window", "scale", "offset"}
    # Of the same sizes always, and sizes that no other law has.
    family = Family((Sizes(2, 3, 1, (8, 8), 4),), forms_of(trial), uses, is_dense=trial.is_thorough)
    rng, design = random.Random(trial.seed), family.design(round(trial.examples / 2), trial.seed)

    def placed(cases: tuple[Case, Case]) -> tuple[Case, Case]:
        first, second = (dataclasses.replace(rng.choice(design), seed=case.seed) for case in cases)
        return first, second

    pairs = st.tuples(family.cases(), family.cases())
    trial.for_all(pairs, body, placed=None if trial.is_thorough else placed)


# --- Gradients --------------------------------------------------------------------------------------------------------


def gradient_cases(trial: Trial) -> Family:
    sizes = PLAIN[1:] + UNEQUAL[:1] * ("lengths" in trial.features) + GROUPED[:1] * ("grouped" in trial.features)
    return Family(sizes, forms_of(trial), trial.features - {"empty", "far"})


def all_gradients(trial: Trial) -> tuple[str, ...]:
    """Return the names of the gradients that are offered."""
    has_slopes = "slope_gradients" in trial.features and trial.offer.takes("attention_grad", "slopes")
    return (*TENSORS, "slopes", "future_slopes") if has_slopes else TENSORS


def check_gradients(trial: Trial, names: tuple[str, ...]) -> None:
    # Where some gradients may be asked for, another law tries as many cases again.
    share = 0.5 if "some_gradients" in trial.features else 1
    trial.for_cases(gradient_cases(trial), lambda case: trial.gradients(case, names), share=share)
    trial.for_all(st.just(Case(PLAIN[1])), lambda case: trial.gradients(case, names))


@law("attention_grad")
def gradients(trial: Trial) -> None:
    """The gradients of query, key and value are exact to rounding."""
    check_gradients(trial, TENSORS)


@law("attention_grad", "slope_gradients")
def slope_gradients(trial: Trial) -> None:
    """The gradients of slopes, on both sides, are exact to rounding."""
    check_gradients(trial, ("slopes", "future_slopes"))


@law("attention_grad")
def long_gradients(trial: Trial) -> None:
    """So are all gradients in rows of several blocks."""
    family, names = Family(long_sizes(trial), forms_of(trial), data=("normal", *DATA)), all_gradients(trial)
    for name in DATA:
        trial.for_all(st.just(Case(long_sizes(trial)[0], data=name)), lambda case: trial.gradients(case, names))
    trial.for_cases(family, lambda case: trial.gradients(case, names), share=0.5)


@law("attention_grad")
def large_gradients(trial: Trial) -> None:
    """So are all gradients with many batch entries, heads, features or tokens."""
    for case in large_cases(trial, LARGE_GRADIENTS):
        narrowed(case, lambda x: trial.gradients(x, all_gradients(trial)))


ASKED = Sizes(2, 2, 1, (150, 150), 8)  # rows of several blocks, which compilers may treat otherwise than short ones


@law("attention_grad")
def cotangents(trial: Trial) -> None:
    """All gradients are exact to rounding where grad_output is ones or zeros, or nothing but one row or one element."""
    for cotangent in COTANGENTS:
        trial.gradients(Case(ASKED, seed=trial.seed, cotangent=cotangent), all_gradients(trial))


@law("attention_grad", "some_gradients")
def some_gradients(trial: Trial) -> None:
    """The gradients of some arguments alone are exact to rounding, whatever grad_output is."""
    names = all_gradients(trial)[:4]
    asked = (*((name,) for name in names), *itertools.combinations(names, 2), TENSORS)
    for wrt in asked:
        for cotangent in ("ones", "random", "one row", "one element") if len(wrt) == 1 else ("ones",):
            trial.gradients(Case(ASKED, seed=trial.seed, cotangent=cotangent, wrt=wrt), wrt)
    if "asymmetric" in trial.features and "slopes" in names:
        trial.gradients(Case(PLAIN[1], "asymmetric", seed=trial.seed, wrt=("future_slopes",)), ("future_slopes",))
    family = dataclasses.replace(gradient_cases(trial), asked=asked, cotangents=COTANGENTS)
    trial.for_cases(family, lambda case: trial.gradients(case, names), share=0.25)


# --- Decoding ---------------------------------------------------------------------------------------------------------


def decodes_groups(trial: Trial) -> bool:
    """Return whether decoding is offered with fewer key/value heads: if nothing is declared, whether it raises."""
    if "grouped" not in trial.features or trial.offer.declared is not None:
        return "grouped" in trial.features
    case = trial.fitted(Case(GROUPED[0]))
    try:
        trial.caller.decode_step({name: case.arrays[name] for name in TENSORS}, case.arrays["slopes"], None)
    except CallError as error:
        return error.kind != "raised"
    return True


@law("decode_step")
def decoding(trial: Trial) -> None:
    """Decoding in steps equals attention to the whole, and sequences do not get into each other."""

    def body(drawn: tuple[Case, int, tuple[int, ...]]) -> None:
        case, other_seed, steps = drawn
        both = [Sequence.of(trial, x) for x in (case, dataclasses.replace(case, seed=other_seed))]
        decode(trial, both, [steps, steps])

    cases = Family((PLAIN[1], *(GROUPED[:1] if decodes_groups(trial) else ()))).cases()
    steps = st.sampled_from([(7,), (3, 4), (4, 3), (3, 1, 1, 1, 1), (1,) * 7])
    trial.for_all(st.tuples(cases, SEEDS, steps), body)
    body((Case(PLAIN[1]), 1, (1, 3, 3)))


# A single step, a few tokens, a page, and a prefill that ends within one. Few, for compilers make a program of each.
CHUNKS = (17, 64, 100)


@law("decode_step")
def long_decoding(trial: Trial) -> None:
    """Decoding equals attention to the whole after several hundred tokens, too, however many come at a time."""
    sizes = (
        Sizes(1, 2, 2, (MOST_TOKENS, MOST_TOKENS), 32)
        if decodes_groups(trial)
        else Sizes(1, 3, 1, (MOST_TOKENS, MOST_TOKENS), 32)
    )
    usual, recalling = (Sequence.of(trial, x) for x in (Case(sizes, seed=trial.seed), recalled(sizes, trial.seed)))
    rng = random.Random(trial.seed)
    decode(trial, [recalling], [(1,) * MOST_TOKENS])
    decode(
        trial,
        [recalling, usual],
        [filled_steps((64, 64, 1, 64), rng), filled_steps((100, 1, 17, 100, 17, 100, 64, 100, 17), rng)],
    )
    for _ in range(round(trial.examples / 20) if trial.is_thorough else 0):
        decode(trial, [usual, recalling], [filled_steps((), rng) for _ in range(2)])


def recalled(sizes: Sizes, seed: int) -> Case:
    """Return a sequence whose queries look for a few keys each, near and far, so that none of them can be missed.

    Every 32nd key is the same, and the queries of a head look for one after the other: what is lost or moved is a
    large part of what is found, also in dtypes of few digits.
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
    """Return steps that begin like this and go on at random, single ones and chunks, to the most tokens."""
    steps = list(first)
    while (rest := MOST_TOKENS - sum(steps)) > 0:
        chunk = rng.choice((*CHUNKS, 0))
        steps += [chunk] if 0 < chunk <= rest else [1] * min(rng.randint(1, 20), rest)
    return tuple(steps)


@dataclass(frozen=True)
class Sequence:
    """What is decoded, and what should come of it."""

    case: Case
    answer: Answer

    @classmethod
    def of(cls, trial: Trial, case: Case) -> Sequence:
        case = trial.fitted(case)
        return cls(case, trial.exact(case).output_without(trial.offer.tolerance))


def decode(trial: Trial, sequences: list[Sequence], steps: list[tuple[int, ...]]) -> None:
    """Decode sequences in these steps of each, by turns, and hold what comes of each step to the answer."""
    for number, start, end, actual, own in trial.caller.decoded([x.case for x in sequences], steps):
        case, answer, part = sequences[number].case, sequences[number].answer, (..., slice(start, end), slice(None))
        expected = Answer(answer.value[part], answer.budget[part])
        runs = ((step, len(list(same))) for step, same in itertools.groupby(own))
        words = " + ".join(f"{count} x {step}" if count > 1 else str(step) for step, count in runs)
        inputs = f"{case}, tokens {start} to {end - 1} of sequence {number}, in steps of {words}"
        trial.compare("decode_step", inputs, actual, expected, case, f"tokens {start}:{end}")


# --- Conduct ----------------------------------------------------------------------------------------------------------


def is_answered(trial: Trial, function: str, seed: int) -> bool:
    """Call a function of the adapter with something plain, and return whether its answer is right."""
    case = Case(PLAIN[1], seed=seed)
    calls: dict[str, Callable[[], Any]] = {
        "slopes": lambda: trial.caller.slopes(case.num_heads),
        "bias": lambda: trial.caller.bias(case.num_heads, *case.sizes.lengths, is_causal=True),
        "attention": lambda: trial.attention(case),
        "attention_grad": lambda: trial.gradients(case, TENSORS),
        "decode_step": lambda: decode(trial, [Sequence.of(trial, case)], [(3, 4)]),
    }
    with contextlib.suppress(DepartureError):  # that is for other laws
        calls[function]()
        return True
    return False


@law("any")
def conduct(trial: Trial) -> None:
    """Calls take arrays however they lie in memory, leave them as they are, and return NumPy's of their dtype."""
    caller = trial.caller
    for name in () if caller.hung else trial.offer.functions:
        if not is_answered(trial, name, trial.seed) or name in ("slopes", "bias"):
            continue
        with caller.tokens_first():
            is_right = is_answered(trial, name, trial.seed + 1)
        if not is_right and is_answered(trial, name, trial.seed + 1):
            sentence = f"{name} is wrong where arrays are not contiguous: made as [batch, length, heads, head_dim]"
            caller.offences.setdefault(f"{name} strides", f"{sentence}, with axes 1 and 2 swapped")
    for offence in caller.offences.values():
        raise CallError("returned", offence)


LAWS = (
    *(slopes, causal_bias, symmetric_bias),
    *(causal, lengths, offset, symmetric, asymmetric, grouped, window, segments, mask, batch_slopes, scale, combined),
    *(long, large, precision, nowhere, empty, independent),
    *(gradients, slope_gradients, long_gradients, large_gradients, cotangents, some_gradients),
    *(decoding, long_decoding, conduct),
)
