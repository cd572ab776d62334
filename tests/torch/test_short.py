"""Short calls on the CPU: the lean way gives what dense scores give, and what is remembered is never out of date."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import array_api_compat.torch as xp  # noqa: E402

import alibi_torch  # noqa: E402
from alibi_core import AttentionCall  # noqa: E402
from alibi_core._horizon.tiling import tiled_as  # noqa: E402
from alibi_core.backend import dense_attention  # noqa: E402
from alibi_torch._dispatch import memory  # noqa: E402
from alibi_torch._tiled import SIZES, blocks, kernels, short, tiled_attention, tiling  # noqa: E402
from tests.support.full import first_of  # noqa: E402

OF_ENTRIES = torch.tensor([[0.5, 0.25, 1.0, 0.0], [0.1, 2.0, 0.7, 0.3]])
DIRECTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "symmetric": {"is_causal": False},
    "asymmetric": {"is_causal": False, "future_slopes": torch.tensor([0.3, 0.0, 1.5, 0.01])},
    "window": {"window_size": 33},
    "window on both sides": {"is_causal": False, "window_size": 33},
    "slopes of each entry": {"slopes": OF_ENTRIES},
    "slopes of each entry, symmetric": {"slopes": OF_ENTRIES, "is_causal": False},
}


def tensors(
    q_len: int, kv_len: int, dtype: torch.dtype = torch.float32, heads: int = 4, head_dim: int = 8, share: int = 2
) -> Any:
    generator = torch.Generator().manual_seed(q_len * 10_007 + kv_len)
    query = torch.randn(2, heads, q_len, head_dim, generator=generator)
    key, value = torch.randn(2, 2, heads // share, kv_len, head_dim, generator=generator).unbind()
    return [x.to(dtype).requires_grad_() for x in (query, key, value)]


def gradients(inputs: list[Any], **arguments: Any) -> list[Any]:
    result = alibi_torch.attention(*inputs, **arguments)
    cotangent = torch.linspace(-1, 1, result.numel(), dtype=result.dtype).reshape(result.shape)
    return [result, *torch.autograd.grad(result, inputs, cotangent)]


def assert_near(found: list[Any], expected: list[Any], eps: float) -> None:
    for one, right in zip(found, expected, strict=True):
        # Sums of up to 1,793 products, as large as the largest.
        assert (one.double() - right.double()).abs().max() <= 64 * eps * right.double().abs().max().clamp(min=1)


# At each limit and one above: of what PyTorch differentiates, of one call, of short blocks, of short calls.
LIMITS = [64, 128, 256, 320, 1024, 1280, 1536, 1792]


@pytest.mark.parametrize("length", [1, 2, 600, *LIMITS, *(x + 1 for x in LIMITS)])
@pytest.mark.parametrize(("is_causal", "share"), first_of([(True, 2), (True, 1), (False, 2)]))
def test_every_length_gives_what_dense_scores_give(length: int, is_causal: bool, share: int) -> None:
    inputs = tensors(length, length, share=share)
    result, *by_inputs = gradients(inputs, is_causal=is_causal, implementation="dense")
    assert_near(gradients(inputs, is_causal=is_causal), [result, *by_inputs], 2.0**-24)
    assert_near([alibi_torch.attention(*(x.detach() for x in inputs), is_causal=is_causal)], [result], 2.0**-24)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("q_len", "kv_len", "q_offset"), [(70, 70, None), (70, 200, None), (1, 90, None), (70, 200, 13), (300, 420, 40)]
)
def test_directions_and_offsets(direction: str, q_len: int, kv_len: int, q_offset: int | None) -> None:
    inputs = tensors(q_len, kv_len)
    arguments = DIRECTIONS[direction] | {"q_offset": q_offset}
    assert_near(gradients(inputs, **arguments), gradients(inputs, implementation="dense", **arguments), 2.0**-24)


@pytest.mark.parametrize(("factor", "common"), [(1.0, 300.0), (20.0, 0.0)], ids=["common part", "large scores"])
def test_gradients_of_few_queries_keep_their_digits(factor: float, common: float) -> None:
    query, key, value = (x.detach() for x in tensors(40, 40))
    query, key = query * factor, key * factor + common
    query = query - query.mean(dim=-1, keepdim=True)  # so that scores of the common part are small

    def by_query(dtype: torch.dtype, implementation: str) -> Any:
        inputs = [x.to(dtype).requires_grad_() for x in (query, key, value)]
        return torch.autograd.grad(alibi_torch.attention(*inputs, implementation=implementation).sin().sum(), inputs)

    right = by_query(torch.float64, "dense")[0]
    found, other = (by_query(torch.float32, name)[0] for name in ("tiled", "dense"))
    assert (found - right).abs().max() <= 2 * (other - right).abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_in_low_precision_are_cast_some_heads_at_a_time(dtype: torch.dtype) -> None:
    inputs = [x.detach() for x in tensors(1, 700, dtype, heads=8, head_dim=64)]
    found = alibi_torch.attention(*inputs)
    right = alibi_torch.attention(*(x.double() for x in inputs), implementation="dense")
    assert (found.double() - right).abs().max() <= torch.finfo(dtype).eps * right.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rules", [{"window_size": 40}, {"window_size": 40, "is_causal": False}, {"q_offset": 600}])
def test_keys_that_no_query_sees_are_not_cast(rules: dict[str, Any], dtype: torch.dtype) -> None:
    inputs = [x.detach() for x in tensors(5, 700, dtype, heads=8, head_dim=64)]
    right = alibi_torch.attention(*(x.double() for x in inputs), implementation="dense", **rules)
    for _ in range(2):
        found = alibi_torch.attention(*inputs, **rules)
        assert (found.double() - right).abs().max() <= torch.finfo(dtype).eps * right.abs().max()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("length", [20, 300])
def test_bfloat16_is_off_by_its_weights_and_its_result(length: int, direction: str) -> None:
    inputs = [x.detach() for x in tensors(length, length, torch.bfloat16, heads=8, head_dim=16)]
    rules = DIRECTIONS[direction] | {"slopes": 8}
    if "future_slopes" in rules:
        rules["future_slopes"] = rules["future_slopes"].repeat(2)
    found = alibi_torch.attention(*inputs, **rules)
    right = alibi_torch.attention(*(x.double() for x in inputs), implementation="dense", **rules)
    # Half a unit each.
    assert (found.double() - right).abs().max() <= 1.01 * torch.finfo(torch.bfloat16).eps * inputs[2].abs().max()


@pytest.mark.parametrize("length", [40, 200])
def test_infinite_numbers_in_bfloat16_are_seen_where_dense_scores_show_them(length: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, length, 16, generator=generator).bfloat16().unbind()
    key[0, 1, 20, 3] = torch.inf
    result, dense = (alibi_torch.attention(query, key, value, implementation=x) for x in (None, "dense"))
    seeing = slice(20, None)  # dense scores add -inf to the infinite ones of other queries
    torch.testing.assert_close(result[:, :, seeing].isfinite(), dense[:, :, seeing].isfinite())


def test_slopes_that_were_written_to_are_seen() -> None:
    inputs = [x.detach() for x in tensors(9, 9)]
    slopes = torch.tensor([0.5, 0.25, 1.0, 0.0])
    before = alibi_torch.attention(*inputs, slopes)
    assert torch.equal(alibi_torch.attention(*inputs, slopes), before)
    slopes.data[1] = 2.0  # which PyTorch does not count as a new version
    changed = alibi_torch.attention(*inputs, slopes)
    assert torch.equal(changed[:, [0, 2, 3]], before[:, [0, 2, 3]])
    assert not torch.equal(changed[:, 1], before[:, 1])
    right = alibi_torch.attention(*inputs, slopes, implementation="dense")
    assert_near([changed], [right], 2.0**-24)
    slopes[2] = -1.0
    with pytest.raises(ValueError, match="slopes must not be negative"):
        alibi_torch.attention(*inputs, slopes)


def test_slopes_remembered_without_gradients_get_theirs() -> None:
    inputs, slopes = tensors(9, 9), torch.tensor([0.5, 0.25, 1.0, 0.1], requires_grad=True)
    with torch.inference_mode():
        alibi_torch.attention(*inputs, slopes)
    with torch.no_grad():
        alibi_torch.attention(*inputs, slopes)
    found = torch.autograd.grad(alibi_torch.attention(*inputs, slopes).square().sum(), slopes)[0]
    dense = alibi_torch.attention(*inputs, slopes, implementation="dense")
    assert_near([found], [torch.autograd.grad(dense.square().sum(), slopes)[0]], 2.0**-22)


def test_what_inference_mode_remembers_serves_training() -> None:
    inputs = tensors(11, 11)
    with torch.inference_mode():
        for _ in range(2):  # a remembered call keeps what it works out from the second on
            alibi_torch.attention(*inputs)
    assert_near(gradients(inputs), gradients(inputs, implementation="dense"), 2.0**-24)


def test_equal_numbers_of_another_kind_are_other_arguments() -> None:
    inputs = [x.detach() for x in tensors(5, 5)]
    alibi_torch.attention(*inputs, window_size=1)
    with pytest.raises(TypeError, match="window_size must be an integer"):
        alibi_torch.attention(*inputs, window_size=1.0)
    with pytest.raises(TypeError, match="window_size must be an integer"):
        alibi_torch.attention(*inputs, window_size=True)
    with pytest.raises(TypeError, match="is_causal must be"):
        alibi_torch.attention(*inputs, is_causal=1)


@pytest.mark.parametrize("wrong", [{"is_causal": None}, {"dropout": None}, {"layout": None}, {"xp": None}], ids=str)
def test_a_call_that_was_checked_lets_no_wrong_argument_pass(wrong: dict[str, None]) -> None:
    inputs = [x.detach() for x in tensors(5, 5, share=1)]
    alibi_torch.attention(*inputs)
    for _ in range(2):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            alibi_torch.attention(*inputs, **wrong)


@pytest.mark.parametrize("place", range(3))
def test_a_call_that_was_checked_lets_no_wrong_tensor_pass(place: int) -> None:
    inputs = [x.detach() for x in tensors(5, 5, share=1)]
    alibi_torch.attention(*inputs)
    for change in (torch.Tensor.double, torch.Tensor.to_sparse, lambda x: x.to("meta")):
        with pytest.raises((TypeError, ValueError)):
            alibi_torch.attention(*(change(x) if i == place else x for i, x in enumerate(inputs)))


@pytest.mark.parametrize("q_len", [1, 7])
def test_a_call_that_was_checked_comes_again_in_other_strides_and_under_autocast(q_len: int) -> None:
    inputs = [x.detach() for x in tensors(q_len, 90, share=1)]
    right = alibi_torch.attention(*inputs, implementation="dense")
    alibi_torch.attention(*inputs)
    for axes in ((1, 2), (2, 3)):
        others = [x.transpose(*axes).contiguous().transpose(*axes) for x in inputs]
        assert_near([alibi_torch.attention(*others)], [right], 2.0**-24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = alibi_torch.attention(*inputs)
    assert again.dtype == torch.float32
    assert_near([again], [right], 2.0**-24)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [3, 300])
def test_windows_that_overlap_are_read_as_they_are(length: int, dtype: torch.dtype, place: int) -> None:
    inputs = tensors(length, length, dtype, head_dim=320, share=1)
    window = torch.randn(2, 4, length + 319, generator=torch.Generator().manual_seed(0)).to(dtype).unfold(-1, 320, 1)
    inputs[place] = window.detach().requires_grad_()
    right = gradients([x.detach().double().requires_grad_() for x in inputs], implementation="dense")
    assert_near(gradients(inputs), right, torch.finfo(dtype).eps)
    for _ in range(2):
        assert_near([alibi_torch.attention(*(x.detach() for x in inputs))], right[:1], torch.finfo(dtype).eps)


@pytest.mark.parametrize(("length", "share"), [(30, 1), (30, 2), (40, 2), (600, 2)])
def test_masks_and_segments_of_the_same_sizes_have_values_of_their_own(length: int, share: int) -> None:
    inputs, at = tensors(length, length, share=share), torch.arange(length)
    for slopes in (None, torch.tensor([[0.5, 0.25, 1.0, 0.1], [0.3, 0.2, 0.9, 0.8]])):
        mask, ids = torch.ones(2, 1, 1, length, dtype=torch.bool), torch.zeros(2, length, dtype=torch.int64)
        for n in (0, 7, length - 5, length // 2):
            mask[1, ..., n:], mask[0, ..., :n] = False, True
            ids[:] = at // max(n, 9)
            for rules in ({"mask": mask}, {"segment_ids": ids}, {"segment_ids": ids, "mask": mask}):
                right = gradients(inputs, slopes=slopes, implementation="dense", **rules)
                for mode in (torch.inference_mode, torch.no_grad):  # of the first, gradients may keep nothing
                    with mode():
                        found = alibi_torch.attention(*inputs, slopes, **{name: x.clone() for name, x in rules.items()})
                        assert_near([found], right[:1], 2.0**-24)
                    assert_near(gradients(inputs, slopes=slopes, **rules), right, 2.0**-24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [1, 2])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 129), (1, 2500), (5, 700), (16, 300)])
def test_few_queries_with_masks_of_any_kind(q_len: int, kv_len: int, share: int, dtype: torch.dtype) -> None:
    inputs = [x.detach() for x in tensors(q_len, kv_len, dtype, heads=8, share=share)]
    keys = torch.arange(kv_len)
    shown = (keys >= torch.tensor([[3], [kv_len // 2]]))[:, None, None, :] & (keys % 5 != 2)
    of_each = torch.rand(1, 8, q_len, kv_len, generator=torch.Generator().manual_seed(0)) < 0.5
    of_each[..., :-1, :] &= q_len == 1  # all but the last query see nothing
    ids = keys[None] // 60
    for mask in (shown, of_each, torch.zeros(1, 1, 1, 1, dtype=torch.bool), None):
        for rules in ({}, {"is_causal": False, "q_offset": 20}, {"window_size": 40}):
            rules |= {"mask": mask, "segment_ids": (ids[:, -q_len:], ids) if mask is None else None}
            right = alibi_torch.attention(*(x.double() for x in inputs), implementation="dense", **rules)
            eps = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 2.0**-24
            for _ in range(2):
                assert_near([alibi_torch.attention(*inputs, **rules)], [right], eps)


def test_a_mask_that_was_checked_lets_no_other_pass() -> None:
    query, key, value = (x.detach() for x in tensors(5, 9))
    right = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    alibi_torch.attention(query, key, value, mask=right)
    for wrong in (right.float(), right[..., :8], right.to("meta"), right.to_sparse(), right.numpy()):
        with pytest.raises((TypeError, ValueError, NotImplementedError)):
            alibi_torch.attention(query, key, value, mask=wrong)
    ids = torch.arange(9)[None] // 3
    for rules in ({"segment_ids": ids}, {"segment_ids": (ids[:, :5], ids), "mask": right.byte()}):
        with pytest.raises((TypeError, ValueError), match=r"segment_ids must be a pair|mask"):
            alibi_torch.attention(query, key, value, **rules)
    of_bytes = alibi_torch.attention(query, key, value, segment_ids=(ids[:, 4:].byte(), ids.byte()))
    assert torch.equal(of_bytes, alibi_torch.attention(query, key, value, segment_ids=(ids[:, 4:], ids)))


def test_few_calls_are_remembered() -> None:
    for length in range(1, 2 * memory.ROOM):
        alibi_torch.attention(*(x.detach() for x in tensors(length, length)))
    assert len(memory._calls) <= memory.ROOM


def test_a_slope_written_to_before_the_gradients_is_noticed() -> None:
    inputs, slopes = tensors(9, 9), torch.tensor([0.5, 0.25, 1.0, 0.1], requires_grad=True)
    result = alibi_torch.attention(*inputs, slopes)
    with torch.no_grad():
        slopes *= 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


# --- Keys that norms prove not to matter ---------------------------------------------------------------------------

STEEP = torch.tensor([4.0, 1.0, 2.0, 0.01])
TWICE = (torch.float32, torch.float64)


@pytest.fixture
def calls_are_free() -> Iterator[None]:
    """So that it pays to leave out any key."""
    with tiled_as(dataclasses.replace(tiling(), sizes=dataclasses.replace(SIZES, call_scores=0))):
        yield


def planned(inputs: list[Any], *levels: int, **rules: Any) -> tuple[AttentionCall, blocks.Plan]:
    call = AttentionCall.check(*inputs, xp=xp, **rules)
    return call, blocks.planned(call, levels) if levels else blocks.plan(call, *inputs[:2])


def scores(plan: blocks.Plan) -> int:
    return sum((job.heads.stop - job.heads.start) * job.rows * job.kv_len for job in plan.jobs)


@pytest.mark.usefixtures("calls_are_free")
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("share", [1, 2])
def test_large_keys_are_found_by_the_heads_that_read_them(share: int, direction: str) -> None:
    inputs = tensors(700, 900, share=share)
    with torch.no_grad():
        inputs[1][1, -1, 5::90] *= 6
        inputs[0][1, :, 600:] *= 2
    rules = {"slopes": STEEP} | DIRECTIONS[direction]
    right = gradients([x.detach().double().requires_grad_() for x in inputs], implementation="dense", **rules)
    assert_near(gradients(inputs, **rules), right, 2.0**-23)
    assert_near([alibi_torch.attention(*(x.detach() for x in inputs), **rules)], right[:1], 2.0**-23)


@pytest.mark.usefixtures("calls_are_free")
def test_scores_may_differ_as_much_as_norms_let_them() -> None:
    direction = torch.full((8,), 8**-0.5)
    query = (40 * 8**0.5) ** 0.5 * direction.expand(1, 4, 900, 8)
    key = -query[:, :2]
    key[:, 1, ::85] *= -1  # 80 more, at most 84 tokens back
    key[:, 0] *= 0.01
    value = torch.randn(1, 2, 900, 8, generator=torch.Generator().manual_seed(0))
    slopes = torch.tensor([1.0, 0.5, 1.0, 0.5])
    call, plan = planned([query, key, value], slopes=slopes)
    assert scores(plan) < scores(blocks.planned(call, ()))
    inputs, doubles = ([x.to(dtype).requires_grad_() for x in (query, key, value)] for dtype in TWICE)
    right = gradients(doubles, slopes=slopes, implementation="dense")
    assert_near(gradients(inputs, slopes=slopes), right, 2.0**-20)


@pytest.mark.usefixtures("calls_are_free")
@pytest.mark.parametrize("is_causal", [True, False])
def test_steep_heads_compute_few_scores_and_no_weight_that_is_too_small(is_causal: bool) -> None:
    inputs = [x.detach() for x in tensors(900, 900)]
    call, plan = planned(inputs, slopes=STEEP, is_causal=is_causal)
    assert scores(plan) < 0.8 * scores(blocks.planned(call, ()))
    assert max(plan.levels) <= 6  # which proves that a weight of 2**-24 is nowhere farther than here
    for bias in short._biases(call, plan):
        assert bias.values[bias.values > -torch.inf].min() >= -(6 * blocks.EXCESS + 24) - STEEP.max()


@pytest.mark.usefixtures("calls_are_free")
def test_a_tolerance_of_nothing_and_scores_without_bounds_leave_out_nothing() -> None:
    inputs = [x.detach() for x in tensors(700, 700)]
    for changed in ({"tolerance": 0.0}, {"scale": 1e4}):
        call, plan = planned(inputs, slopes=STEEP, **changed)
        assert scores(plan) == scores(blocks.planned(call, ()))
    inputs[1][0, 1, 300] = torch.nan
    found = alibi_torch.attention(*inputs, STEEP)
    assert found[:, 2:, 300:].isnan()[0].all()
    right = alibi_torch.attention(*inputs, STEEP, implementation="dense")
    assert_near([found[:, :2], found[1:]], [right[:, :2], right[1:]], 2.0**-24)


@pytest.mark.parametrize("kind", ["holes", "sequences", "added to keys", "each head", "far on both sides"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_biases_of_masks_end_where_no_key_matters(kind: str, is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_is_intel", lambda: True)
    query, key, value = tensors(500, 500, head_dim=16)
    with torch.no_grad():
        key[1, 0, 5::90] *= 3
    mask = torch.rand(2, 1, 1, 500, generator=torch.Generator().manual_seed(0)) < 0.7
    mask[1, ..., 100:300] = False  # behind which the nearest keys are far
    if kind == "added to keys":
        query = (0.01 * query).detach().requires_grad_()
    rules: dict[str, Any] = {"slopes": STEEP, "is_causal": is_causal}
    rules |= {
        "holes": {"mask": mask},
        "sequences": {"segment_ids": torch.arange(500).expand(2, -1) % 7},
        "added to keys": {},
        "far on both sides": {"mask": mask} | ({} if is_causal else {"future_slopes": STEEP / 2}),
        "each head": {"mask": mask & (torch.rand(1, 4, 500, 500, generator=torch.Generator().manual_seed(1)) < 0.9)},
    }[kind]
    call = AttentionCall.check(query, key, value, xp=xp, **rules)
    if kind == "added to keys":
        added = torch.zeros(2, 4, 500)
        added[..., ::97] = 45.0
        call = dataclasses.replace(call, added_key_bias=added)
    lowest = blocks.lowest_bias(call, query.detach(), key.detach(), differentiates=True)
    assert lowest is not None
    assert lowest.isfinite().any()
    found = tiled_attention(call, query, key, value)
    precise = dataclasses.replace(
        call.map_arrays(lambda x, _: x.double() if x.is_floating_point() else x), dtype=torch.float64
    )
    doubles = [x.detach().double().requires_grad_() for x in (query, key, value)]
    right = dense_attention(precise, *doubles)
    cotangent = torch.linspace(-1, 1, found.numel()).reshape(found.shape)
    by_inputs = torch.autograd.grad(found, (query, key, value), cotangent)
    assert_near([found, *by_inputs], [right, *torch.autograd.grad(right, doubles, cotangent.double())], 2.0**-23)


@pytest.mark.parametrize("is_intel", [True, False])
def test_short_calls_with_masks_form_no_weights_that_take_long(is_intel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_is_intel", lambda: is_intel)
    query, key, value = (x.detach() for x in tensors(200, 200, head_dim=64))
    mask = torch.arange(200) % 7 > 0
    call = AttentionCall.check(query, key, value, STEEP, mask=mask[None, None, None], xp=xp)
    for differentiates in (False, True):
        result = short.masked(call, query, key.requires_grad_(differentiates), value, differentiates=differentiates)
        assert (result is None) == is_intel


@pytest.mark.parametrize("share", [1, 2])
@pytest.mark.parametrize("direction", ["causal", "symmetric", "asymmetric", "window"])
def test_a_call_of_other_lengths_is_not_checked_again(
    direction: str, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = torch.tensor([0.4, 0.2, 0.01, 0.0])
    options = {"slopes": rates, "scale": 0.3 + share / 100, "q_offset": None} | DIRECTIONS[direction]
    check, checked = AttentionCall.check, []
    monkeypatch.setattr(AttentionCall, "check", lambda *args, **named: checked.append(0) or check(*args, **named))
    several = [(7, 7), (64, 64), (3, 3), (65, 65), (330, 330), (200, 200), (5, 300), (300, 400)]
    for q_len, kv_len in (*several, (1, 2), (1, 700), (1, 1)):
        inputs = tensors(q_len, kv_len, share=share)
        found = gradients(inputs, **options)
        with torch.no_grad():
            found.append(alibi_torch.attention(*inputs, **options))
        assert len(checked) == (1 if q_len > 1 else 2)
        monkeypatch.setattr(AttentionCall, "check", check)
        right = gradients(inputs, **options, implementation="dense")
        monkeypatch.setattr(AttentionCall, "check", lambda *args, **named: checked.append(0) or check(*args, **named))
        assert_near(found, [*right, right[0]], 2.0**-24)


@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 0), (1, 0), (0, 5), (7, 5)])
def test_unusual_lengths_after_usual_ones(q_len: int, kv_len: int) -> None:
    for usual in (1, 5):
        alibi_torch.attention(*(x.detach() for x in tensors(usual, 5)))
    inputs = [x.detach() for x in tensors(q_len, kv_len)]
    right = alibi_torch.attention(*inputs, implementation="dense")
    torch.testing.assert_close(alibi_torch.attention(*inputs), right)


@pytest.mark.usefixtures("calls_are_free")
def test_another_default_device_changes_nothing() -> None:
    inputs = [x.detach() for x in tensors(701, 701)]
    with torch.device("meta"):
        found = alibi_torch.attention(*inputs, STEEP)
    assert_near([found], [alibi_torch.attention(*inputs, STEEP, implementation="dense")], 2.0**-24)


def test_few_plans_of_a_call_are_kept() -> None:
    call, _ = planned([x.detach() for x in tensors(300, 300)], slopes=STEEP)
    for level in range(3 * blocks.KEPT_PLANS):
        blocks.planned(call, (level,) * 4)
    assert len(call.worked_out[blocks.planned]) <= blocks.KEPT_PLANS


# --- One query -----------------------------------------------------------------------------------------------------

SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.02])


@pytest.fixture
def few_are_many() -> Iterator[None]:
    """From 43 to 512 keys on, by the other sizes, norms or scores decide which keys matter, for each head."""
    with tiled_as(dataclasses.replace(tiling(), short=1, sizes=dataclasses.replace(SIZES, call_scores=0))):
        yield


def one_query(sizes: tuple[int, int, int], length: int, dtype: torch.dtype, spike: int | None) -> list[Any]:
    """Return query, key and value; one key far back, of one entry and head, may outweigh all others."""
    generator = torch.Generator().manual_seed(length)
    batch, heads, kv_heads = sizes
    query = torch.randn(batch, heads, 1, 8, generator=generator)
    key, value = torch.randn(2, batch, kv_heads, length, 8, generator=generator).unbind()
    if spike is not None:
        towards = query[-1, 0, 0] / query[-1, 0, 0].square().sum()
        key[-1, 0, spike] = towards * 8**0.5 * (SLOPES[0] * (length - spike) + 60)
    return [x.to(dtype) for x in (query, key, value)]


@pytest.mark.usefixtures("few_are_many")
@pytest.mark.parametrize("spike", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("length", [4, 129, 257, 700])
@pytest.mark.parametrize("sizes", [(1, 4, 2), (3, 4, 4), (1, 3, 1)], ids=str)
def test_one_query_finds_all_that_matters(
    sizes: tuple[int, int, int], length: int, dtype: torch.dtype, spike: int | None
) -> None:
    query, key, value = one_query(sizes, length, dtype, spike)
    slopes, largest = SLOPES[: sizes[1]], value.abs().max()
    cache = alibi_torch.KVCache(*key.shape[:2], length, 8, dtype=dtype)
    for part in (slice(0, length // 2), slice(length // 2, length)):
        cache.append(key[:, :, part], value[:, :, part])
    rules: dict[str, Any]
    for rules in ({}, {"window_size": 140}, {"tolerance": 0.0}, {"scale": 0.1}):
        right = alibi_torch.attention(
            *(x.double() for x in (query, key, value)), slopes, implementation="dense", **rules
        )
        share = rules.get("tolerance", torch.finfo(dtype).eps / 2)
        allowed = (2 * share + torch.finfo(dtype).eps + 64 * min(torch.finfo(dtype).eps, 2.0**-24)) * largest
        bare = [alibi_torch.attention(query, key, value, slopes, is_causal=x, **rules) for x in (True, False)]
        known = alibi_torch.attention(
            query, key, value, slopes, max_key_norm=key.norm(dim=-1).max().item() + 1, **rules
        )
        for found in (*bare, known, cache.attend(query, slopes, **rules)):
            assert found.dtype == dtype
            assert (found.double() - right).abs().max() <= allowed


@pytest.mark.usefixtures("few_are_many")
def test_one_query_before_the_last_key_sees_none_after_it() -> None:
    query, key, value = one_query((3, 4, 4), 700, torch.float32, 650)
    found = alibi_torch.attention(query, key, value, SLOPES, q_offset=600)
    assert torch.equal(found, alibi_torch.attention(query, key[:, :, :601], value[:, :, :601], SLOPES))
    both = alibi_torch.attention(query, key, value, SLOPES, q_offset=600, is_causal=False)
    assert (both[-1, 0, 0] - value[-1, 0, 650]).abs().max() < 1e-5  # which outweighs all


@pytest.mark.usefixtures("few_are_many")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", ["query", "key"])
def test_what_is_no_number_spares_no_key(bad: float, place: str) -> None:
    query, key, value = one_query((1, 4, 4), 700, torch.float32, None)
    {"query": query, "key": key}[place][0, 0, 0] = bad
    cache = alibi_torch.KVCache(1, 4, 700, 8)
    cache.append(key, value)
    for found in (alibi_torch.attention(query, key, value, SLOPES), cache.attend(query, SLOPES)):
        assert found[0, 0].isnan().all()
        right = alibi_torch.attention(query, key, value, SLOPES, implementation="dense")
        assert_near([found[:, 1:]], [right[:, 1:]], 2.0**-24)


@pytest.mark.usefixtures("few_are_many")
def test_keys_whose_batch_and_heads_are_no_one_axis() -> None:
    query, key, value = one_query((3, 4, 4), 700, torch.float32, 3)
    right = alibi_torch.attention(query, key, value, SLOPES)
    for change in (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), lambda x: x.mT.contiguous().mT):
        assert_near([alibi_torch.attention(query, change(key), change(value), SLOPES)], [right], 2.0**-24)


@pytest.mark.parametrize(("n", "rows"), [(320, 64), (64, 320), (1, 1), (7, 1)])
def test_kept_biases_are_dense_whatever_their_shape(n: int, rows: int) -> None:
    """The kernel reads a bias whose rows do not lie one after the other a fifth more slowly."""
    last = torch.arange(2.0 * (n + rows - 1)).reshape(1, 2, -1)
    bias = kernels.shifted(last, rows)
    assert bias.is_contiguous()
    assert bias.shape == (1, 2, rows, n)
    for row in range(rows):
        first = rows - 1 - row
        assert torch.equal(bias[:, :, row], last[..., first : first + n])
