"""Probes: a fixed set of rich cases, and what an adapter made of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from alibi_core._slopes import slope_values
from alibi_core.conformance._adapter import Offer
from alibi_core.conformance._cases import Case, Sizes, Values
from alibi_core.conformance._diagnosis._observations.observation import Observation, conditions_of
from alibi_core.conformance._trial import Caller, CallError, Evidence

NUM_HEADS, HEAD_DIM = 6, 8  # no power of two; and a model dimension that differs from everything else
# Neither sorted nor powers of two, nor any that bfloat16 holds, so that no two ways to take them agree.
STEEP = (0.3, 0.061, 0.7, 0.11, 1.1, 0.023)
FLAT = (0.03, 0.007, 0.0011, 0.11, 0.3, 0.0023)  # by which far keys still weigh something
MOST_SCORES = 10**6  # of a failure: larger ones take too long to be read in many ways
LONG, LATE_ROWS = 300, 8  # no multiple of any block; and how many of the last rows are looked at


def sized(
    lengths: tuple[int, int], *, batch: int = 2, num_heads: int = NUM_HEADS, group: int = 1, head_dim: int = HEAD_DIM
) -> Sizes:
    """Return the sizes of a probe; ``num_heads`` are those of queries."""
    return Sizes(batch, num_heads // group, group, lengths, head_dim)


def make_case(
    offer: Offer,
    sizes: Sizes | tuple[int, int] = (7, 7),
    *,
    slopes: tuple[float, ...] = STEEP,
    form: str = "causal",
    one_hot: bool = False,
    size: float | None = None,
    **arguments: Any,
) -> Case:
    """Return a case with these arguments of ``attention``.

    Args:
        offer: Whose slopes count, if its attention takes none.
        sizes: Of all axes, or lengths alone.
        slopes: ``[num_heads]``.
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
    sizes = dataclasses.replace(sizes, batch=batch)
    tensors = {
        name: rng.standard_normal((batch, heads, length, head_dim))
        for name, heads, length in (
            ("query", num_heads, q_len), ("key", num_kv_heads, kv_len), ("value", num_kv_heads, kv_len),
            ("cotangent", num_heads, q_len),
        )
    }  # fmt: skip
    tensors["query"] *= size
    if one_hot:
        first = np.arange(batch)[:, None] * head_dim if kv_len > head_dim else np.zeros((batch, 1), int)
        eye = np.arange(kv_len)[:, None] == (first + np.arange(head_dim))[:, None]
        tensors["value"] = np.broadcast_to(eye[:, None] * 1.0, tensors["value"].shape).copy()
    taken = np.resize(slopes, num_heads) if offer.has_slopes else slope_values(num_heads, contract=offer.contract)
    case = Case(sizes, form, None, None, None, None, False, 0, scaling=arguments.get("scale"))
    if form != "causal":
        arguments["is_causal"] = False
    return filled(case, tensors | {"slopes": as_slopes(*taken)}, arguments)


def filled(case: Case, arrays: Mapping[str, Values], arguments: Mapping[str, Any]) -> Case:
    """Return a case with these arrays and arguments in place of those it would draw."""
    lengths = arrays["query"].shape[2], arrays["key"].shape[2]
    sizes = dataclasses.replace(case.sizes, lengths=lengths, batch=arrays["query"].shape[0])
    case = dataclasses.replace(case, sizes=sizes, slopes_per_batch=arrays["slopes"].ndim > 1)
    case.__dict__.update(arrays=dict(arrays), arguments=dict(arguments))  # where cached_property keeps its values
    return case


def as_slopes(*values: Any) -> Values:
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
        output = caller.attention(case)
    except CallError:
        return None
    q_len = case.sizes.lengths[0]
    shown = range(q_len)[rows]
    return Observation(
        case,
        {"output": output[:, :, rows]},
        caller.offer.dtype,
        caller.offer.tolerance,
        conditions_of(case),
        (shown[0], len(shown)) if len(shown) < q_len else None,
    )


