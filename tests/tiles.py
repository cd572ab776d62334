"""What tests of attention in tiles share: hostile data, long rows, and what may be off by how much."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.cases import Case, Sizes, cases
from tests.frameworks import Backend
from tests.oracle import UNIT_ROUNDOFF, Answer, Attention, Rules, assert_within

TOLERANCES = (0.3, 0.01, 1e-4, 2.0**-24)
STEEP = np.asarray([4.0, 1.0, 0.3, 0.0625, 0.03, 2.0**-16, 0.0], np.float32)
# Long enough for keys in several blocks, 64 each at least, and for horizons to end within the row.
LONGER = (Sizes(2, 2, 2, (150, 150), 4), Sizes(1, 3, 1, (70, 200), 3), Sizes(2, 1, 2, (201, 90), 5))
LONGER += (Sizes(1, 2, 3, (2, 260), 4),)
LONGER_CASES = st.sampled_from(LONGER).flatmap(lambda sizes: cases(sizes=sizes))

# Where segments of queries and of keys begin, in 64 tokens.
SPANS = {
    "within tiles": ([10, 33], [10, 33]),
    "at tiles": ([16, 40], [16, 40]),
    "of one token": ([20, 21, 22], [20, 21, 22]),
    "of queries": ([16, 33], []),
    "of keys": ([], [17, 31]),
    "apart": ([10, 30], [18, 38]),
}


def outlier(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> None:
    """Make some heads' first key of huge norm: who sees it attends to nothing else, or not to it at all."""
    key[:, :1, 0] = 1000.0
    key[:, 1:, -1] = -300.0


