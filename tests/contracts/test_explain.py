"""What ``explain`` says is what the call does: which implementation, which scores, how far back, and why."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
from dataclasses import FrozenInstanceError, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import alibi_core
from alibi_core.conformance._cases.oracle import UNIT_ROUNDOFF
from tests.support.frameworks import LIBRARIES, Backend
from tests.support.full import once_in_jax, without_jax

EACH = pytest.mark.parametrize("backend", LIBRARIES)
# JAX's programs have the same shapes whatever the data: it computes more than the jobs that are counted here, and
# compiles for each call.
IN_TILES = pytest.mark.parametrize("backend", [x for x in LIBRARIES if x.id != "jax"])
KERNELS = {
    "torch": ["alibi_torch._cpu.kernel.forward", "alibi_torch._cpu.step.forward"],
    "mlx": ["alibi_mlx._tiled.forward"],
}
NAMES = {"torch": ["tiled", "flex", "sdpa", "dense"], "jax": ["tiled", "dense"], "mlx": ["tiled", "folded", "dense"]}
IMPLEMENTATIONS = [
    pytest.param(*x.values, name, id=f"{x.id}-{name}", marks=x.marks) for x in LIBRARIES for name in NAMES[x.id]
]


def tensors(
    q_len: int = 9,
    kv_len: int | None = None,
    *,
    batch: tuple[int, ...] = (2,),
    heads: tuple[int, int] = (4, 2),
    seed: int = 0,
) -> list[np.ndarray]:
    """Return query, key and value of 8 features, heads first."""
    rng = np.random.default_rng(seed)
    kv_len = q_len if kv_len is None else kv_len
    shapes = [(*batch, heads[0], q_len, 8), *[(*batch, heads[1], kv_len, 8)] * 2]
    return [rng.standard_normal(shape) for shape in shapes]


def explain(backend: Backend, *arrays: Any, dtype: str = "float32", **arguments: Any) -> Any:
    return backend.explain(*arrays, dtype=dtype, **arguments)


def counted(backend: Backend, *arrays: Any, **rules: Any) -> int:
    """Return how many scores a call computes, from the jobs that its kernels are given, key by key."""
    scores: list[int] = []

    def watched(compute: Any) -> Any:
        def count(call: Any, query: Any, key: Any, value: Any, planned: Any, *rest: Any, **options: Any) -> Any:
            done = list(planned)
            for job in done:
                entries, heads = range(call.batch[0])[job.batch], range(call.num_heads)[job.heads]
                for tile in range(job.tiles):
                    queries = range(call.q_len)[job.q_start + tile * job.rows :][: job.rows]
                    keys = range(call.kv_len)[job.kv_start + tile * job.rows :][: job.kv_len]
                    scores.append(len(entries) * len(heads) * len(queries) * len(keys))
            return compute(call, query, key, value, done, *rest, **options)

        return count

    with contextlib.ExitStack() as stack:
        for path in KERNELS[backend.framework.name]:
            module, _, name = path.rpartition(".")
            stack.enter_context(mock.patch(path, watched(getattr(importlib.import_module(module), name))))
        backend.attention(*arrays, dtype="float32", **rules)
    return sum(scores)


def visible(q_len: int, kv_len: int, *, q_offset: int, is_causal: bool = True, window_size: int | None = None) -> int:
    """Return how many pairs of a query and a key causality and the window leave, one by one."""
    back = np.arange(q_len)[:, None] + q_offset - np.arange(kv_len)
    limit = math.inf if window_size is None else window_size
    return int((((back >= 0) | (not is_causal)) & (np.abs(back) <= limit)).sum())


# --- What would run ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", without_jax(LIBRARIES))
def test_printed_it_is_a_few_lines(backend: Backend) -> None:
    query, key, value = np.zeros((3, 2, 3, 8, 4))
    value[1, 2, 7, 3] = -5.0
    slopes = np.asarray([[1.0, 0.0, 8.0], [1.0, 0.0, 0.5]])
    lines = str(explain(backend, query, key, value, slopes, tolerance=0.25)).splitlines()
    assert [x for x in lines if not x.startswith("  not ")] == [
        "implementation: tiled",
        "tolerance: 0.25, which moves the result by at most 2.5",
        "scores: 384 computed, 177.8% of the 216 visible",
        "horizons, in tokens, of the heads: 2 all 5",
    ]
    assert str(explain(backend, query, key, value, 3, window_size=3)).endswith("of the heads: 4 4 4")


@pytest.mark.parametrize(("backend", "implementation"), IMPLEMENTATIONS)
def test_the_implementation_named_is_explained(backend: Backend, implementation: str) -> None:
    query, key, value = tensors(130)
    result = explain(backend, query, key, value, implementation=implementation, dtype="bfloat16")
    assert isinstance(result, importlib.import_module(backend.module).Explanation)
    assert result.implementation == implementation
    assert implementation != "tiled" or explain(backend, query, key, value).implementation == "tiled"  # by default
    assert set(result.refusals) <= {"tpu"}
    approximate = result.implementation in ("tiled", "flex")
    assert result.tolerance == (2.0**-8 if approximate else 0.0)
    assert result.error_bound == pytest.approx(2 * result.tolerance * np.abs(value).max(), rel=2.0**-8)
    assert result.horizons.shape == (2, 4)
    assert result.horizons.dtype == np.float64
    if not approximate:
        assert np.isinf(result.horizons).all()
        assert result.scores_computed == 2 * 4 * 130 * 130
    assert result.scores_visible == 2 * 4 * 130 * 131 // 2
    assert result.share == result.scores_computed / result.scores_visible
    with pytest.raises(FrozenInstanceError):
        result.tolerance = 1.0


@EACH
def test_the_tolerance_is_the_rounding_error_of_the_dtype_or_what_was_asked_for(backend: Backend) -> None:
    inputs = tensors()
    dtypes = {"torch": ["float64", "float32", "float16", "bfloat16"], "mlx": ["float32", "float16", "bfloat16"]}
    for dtype in dtypes.get(backend.framework.name, ["float16"]):
        assert explain(backend, *inputs, dtype=dtype).tolerance == UNIT_ROUNDOFF[dtype]
    assert explain(backend, *inputs, tolerance=1e-3).tolerance == 1e-3
    assert explain(backend, *inputs, tolerance=1e-3, implementation="dense").tolerance == 0


@EACH
@pytest.mark.parametrize(
    "arguments",
    [
        {"implementation": "fast"},
        {"implementation": 3},
        {"slopes": 5},
        {"slopes": np.ones(3)},
        {"slopes": -np.ones(4)},
        {"window_size": -1},
        {"tolerance": math.nan},
        {"scale": math.inf},
        {"is_causal": 1},
        {"future_slopes": np.ones(4)},
        {"q_offset": 1.5},
        {"mask": np.ones((9, 9))},
        {"mask": np.ones((5, 9), bool)},
        {"segment_ids": np.zeros((2, 5), np.int32)},
        {"layout": ("length", "heads", "head_dim")},
        {"xp": np},
        {"tolerence": 0.0},
        {"training": "no"},
        {"max_key_norm": math.nan},
        {"max_key_norm": np.ones((2, 4))},
        {"key": np.zeros((2, 3, 9, 8))},
        {"value": np.zeros((2, 2, 8, 8))},
        {"query": np.zeros((2, 4, 9, 8), np.int32)},
        {"query": "another library's"},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_bad_arguments_raise_what_the_call_raises(backend: Backend, arguments: dict[str, Any]) -> None:
    module, (query, key, value) = importlib.import_module(backend.module), tensors()
    inputs = {name: x.astype(np.float32) for name, x in (("query", query), ("key", key), ("value", value))} | arguments
    inputs = {
        name: backend.framework.array(backend.layout(x) if x.ndim == 4 else x) if isinstance(x, np.ndarray) else x
        for name, x in inputs.items()
    }
    if "query" in arguments and isinstance(arguments["query"], str):
        inputs["query"] = backend.layout(query.astype(np.float32))
    with pytest.raises((TypeError, ValueError)) as expected:
        module.attention(**inputs)
    with pytest.raises(expected.type) as actual:
        module.explain(**inputs)
    assert str(actual.value) == str(expected.value) or "unexpected keyword argument" in str(actual.value)


@pytest.mark.parametrize(
    ("backend", "implementation"), [x for x in IMPLEMENTATIONS if x.values[1] in ("flex", "folded")]
)
@pytest.mark.parametrize("lengths", [(0, 0), (0, 5), (5, 0)])
def test_nothing_to_compute_needs_no_implementation_that_can(
    backend: Backend, implementation: str, lengths: tuple[int, int]
) -> None:
    inputs, rules = (
        tensors(*lengths),
        {"is_causal": False, "dtype": "float64" if implementation == "flex" else "float32"},
    )
    assert replace(backend, implementation=implementation).attention(*inputs, **rules).shape == inputs[0].shape
    assert explain(backend, *inputs, implementation=implementation, **rules).implementation == "dense"


# --- How far back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "tolerance", "is_causal"), once_in_jax(LIBRARIES, [(0.25, False), (2.0**-24, True)])
)
def test_horizons_without_scores_are_the_cores(backend: Backend, tolerance: float, is_causal: bool) -> None:
    slopes = np.asarray([4.0, 0.5, 0.06, 0.0], np.float32)
    expected = alibi_core.horizon(slopes, 0.0, tolerance=tolerance, is_causal=is_causal)
    for length in (2000, 900):  # 900 keys are so few that a call measures nothing
        key = np.zeros((1, 4, length, 8))
        # Of the queries all are zero, so no score exceeds another; far from the first key every horizon is inside.
        result = explain(backend, key, key, key, slopes, tolerance=tolerance, is_causal=is_causal)
        assert np.array_equal(result.horizons[0], expected)
        assert result.share < 1 or length == 900


@IN_TILES
def test_horizons_grow_with_norms_as_the_cores_do(backend: Backend) -> None:
    query, key = np.zeros((2, 1, 1, 3000, 8))
    query[..., 0] = 6.0
    key[..., :1500, 0], key[..., 1500:, 0] = 2.0, -2.0
    # A query's own key scores -c, the best key scores c: the range between them is known exactly.
    score_range = 2 * 8**-0.5 * 6.0 * 2.0
    slopes = np.asarray([0.05], np.float32)
    result = explain(backend, query, key, key, slopes, tolerance=1e-3)
    expected = alibi_core.horizon(slopes, score_range, tolerance=1e-3).item()
    assert alibi_core.horizon(slopes, 0.0, tolerance=1e-3).item() < result.horizons.item() <= expected + 1
    # A mean of scores bounds a row from below, too, and can only tell more.
    decoded = explain(backend, query[:, :, -1:], key, key, slopes, tolerance=1e-3)
    assert decoded.horizons.item() == pytest.approx(expected, abs=1)


@IN_TILES
def test_a_query_that_needs_every_key_needs_all_however_few_it_is(backend: Backend) -> None:
    slopes, steeper = np.asarray([0.008], np.float32), np.asarray([0.035], np.float32)
    query, key, longer = (np.zeros((1, 1, n, 8)) for n in (1, 2000, 4000))
    horizon = alibi_core.horizon(slopes, 0.0).item()
    assert 2000 < horizon < 3999
    assert explain(backend, query, key, key, slopes).horizons.tolist() == [[math.inf]]
    assert explain(backend, query, longer, longer, slopes).horizons.tolist() == [[horizon]]
    # Of queries at positions 500 to 599, the last needs no key that is 600 tokens back: there is none.
    assert 550 < alibi_core.horizon(steeper, 0.0).item() < 600
    few = query.repeat(100, axis=2)
    some, earlier = (explain(backend, few, key, key, steeper, q_offset=offset) for offset in (500, 400))
    assert np.isfinite(some.horizons).all()
    assert np.isinf(earlier.horizons).all()


@pytest.mark.parametrize("backend", without_jax(LIBRARIES))
def test_a_heads_horizon_is_that_of_the_query_that_looks_farthest_back(backend: Backend) -> None:
    key, slopes = tensors(2000, batch=(1,), heads=(1, 1))[1], np.asarray([0.25], np.float32)
    nothing, one = np.zeros((2, 1, 1, 2000, 8))
    one[0, 0, 1300] = 5.0
    shortest, longer = (explain(backend, x, key, key, slopes).horizons.item() for x in (nothing, one))
    assert shortest == alibi_core.horizon(slopes, 0.0).item()
    assert 1.5 * shortest < longer < 1300


@pytest.mark.parametrize(("backend", "implementation"), [x for x in IMPLEMENTATIONS if "folded" not in x.id])
def test_a_window_is_a_horizon(backend: Backend, implementation: str) -> None:
    key, slopes = np.zeros((1, 2, 300, 8)), np.asarray([0.0, 8.0])
    result = explain(backend, key, key, key, slopes, window_size=20, implementation=implementation)
    # A key 20 tokens back is seen, one 21 back is not.
    assert result.horizons[0].tolist() == [21, 21 if implementation in ("sdpa", "dense") else 3]
    if implementation == "tiled":
        assert np.isinf(explain(backend, key, key, key, 2, window_size=299, tolerance=0.0).horizons).all()


@EACH
def test_no_query_behind_its_horizon_misses_what_it_needs(backend: Backend) -> None:
    query, key, value = tensors(1500, batch=(1,))
    key[0, 1, 100] = 30.0  # of which any query may need to know
    slopes = np.asarray([1.0, 0.25, 1.0, 0.0])
    result = explain(backend, query, key, value, slopes)
    distance = np.arange(1500)[:, None] - np.arange(1500)
    for head, horizon in enumerate(result.horizons[0].tolist()):
        scores = 8**-0.5 * (query[0, head] @ key[0, head // 2].T) - slopes[head] * distance
        scores = np.where(distance >= 0, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        behind = np.where(distance >= horizon, weights, 0).sum(axis=-1) / weights.sum(axis=-1)
        assert behind.max() <= result.tolerance
    assert (result.horizons[0, :2] < 200).all()
    assert result.horizons[0, 2] > result.horizons[0, 0] + 50  # of the same slope, over other keys


# --- How many scores -----------------------------------------------------------------------------------------------


@IN_TILES
@settings(max_examples=max(10, settings.default.max_examples // 2))
@given(
    lengths=st.sampled_from([(1, 1), (9, 9), (5, 300), (300, 70), (3, 1500), (17, 1100), (1100, 1100), (1300, 1030)]),
    batch=st.sampled_from([(), (1,), (2,), (2, 3)]),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (3, 1)]),
    rules=st.fixed_dictionaries(
        {
            "is_causal": st.booleans(),
            "window_size": st.sampled_from([None, None, 0, 6, 100]),
            "q_offset": st.sampled_from([None, None, 0, -3, 250]),
            "tolerance": st.sampled_from([None, 0.0, 0.1]),
        }
    ),
    known=st.sampled_from([None, 3.0, 50.0, "each"]),
    seed=st.integers(0, 99),
)
@example((1100, 1100), (2, 3), (4, 2), {}, "each", 0)
@example((700, 700), (2, 3), (4, 2), {}, None, 0)
@example((17, 1600), (2,), (4, 2), {}, 50.0, 0)
@example((1100, 1030), (), (3, 1), {"is_causal": False, "window_size": 6, "q_offset": -3, "tolerance": 0.1}, None, 0)
def test_scores_are_counted_as_they_are_computed(
    backend: Backend,
    lengths: tuple[int, int],
    batch: tuple[int, ...],
    heads: tuple[int, int],
    rules: dict[str, Any],
    known: float | str | None,
    seed: int,
) -> None:
    inputs = tensors(*lengths, batch=batch, heads=heads, seed=seed)
    slopes = np.asarray([1.0, 0.25, 4.0, 0.0, 0.5, 0.1])[: heads[0]]
    if known == "each":
        inputs[1] *= np.linspace(0.1, 5.0, math.prod(batch)).reshape(*batch, 1, 1, 1)
        known = (1.1 * np.linalg.norm(inputs[1], axis=-1).max(axis=-1)).astype(np.float32)
    if backend.framework.name == "torch":
        rules = rules | {"max_key_norm": known}
    result = explain(backend, *inputs, slopes, **rules)
    assert result.implementation == "tiled"
    assert result.scores_computed == counted(backend, *inputs, slopes, **rules)
    seen = {name: rules[name] for name in ("is_causal", "window_size") if name in rules}
    offset = rules.get("q_offset")
    pairs = visible(*lengths, q_offset=lengths[1] - lengths[0] if offset is None else offset, **seen)
    assert result.scores_visible == pairs * math.prod(batch) * heads[0]
    assert result.horizons.shape == (math.prod(batch), heads[0])


@IN_TILES
def test_each_batch_entry_has_its_own_slopes_offset_mask_and_segments(backend: Backend) -> None:
    query, key, value = tensors(1100, 1200, batch=(2, 2), heads=(2, 1))
    slopes = np.asarray([[[2.0, 0.0], [1.0, 1.0]], [[0.0, 0.0], [0.5, 4.0]]])
    ids = (np.arange(1200) // np.asarray([[200, 300], [400, 1200]])[..., None]).astype(np.int32)
    rules = {
        "q_offset": np.asarray([[0, 100], [50, 100]], np.int32),
        "segment_ids": (ids[..., :1100], ids),
        "mask": np.ones((2, 2, 1, 1, 1200), bool),
    }
    result = explain(backend, query, key, value, slopes, **rules)
    assert result.scores_computed == counted(backend, query, key, value, slopes, **rules)
    assert result.scores_visible == 2 * sum(visible(1100, 1200, q_offset=x) for x in (0, 100, 50, 100))
    assert np.isinf(result.horizons).tolist() == [[False, True], [False, False], [True, True], [False, False]]


NOTHING = [*itertools.product([(), (2,), (2, 3)], [(0, 0), (0, 5), (5, 0)]), ((2, 0), (9, 9))]


@EACH
@pytest.mark.parametrize(("batch", "lengths"), NOTHING)
def test_nothing_is_explained_as_nothing(backend: Backend, batch: tuple[int, ...], lengths: tuple[int, int]) -> None:
    inputs = tensors(*lengths, batch=batch)
    result = explain(backend, *inputs)
    assert result.implementation == "dense"
    assert (result.scores_visible, result.scores_computed, result.share, result.error_bound) == (0, 0, 0.0, 0.0)
    assert result.horizons.tolist() == [[0.0] * 4] * math.prod(batch)
    assert "scores: 0 computed, 0.0% of the 0 visible" in str(result)
    assert str(result).endswith("of the heads: none") == (0 in batch)


# --- Which keys ----------------------------------------------------------------------------------------------------


@EACH
def test_spans_hold_the_keys_that_blocks_of_queries_need(backend: Backend) -> None:
    query, key, value = tensors(1100, 1200, batch=(2,))
    slopes = np.asarray([1.0, 0.25, 0.01, 0.0])
    spans = explain(backend, query, key, value, slopes, q_offset=np.asarray([100, 0], np.int32)).spans
    assert (spans.edges[0], spans.edges[-1], spans.kv_len) == (0, 1100, 1200)
    distance = (np.asarray([100, 0])[:, None] + np.arange(1100))[..., None] - np.arange(1200)
    scores = 8**-0.5 * query @ key.repeat(2, axis=1).swapaxes(-1, -2) - slopes[:, None, None] * distance[:, None]
    weights = np.exp(np.where(distance[:, None] >= 0, scores, -np.inf))
    weights /= weights.sum(axis=-1, keepdims=True)
    for block, (start, stop) in enumerate(zip(spans.edges[:-1], spans.edges[1:], strict=True)):
        assert spans.visible[:, block].tolist() == [[0, 100 + stop], [0, stop]]
        for entry, head in np.ndindex(2, 4):
            first, last = spans.needed[entry, head, block]
            assert 0 <= first < last <= spans.visible[entry, block, 1]
            seen = weights[entry, head, start:stop]
            assert seen[:, first:last].sum(axis=-1).min() > 1 - 1e-6
    assert (spans.needed[:, 0, -1, 0] > 500).all()
    assert (spans.needed[:, 3, :, 0] == 0).all()
