"""Contracts: the bits that ``transformers`` adds to the scores of BLOOM, Falcon and MPT, in every library."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import alibi_core
from tests.support.frameworks import COMPILERS, FRAMEWORKS, NUMPY, Framework
from tests.support.full import first_of, once_in_jax

CONTRACTS = ("bloom", "falcon", "mpt", "geometric")
KEY_ONLY = ("bloom", "falcon", "mpt")
DTYPES = ("float32", "float16", "bfloat16")
HEADS = (1, 2, 3, 8, 12, 32, 71, 112)
HEAD_DIM = 16


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """PyTorch with a float32 ``pow`` that rounds correctly, which its own does or does not by processor."""
    torch = pytest.importorskip("torch")
    power = torch.pow

    def rounded_power(base: Any, exponent: Any) -> Any:
        in_float64 = [x.double() if isinstance(x, torch.Tensor) else x for x in (base, exponent)]
        return power(*in_float64).float()

    monkeypatch.setattr(torch, "pow", rounded_power)
    return torch


def modeling(family: str) -> Any:
    pytest.importorskip("transformers")
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def added(torch: Any, family: str, num_heads: int, padding_mask: np.ndarray, dtype: str) -> Any:
    """Return what the model's own function builds, ``[batch, num_heads, 1, kv_len]``."""
    batch, kv_len = padding_mask.shape
    if family == "mpt":
        return modeling("mpt").build_mpt_alibi_tensor(num_heads, kv_len).expand(batch, num_heads, 1, kv_len)
    mask = torch.asarray(padding_mask)
    result = modeling(family).build_alibi_tensor(mask, num_heads, getattr(torch, dtype))
    return result.reshape(batch, num_heads, 1, kv_len)


def left_padded(*lengths: int) -> np.ndarray:
    """Return a padding mask, 1 where there is text, of rows with so many tokens of text at their end."""
    return np.asarray([[0] * (max(lengths) - n) + [1] * n for n in lengths])


def own_dtype(family: str, dtype: str) -> str:
    return "float32" if family == "mpt" else dtype


def bias_of_batch(
    torch: Any, family: str, num_heads: int, mask: np.ndarray, dtype: str, q_len: int | None = None
) -> Any:
    """Return this library's bias for the last ``q_len`` tokens of a padded batch, ``[batch, num_heads, q, kv]``."""
    kv_len, target = mask.shape[1], getattr(torch, own_dtype(family, dtype))
    q_len = kv_len if q_len is None else q_len
    ids = torch.asarray(mask)
    if family == "mpt":
        bias = alibi_core.bias(num_heads, q_len, kv_len, contract=family, xp=torch, dtype=target)
        return torch.where(ids[:, None, None, :] == 1, bias, -math.inf)
    positions = (ids.cumsum(-1) - 1) * ids
    return alibi_core.bias_from_positions(
        num_heads,
        positions[:, -q_len:],
        positions,
        q_segment_ids=ids[:, -q_len:] * 0 + 1,  # also padding asks for text, as it does in the models
        kv_segment_ids=ids,
        contract=family,
        dtype=target,
    )


# --- The functions of transformers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", KEY_ONLY)
def test_slopes_have_the_bits_of_the_models(torch: Any, family: str) -> None:
    for num_heads in range(1, 129):
        two_tokens = added(torch, family, num_heads, np.ones((1, 2), np.int64), "float32")[0, :, 0]
        expected = two_tokens[:, 1] - two_tokens[:, 0]  # of 0 and the slope, in either order
        actual = alibi_core.slopes(num_heads, contract=family, xp=torch)
        assert torch.equal(actual, expected), num_heads


def test_pytorchs_own_power_moves_a_slope_by_at_most_one_unit_in_the_last_place() -> None:
    torch = pytest.importorskip("torch")
    for num_heads in range(1, 129):
        expected = added(torch, "bloom", num_heads, np.ones((1, 2), np.int64), "float32")[0, :, 0, 1].numpy()
        actual = alibi_core.slopes(num_heads, contract="bloom")
        assert abs(actual.view(np.int32) - expected.view(np.int32)).max() <= 1


@pytest.mark.parametrize("bias_max", [4, 16, 7.3])
def test_mpts_bias_max_has_the_bits_of_the_model(torch: Any, bias_max: float) -> None:
    for num_heads in HEADS:
        expected = modeling("mpt").build_mpt_alibi_tensor(num_heads, 300, bias_max)
        slopes = alibi_core.slopes(num_heads, bias_max=bias_max, contract="mpt", xp=torch)
        assert torch.equal(alibi_core.key_bias(slopes, 300), expected)