def short_probes(offer: Offer, features: frozenset[str]) -> Iterator[Case]:
    """Yield short cases of what is offered, the plainest first."""

    def make(*arguments: Any, **options: Any) -> Case:
        return make_case(offer, *arguments, **options)

    yield make(one_hot=True)
    yield make(one_hot=True, size=1.0)
    yield make()
    yield make(size=60.0)  # scores whose exponentials overflow
    if "scale" in features:
        yield make(scale=0.2)
    if "batch_slopes" in features and offer.has_slopes:
        case = make()
        yield case_with_slopes(case, as_slopes(STEEP, FLAT))
    if "lengths" in features:
        yield make((4, 11))
        yield make((1, 9))
    if "offset" in features:
        yield make((5, 11) if "lengths" in features else (7, 7), q_offset=3)
        yield make((1, 9) if "lengths" in features else (7, 7), q_offset=4)
        yield from (make((5, 11) if "lengths" in features else (7, 7), q_offset=x) for x in (0, 20, 3003, 40_000))
    if "batch_offsets" in features:
        yield make((5, 11) if "lengths" in features else (7, 7), q_offset=np.asarray([2, 9], np.int32))
    if {"batch_offsets", "symmetric"} <= features:
        yield make(form="symmetric", q_offset=np.asarray([2, 4], np.int32))
    if "symmetric" in features:
        yield make(form="symmetric", one_hot=True)
        yield make(form="symmetric")
        if "lengths" in features:
            yield make((4, 11), form="symmetric")
        if "offset" in features:
            yield make((5, 11) if "lengths" in features else (7, 7), form="symmetric", q_offset=3)
            yield make(form="symmetric", q_offset=-2)
    if "asymmetric" in features:
        future = np.asarray([0.2, 0.5, 0.05, 0.9, 0.013, 0.33])
        yield make(form="asymmetric", future_slopes=future)
        yield make(form="clamped", future_slopes=future * 0)
    if "grouped" in features:
        yield make(sized((7, 7), group=2), one_hot=True)
        yield make(sized((7, 7), group=2))
        if "lengths" in features:
            yield make(sized((4, 11), group=2))
    yield from _masked_probes(features, make)


def _masked_probes(features: frozenset[str], make: Callable[..., Case]) -> Iterator[Case]:
    forms = ["causal", "symmetric"] if "symmetric" in features else ["causal"]
    rng = np.random.default_rng(5)
    for form in forms:
        if "window" in features:
            yield make((13, 13), form=form, window_size=3)
            yield make((5, 5), form=form, window_size=0)
        if "segments" in features:
            ids = np.asarray([[0, 0, 0, 1, 1, 2, 2], [3, 3, 5, 5, 5, 5, 0]], np.int32)
            yield make(form=form, segment_ids=(ids, ids))
        if "mask" in features:
            yield make(form=form, mask=(rng.random((2, NUM_HEADS, 7, 7)) < 0.6) | np.eye(7, dtype=bool))
    if {"window", "offset"} <= features:
        yield make((5, 11) if "lengths" in features else (9, 9), q_offset=2, window_size=2)
    if {"segments", "lengths"} <= features:
        ids = np.asarray([[0, 0, 0, 1, 1, 1, 2, 2, 2], [3, 3, 5, 5, 5, 5, 5, 0, 0]], np.int32)
        yield make((4, 9), segment_ids=(ids[:, -4:], ids))
    if {"mask", "lengths"} <= features:
        mask = rng.random((2, 1, 4, 9)) < 0.6
        yield make((4, 9), mask=mask | np.eye(4, 9, 5, dtype=bool))
    if "nowhere" in features:
        if "lengths" in features:
            yield make((9, 5))
        if "offset" in features:
            yield make(q_offset=-2)
        if "mask" in features:
            yield make(mask=np.broadcast_to(np.arange(7)[:, None] != 4, (2, 1, 7, 7)))
        if "segments" in features:
            yield make(
                segment_ids=tuple(np.asarray([x] * 2, np.int32) for x in ((0, 1, 1, 1, 4, 4, 4), (0, 0, 1, 1, 2, 2, 2)))
            )


def long_probes(offer: Offer, features: frozenset[str]) -> Iterator[tuple[Case, slice]]:
    """Yield long cases, for blocks, horizons, clipping and rounding, and which rows of them to look at."""
    late = slice(-LATE_ROWS, None)
    if "lengths" in features:
        yield make_case(offer, sized((3, LONG), head_dim=64), slopes=FLAT, one_hot=True), slice(None)
        yield make_case(offer, (5, LONG), slopes=FLAT), slice(None)
        yield make_case(offer, (2, 2100), slopes=FLAT), slice(None)
    else:
        yield make_case(offer, sized((LONG, LONG), head_dim=64), slopes=FLAT, one_hot=True), late
    yield make_case(offer, (LONG, LONG), slopes=FLAT), late
    yield make_case(offer, (LONG, LONG), slopes=FLAT), slice(145, 145 + LATE_ROWS)
    if "symmetric" in features:
        yield make_case(offer, (LONG, LONG), slopes=FLAT, form="symmetric"), slice(145, 145 + LATE_ROWS)
    if "far" in features and "offset" in features:
        yield make_case(offer, (5, 11) if "lengths" in features else (7, 7), q_offset=1_000_000), slice(None)


def case_with_slopes(case: Case, slopes: Values) -> Case:
    """Return the case with other slopes, for each batch entry if they have two axes."""
    return filled(case, case.arrays | {"slopes": slopes}, case.arguments)


def observed_failures(failures: Sequence[Evidence], dtype: str, share: float) -> Iterator[Observation]:
    """Yield what failed elsewhere, as far as it can be read."""
    for evidence in failures:
        case, output = evidence.case, evidence.actual
        if evidence.function != "attention" or case is None or output is None:
            continue
        if case.num_heads * math.prod(case.sizes.lengths) > MOST_SCORES:
            continue
        if output.shape == case.arrays["query"].shape:
            yield Observation(case, {"output": output}, dtype, share, conditions_of(case), ignores_nowhere=True)
