"""Probes: a fixed set of rich cases, and what an adapter made of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from alibi_core._slopes import slope_values
from alibi_core.conformance._adapter import Offer
from alibi_core.conformance._cases import Case, Sizes, Values
from alibi_core.conformance._diagnosis._observations.observation import Observation
from alibi_core.conformance._trial import Caller, CallError, DepartureError

NUM_HEADS, HEAD_DIM = 6, 8  # no power of two; and a model dimension that differs from everything else
# Neither sorted nor powers of two, nor any that bfloat16 holds, so that no two ways to take them agree.
STEEP = (0.3, 0.061, 0.7, 0.11, 1.1, 0.023)
FLAT = (0.03, 0.007, 0.0011, 0.11, 0.3, 0.0023)  # by which far keys still weigh something
FUTURE = np.asarray([0.2, 0.5, 0.05, 0.9, 0.013, 0.33])
MOST_SCORES = 10**6  # of a failure: larger ones take too long to be read in many ways
LONG, LATE_ROWS = 300, 8  # no multiple of any block; and how many of the last rows are looked at


def sized(
    lengths: tuple[int, int], *, batch: int = 2, num_heads: int = NUM_HEADS, group: int = 1, head_dim: int = HEAD_DIM
) -> Sizes:
    """Return the sizes of a probe; ``num_heads`` are those of queries."""
    return Sizes(batch, num_heads // group, group, lengths, head_dim)


def make_case(
    offer: Offer,
    sizes: Sizes | tuple[int, int],
    *,
    slopes: Any = STEEP,
    form: str = "causal",
    one_hot: bool = False,
    size: float | None = None,
    **arguments: Any,
) -> Case:
    """Return a case with these arguments of ``attention``.

    Args:
        offer: Whose slopes count, if its attention takes none.
        sizes: Of all axes, or lengths alone.
        slopes: ``[num_heads]`` or ``[batch, num_heads]``.
        form: As in ``Case``.
        one_hot: Whether values are one-hot, and queries 0 by default, so that the output is the weights; with long keys
            each batch entry shows those of ``head_dim`` keys.
        size: Of queries. Default 1.
        arguments: Of ``attention``.
    """
    sizes = sizes if isinstance(sizes, Sizes) else sized(sizes)
    (q_len, kv_len), head_dim = sizes.lengths, sizes.head_dim
    size = (0.0 if one_hot else 1.0) if size is None else size
    rng = np.random.default_rng(q_len * 1000 + kv_len)
    num_kv_heads, num_heads = sizes.num_kv_heads, sizes.num_kv_heads * sizes.group
    batch = -(-kv_len // head_dim) if one_hot and kv_len > head_dim else sizes.batch
    arrays = {
        name: rng.standard_normal((batch, heads, length, head_dim))
        for name, heads, length in (
            ("query", num_heads, q_len), ("key", num_kv_heads, kv_len), ("value", num_kv_heads, kv_len),
            ("cotangent", num_heads, q_len),
        )
    }  # fmt: skip
    arrays["query"] *= size
    if one_hot:
        first = np.arange(batch)[:, None] * head_dim if kv_len > head_dim else np.zeros((batch, 1), int)
        eye = np.arange(kv_len)[:, None] == (first + np.arange(head_dim))[:, None]
        arrays["value"] = np.broadcast_to(eye[:, None] * 1.0, arrays["value"].shape).copy()
    own = np.resize(slopes, (*np.shape(slopes)[:-1], num_heads))
    arrays["slopes"] = as_slopes(own if offer.has_slopes else slope_values(num_heads, contract=offer.contract))
    if form != "causal":
        arguments["is_causal"] = False
    sizes = dataclasses.replace(sizes, batch=batch)
    case = Case(sizes, scaling=arguments.get("scale"), slopes_per_batch=arrays["slopes"].ndim > 1)
    return case.with_arguments(form, arguments).with_arrays(**arrays)


def as_slopes(values: Any) -> Values:
    """Return slopes as float32 holds them."""
    return np.asarray(values, np.float32).astype(np.float64)


def observe(caller: Caller, case: Case, rows: slice = slice(None)) -> Observation | None:
    """Call the adapter's attention and return what came of it, or None if nothing did.

    Args:
        caller: Of the adapter.
        case: What to ask.
        rows: Which queries to look at.
    """
    try:
        return Observation.of(caller, case, {"output": caller.attention(case)}, rows)
    except CallError:
        return None


class Probe(NamedTuple):
    """A case, described.

    Attributes:
        needs: The features that it is for; ``square`` for those that take no unequal lengths. Where it has unequal
            lengths and does not need them, it may have equal ones.
        sizes: As in :func:`make_case`.
        options: As in :func:`make_case`. The form is by default as the features say.
        rows: Which queries to look at.
    """

    needs: str
    sizes: Sizes | tuple[int, int]
    options: dict[str, Any] = {}  # noqa: RUF012
    rows: slice = slice(None)


def cases_of(offer: Offer, features: frozenset[str], probes: Iterable[Probe]) -> Iterator[tuple[Case, slice]]:
    """Yield the cases of these probes that are offered, and which of their queries to look at."""
    offered = features - (set() if offer.has_slopes else {"batch_slopes"})
    offered |= set() if "lengths" in features else {"square"}
    for needs, sizes, options, rows in probes:
        if not offered.issuperset(needs.split()):
            continue
        if "lengths" not in features and not isinstance(sizes, Sizes) and sizes[0] != sizes[1]:
            sizes = SQUARE
        form = next((x for x in ("asymmetric", "symmetric") if x in needs), "causal")
        yield make_case(offer, sizes, **{"form": form} | options), rows


SQUARE, FEWER = (7, 7), (5, 11)
ONE_HOT = {"one_hot": True}
OFFSETS_BY_ENTRY = np.asarray([2, 9], np.int32)
IDS, LONG_IDS = (
    np.asarray(ids, np.int32)
    for ids in (
        ((0, 0, 0, 1, 1, 2, 2), (3, 3, 5, 5, 5, 5, 0)),
        ((0, 0, 0, 1, 1, 1, 2, 2, 2), (3, 3, 5, 5, 5, 5, 5, 0, 0)),
    )
)
NOWHERE_IDS = tuple(np.asarray([x] * 2, np.int32) for x in ((0, 1, 1, 1, 4, 4, 4), (0, 0, 1, 1, 2, 2, 2)))
_rng = np.random.default_rng(5)
MASK, OTHER_MASK = ((_rng.random((2, NUM_HEADS, 7, 7)) < 0.6) | np.eye(7, dtype=bool) for _ in range(2))
MASK_OF_FEWER = (_rng.random((2, 1, 4, 9)) < 0.6) | np.eye(4, 9, 5, dtype=bool)

# The plainest first.
SHORT = (
    Probe("", SQUARE, ONE_HOT),
    Probe("", SQUARE, ONE_HOT | {"size": 1.0}),
    Probe("", SQUARE),
    Probe("", SQUARE, {"size": 60.0}),  # scores whose exponentials overflow
    Probe("scale", SQUARE, {"scale": 0.2}),
    Probe("batch_slopes", SQUARE, {"slopes": (STEEP, FLAT)}),
    Probe("lengths", (4, 11)),
    Probe("lengths", (1, 9)),
    Probe("offset", FEWER, {"q_offset": 3}),
    Probe("offset", (1, 9), {"q_offset": 4}),
    *(Probe("offset", FEWER, {"q_offset": x}) for x in (0, 20, 3003, 40_000)),
    Probe("batch_offsets", FEWER, {"q_offset": OFFSETS_BY_ENTRY}),
    Probe("batch_offsets symmetric", SQUARE, {"q_offset": np.asarray([2, 4], np.int32)}),
    Probe("symmetric", SQUARE, ONE_HOT),
    Probe("symmetric", SQUARE),
    Probe("symmetric lengths", (4, 11)),
    Probe("symmetric offset", FEWER, {"q_offset": 3}),
    Probe("symmetric offset", SQUARE, {"q_offset": -2}),
    Probe("asymmetric", SQUARE, {"future_slopes": FUTURE}),
    Probe("asymmetric", SQUARE, {"future_slopes": FUTURE * 0}),
    Probe("grouped", sized(SQUARE, group=2), ONE_HOT),
    Probe("grouped", sized(SQUARE, group=2)),
    Probe("grouped lengths", sized((4, 11), group=2)),
    *(
        probe
        for symmetric, mask in (("", MASK), ("symmetric ", OTHER_MASK))
        for probe in (
            Probe(f"{symmetric}window", (13, 13), {"window_size": 3}),
            Probe(f"{symmetric}window", (5, 5), {"window_size": 0}),
            Probe(f"{symmetric}segments", SQUARE, {"segment_ids": (IDS, IDS)}),
            Probe(f"{symmetric}mask", SQUARE, {"mask": mask}),
        )
    ),
    Probe("window offset", FEWER, {"q_offset": 2, "window_size": 2}),
    Probe("segments lengths", (4, 9), {"segment_ids": (LONG_IDS[:, -4:], LONG_IDS)}),
    Probe("mask lengths", (4, 9), {"mask": MASK_OF_FEWER}),
    Probe("nowhere lengths", (9, 5)),
    Probe("nowhere offset", SQUARE, {"q_offset": -2}),
    Probe("nowhere mask", SQUARE, {"mask": np.broadcast_to(np.arange(7)[:, None] != 4, (2, 1, 7, 7))}),
    Probe("nowhere segments", SQUARE, {"segment_ids": NOWHERE_IDS}),
)

# For gradients, the plainest first.
GRADIENT_PROBES = (
    Probe("", SQUARE),
    Probe("", SQUARE, {"size": 8.0}),  # scores of which rounding leaves much
    Probe("", SQUARE, {"size": 60.0}),  # scores whose exponentials overflow
    Probe("scale", SQUARE, {"scale": 0.2}),
    Probe("batch_slopes", SQUARE, {"slopes": (STEEP, FLAT)}),
    Probe("lengths", (4, 11)),
    Probe("offset", FEWER, {"q_offset": 3}),
    Probe("symmetric", SQUARE),
    Probe("asymmetric", SQUARE, {"future_slopes": FUTURE}),
    Probe("grouped", sized(SQUARE, group=2)),
    *(Probe(f"{form}window", (9, 9), {"window_size": 3}) for form in ("", "symmetric ")),
    Probe("batch_offsets lengths", FEWER, {"q_offset": OFFSETS_BY_ENTRY}),
    Probe("segments", SQUARE, {"segment_ids": (IDS, IDS)}),
    Probe("mask", SQUARE, {"mask": MASK}),
    Probe("nowhere lengths", (9, 5)),
    Probe("", sized((150, 150), num_heads=2, batch=1), {"slopes": FLAT}),
)

_FLAT: dict[str, Any] = {"slopes": FLAT}
_LATE, _MIDDLE = slice(-LATE_ROWS, None), slice(145, 145 + LATE_ROWS)
# For blocks, horizons, clipping and rounding.
LONG_ROWS = (
    Probe("lengths", sized((3, LONG), head_dim=64), _FLAT | ONE_HOT),
    Probe("lengths", (5, LONG), _FLAT),
    Probe("lengths", (2, 2100), _FLAT),
    Probe("square", sized((LONG, LONG), head_dim=64), _FLAT | ONE_HOT, _LATE),
    Probe("", (LONG, LONG), _FLAT, _LATE),
    Probe("", (LONG, LONG), _FLAT, _MIDDLE),
    Probe("symmetric", (LONG, LONG), _FLAT, _MIDDLE),
    Probe("far offset", FEWER, {"q_offset": 1_000_000}),
)


def observed_failures(failures: Sequence[DepartureError], caller: Caller) -> Iterator[Observation]:
    """Yield what failed elsewhere, as far as it can be read."""
    for failure in failures:
        case, output = failure.case, failure.actual
        if failure.function != "attention" or case is None or output is None:
            continue
        is_small = case.num_heads * math.prod(case.sizes.lengths) <= MOST_SCORES
        if is_small and output.shape == case.arrays["query"].shape:
            yield dataclasses.replace(Observation.of(caller, case, {"output": output}), ignores_nowhere=True)
