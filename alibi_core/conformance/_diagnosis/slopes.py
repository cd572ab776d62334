"""What slopes an implementation has in place of those of its contract."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from alibi_core._slopes import slope_values
from alibi_core.conformance._cases import UNIT_ROUNDOFF, Values, rounded
from alibi_core.conformance._diagnosis._departures import Departure
from alibi_core.conformance._trial import Caller, CallError

HEADS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 24, 32, 40, 71, 112)
Rule = Callable[[int], Values]


def _power_below(n: int) -> int:
    return 1 << (n.bit_length() - 1)


def _power_above(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _scheme(n: int, scheme: str = "canonical", bias_max: float = 8.0, contract: str = "exact") -> Values:
    return np.asarray(slope_values(n, scheme=scheme, bias_max=bias_max, contract=contract))


def _with_all_between(n: int) -> Values:
    p = _power_below(n)
    return np.concatenate([_scheme(p), _scheme(2 * p)[: n - p]])


def _of_bias_max(bias_max: float, scheme: str) -> tuple[str, Rule]:
    return f"Slopes are {scheme} ones of bias_max {bias_max:g}.", lambda n: _scheme(n, scheme, bias_max)


def _of_padded(multiple: int) -> Rule:
    return lambda n: _scheme(-(-n // multiple) * multiple)[:n]


RULES: Mapping[str, tuple[str, Rule]] = {
    "canonical slopes": ("Slopes are the canonical ones.", _scheme),
    "geometric slopes": (
        "Slopes follow the geometric scheme, 2**(-8 (h+1) / num_heads) for any number of heads, which is "
        "canonical for powers of two alone.",
        lambda n: _scheme(n, "geometric"),
    ),
    "linear slopes": ("Slopes are evenly spaced from 0.05 to 0.5.", lambda n: _scheme(n, "linear")),
    "bloom slopes": (
        "These are the slopes of the bloom contract: powers of a base that is rounded to float32 before.",
        lambda n: _scheme(n, contract="bloom"),
    ),
    "mpt slopes": ("These are the slopes of the mpt contract.", lambda n: _scheme(n, contract="mpt")),
    **{f"bias_max {b:g}": _of_bias_max(b, "canonical") for b in (1.0, 2.0, 4.0, 6.0, 7.0, 9.0, 10.0, 12.0, 16.0, 32.0)},
    **{f"geometric slopes of bias_max {b:g}": _of_bias_max(b, "geometric") for b in (4.0, 16.0)},
    "eight-head slopes": (
        "Slopes are 2**-(h+1) for any number of heads, which is right for 8 alone.",
        lambda n: 2.0 ** -np.arange(1, n + 1),
    ),
    "eight-head slopes from 1": (
        "Slopes are 2**-h for any number of heads: they start at 1, spaced as for 8 heads.",
        lambda n: 2.0 ** -np.arange(n),
    ),
    "slopes from 1": (
        "Slopes start at 1: the head index is off by one, 2**(-8 h / p) instead of 2**(-8 (h+1) / p).",
        lambda n: _from_one(n),
    ),
    "geometric slopes from 1": (
        "Slopes start at 1 and follow the geometric scheme, 2**(-8 h / num_heads).",
        lambda n: 2.0 ** (-8 * np.arange(n) / n),
    ),
    "slopes one head on": (
        "Slopes start one head too far on: the head index is off by one, 2**(-8 (h+2) / num_heads).",
        lambda n: 2.0 ** (-8 * np.arange(2, n + 2) / n),
    ),
    "closest power below": (
        "For head counts that are no power of two, slopes go on beyond the closest power of two below: 2**(-8 "
        "(h+1) / p) for all heads.",
        lambda n: 2.0 ** (-8 * np.arange(1, n + 1) / _power_below(n)),
    ),
    "closest power above": (
        "For head counts that are no power of two, slopes are the first of those for the next power of two.",
        lambda n: _scheme(_power_above(n))[:n],
    ),
    **{
        f"slopes of heads padded to {multiple}": (
            f"Slopes are the first of those for the number of heads padded to a multiple of {multiple}.",
            _of_padded(multiple),
        )
        for multiple in (4, 8, 16, 32)
    },
    "canonical slopes from 1": (
        "Slopes of the largest power of two of heads start at 1: the head index is off by one.",
        lambda n: _shifted(n, 0),
    ),
    "canonical slopes one head on": (
        "Slopes of the largest power of two of heads start one head too far on: the head index is off by one.",
        lambda n: _shifted(n, 2),
    ),
    "all in between": (
        "Beyond the largest power of two, slopes are the first of twice as many, instead of every other one.",
        _with_all_between,
    ),
    "in between first": (
        "For head counts that are no power of two, the slopes in between come first instead of last.",
        lambda n: np.concatenate([_scheme(n)[_power_below(n) :], _scheme(n)[: _power_below(n)]]),
    ),
    "repeated beyond the power of two": (
        "Heads beyond the largest power of two have the first slopes again: of twice as many slopes every other "
        "one is taken from the second on, instead of from the first.",
        lambda n: np.resize(_scheme(_power_below(n)), n),
    ),
    "zero beyond the power of two": (
        "Heads beyond the largest power of two have no slope.",
        lambda n: np.concatenate([_scheme(_power_below(n)), np.zeros(n - _power_below(n))]),
    ),
    "natural exponent": (
        "Slopes are powers of e instead of 2: exp(-8 (h+1) / num_heads).",
        lambda n: np.exp(-8 * np.arange(1, n + 1) / n),
    ),
    "natural exponent, canonical": ("Slopes are powers of e instead of 2.", lambda n: np.exp(np.log2(_scheme(n)))),
    "log slopes": ("Slopes are given as their logarithms to base 2.", lambda n: np.log2(_scheme(n))),
    "equal slopes": ("All heads have the first slope.", lambda n: np.full(n, _scheme(n)[0])),
    "harmonic slopes": ("Slopes are 1 / (h+1).", lambda n: 1 / np.arange(1, n + 1)),
}


def _shifted(n: int, first: int) -> Values:
    p = _power_below(n)
    return np.concatenate([2.0 ** (-8 * np.arange(first, p + first) / p), _scheme(n)[p:]])


def _from_one(n: int) -> Values:
    p = _power_below(n)
    first, between = 2.0 ** (-8 * np.arange(p) / p), 2.0 ** (-4 * (2 * np.arange(n - p)) / p)
    return np.concatenate([first, between])


CHANGES: Mapping[str, tuple[str, Callable[[Values], Values]]] = {
    "": ("", lambda x: x),
    "negated slopes": (
        "They are negative: distance would be rewarded, where -slope * distance is added.",
        lambda x: -x,
    ),
    "bfloat16 slopes": (
        "Slopes are rounded to bfloat16, as in the falcon contract: keep them in float32.",
        lambda x: rounded(x, "bfloat16"),
    ),
    "float16 slopes": ("Slopes are rounded to float16: keep them in float32.", lambda x: rounded(x, "float16")),
    "sorted slopes": (
        "Slopes are sorted, steepest first: for head counts that are no power of two, heads get one another's.",
        lambda x: -np.sort(-x),
    ),
    "sorted slopes, ascending": ("Slopes are sorted, flattest first: heads get one another's.", np.sort),
    "reversed slopes": ("Slopes are in reversed order.", lambda x: x[::-1]),
    "next head's slope": (
        "Each head has the slope of the next one: the head index is off by one.",
        lambda x: np.roll(x, -1),
    ),
    "previous head's slope": (
        "Each head has the slope of the one before: the head index is off by one.",
        lambda x: np.roll(x, 1),
    ),
    "halved slopes": ("Slopes are half of what they should be.", lambda x: x / 2),
    "doubled slopes": ("Slopes are twice what they should be.", lambda x: x * 2),
    "squared slopes": ("Slopes are squared.", lambda x: x**2),
    "root of slopes": ("Slopes are replaced by their square roots.", lambda x: np.sqrt(np.abs(x))),
    "inverted slopes": ("Slopes are replaced by their reciprocals: 2 to the power of +8 (h+1) / n.", lambda x: 1 / x),
    "slopes times ln 2": ("Slopes are multiplied by ln 2.", lambda x: x * math.log(2)),
    "slopes times log2 e": ("Slopes are multiplied by log2(e), for a softmax in base 2.", lambda x: x / math.log(2)),
    "slopes to six digits": ("Slopes are rounded to six decimal places.", lambda x: np.round(x, 6)),
    "slopes to four digits": ("Slopes are rounded to four decimal places.", lambda x: np.round(x, 4)),
    "normalised slopes": ("Slopes are divided by their sum.", lambda x: x / x.sum()),
    "normalised to the first": ("Slopes are divided by the largest.", lambda x: x / x.max()),
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
    right: Rule = lambda n: _scheme(n, contract=contract)  # noqa: E731
    bad = [n for n in actual if not _agree(actual[n], right(n), 4 * unit + 8 * unit * (contract == "geometric"))]
    if not bad:
        return []
    loose = 2.0**-20  # whoever computes another rule may do so in float32
    own = {"exact": "canonical slopes"}.get(contract, f"{contract} slopes")
    for tolerance in (4 * unit, loose):
        for rule, (sentence, compute) in RULES.items():
            if rule != own and _all(actual, compute, tolerance):
                return [Departure(rule, sentence, {})]
    for change, (what, changed) in CHANGES.items():  # the right slopes, changed
        if change and _all(actual, lambda n, f=changed: f(right(n)), loose):  # type: ignore[misc]
            return [Departure(change, what, {})]
    for rule, (sentence, compute) in RULES.items():
        for change, (what, changed) in CHANGES.items():
            if change and rule != own and _all(actual, lambda n, f=changed, g=compute: f(g(n)), loose):  # type: ignore[misc]
                return [Departure(rule, sentence, {}), Departure(change, what, {})]
    return [_measured(actual, bad, right)]


def _all(actual: Mapping[int, Values], rule: Rule, tolerance: float) -> bool:
    with np.errstate(all="ignore"):
        return bool(actual) and all(_agree(x, rule(n), tolerance) for n, x in actual.items())


def _agree(actual: Values, expected: Values, tolerance: float) -> bool:
    return bool(np.all(np.abs(actual - expected) <= tolerance * np.abs(expected)))


def _measured(actual: Mapping[int, Values], bad: list[int], right: Rule) -> Departure:
    """Say for which numbers of heads, and for which heads, slopes are wrong, and how."""
    count = bad[0]
    heads = [h for h in range(count) if not _agree(actual[count][h], right(count)[h], 2.0**-20)] or list(range(count))
    where = "for all head counts tried"
    if len(bad) < len(actual):
        powers = all((n == _power_below(n)) != (n in bad) for n in actual)
        where = "for head counts that are no power of two" if powers else f"for {', '.join(map(str, bad))} heads"
    head = heads[0]
    sentence = (
        f"Slopes are wrong {where}: with {count} heads, that of head {head} is {actual[count][head]:.6g} instead of "
        f"{right(count)[head]:.6g}."
    )
    if set(bad) <= {n for n in actual if n != _power_below(n)}:
        return Departure("wrong beyond powers of two", sentence, {})
    return Departure("unexplained", sentence, {})
