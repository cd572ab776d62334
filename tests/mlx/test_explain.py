"""What ``alibi_mlx.explain`` says is what the call does: which implementation, which scores, how far back, and why."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

mx = pytest.importorskip("mlx.core", reason="mlx is not installed")

import alibi_core  # noqa: E402
from alibi_mlx import (  # noqa: E402
    Explanation,
    _tiled,
    attention,
    explain,
)
from alibi_mlx._tiled import plan as _plan  # noqa: E402


def tensors(
    q_len: int = 9,
    kv_len: int | None = None,
    *,
    batch: tuple[int, ...] = (2,),
    heads: tuple[int, int] = (4, 2),
    dtype: Any = mx.float32,
    seed: int = 0,
) -> list[Any]:
    """Return query, key and value of 8 features."""
    rng = np.random.default_rng(seed)
    kv_len = q_len if kv_len is None else kv_len
    shapes = [(*batch, heads[0], q_len, 8), *[(*batch, heads[1], kv_len, 8)] * 2]
    return [mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype) for shape in shapes]


def counted(*arguments: Any, **rules: Any) -> int:
    """Return how many scores a call computes, from the jobs that its tiles are made of. Nothing is evaluated."""
    scores = []

    def watched(call: Any, query: Any, key: Any, value: Any, jobs: Any, head_dim: int) -> Any:
        for job in jobs:
            entries, heads = range(call.batch[0])[job.batch], range(call.num_heads)[job.heads]
            for tile in range(job.tiles):
                queries = range(call.q_len)[job.q_start + tile * job.rows :][: job.rows]
                keys = range(call.kv_len)[job.kv_start + tile * job.rows :][: job.kv_len]
                scores.append(len(entries) * len(heads) * len(queries) * len(keys))
        return mx.zeros(query.shape, query.dtype)

    with mock.patch.object(_tiled, "forward", watched):
        attention(*arguments, **rules)
    return sum(scores)


def visible(q_len: int, kv_len: int, *, q_offset: int, is_causal: bool = True, window_size: int | None = None) -> int:
    """Return how many pairs of a query and a key causality and the window leave, one by one."""
    pairs = ((i + q_offset - j) for i in range(q_len) for j in range(kv_len))
    limit = math.inf if window_size is None else window_size
    return sum((back >= 0 or not is_causal) and abs(back) <= limit for back in pairs)


# What would run


def test_printed_it_is_a_few_lines():
    query, key = mx.zeros((2, 2, 3, 8, 4))
    value = np.zeros((2, 3, 8, 4), np.float32)
    value[1, 2, 7, 3] = -5.0
    slopes = mx.array([[1.0, 0.0, 8.0], [1.0, 0.0, 0.5]])
    assert str(explain(query, key, mx.array(value), slopes, tolerance=0.25, window_size=7)).splitlines() == [
        "implementation: tiled",
        "  not folded: it takes no mask, segment_ids or window_size",
        "tolerance: 0.25, which moves the result by at most 2.5",
        "scores: 384 computed, 177.8% of the 216 visible",
        "horizons, in tokens, of the heads: 2 all 5",
    ]


def test_float64_is_dense_and_the_others_say_why_they_are_not():
    with mx.stream(mx.cpu):
        inputs = [x.astype(mx.float64) for x in tensors(8, heads=(3, 3))]
        result = explain(*inputs, window_size=3)
    assert str(result).splitlines() == [
        "implementation: dense",
        "  not tiled: it cannot compute in float64 (MLX's attention takes its scale and exponential in float32)",
        "  not folded: it cannot compute in float64 (MLX's attention takes its scale and exponential in float32)",
        "tolerance: 0, which moves the result by at most 0",
        "scores: 384 computed, 246.2% of the 156 visible",
        "horizons, in tokens, of the heads: 4 4 4",
    ]


@pytest.mark.parametrize("implementation", [None, "tiled", "folded", "dense"])
def test_the_implementation_named_is_explained(implementation):
    query, key, value = tensors(130, dtype=mx.bfloat16)
    result = explain(query, key, value, implementation=implementation)
    assert isinstance(result, Explanation)
    assert result.implementation == (implementation or "tiled")
    assert result.refusals == {}
    tiled = result.implementation == "tiled"
    assert result.tolerance == (2.0**-8 if tiled else 0.0)
    assert result.error_bound == pytest.approx(2 * result.tolerance * mx.abs(value).max().item())
    assert result.horizons.shape == (2, 4)
    assert result.horizons.dtype == np.float64
    if not tiled:
        assert np.isinf(result.horizons).all()
        assert result.scores_computed == 2 * 4 * 130 * 130
    assert result.scores_visible == 2 * 4 * 130 * 131 // 2
    assert result.share == result.scores_computed / result.scores_visible
    with pytest.raises(FrozenInstanceError):
        result.tolerance = 1.0


@pytest.mark.parametrize(("dtype", "roundoff"), [(mx.float32, 2**-24), (mx.float16, 2**-11), (mx.bfloat16, 2**-8)])
def test_the_tolerance_is_the_rounding_error_of_the_dtype_or_what_was_asked_for(dtype, roundoff):
    inputs = tensors(dtype=dtype)
    assert explain(*inputs).tolerance == roundoff
    assert explain(*inputs, tolerance=1e-3).tolerance == 1e-3
    assert explain(*inputs, tolerance=1e-3, implementation="dense").tolerance == 0


@pytest.mark.parametrize("name", ["tiled", "folded"])
def test_what_is_refused_raises_what_the_call_raises(name):
    inputs, rules = tensors(dtype=mx.bfloat16), {"window_size": 3}
    if name == "tiled":
        inputs = [x.astype(mx.float64, stream=mx.cpu) for x in inputs]
    with mx.stream(mx.cpu):
        for function in (attention, explain):
            with pytest.raises(NotImplementedError, match=f"implementation '{name}' .*'dense' can run this call"):
                function(*inputs, implementation=name, **rules)
        assert name in explain(*inputs, **rules).refusals


def test_training_is_an_argument_of_the_call(monkeypatch):
    inputs = tensors(dtype=mx.bfloat16)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr("alibi_mlx._metal.routes.has_kernels_for_72_and_96", lambda: True)
    assert explain(*inputs).implementation == "folded"
    assert explain(*inputs, training=True).implementation == "tiled"
    with pytest.raises(TypeError, match="training must be"):
        explain(*inputs, training=1)


def test_it_leaves_the_tensors_as_they_are_and_stands_within_a_gradient():
    inputs = tensors(1100, batch=(1,), heads=(1, 1))
    before = [np.array(x) for x in inputs]
    said = []

    def function(query):
        said.append(explain(query, *inputs[1:]))
        return (query * query).sum()

    gradient = mx.grad(function)(inputs[0])
    assert np.array_equal(np.array(gradient), 2 * before[0])
    assert all(np.array_equal(x, y) for x, y in zip(map(np.array, inputs), before, strict=True))
    assert np.array_equal(said[0].horizons, explain(*inputs).horizons)


@pytest.mark.parametrize("transform", [mx.compile, mx.vmap])
def test_what_has_no_values_to_measure_is_refused(transform):
    query, key, value = tensors(5)
    key, value = (key, value) if transform is mx.compile else (key[0], value[0])
    with pytest.raises(ValueError, match="query and key must hold values, which are measured; got traced arrays"):
        transform(lambda query: explain(query, key, value).horizons)(query)


@pytest.mark.parametrize(
    "arguments",
    [
        {"implementation": "fast"},
        {"implementation": 3},
        {"slopes": 5},
        {"slopes": mx.ones(3)},
        {"slopes": -mx.ones(4)},
        {"window_size": -1},
        {"tolerance": -1.0},
        {"tolerance": math.nan},
        {"scale": math.inf},
        {"is_causal": 1},
        {"training": "no"},
        {"future_slopes": mx.ones(4)},
        {"q_offset": 1.5},
        {"mask": mx.ones((9, 9))},
        {"mask": mx.ones((5, 9), mx.bool_)},
        {"segment_ids": mx.zeros((2, 5), mx.int32)},
        {"layout": ("length", "heads", "head_dim")},
        {"xp": mx},
        {"tolerence": 0.0},
        {"key": mx.zeros((2, 3, 9, 8))},
        {"value": mx.zeros((2, 2, 8, 8))},
        {"query": mx.zeros((2, 4, 9, 8), mx.float16)},
        {"query": mx.zeros((2, 4, 9, 8), mx.int32)},
        {"query": np.zeros((2, 4, 9, 8), np.float32)},
    ],
)
def test_bad_arguments_raise_what_the_call_raises(arguments):
    arguments = dict(zip(("query", "key", "value"), tensors(), strict=True)) | arguments
    with pytest.raises((TypeError, ValueError)) as expected:
        attention(**arguments)
    with pytest.raises(expected.type) as actual:
        explain(**arguments)
    assert str(actual.value) == str(expected.value) or "unexpected keyword argument" in str(actual.value)


# How far back


@pytest.mark.parametrize("tolerance", [2.0**-24, 1e-3, 0.25])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("length", [2000, 900])  # 900 keys are so few that the call itself measures nothing
def test_horizons_without_scores_are_the_cores(tolerance, is_causal, length):
    key = mx.zeros((1, 4, length, 8))
    slopes = np.asarray([4.0, 0.5, 0.06, 0.0], np.float32)
    # Of the queries all are zero, so no score exceeds another; far from the first key every horizon is inside.
    result = explain(key, key, key, mx.array(slopes), tolerance=tolerance, is_causal=is_causal)
    expected = alibi_core.horizon(slopes, 0.0, tolerance=tolerance, is_causal=is_causal)
    assert np.array_equal(result.horizons[0], expected)
    assert (result.share < 1) == (length > 1024)


def test_a_query_that_needs_every_key_needs_all_however_few_it_is():
    slopes = mx.array([0.008])
    query, key, longer = mx.zeros((1, 1, 1, 8)), mx.zeros((1, 1, 2000, 8)), mx.zeros((1, 1, 4000, 8))
    horizon = alibi_core.horizon(np.array(slopes), 0.0).item()
    assert 2000 < horizon < 3999
    assert explain(query, key, key, slopes).horizons.tolist() == [[math.inf]]
    assert explain(query, longer, longer, slopes).horizons.tolist() == [[horizon]]


def test_a_heads_horizon_is_that_of_the_query_that_looks_farthest_back():
    key, slopes = tensors(2000, batch=(1,), heads=(1, 1))[1], mx.array([0.25])
    nothing, one = np.zeros((2, 1, 1, 2000, 8), np.float32)
    one[0, 0, 1300] = 5.0
    shortest, longer = (explain(mx.array(x), key, key, slopes).horizons.item() for x in (nothing, one))
    assert shortest == alibi_core.horizon(np.array(slopes), 0.0).item()
    assert 1.5 * shortest < longer < 1300


@pytest.mark.parametrize("implementation", ["tiled", "dense"])
def test_a_window_is_a_horizon(implementation):
    key = mx.zeros((1, 2, 300, 8))
    result = explain(key, key, key, mx.array([0.0, 8.0]), window_size=20, implementation=implementation)
    # A key 20 tokens back is seen, one 21 back is not.
    assert result.horizons[0].tolist() == [21, 3 if implementation == "tiled" else 21]
    assert np.isinf(explain(key, key, key, 2, window_size=299, tolerance=0.0).horizons).all()


def test_no_query_behind_its_horizon_misses_what_it_needs():
    query, key, value = tensors(1500, batch=(1,))
    keys = np.array(key)
    keys[0, 1, 100] = 30.0  # of which any query may need to know
    slopes = np.asarray([1.0, 0.25, 1.0, 0.0])
    result = explain(query, mx.array(keys), value, mx.array(slopes.astype(np.float32)))
    distance = np.arange(1500)[:, None] - np.arange(1500)
    for head, horizon in enumerate(result.horizons[0].tolist()):
        scores = 8**-0.5 * (np.array(query)[0, head].astype(float) @ keys[0, head // 2].T) - slopes[head] * distance
        scores = np.where(distance >= 0, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        behind = np.where(distance >= horizon, weights, 0).sum(-1) / weights.sum(-1)
        assert behind.max() <= result.tolerance
    assert (result.horizons[0, :2] < 200).all()


# How many scores


@given(
    lengths=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    batch=st.sampled_from([(), (1,), (2,), (2, 3)]),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2), (6, 6)]),
    is_causal=st.booleans(),
    window_size=st.none() | st.integers(0, 400),
    q_offset=st.none() | st.integers(-400, 400),
    tolerance=st.sampled_from([None, 0.0, 1e-3]),
    short=st.sampled_from([0, 1024]),
    seed=st.integers(0, 99),
)
@example((700, 700), (2, 3), (4, 2), True, None, None, None, 0, 0)
@example((700, 700), (2, 3), (4, 2), True, None, None, None, 1024, 0)
@example((4, 600), (2,), (4, 2), True, None, None, None, 0, 0)
@example((300, 70), (), (3, 1), False, 6, -3, 0.1, 0, 0)
def test_scores_are_counted_as_they_are_computed(
    lengths, batch, heads, is_causal, window_size, q_offset, tolerance, short, seed
):
    inputs = tensors(*lengths, batch=batch, heads=heads, seed=seed)
    slopes = mx.array([1.0, 0.25, 4.0, 0.0, 0.5, 0.1])[: heads[0]]
    rules = {"is_causal": is_causal, "window_size": window_size, "tolerance": tolerance, "q_offset": q_offset}
    with mock.patch.object(_plan, "SHORT", short):
        result = explain(*inputs, slopes, **rules)
        assert result.implementation == "tiled"
        assert result.scores_computed == counted(*inputs, slopes, **rules)
    offset = lengths[1] - lengths[0] if q_offset is None else q_offset
    pairs = visible(*lengths, q_offset=offset, is_causal=is_causal, window_size=window_size)
    assert result.scores_visible == pairs * math.prod(batch) * heads[0]
    assert result.horizons.shape == (math.prod(batch), heads[0])


def test_each_batch_entry_has_its_own_slopes_offset_mask_and_segments():
    query, key, value = tensors(1100, 1200, batch=(2, 2), heads=(2, 1))
    slopes = mx.array([[[2.0, 0.0], [1.0, 1.0]], [[0.0, 0.0], [0.5, 4.0]]])
    ids = mx.array((np.arange(1200) // np.asarray([[200, 300], [400, 1200]])[..., None]).astype(np.int32))
    rules = {
        "q_offset": mx.array([[0, 100], [50, 100]]),
        "segment_ids": (ids[..., :1100], ids),
        "mask": mx.ones((2, 2, 1, 1, 1200), mx.bool_),
    }
    result = explain(query, key, value, slopes, **rules)
    assert result.scores_computed == counted(query, key, value, slopes, **rules)
    assert result.scores_visible == 2 * sum(visible(1100, 1200, q_offset=x) for x in (0, 100, 50, 100))
    assert np.isinf(result.horizons).tolist() == [[False, True], [False, False], [True, True], [False, False]]
    assert result.share < 1


def test_the_share_falls_with_the_length():
    slopes = mx.array([2.0, 1.0])
    shares = [explain(*tensors(n, batch=(), heads=(2, 2)), slopes).share for n in (16, 2048, 8192)]
    assert shares[0] > 1 > shares[1] > shares[2]
    assert shares[2] < 0.1


@pytest.mark.parametrize("batch", [(), (1,), (2,), (2, 0), (2, 3)])
@pytest.mark.parametrize("lengths", [(0, 0), (0, 5), (5, 0)])
@pytest.mark.parametrize("implementation", [None, "folded"])
def test_nothing_is_explained_as_nothing(batch, lengths, implementation):
    inputs = tensors(*lengths, batch=batch)
    assert attention(*inputs, implementation=implementation).shape == inputs[0].shape
    result = explain(*inputs, implementation=implementation)
    assert result.implementation == "dense"
    assert (result.scores_visible, result.scores_computed, result.share, result.error_bound) == (0, 0, 0.0, 0.0)
    assert result.horizons.tolist() == [[0.0] * 4] * math.prod(batch)
    assert "scores: 0 computed, 0.0% of the 0 visible" in str(result)


def test_no_batch_entry_at_all():
    result = explain(*tensors(batch=(2, 0)))
    assert result.horizons.shape == (0, 4)
    assert str(result).endswith("of the heads: none")