def sinks(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> None:
    """Make queries alike, and the first keys point their way."""
    query[...] = 3 + query / 10
    key[:, :, :4] = 2.0


def equal_keys(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> None:
    key[...] = key[:, :, :1]


def no_queries(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> None:
    query[...] = 0


def no_keys(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> None:
    key[...] = 0


def shifted(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> None:
    """Add a vector to all keys that every query points along: softmax does not notice."""
    query[...] = 1 + query / 10
    key += 20.0


def opposed(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> None:
    """Let every key but those around the middle score low, the query's own too."""
    query[...] = 2 + query / 10
    key[...] = -2
    middle = key.shape[2] // 2
    key[:, :, middle : middle + 3] = 1


def fading(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> None:
    """Let keys and queries grow towards the beginning, and values be nothing but at the far end."""
    key *= np.linspace(3, 0, key.shape[2])[:, None]
    query *= np.linspace(3, 0, query.shape[2])[:, None]
    value[:, :, key.shape[2] // 3 :] = 0


def stripes(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> None:
    """Let scores be high and low by turns of 32 keys, and rise in the end."""
    query[...] = 2 + query / 10
    turns = np.arange(key.shape[2]) // 32
    key[...] = key / 100 + np.where(turns % 2, -1.0, 1.0)[:, None] + turns[:, None] / 8


DATA = {f.__name__: f for f in (outlier, sinks, equal_keys, no_queries, no_keys, shifted, opposed, fading, stripes)}


def attend(backend: Backend, case: Case, dtype: str, **changes: Any) -> np.ndarray:
    arrays = {name: case.arrays[name] for name in ("query", "key", "value", "slopes")}
    return backend.attention(**arrays, dtype=dtype, **(case.arguments | changes))


def with_arrays(case: Case, **arrays: np.ndarray) -> Case:
    """Return the case with other tensors or slopes, but with the arguments that it has."""
    changed = case.with_tensors(**arrays)
    changed.__dict__["arguments"] = case.arguments
    return changed


def hostile(case: Case, data: str, sign: int) -> Case:
    """Return the case with such data, with steep slopes among its own, and maybe with a negative one."""
    tensors = {name: case.arrays[name].copy() for name in ("query", "key", "value")}
    DATA[data](**tensors)
    slopes = np.resize(np.roll(STEEP, case.seed), case.arrays["slopes"].shape).astype(np.float64)
    if sign < 0:
        slopes[..., -1] = -0.125
        case = case.with_arguments(case.form, case.arguments | {"allow_negative_slopes": True})
    return with_arrays(case, **tensors, slopes=slopes)


def rules_of(case: Case, slopes: np.ndarray) -> Rules:
    arguments = {name: value for name, value in case.arguments.items() if name != "allow_negative_slopes"}
    return case.with_arguments(case.form, arguments).rules(slopes)


def fast_penalties(rules: Rules, batch: int, heads: int, q_len: int, kv_len: int) -> np.ndarray:
    """Return what :func:`tests.oracle.penalties` does, of long rows in less time."""
    offsets = np.broadcast_to(rules.q_offset, (batch,))[:, None, None, None]
    ahead = np.arange(kv_len) - (offsets + np.arange(q_len)[:, None])
    past = np.broadcast_to(rules.slopes, (batch, heads))[..., None, None].astype(np.float64)
    future = past if rules.future_slopes is None else np.broadcast_to(rules.future_slopes, (batch, heads))
    future = np.reshape(future, (batch, heads, 1, 1)).astype(np.float64)
    visible = np.ones((batch, heads, q_len, kv_len), dtype=bool)
    if rules.is_causal:
        visible &= ahead <= 0
    if rules.window_size is not None:
        visible &= np.abs(ahead) <= rules.window_size
    if rules.q_segment_ids is not None:
        ids = (np.broadcast_to(x, (batch, x.shape[-1])) for x in (rules.q_segment_ids, rules.kv_segment_ids))
        q_ids, kv_ids = ids
        visible &= (q_ids[:, :, None] == kv_ids[:, None, :])[:, None]
    if rules.mask is not None:
        visible &= rules.mask
    return np.where(visible, -np.where(ahead > 0, future, past) * np.abs(ahead), -np.inf)


def exact(backend: Backend, case: Case, dtype: str) -> Attention:
    """Return ``case.exact``, of long rows in less time."""
    tensors = {
        name: backend.framework.numpy(backend.framework.array(case.arrays[name], dtype))
        for name in ("query", "key", "value")
    }
    rules = rules_of(case, case.arrays["slopes"])
    bias = fast_penalties(rules, case.sizes.batch, case.num_heads, *case.sizes.lengths)
    return Attention(**tensors, bias=bias, scale=case.scale, dtype=dtype)


def within_tolerance(answer: Answer, case: Case, tolerance: float) -> Answer:
    """Return an answer that may be off by what a share of the weight can move, besides rounding."""
    largest = np.abs(case.arrays["value"]).max(axis=(2, 3), keepdims=True) * 1.01  # as they are once rounded
    return Answer(answer.value, answer.budget + 2 * tolerance * largest.repeat(case.sizes.group, axis=1))


def assert_exact(backend: Backend, case: Case, dtype: str = "float32", tolerance: float | None = None) -> None:
    """Assert that result and gradients of a case are exact to rounding, and to the tolerance."""
    problem = exact(backend, case, dtype)
    share = UNIT_ROUNDOFF[dtype] if tolerance is None else tolerance
    assert_within(attend(backend, case, dtype, tolerance=tolerance), within_tolerance(problem.output, case, share))
    rules = rules_of(case, np.ones(case.num_heads))
    if rules.future_slopes is not None:  # slopes then count backwards only
        rules = replace(rules, future_slopes=np.zeros(case.num_heads))
    distances = -fast_penalties(rules, case.sizes.batch, case.num_heads, *case.sizes.lengths)
    distances = np.where(np.isfinite(distances), distances, 0)
    cotangent = backend.framework.numpy(backend.framework.array(case.arrays["cotangent"], dtype))
    expected, left_out = problem.gradients(cotangent, distances), moved_by(share, problem, cotangent, distances)
    expected = {name: Answer(x.value, x.budget + left_out[name]) for name, x in expected.items()}
    if case.arrays["slopes"].ndim == 1:
        by_entry = expected["slopes"]
        rounding = 1 + case.sizes.batch * 2**-20
        expected["slopes"] = Answer(by_entry.value.sum(axis=0), by_entry.budget.sum(axis=0) * rounding)
    inputs = {name: case.arrays[name] for name in ("query", "key", "value", "slopes")}
    arguments = case.arguments | {"tolerance": tolerance}
    actual = backend.gradients(inputs, case.arrays["cotangent"], dtype=dtype, **arguments)
    for name, answer in expected.items():
        assert_within(actual[name], answer)


def moved_by(
    share: float, problem: Attention, cotangent: np.ndarray, distances: np.ndarray
) -> dict[str, np.ndarray | float]:
    """Return by how much gradients may move where this share of each row's weight is left out, at most.

    Weights w then move by 2 * share in all, along a row. A score's gradient is w * (d - mean), where d, the weight's
    gradient, and their mean are of size D at most: along a row they move by 2 * share * 2 D, and w times the mean's
    move, by another 2 * share * D.
    """
    d_weights = np.abs(np.einsum("bhid,bhjd->bhij", cotangent, problem.values))
    by_row = 6.1 * share * np.where(np.isfinite(problem.bias), d_weights, 0).max(axis=-1)  # [batch, heads, q_len]
    largest_key = np.abs(problem.keys).max(axis=2, keepdims=True)

    def per_kv_head(x: np.ndarray) -> np.ndarray:
        return x.reshape(x.shape[0], -1, problem.group, *x.shape[2:]).sum(axis=2)

    by_key = (by_row[..., None] * np.abs(problem.query)).sum(axis=2, keepdims=True)
    return {
        "query": problem.scale * by_row[..., None] * largest_key,
        "key": problem.scale * per_kv_head(by_key),
        "value": per_kv_head(2.1 * share * np.abs(cotangent).sum(axis=2, keepdims=True)),
        "slopes": (by_row * distances.max(axis=-1)).sum(axis=-1),
    }
