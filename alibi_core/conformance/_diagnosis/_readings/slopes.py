"""Slopes other than those that are meant: as lists for a number of heads, changed, or taken otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from alibi_core._slopes import slope_values
from alibi_core.conformance._cases import Values, rounded

Rule = Callable[[int], Values]


def power_below(n: int) -> int:
    """Return the largest power of two that is not above ``n``."""
    return 1 << (n.bit_length() - 1)


def scheme(n: int, scheme: str = "canonical", bias_max: float = 8.0, contract: str = "exact") -> Values:
    """Return the library's slopes."""
    return np.asarray(slope_values(n, scheme=scheme, bias_max=bias_max, contract=contract))


def _of_bias_max(bias_max: float, name: str) -> Rule:
    return lambda n: scheme(n, name, bias_max)


def _of_padded(multiple: int) -> Rule:
    return lambda n: scheme(-(-n // multiple) * multiple)[:n]


def _shifted(n: int, first: int) -> Values:
    p = power_below(n)
    return np.concatenate([2.0 ** (-8 * np.arange(first, p + first) / p), scheme(n)[p:]])


def _from_one(n: int) -> Values:
    p = power_below(n)
    first, between = 2.0 ** (-8 * np.arange(p) / p), 2.0 ** (-4 * (2 * np.arange(n - p)) / p)
    return np.concatenate([first, between])


# Lists of slopes by the number of heads.
RULES: dict[str, Rule] = {
    "canonical slopes": scheme,
    "geometric slopes": lambda n: scheme(n, "geometric"),
    "linear slopes": lambda n: scheme(n, "linear"),
    "bloom slopes": lambda n: scheme(n, contract="bloom"),
    "mpt slopes": lambda n: scheme(n, contract="mpt"),
    **{f"bias_max {b}": _of_bias_max(b, "canonical") for b in (1, 2, 4, 6, 7, 9, 10, 12, 16, 32)},
    **{f"geometric slopes of bias_max {b}": _of_bias_max(b, "geometric") for b in (4, 16)},
    "eight-head slopes": lambda n: 2.0 ** -np.arange(1, n + 1),
    "eight-head slopes from 1": lambda n: 2.0 ** -np.arange(n),
    "slopes from 1": _from_one,
    "geometric slopes from 1": lambda n: 2.0 ** (-8 * np.arange(n) / n),
    "slopes one head on": lambda n: 2.0 ** (-8 * np.arange(2, n + 2) / n),
    "closest power below": lambda n: 2.0 ** (-8 * np.arange(1, n + 1) / power_below(n)),
    "closest power above": lambda n: scheme(1 << (n - 1).bit_length())[:n],
    **{f"slopes of heads padded to {multiple}": _of_padded(multiple) for multiple in (4, 8, 16, 32)},
    "canonical slopes from 1": lambda n: _shifted(n, 0),
    "canonical slopes one head on": lambda n: _shifted(n, 2),
    "all in between": lambda n: np.concatenate(
        [scheme(power_below(n)), scheme(2 * power_below(n))[: n - power_below(n)]]
    ),
    "in between first": lambda n: np.roll(scheme(n), n - power_below(n)),
    "repeated beyond the power of two": lambda n: np.resize(scheme(power_below(n)), n),
    "zero beyond the power of two": lambda n: scheme(n) * (np.arange(n) < power_below(n)),
    "natural exponent": lambda n: np.exp(-8 * np.arange(1, n + 1) / n),
    "natural exponent, canonical": lambda n: np.exp(np.log2(scheme(n))),
    "log slopes": lambda n: np.log2(scheme(n)),
    "equal slopes": lambda n: np.full(n, scheme(n)[0]),
    "harmonic slopes": lambda n: 1 / np.arange(1, n + 1),
}

# What becomes of slopes [..., num_heads].
CHANGES: dict[str, Callable[[Values], Values]] = {
    "negated slopes": lambda x: -x,
    "bfloat16 slopes": lambda x: rounded(x, "bfloat16"),
    "float16 slopes": lambda x: rounded(x, "float16"),
    "sorted slopes": lambda x: -np.sort(-x),
    "sorted slopes, ascending": np.sort,
    "reversed slopes": lambda x: x[..., ::-1],
    "next head's slope": lambda x: np.roll(x, -1, axis=-1),
    "previous head's slope": lambda x: np.roll(x, 1, axis=-1),
    "halved slopes": lambda x: x / 2,
    "doubled slopes": lambda x: x * 2,
    "squared slopes": lambda x: x**2,
    "root of slopes": lambda x: np.sqrt(np.abs(x)),
    "inverted slopes": lambda x: 1 / x,
    "slopes times ln 2": lambda x: x * math.log(2),
    "slopes times log2 e": lambda x: x / math.log(2),
    "slopes to six digits": lambda x: np.round(x, 6),
    "slopes to four digits": lambda x: np.round(x, 4),
    "normalised slopes": lambda x: x / x.sum(),
    "normalised to the first": lambda x: x / x.max(),
}

_LISTED = (
    *("canonical slopes", "geometric slopes", "linear slopes", "bias_max 4", "bias_max 16"),
    *("eight-head slopes", "eight-head slopes from 1"),
)
_CHANGED = (
    *("sorted slopes", "sorted slopes, ascending", "reversed slopes", "next head's slope", "previous head's slope"),
    *("squared slopes", "root of slopes"),
)


def _listed(name: str) -> Callable[[Values, Any], Values]:
    return lambda x, i: RULES[name](i.num_heads)


def _changed(name: str) -> Callable[[Values, Any], Values]:
    return lambda x, i: CHANGES[name](x)


# How slopes [batch, num_heads] come about, by those that are given and the call. Each returns what broadcasts to them.
SLOPES: dict[str, Callable[[Values, Any], Values]] = {
    "given": lambda x, i: x,
    **{name: _listed(name) for name in _LISTED},
    "slopes from 1": _listed("geometric slopes from 1"),
    "next power of two": _listed("closest power above"),
    **{name: _changed(name) for name in _CHANGED},
    "slopes of kv heads": lambda x, i: scheme(i.num_kv_heads).repeat(i.group),
    "slopes of kv heads, tiled": lambda x, i: np.tile(scheme(i.num_kv_heads), i.group),
    "slopes by kv head": lambda x, i: x[:, np.arange(i.num_heads) // i.group],
    "slopes by kv head, tiled": lambda x, i: x[:, np.arange(i.num_heads) % i.num_kv_heads],
    "slopes by place in the group": lambda x, i: x[:, np.arange(i.num_heads) % i.group],
    "group's first slope": lambda x, i: x[:, np.arange(i.num_heads) // i.group * i.group],
    "slopes transposed": lambda x, i: x.reshape(-1, i.group, i.num_kv_heads).swapaxes(1, 2).reshape(x.shape),
    "slopes transposed back": lambda x, i: x.reshape(-1, i.num_kv_heads, i.group).swapaxes(1, 2).reshape(x.shape),
    "next head's slope, cut": lambda x, i: x[:, np.minimum(np.arange(i.num_heads) + 1, i.num_heads - 1)],
    "first half's slopes": lambda x, i: x[:, np.arange(i.num_heads) % -(-i.num_heads // 2)],
    "first head's slope": lambda x, i: x[:, :1],
    "mean slope": lambda x, i: x.mean(axis=1, keepdims=True),
    "first batch slopes": lambda x, i: x[:1],
    "last batch slopes": lambda x, i: x[-1:],
    "next batch slopes": lambda x, i: np.roll(x, -1, axis=0),
    "slopes by batch entry": lambda x, i: x[:, np.arange(i.batch) % i.num_heads].diagonal()[:, None],
    "slopes of batch and head swapped": lambda x, i: x.reshape(i.num_heads, i.batch).T,
    "slopes by flat index": lambda x, i: x[:, np.arange(i.batch * i.num_heads) // i.batch][0].reshape(x.shape),
    "exponentiated slopes": lambda x, i: np.exp(-x),
    "powers of slopes": lambda x, i: 2.0**-x,
}
