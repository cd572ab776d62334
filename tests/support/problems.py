"""An attention problem over all arguments, as a few words and a seed, and its exact answer from the definition."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from alibi_core.conformance.testing import DATA, UNIT_ROUNDOFF, Answer, Attention, rounded, summed_over_batch
from tests.support.tiles import Tiling

TENSORS = ("query", "key", "value")
SIGNED = ("int8", "int16", "int32", "int64")
INTEGERS = (*SIGNED, *(f"u{x}" for x in SIGNED))
BY_KEY = ("key", "value", "log_gates")
AS_SLOPES = ("slopes", "future_slopes", "log_gates", "sinks")  # arrays of the working dtype


@dataclass(frozen=True, repr=False)
class Problem:
    """One call of attention, and what is asked of it. A word says how an array is made; its values are the seed's."""

    lengths: tuple[int, int] = (7, 7)  # queries, keys
    batch: tuple[int, ...] = (2,)
    heads: tuple[int, int] = (3, 1)  # of keys and values; query heads to each
    head_dim: int = 5
    dtype: str = "float32"
    data: str = "normal"  # or a name in DATA: outliers, sinks, ...
    slopes: str = "shared"  # "per entry"; "default"; "one negative"
    future: str | None = None  # as slopes, or "zero": slopes of keys after the query
    gates: str | None = None  # a name in GATES
    sinks: str | None = None  # a name in SINKS
    is_causal: bool = True
    q_offset: int | str | None = None  # "array"; "per entry"; "far per entry"
    window_size: int | None = None
    segments: str | None = None  # a name in SEGMENTS
    mask: str | None = None  # axes in order, "1" for one that broadcasts; behind them ":int" or ":pad"
    points: str | None = None  # a name in POINTS: positions of the caller's own
    distance: str = "manhattan"
    law: str = "linear"
    scale: float | None = None
    tolerance: float | None = None
    knows_norms: bool = False  # an upper bound of the norms of keys is given, to a backend that takes one
    adds_bias: bool = False
    returns_weights: bool = False
    wrt: tuple[str, ...] = ()  # the arguments whose gradients are asked for
    loss: str = "random"  # a name in COTANGENTS
    luck: int = 50  # compiled in libraries in which more problems than so many in a hundred are compiled
    closes_over: bool = False  # whether arguments without gradients are constants of the program
    tiling: Tiling | None = None  # sizes of tiles in place of those by default
    seed: int = 0

    @property
    def num_heads(self) -> int:
        return self.heads[0] * self.heads[1]

    @property
    def scores(self) -> tuple[int, ...]:
        """The shape of the scores."""
        return (*self.batch, self.num_heads, *self.lengths)

    @functools.cached_property
    def arrays(self) -> dict[str, Any]:
        """The tensors, rounded to the dtype, the cotangent, and the slopes, float32 numbers; all in float64."""
        rng, (q_len, kv_len) = np.random.default_rng(self.seed), self.lengths
        sizes = {"query": (self.num_heads, q_len), "key": (self.heads[0], kv_len), "value": (self.heads[0], kv_len)}
        entries = math.prod(self.batch)
        found = {
            name: rng.standard_normal((entries, *size, self.head_dim)) * rng.choice([0.25, 1, 4], (entries, 1, 1, 1))
            for name, size in (sizes | {"cotangent": sizes["query"]}).items()
        }
        if self.data != "normal" and 0 not in self.scores:
            DATA[self.data](*(found[name][self.seed % 2 :] for name in TENSORS))  # maybe not of the first entry
        found = {name: rounded(x, self.dtype).reshape(*self.batch, *x.shape[1:]) for name, x in found.items()}
        found["cotangent"] = shaped(self.loss, found["cotangent"])
        for name, kind in (("slopes", self.slopes), ("future_slopes", self.future)):
            shape = (*(self.batch if kind == "per entry" else ()), self.num_heads)
            values = rng.choice(np.float32([0, 2.0**-16, 0.0625, 0.3, 1, 2.5]), shape).astype(np.float64)
            if kind not in (None, "default"):
                found[name] = values * (kind != "zero")
            if kind == "one negative":
                found[name][-1] = -0.125
        if self.gates is not None:
            gates = GATES[self.gates](rng, (*self.batch, self.num_heads, kv_len))
            found["log_gates"] = np.where(gates < 0, gates, 0).astype(np.float32).astype(np.float64)
        if self.sinks is not None:
            found["sinks"] = SINKS[self.sinks](rng, self.num_heads).astype(np.float32).astype(np.float64)
        return found

    @functools.cached_property
    def arguments(self) -> dict[str, Any]:
        """The other arguments of attention, those that are not the defaults; arrays are NumPy's."""
        rng, (q_len, kv_len) = np.random.default_rng((self.seed, 1)), self.lengths
        values = {"is_causal": True, "distance": "manhattan", "law": "linear", "scale": None, "window_size": None}
        given = {name: getattr(self, name) for name, default in values.items() if getattr(self, name) != default}
        given |= {} if self.tolerance is None else {"tolerance": self.tolerance}
        given |= {"return_weights": True} if self.returns_weights else {}
        given |= {"allow_negative_slopes": True} if self.slopes == "one negative" else {}
        if self.knows_norms:
            norms = np.linalg.norm(self.arrays["key"], axis=-1).max(axis=-1, initial=0)
            norms = np.float32(norms * rng.choice([1 + 2.0**-20, 3.0, 1e30]))
            given["max_key_norm"] = norms if rng.random() < 0.5 else float(norms.max(initial=0))
        if isinstance(self.q_offset, str):
            near, far = np.arange(-4, 14), np.asarray([-(2**30), -(10**6), 5, 10**6, 2**29 + 50, 2**30 - 9])
            shape = () if self.q_offset == "array" else self.batch
            values = rng.choice(far if "far" in self.q_offset else near, shape)
            kinds = SIGNED if np.min(values, initial=0) < 0 else INTEGERS
            given["q_offset"] = np.asarray(values, "int32" if "far" in self.q_offset else rng.choice(kinds))
        elif self.q_offset is not None:
            given["q_offset"] = self.q_offset
        if self.segments is not None:
            given["segment_ids"] = SEGMENTS[self.segments](rng, self.batch, q_len, kv_len)
        if self.points is not None:
            given["positions"] = POINTS[self.points](rng, self.batch, q_len, kv_len)
        if self.mask is not None:
            axes, _, kind = self.mask.partition(":")
            mask = rng.random(self.mask_shape(axes)) < rng.choice([0.3, 0.6, 0.95])
            mask[rng.random(mask.shape[:-1]) < 0.2] = False  # rows that see nothing
            if kind == "pad":
                start, stop = np.sort(rng.integers(0, kv_len + 1, (2, *mask.shape[:-1], 1)), axis=0)
                mask = (np.arange(kv_len) >= start) & (np.arange(kv_len) < stop)
            given["mask"] = mask.astype(rng.choice(INTEGERS)) if kind == "int" else mask
        if self.adds_bias:
            added = rng.standard_normal(self.scores[-3:]).astype(np.float32)
            added = added.reshape((*(1,) * len(self.batch), *added.shape))
            given["added_bias"] = np.where(rng.random(added.shape) < 0.2, -np.inf, added).astype(np.float32)
        return given

    def mask_shape(self, axes: str) -> tuple[int, ...]:
        partial = (*self.batch[:1], *(1,) * len(self.batch[1:]))  # "p": one for all of the other axes of the batch
        sizes = dict(zip("hqk", ((n,) for n in self.scores[-3:]), strict=True))
        sizes |= {"b": self.batch, "p": partial, "1": (1,)}
        return sum((sizes[axis] for axis in axes), ())

    def __repr__(self) -> str:
        fields = ((x.name, getattr(self, x.name), x.default) for x in dataclasses.fields(self))
        return f"Problem({', '.join(f'{name}={value!r}' for name, value, default in fields if value != default)})"