def test_an_mpt_slope_that_is_zero_in_float32_is_zero(torch: Any) -> None:
    expected = modeling("mpt").build_mpt_alibi_tensor(3, 2, 260)
    slopes = alibi_core.slopes(3, bias_max=260, contract="mpt", xp=torch)
    assert torch.equal(slopes, -expected[:, 0, 0])
    assert slopes.tolist() == [0, 0, 2.0**-65]  # 2**130 is infinite, though 2**-130 would not be 0


def test_bloom_slopes_are_up_to_eleven_units_off() -> None:
    distances = []
    for num_heads in range(1, 129):
        exact, bloom = (
            alibi_core.slopes(num_heads, contract=contract).view(np.int32) for contract in ("exact", "bloom")
        )
        distances.append(abs(exact - bloom).max())
    assert max(distances) == 11


@pytest.mark.parametrize("family", KEY_ONLY)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_len", [1, 7, 3001])
def test_key_bias_has_the_bits_of_the_models_function(torch: Any, family: str, dtype: str, kv_len: int) -> None:
    target = getattr(torch, own_dtype(family, dtype))
    for num_heads in HEADS:
        expected = added(torch, family, num_heads, np.ones((1, kv_len), np.int64), dtype)[0]
        actual = alibi_core.key_bias(num_heads, kv_len, contract=family, xp=torch, dtype=target)
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected), num_heads


