"""What ``explain`` says in PyTorch alone: of ``flex``, of gradients and of the ``meta`` device."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from alibi_torch import attention, explain  # noqa: E402


def tensors(length: int = 9) -> list[torch.Tensor]:
    """Return query, key and value of two entries, 4 heads over 2, and 8 features."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, length, 8, generator=generator) for heads in (4, 2, 2)]


def test_refusals_say_why_not() -> None:
    query, key, value = tensors()
    with_gradients = query.clone().requires_grad_()
    assert explain(with_gradients, key, value).refusals == {"flex": "has no gradients on a CPU"}
    slopes = torch.rand(4, requires_grad=True)
    assert explain(query, key, value, slopes).refusals == {"flex": "has no gradients on a CPU"}
    with torch.no_grad():
        assert explain(with_gradients, key, value).refusals == {}
    double = [x.double() for x in (query, key, value)]
    reason = "must be given float32, float16 or bfloat16, got torch.float64"
    assert explain(*double).refusals == {"flex": reason}
    assert f"  not flex: it {reason}" in str(explain(*double)).splitlines()
    for inputs in ((with_gradients, key, value), double):
        for function in (attention, explain):
            with pytest.raises(NotImplementedError, match="implementation 'flex' .*'tiled' and 'sdpa' and 'dense' can"):
                function(*inputs, implementation="flex")


def test_it_changes_nothing_and_records_no_gradient() -> None:
    inputs = [x.requires_grad_() for x in tensors(1100)]
    before = [x.detach().clone() for x in inputs]
    explain(*inputs)
    assert all(torch.equal(x, y) and x.grad is None for x, y in zip(inputs, before, strict=True))


def test_what_has_no_values_to_measure_is_refused() -> None:
    inputs = [x.to("meta") for x in tensors()]
    assert attention(*inputs).is_meta
    with pytest.raises(ValueError, match="query, key and value must hold values, which are measured; got .* on meta"):
        explain(*inputs)
    with pytest.raises(NotImplementedError, match="implementation 'flex' runs on cuda and cpu, got meta"):
        explain(*inputs, implementation="flex")


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
        assert not np.array_equal(*result.horizons)
