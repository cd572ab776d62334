"""Numbers added to the bias of single keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import array_api_compat.torch as xp
import pytest
import torch

from alibi_core import slopes
from alibi_core.backend import AttentionCall
from alibi_torch._attention import run
from tests.support.tiles import planned_from

HEADS, KV_HEADS, HEAD_DIM = 6, 3, 16


@pytest.fixture(autouse=True)
def _tiles_of_few_keys() -> Iterator[None]:
    with planned_from(100):
        yield


def arguments_of(q_len: int, kv_len: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return query, key, value and what is added to each key's bias."""
    torch.manual_seed(0)
    query = torch.randn(2, HEADS, q_len, HEAD_DIM)
    key, value = torch.randn(2, 2, KV_HEADS, kv_len, HEAD_DIM)
    added = 3 * torch.randn(2, HEADS, kv_len)
    added[:, :, 5] = 40.0  # a key that matters to all after it
    return [query.to(dtype), key.to(dtype), value.to(dtype), added.to(torch.promote_types(dtype, torch.float32))]


def result_of(implementation: str, tensors: list[torch.Tensor], **rules: object) -> torch.Tensor:
    *tensors, added = tensors
    call = AttentionCall.check(*tensors, slopes(HEADS, xp=xp), xp=xp, **rules)
    return run(replace(call, added_key_bias=added), *tensors, implementation, None)


def by_hand(tensors: list[torch.Tensor], mask: torch.Tensor | None = None) -> torch.Tensor:
    """Compute the attention in float64 from its definition."""
    query, key, value, added = (x.double() for x in tensors)
    key, value = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (key, value))
    q_len, kv_len = query.shape[2], key.shape[2]
    distance = torch.arange(kv_len - q_len, kv_len)[:, None] - torch.arange(kv_len)
    scores = query @ key.mT * HEAD_DIM**-0.5 - slopes(HEADS, xp=xp).double()[:, None, None] * distance
    visible = distance >= 0 if mask is None else (distance >= 0) & mask
    scores = torch.where(visible, scores + added[:, :, None], -torch.inf)
    return torch.nan_to_num(scores.softmax(dim=-1)) @ value


@pytest.mark.parametrize("q_len", [1, 5, 600])
def test_added_bias_with_padding(q_len: int) -> None:
    tensors = arguments_of(q_len, 600, torch.float32)
    mask = (torch.arange(600) >= torch.tensor([[0], [150]]))[:, None, None, :]
    actual = result_of("tiled", tensors, mask=mask)
    assert torch.allclose(actual.double(), by_hand(tensors, mask), rtol=0, atol=2.0**-16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [50, 400])
def test_gradients_under_an_added_bias(dtype: torch.dtype, length: int) -> None:
    *tensors, added = arguments_of(length, length, dtype)
    grad = torch.randn(2, HEADS, length, HEAD_DIM)
    doubles = [x.double().requires_grad_() for x in tensors]
    expected = torch.autograd.grad((by_hand([*doubles, added]) * grad).sum(), doubles)
    inputs = [x.requires_grad_() for x in tensors]
    actual = torch.autograd.grad((result_of("tiled", [*inputs, added]) * grad).sum(), inputs)
    # Rounded once to the dtype; in low precision the result that they follow from has been rounded before.
    tolerance = 2.0**-14 if dtype == torch.float32 else 2.0**-6
    for one, other in zip(actual, expected, strict=True):
        assert (one - other).abs().max() <= tolerance * other.abs().max()


def test_the_bias_of_packed_rows_is_counted_from_where_each_sequence_begins() -> None:
    # MPT counts from the end of a row: what begins after 10,000 tokens has biases of -2,500, where scores lose digits.
    transformers = pytest.importorskip("transformers")
    from alibi_torch.transformers import accelerate

    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "d_model": 32, "n_heads": 4, "n_layers": 1, "max_seq_len": 16_384}
    model = transformers.MptForCausalLM(transformers.MptConfig(**sizes)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model, tokens = accelerate(model, contract="model"), torch.randint(3, 50, (1, 10_030))
    positions = torch.cat([torch.arange(10_000), torch.arange(30)])[None]
    with torch.no_grad():
        packed = model(tokens, position_ids=positions).logits[:, 10_000:]
        alone = model(tokens[:, 10_000:]).logits
    assert (packed - alone).abs().max() <= 2.0**-18 * alone.abs().max()