@pytest.mark.parametrize("family", KEY_ONLY)
@pytest.mark.parametrize("lengths", [(5, 5), (1, 1), (1, 6), (6, 1), (2, 700)])
def test_bias_is_the_row_where_a_query_may_look(torch: Any, family: str, lengths: tuple[int, int]) -> None:
    q_len, kv_len = lengths
    row = added(torch, family, 3, np.ones((1, kv_len), np.int64), "float32")[0]
    hidden = torch.ones(q_len, kv_len).triu(kv_len - q_len + 1).bool()
    actual = alibi_core.bias(3, q_len, kv_len, contract=family, xp=torch)
    assert torch.equal(actual, row.expand(3, q_len, kv_len).masked_fill(hidden, -math.inf))
    shifted = alibi_core.bias(3, 1, kv_len, q_offset=kv_len // 2, contract=family, xp=torch)[:, 0]
    assert torch.equal(shifted[:, : kv_len // 2 + 1], row[:, 0, : kv_len // 2 + 1])
    assert torch.all(shifted[:, kv_len // 2 + 1 :] == -math.inf)


@pytest.mark.parametrize("family", ["bloom", "falcon"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_padded_batches_have_the_bits_of_the_models_function(torch: Any, family: str, dtype: str) -> None:
    mask = left_padded(300, 7, 299, 1)
    for num_heads in (1, 12):
        expected = added(torch, family, num_heads, mask, dtype).expand(-1, -1, 300, -1)
        visible = torch.asarray(np.tril(np.ones((300, 300))) * mask[:, None, :] == 1)[:, None].expand(expected.shape)
        text = torch.asarray(mask == 1)[:, None, :, None].expand(expected.shape)
        actual = bias_of_batch(torch, family, num_heads, mask, dtype)
        assert torch.equal(actual[text & visible], expected[text & visible])
        assert torch.all(actual[text & ~visible] == -math.inf)


def test_falcons_product_is_rounded_like_bfloat16s_at_any_position(torch: Any) -> None:
    rng = np.random.default_rng(1)
    ties = [(2 * k + 1) << shift for k in (128, 129, 255) for shift in range(23)]
    far = np.concatenate(
        [np.arange(2000), rng.integers(0, 2**31, 2000), ties, [2**24 + 1, 2**24 + 2**16 + 1, 2**31 - 1]]
    )
    positions = torch.asarray(np.concatenate([far, -far]))
    for num_heads in (12, 128):
        slopes = alibi_core.slopes(num_heads, contract="falcon", xp=torch)
        actual = alibi_core.bias_from_positions(num_heads, positions.max()[None], positions, contract="falcon")[:, 0]
        assert torch.equal(actual, (slopes.bfloat16()[:, None] * positions).float())


# --- What the models add to their scores ---------------------------------------------------------------------------


class SeenError(Exception):
    """Raised by a spy that has seen what it was to see."""


def tiny_model(torch: Any, family: str, num_heads: int, dtype: str, attention: str, *, zero: bool) -> Any:
    """Return a model of one layer, random or with scores that are 0 but for the bias."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 11, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    size = num_heads * HEAD_DIM
    if family == "bloom":
        config = transformers.BloomConfig(hidden_size=size, n_head=num_heads, n_layer=1, **sizes)
    elif family == "falcon":
        sizes |= {"num_hidden_layers": 1, "alibi": True, "multi_query": False, "parallel_attn": False}
        config = transformers.FalconConfig(hidden_size=size, num_attention_heads=num_heads, **sizes)
    else:
        config = transformers.MptConfig(d_model=size, n_heads=num_heads, n_layers=1, max_seq_len=64, **sizes)
    config._attn_implementation = attention
    torch.manual_seed(num_heads)
    model = getattr(transformers, f"{family.capitalize()}Model")(config).eval().to(getattr(torch, dtype))
    if zero:
        for name, parameter in model.named_parameters():
            if "query_key_value" in name or "Wqkv" in name:
                parameter.data.zero_()
    return model


def scores_of(torch: Any, monkeypatch: pytest.MonkeyPatch, model: Any, mask: np.ndarray, q_len: int | None) -> Any:
    """Return what reaches softmax (or, of "sdpa", what is added before it), for the last ``q_len`` tokens."""
    ids, cache = torch.asarray(mask) * 3, None
    padding_mask = None if mask.all() else torch.asarray(mask)  # BLOOM has a path of its own for None
    with torch.no_grad():
        if q_len is not None:
            past_mask = None if padding_mask is None else padding_mask[:, :-q_len]
            cache = model(ids[:, :-q_len], attention_mask=past_mask, use_cache=True).past_key_values
            ids = ids[:, -q_len:]
        seen: list[Any] = []

        def softmax(scores: Any, *_: Any, **__: Any) -> Any:
            seen.append(scores)
            raise SeenError

        def attention(*_: Any, attn_mask: Any, **__: Any) -> Any:
            seen.append(attn_mask)
            raise SeenError

        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, "softmax", softmax)
            patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
            with pytest.raises(SeenError):
                model(ids, attention_mask=padding_mask, past_key_values=cache)
    return seen[0]


def assert_same_where_visible(torch: Any, actual: Any, expected: Any, mask: np.ndarray) -> None:
    """Compare where queries are text and look at visible keys; elsewhere, what the model has must weigh nothing."""
    text = torch.asarray(mask[:, -expected.shape[2] :] == 1)[:, None, :, None].expand(expected.shape)
    visible = actual != -math.inf
    actual = actual.expand(expected.shape)
    assert torch.equal(actual[text & visible].to(expected.dtype), expected[text & visible])
    assert torch.all(expected[text & ~visible] <= torch.finfo(torch.float16).min)
    assert visible.any(-1)[text[..., 0]].all()


MODELS = [("bloom", "eager"), ("falcon", "sdpa"), ("mpt", "eager")]


@pytest.mark.parametrize(("family", "attention"), MODELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_heads", [3, 8])
@pytest.mark.parametrize("mask", [left_padded(9, 9), left_padded(9, 4)], ids=["full", "padded"])
@pytest.mark.parametrize("q_len", [None, 1, 2])
def test_scores_of_the_models_hold_the_bits_of_the_bias(
    torch: Any,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    attention: str,
    dtype: str,
    num_heads: int,
    mask: np.ndarray,
    q_len: int | None,
) -> None:
    model = tiny_model(torch, family, num_heads, dtype, attention, zero=True)
    scores = scores_of(torch, monkeypatch, model, mask, q_len)
    bias = bias_of_batch(torch, family, num_heads, mask, dtype, q_len)
    assert scores.dtype == bias.dtype
    assert_same_where_visible(torch, bias / math.sqrt(HEAD_DIM) if family == "falcon" else bias, scores, mask)


@pytest.mark.parametrize("family", ["bloom", "mpt"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bias_is_added_to_scaled_scores_as_documented(
    torch: Any, monkeypatch: pytest.MonkeyPatch, family: str, dtype: str
) -> None:
    model, mask = tiny_model(torch, family, 3, dtype, "eager", zero=False), left_padded(9, 4)
    fused: list[Any] = []
    projection = next(m for name, m in model.named_modules() if name.endswith(("query_key_value", "Wqkv")))
    projection.register_forward_hook(lambda module, inputs, output: fused.append(output))
    scores = scores_of(torch, monkeypatch, model, mask, None)
    bias = bias_of_batch(torch, family, 3, mask, dtype)
    if family == "bloom":  # features of a head, then query, key and value; as they stand in PyTorch's fused product
        query, key, _ = fused[0].view(2, 9, 3, 3, HEAD_DIM).permute(3, 0, 2, 1, 4).reshape(3, 6, 9, HEAD_DIM)
        row = alibi_core.key_bias(3, 9, contract="bloom", xp=torch, dtype=bias.dtype)
        row = torch.where(torch.isfinite(bias[:, :, -1:]), bias[:, :, -1:], 0 * row)
        actual = torch.baddbmm(row.reshape(6, 1, 9), query, key.mT, alpha=1 / math.sqrt(HEAD_DIM)).view(2, 3, 9, 9)
    else:
        query, key, _ = fused[0].view(2, 9, 3, 3, HEAD_DIM).permute(2, 0, 3, 1, 4)
        actual = (query @ key.mT) * (1 / math.sqrt(HEAD_DIM)) + bias
    assert_same_where_visible(torch, torch.where(torch.isfinite(bias), actual, -math.inf), scores, mask)


def test_falcons_eager_attention_adds_its_bias_twice(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    if not transformers.__version__.startswith("5.23."):
        pytest.skip(f"known of transformers 5.23, not of {transformers.__version__}")
    mask = left_padded(9, 4)
    model = tiny_model(torch, "falcon", 3, "float32", "eager", zero=True)
    scores = scores_of(torch, monkeypatch, model, mask, None)
    bias = bias_of_batch(torch, "falcon", 3, mask, "float32")
    assert_same_where_visible(torch, 2 * bias / math.sqrt(HEAD_DIM), scores, mask)


# --- The same bits in every library --------------------------------------------------------------------------------


def every_bias(xp: Any, contract: str, q_positions: Any, kv_positions: Any, dtype: Any) -> tuple[Any, ...]:
    """Return what each function gives for 12 heads; with MPT, which has none of positions, those of lengths alone."""
    results = [
        alibi_core.slopes(12, contract=contract, xp=xp, dtype=dtype),
        alibi_core.key_bias(12, 700, contract=contract, xp=xp, dtype=dtype),
        alibi_core.bias(12, 5, 700, contract=contract, xp=xp, dtype=dtype),
        alibi_core.bias(12, 7, 5, contract=contract, xp=xp, dtype=dtype),
    ]
    if contract != "mpt":
        results.append(alibi_core.bias_from_positions(12, q_positions, kv_positions, contract=contract, dtype=dtype))
        results.append(
            alibi_core.bias_from_positions(
                12,
                q_positions,
                kv_positions,
                q_segment_ids=q_positions % 3,
                kv_segment_ids=kv_positions % 3,
                contract=contract,
                dtype=dtype,
            )
        )
    return tuple(results)


def positions() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return rng.integers(0, 3000, (2, 5), np.int32), rng.integers(0, 3000, (2, 97), np.int32)


def assert_same_everywhere(framework: Framework, contract: str, through: Callable[..., Any] = lambda f: f) -> None:
    xp = framework.xp
    function = through(lambda *arrays: every_bias(xp, contract, *arrays, xp.float32))
    expected = every_bias(np, contract, *positions(), np.float32)
    for actual, exact in zip(function(*map(framework.array, positions())), expected, strict=True):
        np.testing.assert_array_equal(framework.bits(actual), NUMPY.bits(exact))


@pytest.mark.parametrize(("framework", "contract"), once_in_jax(FRAMEWORKS, CONTRACTS))
def test_contracts_have_the_same_bits_everywhere(framework: Framework, contract: str) -> None:
    assert_same_everywhere(framework, contract)


@pytest.mark.parametrize("framework", COMPILERS)
@pytest.mark.parametrize("contract", first_of(CONTRACTS))
def test_contracts_have_the_same_bits_compiled(framework: Framework, contract: str) -> None:
    assert_same_everywhere(framework, contract, framework.compiled)


LOW_PRECISION = [  # each with each of the others once
    ("bloom", "bfloat16", True),
    ("bloom", "float16", False),
    ("falcon", "bfloat16", False),
    ("falcon", "float16", True),
]


@pytest.mark.parametrize(("framework", "contract", "dtype", "is_compiled"), once_in_jax(COMPILERS, LOW_PRECISION))
def test_low_precision_is_rounded_last(framework: Framework, contract: str, dtype: str, is_compiled: bool) -> None:
    xp, target = framework.xp, getattr(framework.xp, dtype)
    arrays = [framework.array(x) for x in positions()]

    def function(*arrays: Any) -> Any:
        return every_bias(xp, contract, *arrays, target)

    for actual, exact in zip(
        (framework.compiled(function) if is_compiled else function)(*arrays),
        every_bias(xp, contract, *arrays, xp.float32),
        strict=True,
    ):
        assert actual.dtype == target
        np.testing.assert_array_equal(framework.numpy(actual), framework.numpy(framework.cast(exact, dtype)))


def test_float64_models_add_the_float32_product() -> None:
    for contract in ("bloom", "falcon"):
        actual = alibi_core.key_bias(12, 700, contract=contract, dtype=np.float64)
        assert actual.dtype == np.float64
        np.testing.assert_array_equal(actual, alibi_core.key_bias(12, 700, contract=contract))


# --- Geometric, and what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_geometric_is_exact_with_the_slopes_of_the_papers_text(is_causal: bool, dtype: type) -> None:
    slopes = alibi_core.slopes(12, scheme="geometric", dtype=np.float64 if dtype == np.float64 else np.float32)
    assert np.array_equal(alibi_core.slopes(12, contract="geometric", dtype=slopes.dtype), slopes)
    expected = alibi_core.bias(slopes, 5, 7, is_causal=is_causal, dtype=dtype)
    actual = alibi_core.bias(12, 5, 7, is_causal=is_causal, contract="geometric", dtype=dtype)
    np.testing.assert_array_equal(actual, expected)
    expected, actual = (
        alibi_core.key_bias(slopes, 7),
        alibi_core.key_bias(12, 7, contract="geometric", dtype=slopes.dtype),
    )
    np.testing.assert_array_equal(actual, expected)


ONES = np.ones(3, np.float32)
PLACES = np.arange(4)
LENGTHS = (alibi_core.bias, 3, 4)
REFUSED = [  # a function and its arguments by position, by name, and what is said
    (LENGTHS, {"contract": "gpt"}, "contract must be one of 'exact', .*'mpt', got 'gpt'"),
    (LENGTHS, {"contract": None}, "contract must be a string"),
    ((alibi_core.slopes, 3), {"contract": "gpt"}, "contract must be one of"),
    ((alibi_core.slopes, 3), {"contract": "mpt", "scheme": "linear"}, "scheme must be left at 'canonical'"),
    ((alibi_core.slopes, 3), {"contract": "geometric", "scheme": "geometric"}, "scheme must be left at"),
    ((alibi_core.slopes, 3), {"contract": "bloom", "bias_max": 16}, "bias_max must be left at 8 with contract"),
    ((alibi_core.slopes, 3), {"contract": "falcon", "bias_max": 4}, "bias_max must be left at 8"),
    (LENGTHS, {"contract": "mpt", "dtype": np.float16}, "dtype must be float32 with contract"),
    ((alibi_core.key_bias, 3, 4), {"contract": "mpt", "dtype": np.float64}, "dtype must be float32 with"),
    ((alibi_core.key_bias, ONES, 4), {"contract": "bloom"}, "slopes must be the number of heads with contract"),
    ((alibi_core.bias_from_positions, 3, PLACES, PLACES), {"contract": "mpt"}, "contract must be one that knows"),
]
OF_EACH = [
    (LENGTHS, {"allow_negative_slopes": True}, "allow_negative_slopes must be False with contract"),
    (LENGTHS, {"future_slopes": ONES, "is_causal": False}, "(future_slopes must be None|is_causal must be True) with"),
    ((alibi_core.bias, ONES, 4), {}, "slopes must be the number of heads .*got ndarray"),
]
REFUSED += [(call, {"contract": x} | options, told) for x in CONTRACTS for call, options, told in OF_EACH]
REFUSED += [(LENGTHS, {"contract": x, "is_causal": False}, "is_causal must be True with") for x in KEY_ONLY]


@pytest.mark.parametrize(("call", "options", "message"), REFUSED)
def test_what_makes_no_sense_is_refused(call: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    function, *arguments = call
    with pytest.raises(TypeError if options.get("contract") is None else ValueError, match=message):
        function(*arguments, **options)
