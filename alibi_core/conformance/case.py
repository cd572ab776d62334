"""Attention problems: small frozen descriptions with a seed, from which NumPy draws the arrays."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from alibi_core.conformance.data import DATA, STEEP
from alibi_core.conformance.oracle import (
    Answer,
    Attention,
    distances,
    largest_bias,
    masked_bias,
    rounded,
    summed_over_batch,
)
from alibi_core.conformance.reference import TENSORS, Computation, Values, compute_bias

FAR, PER_BATCH = 1_000_000, -1_000_000
FORMS = ("causal", "symmetric", "asymmetric", "clamped")
# Positions of the caller's own: how they are drawn, of a shape.
POINTS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], Any]] = {
    "line": lambda rng, shape: rng.integers(-9, 9, shape).astype(np.int32),  # with ties
    "times": lambda rng, shape: rng.normal(0, 9, shape).astype(np.float32),
    "grid": lambda rng, shape: rng.integers(-5, 5, (*shape, 2)).astype(np.int32),
    "space": lambda rng, shape: rng.normal(0, 4, (*shape, 3)).astype(np.float32),
    "class token": lambda rng, shape: np.where(
        np.arange(shape[1])[:, None] == 0, np.nan, rng.normal(0, 4, (*shape, 2))
    ).astype(np.float32),
}
# Logarithms of forget gates, [batch, num_heads, kv_len].
GATES: dict[str, Callable[[np.random.Generator, tuple[int, ...]], Any]] = {
    "constant": lambda rng, shape: np.broadcast_to(-rng.choice([0.0625, 0.3, 1.0], (*shape[:2], 1)), shape),
    "open": lambda rng, shape: np.zeros(shape),
    "strong": lambda rng, shape: -5 * rng.random(shape) ** 4,
    "huge": lambda rng, shape: -1e4 * rng.random(shape) ** 30,
    "closed": lambda rng, shape: np.where(rng.random(shape) < 0.2, -np.inf, -0.3 * rng.random(shape)),
    "late": lambda rng, shape: np.where(np.arange(shape[2]) > shape[2] // 2, rng.choice([-np.inf, -1e6], shape), 0.0),
    # One gate after a single other that makes the running sum up to a million, whatever the order of additions.
    "large": lambda rng, shape: (
        -1e6 * rng.random(shape) * np.eye(1, shape[2], shape[2] // 3) - 0.3 * np.eye(1, shape[2], 2 * shape[2] // 3)
    ),
}
COTANGENTS = ("random", "ones", "zeros", "one row", "one element")


@dataclass(frozen=True)
class Sizes:
    """Axis sizes; mostly distinct primes, so that swapped axes fail.

    Example:
        >>> sizes = Sizes(batch=2, num_kv_heads=3, group=2, lengths=(5, 7), head_dim=11)
        >>> Case(sizes).arrays["query"].shape, Case(sizes).arrays["key"].shape
        ((2, 6, 5, 11), (2, 3, 7, 11))
    """

    batch: int
    num_kv_heads: int
    group: int  # query heads to a key/value head
    lengths: tuple[int, int]  # queries, keys
    head_dim: int

    @property
    def elements(self) -> int:
        """The number of elements of all tensors. Cases are sorted by it."""
        q_len, kv_len = self.lengths
        return self.batch * self.num_kv_heads * self.head_dim * (self.group * q_len + kv_len)


@dataclass(frozen=True)
class Case:
    """One attention problem: the sizes, the form, and a seed for the values.

    Example:
        A window of 1 hides the first of three keys from the last query:

        >>> case = Case(Sizes(1, 2, 1, (3, 3), 4), window_size=1)
        >>> print(case)
        batch 1, 2 heads of 4 features, 3 queries, 3 keys, causal, window_size 1, slopes [1.0, 0.3], seed 0
        >>> case.exact("float32").weights[0, 0, 2, 0].tolist()
        0.0
    """

    sizes: Sizes
    form: str = "causal"
    q_offset: int | None = None  # None for the default, FAR for far beyond the keys, PER_BATCH for an array [batch]
    window_size: int | None = None
    packing: str | None = None
    masking: str | None = None
    slopes_per_batch: bool = False
    seed: int = 0
    data: str = "normal"  # or a name in DATA, with the slopes STEEP
    scaling: float | None = None  # the scale; None for the default
    cotangent: str = "random"  # or another name in COTANGENTS
    wrt: tuple[str, ...] | None = None  # names of the gradients to compute; None for all
    points: tuple[str, str, str] | None = None  # one of POINTS, or "indices"; a distance, and a law
    gates: str | None = None  # a name in GATES

    def __str__(self) -> str:
        size, (q_len, kv_len) = self.sizes, self.sizes.lengths
        heads = count(self.num_heads, "head") + (f" over {size.num_kv_heads}" if size.group > 1 else "")
        lengths = f"{count(q_len, 'query', 'queries')}, {count(kv_len, 'key')}"
        words = [f"batch {size.batch}, {heads} of {count(size.head_dim, 'feature')}, {lengths}, {self.form}"]
        for name, value in self.arguments.items():
            if isinstance(value, np.ndarray) and value.size <= 8:
                words.append(f"{name} {value.tolist()}")
            elif isinstance(value, np.ndarray | tuple):
                words.append(f"{name} given")
            elif name != "is_causal":
                words.append(f"{name} {value}")
        slopes = self.arrays["slopes"]
        words += [f"slopes {np.round(slopes, 7).tolist()}"] if slopes.size <= 8 else []
        words += [f"{self.gates} gates"] if self.gates is not None else []
        words += [f"{self.data} data"] if self.data != "normal" else []
        words += [f"grad_output of {self.cotangent}"] if self.cotangent != "random" else []
        words += [f"gradients of {' and '.join(self.wrt)} alone"] if self.wrt is not None else []
        return ", ".join([*words, f"seed {self.seed}"])

    def with_arrays(self, **arrays: Values) -> Case:
        """Return the case with other tensors, of any length, or slopes, and the same arguments."""
        arrays = self.arrays | arrays
        lengths = arrays["query"].shape[2], arrays["key"].shape[2]
        case = dataclasses.replace(self, sizes=dataclasses.replace(self.sizes, lengths=lengths))
        case.__dict__.update(arguments=self.arguments, arrays=arrays)  # cached_property reads its value here
        return case

    def with_arguments(self, form: str, arguments: dict[str, Any]) -> Case:
        """Return the case with these arguments of ``attention`` instead of drawn ones."""
        case = dataclasses.replace(self, form=form)
        case.__dict__.update(arguments=arguments, arrays=self.arrays)
        return case

    @cached_property
    def arrays(self) -> dict[str, Values]:
        """Query, key, value, cotangent and slopes; some slopes are 0, and some tensors have large elements."""
        rng = np.random.default_rng(self.seed)
        size, heads = self.sizes, self.num_heads
        q_len, kv_len = size.lengths
        # Slopes are float32 numbers, so the oracle's float64 products with distances are exact.
        choices = np.asarray([0.0, 2.0**-16, 0.0625, 0.3, 1.0], np.float32)
        slopes = rng.choice(choices, size=(size.batch, heads)).astype(np.float64)
        query, key, value, cotangent = (
            rng.standard_normal((size.batch, h, n, size.head_dim)) * rng.choice([0.25, 1.0, 4.0])
            for h, n in ((heads, q_len), (size.num_kv_heads, kv_len), (size.num_kv_heads, kv_len), (heads, q_len))
        )
        if self.data != "normal":
            DATA[self.data](query, key, value)
            slopes = np.resize(np.roll(STEEP, self.seed), slopes.shape).astype(np.float64)
        return {
            "query": query,
            "key": key,
            "value": value,
            "cotangent": _structured(self.cotangent, cotangent),
            "slopes": slopes if self.slopes_per_batch else slopes[0],
        }

    @property
    def num_heads(self) -> int:
        """The number of query heads."""
        return self.sizes.num_kv_heads * self.sizes.group

    @property
    def scale(self) -> float:
        """The scale of scores: ``scaling``, or the default."""
        return float(self.sizes.head_dim**-0.5 if self.scaling is None else self.scaling)

    @property
    def features(self) -> frozenset[str]:
        """The features that an attention must offer to compute the case, all but ``"nowhere"``."""
        call = Computation((), {}, *(self.arrays[name] for name in (*TENSORS, "slopes")), **self.arguments)
        found = call.conditions & FEATURES.keys()
        offsets = np.ndim(self.arguments.get("q_offset", 0)) > 0
        shown = {
            "points": self.points is not None,  # positions, or a law alone
            "pair_masks": call.mask is not None and call.mask.shape[2] > 1,
            "wide_heads": self.sizes.head_dim > 256,
            "offset": offsets,
            "batch_offsets": offsets,
            "far": not offsets and abs(int(call.q_offset.max(initial=0))) >= FAR,
            "empty": 0 in self.sizes.lengths,
        }
        return frozenset(found | {name for name, is_shown in shown.items() if is_shown})

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of ``attention``, as NumPy arrays."""
        # Another stream than the arrays'.
        rng = np.random.default_rng(self.seed + 1)
        batch, (q_len, kv_len) = self.sizes.batch, self.sizes.lengths
        arguments: dict[str, Any] = {}
        if self.form != "causal":
            arguments["is_causal"] = False
        if self.form in ("asymmetric", "clamped"):
            future = rng.choice([0.0, 0.125, 0.7], size=(batch, self.num_heads)).astype(np.float32)
            future = future if self.slopes_per_batch else future[0]
            arguments["future_slopes"] = future if self.form == "asymmetric" else future * 0
        if self.q_offset == PER_BATCH:
            arguments["q_offset"] = rng.integers(-4, 14, batch, np.int32)
        elif self.q_offset is not None:
            arguments["q_offset"] = self.q_offset
        if self.window_size is not None:
            arguments["window_size"] = self.window_size
        if self.scaling is not None:
            arguments["scale"] = self.scaling
        if self.points is not None:
            kind, arguments["distance"], arguments["law"] = self.points
            if kind != "indices":
                arguments["positions"] = tuple(POINTS[kind](rng, (batch, n)) for n in (q_len, kv_len))
        if self.packing is not None:
            # Sorted ids make contiguous segments.
            ids = np.sort(rng.integers(0, 3, size=(batch, q_len + kv_len)), axis=-1).astype(np.int32)
            if self.packing == "mixed":  # arbitrary ids in any order
                ids = rng.choice(np.asarray([2, -7, 7, 2 + 2**16], np.int32), ids.shape)
            # The same ids for all batch entries, [length].
            if self.packing == "one row":
                ids = ids[0]
            is_one_array = self.packing == "same" and q_len == kv_len
            arguments["segment_ids"] = ids[:, :q_len] if is_one_array else (ids[..., :q_len], ids[..., -kv_len:])
        if self.masking == "padding":  # at the end; adjacent batch entries may have equal lengths
            lengths = np.resize([kv_len, kv_len, kv_len // 3], (batch, 1, 1, 1))
            arguments["mask"] = np.arange(kv_len) < lengths
        elif self.masking is not None:
            heads = self.num_heads
            # If heads and batch entries are equally many, a mask of three axes is ambiguous: add a batch axis of 1.
            of_heads = (*(1,) * (batch == heads), heads, q_len, kv_len)
            shape = {"by head": of_heads, "by key": (batch, 1, 1, kv_len)}.get(self.masking)
            arguments["mask"] = rng.random(shape or (batch, 1, q_len, kv_len)) < 0.6
        if self.gates is not None:
            arguments["log_gates"] = GATES[self.gates](rng, (batch, self.num_heads, kv_len)).astype(np.float32)
        return arguments

    @property
    def segment_ids(self) -> tuple[Values, Values]:
        """The ids of queries, ``[batch, q_len]``, and of keys, ``[batch, kv_len]``."""
        ids = self.arguments["segment_ids"]
        q_ids, kv_ids = ids if isinstance(ids, tuple) else (ids, ids)
        batch = self.sizes.batch
        return tuple(np.array(np.broadcast_to(x, (batch, x.shape[-1]))) for x in (q_ids, kv_ids))  # type: ignore

    def call(self, dtype: str) -> dict[str, Any]:
        """Return the arguments of the reference, rounded to ``dtype``."""
        arguments = {name: x for name, x in self.arguments.items() if name != "allow_negative_slopes"}
        arguments |= {name: rounded(self.arrays[name], dtype) for name in TENSORS}
        slopes = rounded(self.arrays["slopes"], "float64" if dtype == "float64" else "float32")
        return arguments | {"slopes": slopes, "grad_output": rounded(self.arrays["cotangent"], dtype)}

    def exact(self, dtype: str, share: float = 0.0, *, counted_from_anywhere: bool = False) -> Attention:
        """Return the problem in float64, on inputs rounded to ``dtype``.

        Args:
            dtype: Dtype of the tensors.
            share: Share of a row's weight that may be left out.
            counted_from_anywhere: Whether the budget allows a bias that is counted from any token of the row, not from
                the nearest key.
        """
        c = Computation((), {}, **self.call(dtype))
        tensors, bias = (c.query, c.key, c.value), masked_bias(c)
        largest = largest_bias(c) if counted_from_anywhere else None
        further = {"largest_bias": largest, "forgotten": c.forgotten, "share": share}
        return Attention(*tensors, bias, self.scale, dtype, **further)

    def gradients(self, dtype: str, share: float = 0.0, *, problem: Attention | None = None) -> dict[str, Answer]:
        """Return the exact gradients by query, key, value, slopes, future slopes and gates.

        Args:
            dtype: Dtype of the tensors.
            share: Share of a row's weight that may be left out.
            problem: The problem to differentiate. Default: ``exact(dtype, share)``.
        """
        problem = self.exact(dtype, share) if problem is None else problem
        c, answers = Computation((), {}, **self.call(dtype)), dict[str, Answer]()
        compute_bias(c)
        for name, multiplied in distances(c).items():
            found = problem.gradients(c.grad_output, multiplied)
            answer, by_gates = found.pop("slopes"), found.pop("log_gates")
            answers |= found | {name: answer if self.slopes_per_batch else summed_over_batch(answer)}
        if c.log_gates is not None:
            answers["log_gates"] = Answer(by_gates.value * c.is_token, by_gates.budget)
        return answers


SQUARE, FEWER = Sizes(2, 3, 1, (7, 7), 5), Sizes(2, 2, 1, (5, 11), 3)


class Feature(NamedTuple):
    """A feature of attention beyond causal rows with as many queries as keys.

    ``words`` name the argument or behaviour that shows it. A function without the ``parameter`` lacks it; a function
    may also refuse its simplest case, ``probe``.
    """

    words: str
    parameter: str = ""
    probe: Case | None = None


# What an attention may offer. The features without a probe are taken as offered, but for those to declare.
# fmt: off
OFFERS = {
    "lengths": Feature("more or fewer queries than keys", probe=Case(FEWER)),
    "offset": Feature("q_offset other than kv_len - q_len", "q_offset", Case(SQUARE, q_offset=2)),
    "batch_offsets": Feature("q_offset as an array [batch]"),
    "far": Feature("positions so far from all keys that the bias itself would lose its digits"),
    "symmetric": Feature("is_causal=False", "is_causal", Case(SQUARE, "symmetric")),
    "asymmetric": Feature("future_slopes with is_causal=False", "future_slopes", Case(SQUARE, "asymmetric")),
    "grouped": Feature("fewer key/value heads than query heads", probe=Case(Sizes(1, 3, 2, (7, 7), 8))),
    "wide_heads": Feature("heads of more than 256 features", probe=Case(Sizes(1, 1, 1, (2, 2), 264))),
    "window": Feature("window_size", "window_size", Case(SQUARE, window_size=2)),
    "segments": Feature("segment_ids, a pair of arrays [batch, q_len] and [batch, kv_len], of any integers in any "
                        "order", "segment_ids", Case(SQUARE, packing="pair")),
    "mask": Feature("mask, booleans [batch or 1, num_heads or 1, q_len or 1, kv_len]", "mask",
                    Case(SQUARE, masking="by key")),
    "pair_masks": Feature("a mask that differs from query to query", "mask", Case(SQUARE, masking="by query")),
    "batch_slopes": Feature("slopes [batch, num_heads]"),
    "scale": Feature("scale", "scale", Case(SQUARE, scaling=0.25)),
    "log_gates": Feature("log_gates [batch, num_heads, kv_len], beside slopes, with is_causal=True", "log_gates",
                         Case(SQUARE, gates="strong")),
    "points": Feature("positions, a pair of arrays [batch, length] or [batch, length, dims], with distance and law",
                      "positions", Case(SQUARE, points=("line", "manhattan", "linear"))),
    "nowhere": Feature("zeros for a query that sees no key"),
    "empty": Feature("lengths of 0", probe=Case(Sizes(2, 3, 1, (0, 0), 5))),
    "slope_gradients": Feature("the gradients of slopes and gates"),
    "some_gradients": Feature("wrt, the names of the arguments whose gradients are asked for"),
    "continuations": Feature("caches that stay as they are, so that two sequences may go on from one"),
}
# fmt: on
FEATURES = {name: x.words for name, x in OFFERS.items()}
# Features that no signature shows and that fail silently: they must be declared.
TO_DECLARE = {"batch_offsets", "far", "batch_slopes", "continuations"}


def count(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: ``"1 query"``, ``"3 queries"``."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def _structured(kind: str, cotangent: Values) -> Values:
    """Return a cotangent of ones, of zeros, or with one row or one element in the middle and zeros elsewhere."""
    if kind == "random":
        return cotangent
    if kind in ("ones", "zeros"):
        return np.full_like(cotangent, float(kind == "ones"))
    kept = np.zeros_like(cotangent)
    middle = tuple(n // 2 for n in cotangent.shape)
    place = (..., middle[2], slice(None)) if kind == "one row" else middle
    kept[place] = cotangent[place]
    return kept


SMALL = 64  # up to this many elements, more seeds are tried: a slope of 0 or a single key hides mistakes
OPTIONS: dict[str, tuple[Any, ...]] = {
    "q_offset": (-3, 0, 4, 13, FAR, PER_BATCH),
    "window_size": (0, 1, 4),
    "packing": ("pair", "same", "one row", "mixed"),
    "masking": ("by query", "by key", "by head"),
    "scaling": (0.25, 1.0, 2.0**-5, 0.0),
    "slopes_per_batch": (True,),
    "gates": tuple(GATES),
}
Choose = Callable[[Sequence[Any]], Any]


@functools.cache
def option_values(features: frozenset[str]) -> dict[str, tuple[Any, ...]]:
    """Return the values of the options that these features allow."""
    size, found = Sizes(2, 1, 1, (1, 99), 1), dict[str, tuple[Any, ...]]()  # no q_offset of OPTIONS is its default
    for name, values in OPTIONS.items():
        allowed = tuple(x for x in values if Case(size, **{name: x}).features <= features | {"lengths"})
        found |= {name: allowed} if allowed else {}
    return found


def draw_case(
    choose: Choose,
    sizes: Sequence[Sizes],
    forms: Sequence[str],
    features: Collection[str],
    **more: Sequence[Any],
) -> Case:
    """Draw a case: each option that features allow with probability 1/2, and one value each of ``more``."""
    options = {"form": choose(forms)} | {name: choose(values) for name, values in more.items()}
    for name, values in option_values(frozenset(features)).items():
        if (name != "gates" or options["form"] == "causal") and choose((False, True)):
            options[name] = choose(values)
    return Case(choose(sizes), **options)


def design(draw: Callable[[Choose], Case], number: int, seed: int) -> list[Case]:
    """Return at most ``number`` cases, the smallest first, that cover as many pairs of options as possible.

    Compiling each new combination of shapes and options takes long. Covering pairs takes fewer cases than drawing at
    random.
    """
    rng, met, found = random.Random(seed), set[Any](), dict[Case, None]()
    for _ in range(number):
        tries = {case: _pairs(case) for case in (draw(rng.choice) for _ in range(40))}
        # Greedy: of 40 drawn cases, keep the one with the most new pairs.
        best = max(tries, key=lambda case: len(tries[case] - met))
        met |= tries[best]
        found[best] = None
    return sorted(found, key=lambda case: case.sizes.elements)


def _pairs(case: Case) -> set[Any]:
    options = [(x.name, getattr(case, x.name)) for x in dataclasses.fields(case) if x.name != "seed"]
    return set(itertools.combinations(options, 2))
