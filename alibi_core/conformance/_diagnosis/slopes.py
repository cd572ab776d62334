"""What slopes an implementation has in place of those of its contract."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from alibi_core.conformance._cases import UNIT_ROUNDOFF, Values
from alibi_core.conformance._diagnosis._departures import Departure
from alibi_core.conformance._diagnosis._readings import CHANGES, RULES, Rule, power_below, scheme
from alibi_core.conformance._trial import Caller, CallError

HEADS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 24, 32, 40, 71, 112)

# What is said of those that have a rule, or a change, of these names.
SENTENCES: Mapping[str, str] = {
    "canonical slopes": "Slopes are the canonical ones.",
    "geometric slopes": "Slopes follow the geometric scheme, 2**(-8 (h+1) / num_heads) for any number of heads, which "
    "is canonical for powers of two alone.",
    "linear slopes": "Slopes are evenly spaced from 0.05 to 0.5.",
    "bloom slopes": "These are the slopes of the bloom contract: powers of a base that is rounded to float32 before.",
    "mpt slopes": "These are the slopes of the mpt contract.",
    **{x: f"Slopes are canonical ones of {x}." for x in RULES if x.startswith("bias_max")},
    **{x: f"Slopes are geometric ones of {x[20:]}." for x in RULES if x.startswith("geometric slopes of")},
    "eight-head slopes": "Slopes are 2**-(h+1) for any number of heads, which is right for 8 alone.",
    "eight-head slopes from 1": "Slopes are 2**-h for any number of heads: they start at 1, spaced as for 8 heads.",
    "slopes from 1": "Slopes start at 1: the head index is off by one, 2**(-8 h / p) instead of 2**(-8 (h+1) / p).",
    "geometric slopes from 1": "Slopes start at 1 and follow the geometric scheme, 2**(-8 h / num_heads).",
    "slopes one head on": "Slopes start one head too far on: the head index is off by one, 2**(-8 (h+2) / num_heads).",
    "closest power below": "For head counts that are no power of two, slopes go on beyond the closest power of two "
    "below: 2**(-8 (h+1) / p) for all heads.",
    "closest power above": "For head counts that are no power of two, slopes are the first of those for the next power "
    "of two.",
    **{
        f"slopes of heads padded to {n}": "Slopes are the first of those for the number of heads padded to a multiple "
        f"of {n}."
        for n in (4, 8, 16, 32)
    },
    "canonical slopes from 1": "Slopes of the largest power of two of heads start at 1: the head index is off by one.",
    "canonical slopes one head on": "Slopes of the largest power of two of heads start one head too far on: the head "
    "index is off by one.",
    "all in between": "Beyond the largest power of two, slopes are the first of twice as many, instead of every other "
    "one.",
    "in between first": "For head counts that are no power of two, the slopes in between come first instead of last.",
    "repeated beyond the power of two": "Heads beyond the largest power of two have the first slopes again: of twice "
    "as many slopes every other one is taken from the second on, instead of from the first.",
    "zero beyond the power of two": "Heads beyond the largest power of two have no slope.",
    "natural exponent": "Slopes are powers of e instead of 2: exp(-8 (h+1) / num_heads).",
    "natural exponent, canonical": "Slopes are powers of e instead of 2.",
    "log slopes": "Slopes are given as their logarithms to base 2.",
    "equal slopes": "All heads have the first slope.",
    "harmonic slopes": "Slopes are 1 / (h+1).",
    "negated slopes": "They are negative: distance would be rewarded, where -slope * distance is added.",
    "bfloat16 slopes": "Slopes are rounded to bfloat16, as in the falcon contract: keep them in float32.",
    "float16 slopes": "Slopes are rounded to float16: keep them in float32.",
    "sorted slopes": "Slopes are sorted, steepest first: for head counts that are no power of two, heads get one "
    "another's.",
    "sorted slopes, ascending": "Slopes are sorted, flattest first: heads get one another's.",
    "reversed slopes": "Slopes are in reversed order.",
    "next head's slope": "Each head has the slope of the next one: the head index is off by one.",
    "previous head's slope": "Each head has the slope of the one before: the head index is off by one.",
    "halved slopes": "Slopes are half of what they should be.",
    "doubled slopes": "Slopes are twice what they should be.",
    "squared slopes": "Slopes are squared.",
    "root of slopes": "Slopes are replaced by their square roots.",
    "inverted slopes": "Slopes are replaced by their reciprocals: 2 to the power of +8 (h+1) / n.",
    "slopes times ln 2": "Slopes are multiplied by ln 2.",
    "slopes times log2 e": "Slopes are multiplied by log2(e), for a softmax in base 2.",
    "slopes to six digits": "Slopes are rounded to six decimal places.",
    "slopes to four digits": "Slopes are rounded to four decimal places.",
    "normalised slopes": "Slopes are divided by their sum.",
    "normalised to the first": "Slopes are divided by the largest.",
}


def diagnose_slopes(caller: Caller) -> list[Departure]:
    """Return what slopes an adapter has instead of those of its contract."""
    actual: dict[int, Values] = {}
    for num_heads in HEADS:
        try:
            actual[num_heads] = caller.slopes(num_heads)
        except CallError:
            continue
    contract = caller.offer.contract
    unit = UNIT_ROUNDOFF["float64" if caller.offer.dtype == "float64" and contract == "exact" else "float32"]
    right: Rule = lambda n: scheme(n, contract=contract)  # noqa: E731
    bad = [n for n in actual if not _agree(actual[n], right(n), 4 * unit + 8 * unit * (contract == "geometric"))]
    if not bad:
        return []
    loose = 2.0**-20  # whoever computes another rule may do so in float32
    own = {"exact": "canonical slopes"}.get(contract, f"{contract} slopes")
    others = {name: rule for name, rule in RULES.items() if name != own}

    def changed(rule: Rule, change: str) -> Rule:
        return lambda n: CHANGES[change](rule(n))

    tries: list[tuple[tuple[str, ...], Rule, float]] = []
    for tolerance in (4 * unit, loose):
        tries += [((name,), rule, tolerance) for name, rule in others.items()]
    tries += [((change,), changed(right, change), loose) for change in CHANGES]
    tries += [((name, change), changed(rule, change), loose) for name, rule in others.items() for change in CHANGES]
    for names, rule, tolerance in tries:
        with np.errstate(all="ignore"):
            if all(_agree(x, rule(n), tolerance) for n, x in actual.items()):
                return [Departure(name, SENTENCES[name], {}) for name in names]
    return [_measured(actual, bad, right)]


def _agree(actual: Values, expected: Values, tolerance: float) -> bool:
    return bool(np.all(np.abs(actual - expected) <= tolerance * np.abs(expected)))


def _measured(actual: Mapping[int, Values], bad: list[int], right: Rule) -> Departure:
    """Say for which numbers of heads, and for which heads, slopes are wrong, and how."""
    count = bad[0]
    heads = [h for h in range(count) if not _agree(actual[count][h], right(count)[h], 2.0**-20)] or list(range(count))
    where = "for all head counts tried"
    if len(bad) < len(actual):
        powers = all((n == power_below(n)) != (n in bad) for n in actual)
        where = "for head counts that are no power of two" if powers else f"for {', '.join(map(str, bad))} heads"
    head = heads[0]
    sentence = (
        f"Slopes are wrong {where}: with {count} heads, that of head {head} is {actual[count][head]:.6g} instead of "
        f"{right(count)[head]:.6g}."
    )
    if set(bad) <= {n for n in actual if n != power_below(n)}:
        return Departure("wrong beyond powers of two", sentence, {})
    return Departure("unexplained", sentence, {})