def shaped(kind: str, cotangent: Any) -> Any:
    """Return the cotangent of a loss: a weighted sum, a sum, or one row or one element in the middle."""
    if kind in ("ones", "zeros"):
        return np.full_like(cotangent, float(kind == "ones"))
    middle = tuple(n // 2 for n in cotangent.shape)
    place = {"one row": (..., middle[-2], slice(None)), "one element": middle}.get(kind, ...)
    kept = np.zeros_like(cotangent)
    if cotangent.size:
        kept[place] = cotangent[place]
    return kept


def sorted_ids(rng: Any, *shape: int) -> Any:
    return np.sort(rng.integers(0, 3, shape), axis=-1).astype(rng.choice(INTEGERS))


def mixed_ids(rng: Any, *shape: int) -> Any:
    return rng.choice(np.asarray([2, -7, 7, 2 + 2**16], np.int32), shape)


# One array serves queries and keys, a pair has one for each; without batch axes all entries share it.
SEGMENTS: dict[str, Callable[..., Any]] = {
    "one": lambda rng, batch, _, k: sorted_ids(rng, *batch, k),
    "one, interrupted": lambda rng, batch, _, k: (rng.random((*batch, k)) < 0.06).astype(np.int32),
    "one row": lambda rng, _, q, k: sorted_ids(rng, k),
    "pair": lambda rng, batch, q, k: (sorted_ids(rng, *batch, q), sorted_ids(rng, *batch, k)),
    "pair of one row": lambda rng, batch, q, k: (sorted_ids(rng, q), mixed_ids(rng, *batch, k)),
    "pair of one axis": lambda rng, batch, q, k: (sorted_ids(rng, *batch[-1:], q), sorted_ids(rng, *batch[-1:], k)),
    "mixed": lambda rng, batch, q, k: (mixed_ids(rng, *batch, q), mixed_ids(rng, *batch, k)),
}


def at(kind: str, *dims: int, shares: bool = False, of_all: bool = False) -> Callable[..., Any]:
    """Return a function that makes positions; NaN marks a token without a position."""

    def made(rng: Any, batch: tuple[int, ...], *lengths: int) -> Any:
        shapes = [(*(() if of_all else batch), n, *dims) for n in lengths]
        if kind in ("integer", "far"):
            found = [rng.integers(-9, 9, shape).astype(np.int32) for shape in shapes]  # with ties
            if kind == "far":  # distances that do not fit float32, but for one key, which a mask may hide
                found[0] += (shift := rng.choice(np.int32([2**23 - 20, 10**8 + 3, 2**30 - 9, 20 - 2**23])))
                found[1][..., :1, *[slice(None)] * len(dims)] = shift
        elif kind == "far real":
            found = [rng.integers(-9, 9, shape).astype(np.float32) for shape in shapes]
            found = [found[0] + 2**22, found[1] / 8]
        else:
            found = [rng.normal(0, 9, shape).astype(np.float32) for shape in shapes]
        if kind == "nowhere":
            for x in found:
                x[rng.random(x.shape) < 0.3] = np.nan  # one coordinate is enough
        return found[0] if shares else tuple(found)

    return made


POINTS = {
    "integers": at("integer"),
    "times": at("real"),
    "times of all": at("real", of_all=True),
    "some nowhere": at("nowhere"),
    "one for both": at("integer", shares=True),
    "far": at("far"),
    "far times": at("far real"),
    "grid": at("integer", 2),
    "far grid": at("far", 2),
    "space": at("real", 3),
    "space, some nowhere": at("nowhere", 2),
    "one space for both": at("nowhere", 3, shares=True),
    "space of all": at("real", 2, of_all=True),
}
ON_LINE = tuple(POINTS)[:7]


# Logarithms of forget gates.
GATES: dict[str, Callable[..., Any]] = {
    "mild": lambda rng, shape: -0.1 * rng.random(shape),
    "strong": lambda rng, shape: -5 * rng.random(shape) ** 4,
    "huge": lambda rng, shape: -1e4 * rng.random(shape) ** 30,
    "none": lambda rng, shape: np.zeros(shape),
    "closed sometimes": lambda rng, shape: np.where(rng.random(shape) < 0.1, -np.inf, -0.3 * rng.random(shape)),
}

# Sinks; -inf is none.
SINKS: dict[str, Callable[..., Any]] = {
    "usual": lambda rng, heads: rng.standard_normal(heads),
    "wide": lambda rng, heads: rng.choice([-np.inf, -1e6, -50.0, -5.0, 3.0, 20.0, 1e4], heads),
}


# --- The exact answer -------------------------------------------------------------------------------------------------


def pair(given: Any) -> tuple[Any, Any]:
    return given if isinstance(given, tuple) else (given, given)


def canonical_slopes(heads: int) -> list[float]:
    """Return the slopes of the paper, also where heads are no power of two."""
    power = 2 ** int(math.log2(heads))
    own = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
    return own + [2.0 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]


def of_keys(x: Any, at_keys: Any, others: int) -> Any:
    """Return numbers of keys along the last axis at the places of keys, and 0 at other ones."""
    found = np.zeros((*x.shape[:-1], x.shape[-1] + others))
    found[..., at_keys] = x
    return found


def exact(p: Problem) -> dict[str, Answer]:
    """Return the exact result, weights and gradients of a problem, each with its budget of rounding.

    Budgets are derived in alibi_core.conformance.oracle; bias, mask and distances are made here, from the definition.
    """
    given, (q_len, kv_len), entries = p.arguments, p.lengths, math.prod(p.batch)

    def of_entries(x: Any, *axes: int) -> Any:
        """Return an array of the batch, [entries, *axes], of one that broadcasts to it."""
        return np.broadcast_to(x, (*p.batch, *axes)).reshape(entries, *axes)

    tensors = {name: p.arrays[name].reshape(entries, *p.arrays[name].shape[-3:]) for name in (*TENSORS, "cotangent")}
    default = np.float32(canonical_slopes(p.num_heads)) if p.dtype != "float64" else canonical_slopes(p.num_heads)
    default = default if p.gates is None else np.zeros(p.num_heads)
    slopes = of_entries(p.arrays.get("slopes", default), p.num_heads)[..., None, None]
    future = slopes if p.future is None else of_entries(p.arrays["future_slopes"], p.num_heads)[..., None, None]

    # How far keys are ahead of queries, and the distance, [entries, 1, q_len, kv_len]. Products of float32 slopes with
    # near distances are exact in float64, others need more bits.
    is_far = np.abs(given.get("q_offset", 0)).max(initial=0) > 999 or "far" in (p.points or "")
    wide = np.longdouble if is_far or p.dtype == "float64" else np.float64
    if p.points is None:
        offset = of_entries(given.get("q_offset", kv_len - q_len)).astype(np.int64)[:, None, None, None]
        places = offset + np.arange(q_len)[:, None]  # of queries
        ahead = (np.arange(kv_len) - places).astype(wide)
        distance, origin = abs(ahead), np.maximum(np.maximum(-places, places - kv_len + 1), 0)
    else:
        places = (x[..., None] if p.points in ON_LINE else x for x in pair(given["positions"]))
        queries, keys = (of_entries(x, n, x.shape[-1]).astype(wide) for x, n in zip(places, p.lengths, strict=True))
        steps = (keys[:, None] - queries[:, :, None])[:, None]
        norms = {"manhattan": abs(steps).sum(-1), "chebyshev": abs(steps).max(-1)}
        norms["euclidean"] = np.sqrt((steps**2).sum(-1))
        is_nowhere = np.isnan(steps).any(-1)
        distance = np.where(is_nowhere, 0, norms[p.distance])
        ahead = np.where(is_nowhere, 0, steps[..., 0]) if p.points in ON_LINE else -distance
    penalty = {"linear": lambda x: x, "log": np.log1p, "sqrt": np.sqrt}[p.law](distance)

    visible = np.ones((entries, p.num_heads, q_len, kv_len), bool)
    if p.is_causal:
        visible &= ahead <= 0
    if p.window_size is not None:
        visible &= distance <= p.window_size
    if p.segments is not None:
        q_ids, kv_ids = (of_entries(x, n) for x, n in zip(pair(given["segment_ids"]), p.lengths, strict=True))
        visible &= q_ids[:, None, :, None] == kv_ids[:, None, None].astype(np.int64)
    if p.mask is not None:
        axes, mask = p.mask.partition(":")[0], given["mask"] != 0
        if axes[0] == "b":  # the axes of the batch come first; the axes that are missing follow
            mask = mask.reshape(*p.batch, *(1,) * (4 - len(axes)), *mask.shape[len(p.batch) :])
        visible &= of_entries(mask, *p.scores[-3:])
    forgotten, is_token = 0.0, True
    if p.gates is not None:
        if p.mask is not None and mask.shape[-2:-1] in ((), (1,)):  # of keys: tokens that are none forget nothing
            is_token = of_entries(mask[..., 0, :] if mask.ndim > 1 else mask, p.num_heads, kv_len)
        gates = np.where(is_token, of_entries(p.arrays["log_gates"], p.num_heads, kv_len), 0)
        # Differences of running sums, and of counts of closed gates. Who stands beside the keys stands at the next.
        at = np.broadcast_to(np.clip(places, 0, max(kv_len - 1, 0)), (entries, p.num_heads, q_len, 1))[..., 0]
        sums, closed = (
            np.take_along_axis(x, at, -1)[..., None] - x[..., None, :] if 0 not in p.scores else np.zeros(visible.shape)
            for x in (
                np.cumsum(np.where(np.isinf(gates), 0, gates).astype(np.longdouble), -1),
                np.cumsum(gates == -np.inf, -1),
            )
        )
        forgotten, visible = np.where(visible, sums, 0), visible & (closed == 0)
    # Far from all keys, sums of gates would lose digits.
    beyond = penalty if p.gates is None or p.sinks else penalty - origin
    added = of_entries(given.get("added_bias", 0.0), *p.scores[-3:])
    visible &= np.isfinite(added)

    # Softmax ignores what the keys of a row have in common: the bias counts from the highest.
    full = np.where(np.isfinite(added), added, 0) - np.where(ahead > 0, future, slopes) * beyond + forgotten
    full = np.where(visible, full, 0)
    highest = np.where(visible, full, -np.inf).max(-1, keepdims=True, initial=-np.inf)
    highest = np.where(highest > -np.inf, highest, 0)
    bias = np.where(visible, full - highest, -np.inf).astype(np.float64)
    # Distances between tokens are whole, and those of a row count from the nearest; others are rounded at their size.
    # With a sink, they count from the query.
    is_whole = p.law == "linear" and p.sinks is None and p.points in (None, "integers", "one for both", "far")
    largest = None if is_whole else abs(full).max(-1, keepdims=True, initial=0).astype(np.float64)
    scale = p.head_dim**-0.5 if p.scale is None else p.scale
    arrays, at_keys = [tensors[name] for name in TENSORS], np.arange(kv_len)
    sums = None if p.gates is None else forgotten.astype(np.float64)
    if p.sinks is not None:
        # A sink is a key of zeros without a value. With gates there is one behind each key, for the query there: score
        # gradients of rows before a gate then sum to 0, as the oracle has it.
        slots = kv_len if p.gates and kv_len else 1
        at_keys = np.arange(kv_len) * (2 if p.gates else 1)
        at_sinks = np.setdiff1d(np.arange(kv_len + slots), at_keys)
        own = np.clip(places, 0, max(kv_len - 1, 0)) if p.gates else 0
        sees = visible.any(-1, keepdims=True) & (np.arange(slots) == own)
        bias = of_keys(np.where(visible, full, -np.inf).astype(np.float64), at_keys, slots)
        bias[..., at_sinks] = np.where(sees, p.arrays["sinks"][:, None, None], -np.inf)
        sums = None if sums is None else of_keys(sums, at_keys, slots)
        arrays[1:] = (of_keys(x.swapaxes(-1, -2), at_keys, slots).swapaxes(-1, -2) for x in arrays[1:])
    is_approximate = p.points is None and p.law == "linear" and not (p.adds_bias or p.returns_weights)
    share = (UNIT_ROUNDOFF[p.dtype] if p.tolerance is None else p.tolerance) if is_approximate else 0.0
    problem = Attention(*arrays, bias, scale, p.dtype, largest_bias=largest, forgotten=sums, share=share)
    found = {"result": problem.output}
    if p.returns_weights:
        identity = np.zeros((entries, p.heads[0], bias.shape[-1], kv_len))
        identity[..., at_keys, np.arange(kv_len)] = 1
        found["weights"] = dataclasses.replace(problem, value=identity).output
    # The derivatives of the bias by slopes of either side. Distances count from the row's end that is nearest.
    sides = {"slopes": visible & ((p.future is None) | (ahead <= 0)), "future_slopes": visible & (ahead > 0)}
    for name in ("slopes", "future_slopes") if p.future is not None else ("slopes",):
        along = np.where(sides[name], penalty - (origin if is_whole and p.points is None else 0), 0).astype(np.float64)
        gradients = problem.gradients(tensors["cotangent"], of_keys(along, at_keys, bias.shape[-1] - kv_len))
        by_slopes = gradients.pop("slopes")
        is_shared = name in p.arrays and p.arrays[name].ndim == 1 and len(p.batch) > 0
        found |= gradients | {name: summed_over_batch(by_slopes) if is_shared else by_slopes}

    if p.sinks is not None:
        is_sink = np.isin(np.arange(bias.shape[-1]), at_sinks).astype(np.float64)
        by_sinks = problem.gradients(tensors["cotangent"], is_sink)["slopes"]
        by_sinks = Answer(-by_sinks.value, by_sinks.budget)  # of minus the score
        found |= {x: Answer(found[x].value[:, :, at_keys], found[x].budget[:, :, at_keys]) for x in BY_KEY}
        found["sinks"] = summed_over_batch(by_sinks) if p.batch else by_sinks
    found["log_gates"] = Answer(found["log_gates"].value * is_token, found["log_gates"].budget)

    def as_given(name: str, x: Any) -> Any:
        return x.reshape(p.arrays[name].shape if name in AS_SLOPES else (*p.batch, *x.shape[-3:]))

    names = ("result", *(["weights"] if p.returns_weights else []), *p.wrt)
    return {name: Answer(as_given(name, found[name].value), as_given(name, found[name].budget)) for name in names}
