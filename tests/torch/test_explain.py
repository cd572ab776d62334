"""What ``explain`` says is what the call does: which implementation, which scores, how far back, and why."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import alibi_core  # noqa: E402
import alibi_torch  # noqa: E402
from alibi_torch import Explanation, attention, explain  # noqa: E402
from alibi_torch._tiled import kernels as _tile_kernels  # noqa: E402
from alibi_torch._tiled import plan as _tile_plan  # noqa: E402

Tensor = torch.Tensor


def tensors(
    q_len: int = 9,
    kv_len: int | None = None,
    *,
    batch: tuple[int, ...] = (2,),
    heads: tuple[int, int] = (4, 2),
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> list[Tensor]:
    """Return query, key and value of 8 features."""
    generator = torch.Generator().manual_seed(seed)
    kv_len = q_len if kv_len is None else kv_len
    shapes = [(*batch, heads[0], q_len, 8), *[(*batch, heads[1], kv_len, 8)] * 2]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def counted(*arguments: Any, **rules: Any) -> int:
    """Return how many scores a call computes, from the jobs that its kernels are given, key by key."""
    scores = []
    compute = _tile_kernels.forward

    def watched(call: Any, query: Tensor, key: Tensor, value: Tensor, planned: Iterator[Any], *rest: Any) -> Any:
        done = list(planned)
        for job in done:
            entries, heads = range(call.batch[0])[job.batch], range(call.num_heads)[job.heads]
            for tile in range(job.tiles):
                queries = range(call.q_len)[job.q_start + tile * job.rows :][: job.rows]
                keys = range(call.kv_len)[job.kv_start + tile * job.rows :][: job.kv_len]
                scores.append(len(entries) * len(heads) * len(queries) * len(keys))
        return compute(call, query, key, value, iter(done), *rest)

    with mock.patch.object(_tile_kernels, "forward", watched):
        attention(*arguments, **rules)
    return sum(scores)


def visible(q_len: int, kv_len: int, *, q_offset: int, is_causal: bool = True, window_size: int | None = None) -> int:
    """Return how many pairs of a query and a key causality and the window leave, one by one."""
    pairs = ((i + q_offset - j) for i in range(q_len) for j in range(kv_len))
    limit = math.inf if window_size is None else window_size
    return sum((back >= 0 or not is_causal) and abs(back) <= limit for back in pairs)


# --- What would run ------------------------------------------------------------------------------------------------


def test_printed_it_is_a_few_lines() -> None:
    query, key, value = torch.zeros(3, 2, 3, 8, 4).unbind()
    value[1, 2, 7, 3] = -5.0
    slopes = torch.tensor([[1.0, 0.0, 8.0], [1.0, 0.0, 0.5]])
    assert str(explain(query, key, value, slopes, tolerance=0.25)).splitlines() == [
        "implementation: tiled",
        "tolerance: 0.25, which moves the result by at most 2.5",
        "scores: 384 computed, 177.8% of the 216 visible",
        "horizons, in tokens, of the heads: 2 all 5",
    ]
    text = str(explain(query.double(), key.double(), value.double(), 3, implementation="sdpa", window_size=3))
    assert text.splitlines() == [
        "implementation: sdpa",
        "  not flex: it must be given float32, float16 or bfloat16, got torch.float64",
        "tolerance: 0, which moves the result by at most 0",
        "scores: 384 computed, 246.2% of the 156 visible",
        "horizons, in tokens, of the heads: 4 4 4",
    ]


@pytest.mark.parametrize("implementation", [None, "tiled", "flex", "sdpa", "dense"])
def test_the_implementation_named_is_explained(implementation: str | None) -> None:
    query, key, value = tensors(130)
    result = explain(query, key, value, implementation=implementation)
    assert result.implementation == (implementation or "tiled")
    assert result.refusals == {}
    approximate = result.implementation in ("tiled", "flex")
    assert result.tolerance == (2.0**-24 if approximate else 0.0)
    assert result.error_bound == pytest.approx(2 * result.tolerance * value.abs().max().item())
    assert result.horizons.shape == (2, 4)
    assert result.horizons.dtype == torch.float64
    if not approximate:
        assert result.horizons.isinf().all()
        assert result.scores_computed == 2 * 4 * 130 * 130
    assert result.scores_visible == 2 * 4 * 130 * 131 // 2
    assert result.share == result.scores_computed / result.scores_visible
    with pytest.raises(FrozenInstanceError):
        result.tolerance = 1.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_tolerance_is_the_rounding_error_of_the_dtype_or_what_was_asked_for(dtype: torch.dtype) -> None:
    inputs = tensors(dtype=dtype)
    assert explain(*inputs).tolerance == torch.finfo(dtype).eps / 2
    assert explain(*inputs, tolerance=1e-3).tolerance == 1e-3
    assert explain(*inputs, tolerance=1e-3, implementation="dense").tolerance == 0


def test_refusals_say_why_not() -> None:
    query, key, value = tensors()
    with_gradients = query.clone().requires_grad_()
    assert explain(with_gradients, key, value).refusals == {"flex": "has no gradients on a CPU"}
    slopes = torch.rand(4, requires_grad=True)
    assert explain(query, key, value, slopes).refusals == {"flex": "has no gradients on a CPU"}
    with torch.no_grad():
        assert explain(with_gradients, key, value).refusals == {}
    double = [x.double() for x in (query, key, value)]
    assert explain(*double).refusals == {"flex": "must be given float32, float16 or bfloat16, got torch.float64"}
    for inputs in ((with_gradients, key, value), double):
        for function in (attention, explain):
            with pytest.raises(NotImplementedError, match="implementation 'flex' .*'tiled' and 'sdpa' and 'dense' can"):
                function(*inputs, implementation="flex")


def test_it_changes_nothing_and_records_no_gradient() -> None:
    inputs = [x.requires_grad_() for x in tensors(1100)]
    before = [x.detach().clone() for x in inputs]
    result = explain(*inputs)
    assert not result.horizons.requires_grad
    assert all(torch.equal(x, y) and x.grad is None for x, y in zip(inputs, before, strict=True))


def test_what_has_no_values_to_measure_is_refused() -> None:
    inputs = [x.to("meta") for x in tensors()]
    assert attention(*inputs).is_meta
    with pytest.raises(ValueError, match="query, key and value must hold values, which are measured; got .* on meta"):
        explain(*inputs)
    with pytest.raises(NotImplementedError, match="implementation 'flex' runs on cuda and cpu, got meta"):
        explain(*inputs, implementation="flex")


@pytest.mark.parametrize(
    "arguments",
    [
        {"implementation": "fast"},
        {"implementation": 3},
        {"slopes": 5},
        {"slopes": torch.ones(3)},
        {"slopes": -torch.ones(4)},
        {"window_size": -1},
        {"tolerance": -1.0},
        {"tolerance": math.nan},
        {"scale": math.inf},
        {"is_causal": 1},
        {"future_slopes": torch.ones(4)},
        {"q_offset": 1.5},
        {"mask": torch.ones(9, 9)},
        {"mask": torch.ones(5, 9, dtype=torch.bool)},
        {"segment_ids": torch.zeros(2, 5, dtype=torch.int32)},
        {"max_key_norm": -1.0},
        {"max_key_norm": math.nan},
        {"max_key_norm": "8"},
        {"max_key_norm": torch.ones(2, 4)},
        {"max_key_norm": torch.ones(2, 2, dtype=torch.int32)},
        {"layout": ("length", "heads", "head_dim")},
        {"xp": torch},
        {"tolerence": 0.0},
        {"key": torch.zeros(2, 3, 9, 8)},
        {"value": torch.zeros(2, 2, 8, 8)},
        {"query": torch.zeros(2, 4, 9, 8, dtype=torch.float16)},
        {"query": torch.zeros(2, 4, 9, 8, dtype=torch.int32)},
        {"query": np.zeros((2, 4, 9, 8))},
    ],
)
def test_bad_arguments_raise_what_the_call_raises(arguments: dict[str, Any]) -> None:
    arguments = dict(zip(("query", "key", "value"), tensors(), strict=True)) | arguments
    with pytest.raises((TypeError, ValueError)) as expected:
        attention(**arguments)
    with pytest.raises(expected.type) as actual:
        explain(**arguments)
    assert str(actual.value) == str(expected.value) or "unexpected keyword argument" in str(actual.value)


# --- How far back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tolerance", [2.0**-24, 1e-3, 0.25])
@pytest.mark.parametrize("is_causal", [True, False])
def test_horizons_without_scores_are_the_cores(tolerance: float, is_causal: bool) -> None:
    key = torch.zeros(1, 4, 2000, 8)
    slopes = torch.tensor([4.0, 0.5, 0.03, 0.0])
    # Of the queries all are zero, so no score exceeds another; far from the first key every horizon is inside.
    result = explain(key, key, key, slopes, tolerance=tolerance, is_causal=is_causal)
    expected = alibi_core.horizon(slopes, 0.0, tolerance=tolerance, is_causal=is_causal).double()
    assert torch.equal(result.horizons[0], expected)
    assert result.share < 1


def test_horizons_grow_with_norms_as_the_cores_do() -> None:
    query, key = torch.zeros(2, 1, 1, 3000, 8).unbind()
    query[..., 0] = 6.0
    key[..., :1500, 0], key[..., 1500:, 0] = 2.0, -2.0
    # A query's own key scores -c, the best key scores c: the range between them is known exactly.
    score_range = 2 * 8**-0.5 * 6.0 * 2.0
    slopes = torch.tensor([0.05])
    result = explain(query, key, key, slopes, tolerance=1e-3)
    expected = alibi_core.horizon(slopes, score_range, tolerance=1e-3).item()
    assert alibi_core.horizon(slopes, 0.0, tolerance=1e-3).item() < result.horizons.item() <= expected + 1
    # A mean of scores bounds a row from below, too, and can only tell more.
    decoded = explain(query[:, :, -1:], key, key, slopes, tolerance=1e-3)
    assert decoded.horizons.item() == pytest.approx(expected, abs=1)


def test_a_query_that_needs_every_key_needs_all_however_few_it_is() -> None:
    slopes = torch.tensor([0.008])
    query, key = torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 2000, 8)
    horizon = alibi_core.horizon(slopes, 0.0).item()
    assert 2000 < horizon < 3999
    assert explain(query, key, key, slopes).horizons.tolist() == [[math.inf]]
    longer = torch.zeros(1, 1, 4000, 8)
    assert explain(query, longer, longer, slopes).horizons.tolist() == [[horizon]]
    # Of queries at positions 500 to 599, the last needs no key that is 600 tokens back: there is none.
    some = explain(query.expand(1, 1, 100, 8), key, key, torch.tensor([0.035]), q_offset=500)
    assert 550 < alibi_core.horizon(torch.tensor([0.035]), 0.0).item() < 600
    assert some.horizons.isfinite().all()
    earlier = explain(query.expand(1, 1, 100, 8), key, key, torch.tensor([0.035]), q_offset=400)
    assert earlier.horizons.isinf().all()


@pytest.mark.parametrize("implementation", ["tiled", "flex", "sdpa", "dense"])
def test_a_window_is_a_horizon(implementation: str) -> None:
    key = torch.zeros(1, 2, 300, 8)
    result = explain(key, key, key, torch.tensor([0.0, 8.0]), window_size=20, implementation=implementation)
    # A key 20 tokens back is seen, one 21 back is not.
    assert result.horizons[0, 0] == 21
    assert result.horizons[0, 1] == (3 if implementation in ("tiled", "flex") else 21)
    assert explain(key, key, key, 2, window_size=299, tolerance=0.0).horizons.isinf().all()


def test_no_query_behind_its_horizon_misses_what_it_needs() -> None:
    query, key, value = tensors(1500, batch=(1,))
    key[0, 1, 100] = 30.0  # of which any query may need to know
    slopes = torch.tensor([1.0, 0.25, 1.0, 0.0])
    result = explain(query, key, value, slopes)
    for head, horizon in enumerate(result.horizons[0].tolist()):
        distance = torch.arange(1500)[:, None] - torch.arange(1500)
        scores = 8**-0.5 * (query[0, head].double() @ key[0, head // 2].double().T) - slopes[head] * distance
        weights = scores.masked_fill(distance < 0, -torch.inf).softmax(dim=-1)
        assert weights.masked_fill(distance < horizon, 0.0).sum(dim=-1).max() <= result.tolerance
    assert (result.horizons[0, :2] < 200).all()
    assert result.horizons[0, 2] > result.horizons[0, 0] + 50  # of the same slope, over other keys


# --- How many scores -----------------------------------------------------------------------------------------------


@given(
    lengths=st.sampled_from([(1, 1), (9, 9), (5, 300), (300, 300), (300, 70), (17, 600), (700, 700)]),
    batch=st.sampled_from([(), (1,), (2,), (2, 3)]),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (3, 1)]),
    is_causal=st.booleans(),
    window_size=st.sampled_from([None, None, 0, 6, 100]),
    q_offset=st.sampled_from([None, None, 0, -3, 250]),
    tolerance=st.sampled_from([None, 0.0, 0.1]),
    known=st.sampled_from([None, 3.0, 50.0, "each"]),
    short=st.sampled_from([0, 1024]),
    seed=st.integers(0, 99),
)
@example((700, 700), (2, 3), (4, 2), True, None, None, None, "each", 0, 0)
@example((17, 600), (2,), (4, 2), True, None, None, None, 50.0, 0, 0)
@example((300, 70), (), (3, 1), False, 6, -3, 0.1, None, 0, 0)
def test_scores_are_counted_as_they_are_computed(
    lengths: tuple[int, int],
    batch: tuple[int, ...],
    heads: tuple[int, int],
    is_causal: bool,
    window_size: int | None,
    q_offset: int | None,
    tolerance: float | None,
    known: float | str | None,
    short: int,
    seed: int,
) -> None:
    inputs = tensors(*lengths, batch=batch, heads=heads, seed=seed)
    slopes = torch.tensor([1.0, 0.25, 4.0, 0.0, 0.5, 0.1])[: heads[0]]
    rules: dict[str, Any] = {"is_causal": is_causal, "window_size": window_size, "tolerance": tolerance}
    rules |= {"q_offset": q_offset, "max_key_norm": known}
    if known == "each":
        inputs[1] *= torch.linspace(0.1, 5.0, math.prod(batch)).reshape(*batch, 1, 1, 1)
        rules["max_key_norm"] = 1.1 * inputs[1].norm(dim=-1).amax(dim=-1)
    with mock.patch.object(_tile_plan, "SHORT", short):
        result = explain(*inputs, slopes, **rules)
        assert result.implementation == "tiled"
        assert result.scores_computed == counted(*inputs, slopes, **rules)
    offset = lengths[1] - lengths[0] if q_offset is None else q_offset
    pairs = visible(*lengths, q_offset=offset, is_causal=is_causal, window_size=window_size)
    assert result.scores_visible == pairs * math.prod(batch) * heads[0]
    assert result.horizons.shape == (math.prod(batch), heads[0])


def test_each_batch_entry_has_its_own_slopes_offset_mask_and_segments() -> None:
    query, key, value = tensors(1100, 1200, batch=(2, 2), heads=(2, 1))
    slopes = torch.tensor([[[2.0, 0.0], [1.0, 1.0]], [[0.0, 0.0], [0.5, 4.0]]])
    ids = torch.arange(1200).expand(2, 2, -1) // torch.tensor([[200, 300], [400, 1200]])[..., None]
    rules = {
        "q_offset": torch.tensor([[0, 100], [50, 100]]),
        "segment_ids": (ids[..., :1100].int(), ids.int()),
        "mask": torch.ones(2, 2, 1, 1, 1200, dtype=torch.bool),
    }
    result = explain(query, key, value, slopes, **rules)
    assert result.scores_computed == counted(query, key, value, slopes, **rules)
    assert result.scores_visible == 2 * sum(visible(1100, 1200, q_offset=x) for x in (0, 100, 50, 100))
    assert result.horizons.isinf().tolist() == [[False, True], [False, False], [True, True], [False, False]]
    assert result.share < 1


@pytest.mark.parametrize(("length", "tolerance"), [(130, 0.0), (700, None), (700, 0.1)])
def test_flex_counts_whole_blocks(length: int, tolerance: float | None) -> None:
    inputs = tensors(length)
    slopes = torch.tensor([4.0, 1.0, 0.01, 0.0])
    result = explain(*inputs, slopes, implementation="flex", tolerance=tolerance)
    blocks = -(-length // 128)
    every = blocks * (blocks + 1) // 2  # which causality leaves
    assert result.scores_computed % 128**2 == 0
    computed = result.scores_computed // 128**2
    if tolerance == 0.0:
        assert computed == 2 * 4 * every
    else:
        diagonal = blocks + blocks - 1  # what a steep head needs at most: its own block and the one before
        assert 2 * 2 * (every + blocks) <= computed <= 2 * (2 * every + 2 * diagonal)


@pytest.mark.parametrize("max_key_norm", [None, 5.0, 100.0, "each"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_flex_counts_the_blocks_of_its_mask(max_key_norm: Any, is_causal: bool) -> None:
    from alibi_torch._flex import kernels as _flex
    from alibi_torch._flex import mask as _flex_mask

    inputs = tensors(700)
    inputs[1][1] *= 5.0  # so that the entries' horizons differ
    slopes = torch.tensor([4.0, 1.0, 0.3, 0.0])
    masks = []

    def stopped(*arguments: Any, **options: Any) -> None:
        masks.append(_flex_mask.block_mask(*arguments, **options))
        raise InterruptedError

    if max_key_norm == "each":
        max_key_norm = inputs[1].norm(dim=-1).amax(dim=-1)
    rules: dict[str, Any] = {"max_key_norm": max_key_norm, "is_causal": is_causal, "implementation": "flex"}
    with mock.patch.object(_flex, "block_mask", stopped), pytest.raises(InterruptedError):
        attention(*inputs, slopes, **rules)
    counts = masks[0].kv_num_blocks.expand(2, 4, -1).sum()
    counts += 0 if masks[0].full_kv_num_blocks is None else masks[0].full_kv_num_blocks.expand(2, 4, -1).sum()
    result = explain(*inputs, slopes, **rules)
    assert result.scores_computed == 128**2 * counts
    if max_key_norm is None:
        assert not torch.equal(*result.horizons)


def test_the_share_falls_with_the_length() -> None:
    slopes = torch.tensor([2.0, 1.0])
    shares = [explain(*tensors(n, batch=(), heads=(2, 2)), slopes).share for n in (16, 2048, 8192)]
    assert shares[0] > 1 > shares[1] > shares[2]
    assert shares[2] < 0.1


@pytest.mark.parametrize("batch", [(), (1,), (2,), (2, 3)])
@pytest.mark.parametrize("lengths", [(0, 0), (0, 5), (5, 0)])
@pytest.mark.parametrize("implementation", [None, "flex"])
def test_nothing_is_explained_as_nothing(
    batch: tuple[int, ...], lengths: tuple[int, int], implementation: str | None
) -> None:
    inputs = tensors(*lengths, batch=batch, dtype=torch.float64)
    assert attention(*inputs, implementation=implementation).shape == inputs[0].shape  # which flex could not compute
    result = explain(*inputs, implementation=implementation)
    assert result.implementation == "dense"
    assert (result.scores_visible, result.scores_computed, result.share, result.error_bound) == (0, 0, 0.0, 0.0)
    assert result.horizons.tolist() == [[0.0] * 4] * math.prod(batch)
    assert "scores: 0 computed, 0.0% of the 0 visible" in str(result)


def test_no_batch_entry_at_all() -> None:
    result = explain(*tensors(batch=(2, 0)))
    assert result.horizons.shape == (0, 4)
    assert str(result).endswith("of the heads: none")


def test_it_is_what_the_package_exports() -> None:
    assert isinstance(alibi_torch.explain(*tensors()), Explanation)
