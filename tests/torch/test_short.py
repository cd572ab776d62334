"""Calls that come again, and single queries, on the CPU: they give what dense scores give."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import alibi_torch  # noqa: E402
from tests.support.tiles import planned_from  # noqa: E402


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


def test_equal_numbers_of_another_kind_are_other_arguments() -> None:
    inputs = [x.detach() for x in tensors(5, 5)]
    alibi_torch.attention(*inputs, window_size=1)
    with pytest.raises(TypeError, match="window_size must be an integer"):
        alibi_torch.attention(*inputs, window_size=1.0)
    with pytest.raises(TypeError, match="window_size must be an integer"):
        alibi_torch.attention(*inputs, window_size=True)
    with pytest.raises(TypeError, match="is_causal must be"):
        alibi_torch.attention(*inputs, is_causal=1)


@pytest.mark.parametrize("place", range(3))
def test_a_call_that_was_checked_lets_no_wrong_tensor_pass(place: int) -> None:
    inputs = [x.detach() for x in tensors(5, 5, share=1)]
    alibi_torch.attention(*inputs)
    for change in (torch.Tensor.double, torch.Tensor.to_sparse, lambda x: x.to("meta")):
        with pytest.raises((TypeError, ValueError)):
            alibi_torch.attention(*(change(x) if i == place else x for i, x in enumerate(inputs)))


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


def test_a_slope_written_to_before_the_gradients_is_noticed() -> None:
    inputs, slopes = tensors(9, 9), torch.tensor([0.5, 0.25, 1.0, 0.1], requires_grad=True)
    result = alibi_torch.attention(*inputs, slopes)
    with torch.no_grad():
        slopes *= 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


# --- One query -------------------------------------------------------------------------------------------------------

SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.02])


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
        with planned_from(1):  # norms decide which keys matter, for each head
            cached = cache.attend(query, slopes, **rules)
        bare = [alibi_torch.attention(query, key, value, slopes, is_causal=x, **rules) for x in (True, False)]
        known = alibi_torch.attention(
            query, key, value, slopes, max_key_norm=key.norm(dim=-1).max().item() + 1, **rules
        )
        for found in (*bare, known, cached):
            assert found.dtype == dtype
            assert (found.double() - right).abs().max() <= allowed
