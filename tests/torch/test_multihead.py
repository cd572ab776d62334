"""``AlibiMultiheadAttention`` is ``nn.MultiheadAttention`` with the bias as part of its ``attn_mask``."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import alibi_core
from alibi_torch import AlibiMultiheadAttention
from tests.support.memory import largest_allocation

BATCH, HEADS, Q_LEN, KV_LEN, EMBED = 2, 4, 5, 7, 12
SLOPES = torch.tensor([1.0, 0.5, 0.3, 0.1])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pair(**options: Any) -> tuple[AlibiMultiheadAttention, nn.MultiheadAttention]:
    """Return a module and PyTorch's own, with the same state dict, no biases zero."""
    plain = nn.MultiheadAttention(EMBED, HEADS, **options)
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.3)
    module = AlibiMultiheadAttention(EMBED, HEADS, slopes=SLOPES, **options)
    module.load_state_dict(plain.state_dict())
    return module.eval(), plain.eval()


def as_numbers(mask: Tensor | None) -> Any:
    """Return a mask as numbers to add to scores."""
    return mask if mask is None or mask.dtype != torch.bool else torch.zeros(mask.shape).masked_fill(mask, -math.inf)


def expected(
    plain: nn.MultiheadAttention, *tensors: Tensor, attn_mask: Any = None, padding: Any = None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Return the results of PyTorch's module with the bias added to its mask."""
    length = 0 if tensors[0].ndim == 2 else int(plain.batch_first)
    q_len, kv_len = tensors[0].shape[length], tensors[1].shape[length]
    batch = tensors[0].shape[1 - length] if tensors[0].ndim == 3 else 1
    bias = alibi_core.bias(SLOPES, q_len, kv_len, is_causal=False).repeat(batch, 1, 1)
    if attn_mask is not None:
        bias = bias + as_numbers(attn_mask)
    return plain(*tensors, key_padding_mask=as_numbers(padding), attn_mask=bias, **options)


def hidden(*shape: int) -> Tensor:
    """Return a mask, True where not to attend, that leaves each row its first key."""
    mask = torch.rand(shape) < 0.4
    mask[..., 0] = False
    return mask


MASKS = {
    "none": {},
    "padding": {"padding": hidden(BATCH, KV_LEN)},
    "padding as numbers": {"padding": torch.randn(BATCH, KV_LEN)},
    "of positions": {"attn_mask": hidden(Q_LEN, KV_LEN)},
    "of positions, by head": {"attn_mask": hidden(BATCH * HEADS, Q_LEN, KV_LEN)},
    "as numbers, by head": {"attn_mask": torch.randn(BATCH * HEADS, Q_LEN, KV_LEN), "padding": hidden(BATCH, KV_LEN)},
    "0 and -inf": {"attn_mask": as_numbers(hidden(Q_LEN, KV_LEN)), "padding": hidden(BATCH, KV_LEN)},
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(
    "options", [{}, {"batch_first": True, "bias": False}, {"kdim": 5, "vdim": 6}], ids=lambda x: ", ".join(x) or "plain"
)
def test_it_is_pytorchs_module_with_the_bias_in_its_mask(name: str, options: dict[str, Any]) -> None:
    module, plain = pair(**options)
    sizes = (Q_LEN, EMBED), (KV_LEN, options.get("kdim", EMBED)), (KV_LEN, options.get("vdim", EMBED))
    tensors = [torch.randn(BATCH, *size) for size in sizes]
    tensors = tensors if module.batch_first else [x.transpose(0, 1) for x in tensors]
    masks = dict(MASKS[name])
    given = {"key_padding_mask": masks.get("padding"), "attn_mask": masks.get("attn_mask")}
    for average in (True, False):
        found, weights = module(*tensors, **given, average_attn_weights=average)
        output, all_weights = expected(plain, *tensors, **masks, average_attn_weights=average)
        torch.testing.assert_close(found, output, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(weights, all_weights, rtol=1e-5, atol=1e-6)
    found, weights = module(*tensors, **given, need_weights=False)
    assert weights is None
    torch.testing.assert_close(found, output, rtol=1e-5, atol=1e-5)


def test_inputs_without_a_batch() -> None:
    module, plain = pair()
    query, key, value = torch.randn(Q_LEN, EMBED), *torch.randn(2, KV_LEN, EMBED)
    masks = {"padding": hidden(KV_LEN), "attn_mask": torch.randn(HEADS, Q_LEN, KV_LEN)}
    found = module(query, key, value, masks["padding"], attn_mask=masks["attn_mask"])
    torch.testing.assert_close(found, expected(plain, query, key, value, **masks), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("need_weights", [False, True])
def test_positions_and_their_distance_and_law(need_weights: bool) -> None:
    plain = nn.MultiheadAttention(EMBED, HEADS, batch_first=True)
    module = AlibiMultiheadAttention(EMBED, HEADS, slopes=SLOPES, batch_first=True, distance="euclidean", law="log")
    module.load_state_dict(plain.state_dict())
    x, points = torch.randn(BATCH, Q_LEN, EMBED), torch.randn(BATCH, Q_LEN, 2) * 5
    bias = alibi_core.bias_from_positions(SLOPES, points, points, distance="euclidean", law="log", is_causal=False)
    found = module(x, x, x, need_weights=need_weights, positions=points)
    torch.testing.assert_close(found, plain(x, x, x, need_weights=need_weights, attn_mask=bias.flatten(0, 1)))


def test_dropout_of_weights_is_pytorchs() -> None:
    module, plain = (x.train() for x in pair(dropout=0.5))
    x = torch.randn(KV_LEN, BATCH, EMBED)
    state = torch.get_rng_state()
    found, weights = module(x, x, x)
    torch.set_rng_state(state)
    torch.testing.assert_close((found, weights), expected(plain, x, x, x), rtol=1e-5, atol=1e-5)
    assert not torch.equal(module(x, x, x, need_weights=False)[0], module.eval()(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize(
    "mask", [None, hidden(1, 2048), as_numbers(hidden(1, 2048))], ids=["none", "booleans", "numbers"]
)
def test_masks_that_hide_need_no_scores_in_memory(mask: Tensor | None) -> None:
    module, x = pair()[0], torch.randn(2048, 1, EMBED)
    causal = nn.Transformer.generate_square_subsequent_mask(2048)

    def attend() -> None:
        module(x, x, x, key_padding_mask=mask, attn_mask=causal, is_causal=True, need_weights=False)

    assert largest_allocation(attend) < HEADS * 2048 * 2048  # bytes: a quarter of the scores


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_causal_module_sees_no_key_to_come(is_causal: bool) -> None:
    module, plain = pair()
    module.is_causal, x = is_causal, torch.randn(KV_LEN, BATCH, EMBED)
    ahead = torch.ones(KV_LEN, KV_LEN, dtype=torch.bool).triu(1)
    found = module(x, x, x, is_causal=not is_causal)[0]
    torch.testing.assert_close(found, expected(plain, x, x, x, attn_mask=ahead)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("missing", ["training", "attribute", "hook", ""])
@pytest.mark.parametrize("masks", ["none", "causal", "padding"])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:The PyTorch API of nested tensors")
def test_transformer_layers_of_pytorch_take_it(missing: str, masks: str) -> None:
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 16, dropout=0.0, batch_first=True)
    plain = layer.self_attn
    layer.self_attn = AlibiMultiheadAttention(EMBED, HEADS, batch_first=True, slopes=SLOPES)
    layer.self_attn.load_state_dict(plain.state_dict())
    if missing == "attribute":  # as if a PyTorch to come had renamed one of the two locks of its fused path
        layer.self_attn._qkv_same_embed_dim = True
    elif missing == "hook":
        layer.self_attn._forward_pre_hooks.clear()
    encoder, x = nn.TransformerEncoder(layer, 1).train(missing == "training"), torch.randn(BATCH, KV_LEN, EMBED)
    causal = nn.Transformer.generate_square_subsequent_mask(KV_LEN)
    padding = torch.arange(KV_LEN) >= torch.tensor([[KV_LEN], [3]])
    options = {"none": {}, "causal": {"attn_mask": causal}, "padding": {"padding": padding}}[masks]
    with torch.no_grad():
        found = encoder(x, options.get("attn_mask"), options.get("padding"))
        attended = expected(plain, x, x, x, **options)[0]
        y = layer.norm1(x + attended)
        output = layer.norm2(y + layer.linear2(layer.linear1(y).relu()))
    shown = slice(None) if masks != "padding" else ~padding
    torch.testing.assert_close(found[shown], output[shown], rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_made_before_is_not_bypassed_either() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(EMBED, HEADS, 16, batch_first=True), 1).eval()
    x, padding = torch.randn(BATCH, KV_LEN, EMBED), torch.arange(KV_LEN).expand(BATCH, -1) > 3
    before = encoder(x)
    encoder.layers[0].self_attn = AlibiMultiheadAttention(EMBED, HEADS, batch_first=True).eval()
    encoder.layers[0].self_attn._reset_parameters()
    with torch.no_grad():
        assert (encoder(x) - before).abs().max() > 1e-2
        nested = encoder(x, src_key_padding_mask=padding)  # as PyTorch's own does without gradients
    expected = encoder(x[:, :4])
    torch.testing.assert_close(nested[:, :4], expected, rtol=1e-5, atol=1e-5)
    assert not nested[:, 4:].any()


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_sequences_of_a_nested_tensor_are_attended_to_one_by_one(batch_first: bool) -> None:
    module, _ = pair(batch_first=batch_first)
    rows = [torch.randn(n, EMBED, requires_grad=True) for n in (5, 2, 7)]
    nested = torch.nested.as_nested_tensor(rows)
    output, weights = module(nested, nested, nested, need_weights=False)
    assert weights is None
    for found, row in zip(output.unbind(), rows, strict=True):
        torch.testing.assert_close(found, module(row, row, row)[0], rtol=1e-5, atol=1e-5)
    sum(x.square().sum() for x in output.unbind()).backward()
    expected = torch.autograd.grad(module(rows[1], rows[1], rows[1])[0].square().sum(), rows[1])[0]
    torch.testing.assert_close(rows[1].grad, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(TypeError, match="key must not be nested but in self-attention"):
        module(torch.randn(3, 7, EMBED), nested, nested)


def test_decoder_layers_and_compiled_modules_take_it() -> None:
    module, plain = pair(batch_first=True)
    x, padding = torch.randn(BATCH, KV_LEN, EMBED), hidden(BATCH, KV_LEN)
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    for mask in (padding, as_numbers(padding)):
        found = compiled(x, x, x, key_padding_mask=mask, need_weights=False)[0]
        torch.testing.assert_close(found, expected(plain, x, x, x, padding=padding)[0], rtol=1e-5, atol=1e-5)
    decoder = nn.TransformerDecoderLayer(EMBED, HEADS, 16, batch_first=True).eval()
    decoder.self_attn = decoder.multihead_attn = module
    causal = nn.Transformer.generate_square_subsequent_mask(KV_LEN)
    alone = decoder(x[:, :3], x, tgt_mask=causal[:3, :3], tgt_is_causal=True)
    torch.testing.assert_close(decoder(x[:, :3], x, tgt_mask=causal[:3, :3]), alone, rtol=1e-5, atol=1e-5)


class SelfAttention(nn.Module):
    """A module of a user's own around attention."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = pair(batch_first=True)[0]

    def forward(self, x: Tensor, padding: Tensor, mask: Tensor) -> Tensor:
        return self.inner(x, x, x, key_padding_mask=padding, attn_mask=mask, need_weights=False)[0]


def test_it_exports_for_any_batch_and_length() -> None:
    def given(batch: int, length: int) -> tuple[Tensor, ...]:
        return torch.randn(batch, length, EMBED), hidden(batch, length), hidden(length, length)

    module, batch, length = SelfAttention(), torch.export.Dim("batch"), torch.export.Dim("length")
    shapes = {0: batch, 1: length}, {0: batch, 1: length}, {0: length, 1: length}
    exported = torch.export.export(module, given(2, 5), dynamic_shapes=shapes, strict=False)
    for inputs in (given(3, 9), given(1, 40)):
        torch.testing.assert_close(exported.module()(*inputs), module(*inputs), rtol=0, atol=2e-6)


def test_gradients_and_learnable_slopes() -> None:
    module = AlibiMultiheadAttention(EMBED, HEADS, slopes=SLOPES, learnable_slopes=True)
    x = torch.randn(KV_LEN, BATCH, EMBED)
    found = module(x, x, x, need_weights=False)[0]
    torch.testing.assert_close(found, AlibiMultiheadAttention.forward(module, x, x, x)[0], rtol=1e-5, atol=1e-5)
    found.square().sum().backward()
    assert all(parameter.grad.any() for name, parameter in module.named_parameters() if not name.endswith("bias"))
    assert module.bfloat16().log_slopes.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "arguments", "error", "message"),
    [
        ({"add_bias_kv": True}, {}, ValueError, "add_bias_kv must be False with ALiBi"),
        ({"add_zero_attn": True}, {}, ValueError, "add_zero_attn must be False with ALiBi"),
        ({"implementation": "fast"}, {}, ValueError, "implementation must be one of"),
        ({}, {"attn_mask": torch.zeros(3, 3)}, ValueError, r"attn_mask must have shape \(7, 7\) or \(8, 7, 7\), got"),
        ({}, {"key_padding_mask": torch.zeros(3, 7)}, ValueError, r"key_padding_mask must have shape \(2, 7\), got"),
        ({}, {"attn_mask": torch.zeros(7, 7).int()}, TypeError, r"attn_mask must be boolean \(True where NOT to"),
        ({}, {"query": torch.zeros(7, EMBED)}, ValueError, r"key must have shape \(length, batch, 12\), or \(length"),
        (
            {"implementation": "tiled"},
            {},
            NotImplementedError,
            "implementation 'tiled' returns no weights; 'dense' can",
        ),
    ],
    ids=str,
)
def test_it_refuses(options: dict[str, Any], arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    x = torch.zeros(KV_LEN, BATCH, EMBED)
    with pytest.raises(error, match=f"^{message}"):
        AlibiMultiheadAttention(EMBED, HEADS, **options)(**{"query": x, "key": x, "value": x} | arguments)
