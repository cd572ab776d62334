"""Contracts: the bits that ``transformers`` adds to the scores of BLOOM, Falcon and MPT, in every library."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
import pytest

import alibi_core
from tests.support.frameworks import COMPILERS, FRAMEWORKS, Framework

CONTRACTS = ("bloom", "falcon", "mpt", "geometric")
KEY_ONLY = ("bloom", "falcon", "mpt")
DTYPES = ("float32", "float16", "bfloat16")
HEADS = (1, 2, 3, 8, 12, 32, 71, 112)


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


def padded(torch: Any, family: str, num_heads: int, mask: np.ndarray, dtype: str) -> Any:
    """Return the bias of the model's own function, ``[batch, num_heads, 1, kv_len]``."""
    result = modeling(family).build_alibi_tensor(torch.asarray(mask), num_heads, getattr(torch, dtype))
    return result.reshape(len(mask), num_heads, 1, -1)


def added(torch: Any, family: str, num_heads: int, kv_len: int, dtype: str = "float32") -> Any:
    """Return the bias of the model's own function, ``[num_heads, 1, kv_len]``."""
    if family == "mpt":
        return modeling("mpt").build_mpt_alibi_tensor(num_heads, kv_len)
    return padded(torch, family, num_heads, np.ones((1, kv_len), np.int64), dtype)[0]


# --- The functions of transformers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", KEY_ONLY)
def test_slopes_have_the_bits_of_the_models(torch: Any, family: str) -> None:
    for num_heads in range(1, 129):
        two_tokens = added(torch, family, num_heads, 2)[:, 0]
        expected = two_tokens[:, 1] - two_tokens[:, 0]  # of 0 and the slope, in either order
        actual = alibi_core.slopes(num_heads, contract=family, xp=torch)
        assert torch.equal(actual, expected), num_heads


@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_the_models_own_pow_moves_a_slope_by_a_unit_and_a_bias_by_two(family: str) -> None:
    torch = pytest.importorskip("torch")
    for num_heads in range(1, 129):
        expected = added(torch, family, num_heads, 300)[:, 0]
        actual = alibi_core.key_bias(num_heads, 300, contract=family, xp=torch)[:, 0]
        units = (expected.view(torch.int32) - actual.view(torch.int32)).abs()
        at_one = [1] if family == "bloom" else [-2]  # the bias at distance 1 is the slope
        assert units[:, at_one].max() <= 1, num_heads
        assert units.max() <= 2, num_heads


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
    exact, bloom = (
        np.concatenate([alibi_core.slopes(n, contract=contract) for n in range(1, 129)]).view(np.int32)
        for contract in ("exact", "bloom")
    )
    assert abs(exact - bloom).max() == 11


@pytest.mark.parametrize("family", KEY_ONLY)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_len", [1, 7, 3001])
def test_key_bias_has_the_bits_of_the_models_function(torch: Any, family: str, dtype: str, kv_len: int) -> None:
    for num_heads in HEADS:
        expected = added(torch, family, num_heads, kv_len, dtype)
        dtype = "float32" if family == "mpt" else dtype
        actual = alibi_core.key_bias(num_heads, kv_len, contract=family, xp=torch, dtype=dtype)
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected), num_heads


@pytest.mark.parametrize("family", KEY_ONLY)
@pytest.mark.parametrize("lengths", [(5, 5), (1, 1), (1, 6), (6, 1), (2, 700)])
def test_bias_is_the_row_where_a_query_may_look(torch: Any, family: str, lengths: tuple[int, int]) -> None:
    q_len, kv_len = lengths
    row = added(torch, family, 3, kv_len)
    hidden = torch.ones(q_len, kv_len).triu(kv_len - q_len + 1).bool()
    actual = alibi_core.bias(3, q_len, kv_len, contract=family, xp=torch)
    assert torch.equal(actual, row.expand(3, q_len, kv_len).masked_fill(hidden, -math.inf))
    shifted = alibi_core.bias(3, 1, kv_len, q_offset=kv_len // 2, contract=family, xp=torch)[:, 0]
    assert torch.equal(shifted[:, : kv_len // 2 + 1], row[:, 0, : kv_len // 2 + 1])
    assert torch.all(shifted[:, kv_len // 2 + 1 :] == -math.inf)


@pytest.mark.parametrize("family", ["bloom", "falcon"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_padded_batches_have_the_bits_of_the_models_function(torch: Any, family: str, dtype: str) -> None:
    lengths = (300, 7, 299, 1)
    mask = np.asarray([[0] * (300 - n) + [1] * n for n in lengths])
    ids = torch.asarray(mask)
    positions = (ids.cumsum(-1) - 1) * ids
    for num_heads in (1, 12):
        expected = padded(torch, family, num_heads, mask, dtype).expand(-1, -1, 300, -1)
        visible = torch.asarray(np.tril(np.ones((300, 300))) * mask[:, None, :] == 1)[:, None].expand(expected.shape)
        text = torch.asarray(mask == 1)[:, None, :, None].expand(expected.shape)
        actual = alibi_core.bias_from_positions(
            num_heads,
            positions,
            positions,
            q_segment_ids=ids * 0 + 1,  # also padding asks for text, as it does in the models
            kv_segment_ids=ids,
            contract=family,
            dtype=getattr(torch, dtype),
        )
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


# --- The same bits in every library --------------------------------------------------------------------------------


def every_bias(xp: Any, contract: str, q_positions: Any, kv_positions: Any, dtype: Any) -> tuple[Any, ...]:
    """Return the bias of each function for 12 heads; MPT has only functions of lengths."""
    options = {"contract": contract, "dtype": dtype}
    results = [alibi_core.slopes(12, xp=xp, **options), alibi_core.key_bias(12, 700, xp=xp, **options)]
    results += [alibi_core.bias(12, *lengths, xp=xp, **options) for lengths in ((5, 700), (7, 5))]
    if contract != "mpt":
        ids = {"q_segment_ids": q_positions % 3, "kv_segment_ids": kv_positions % 3}
        for packed in ({}, ids):
            results.append(alibi_core.bias_from_positions(12, q_positions, kv_positions, **options, **packed))
    return tuple(results)


EAGER = [*((contract, "float32") for contract in CONTRACTS), ("bloom", "float16"), ("falcon", "bfloat16")]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("contract", "dtype"), EAGER)
def test_biases_have_the_same_bits_everywhere_and_are_rounded_last(
    framework: Framework, contract: str, dtype: str
) -> None:
    if dtype not in framework.dtypes:
        pytest.skip(f"{framework} has no {dtype}")
    # Operation by operation, JAX takes seconds; it has all biases compiled as one program.
    assert_same_bits(framework, contract, dtype, is_compiled=framework.name == "jax")


@pytest.mark.parametrize("framework", COMPILERS)
@pytest.mark.parametrize(
    ("contract", "dtype"),
    [
        ("bloom", "bfloat16"),
        pytest.param("falcon", "float16", marks=pytest.mark.slow),
        pytest.param("mpt", "float32", marks=pytest.mark.slow),
    ],
)
def test_compiled_biases_have_the_same_bits(framework: Framework, contract: str, dtype: str) -> None:
    assert_same_bits(framework, contract, dtype, is_compiled=True)


def assert_same_bits(framework: Framework, contract: str, dtype: str, *, is_compiled: bool) -> None:
    xp, target, rng = framework.xp, getattr(framework.xp, dtype), np.random.default_rng(3)
    positions = [rng.integers(0, 3000, (2, n), np.int32) for n in (5, 97)]

    def function(*arrays: Any) -> Any:
        return every_bias(xp, contract, *arrays, target)

    found = (framework.compiled(function) if is_compiled else function)(*map(framework.array, positions))
    for actual, exact in zip(found, every_bias(np, contract, *positions, np.float32), strict=True):
        assert actual.dtype == target
        expected = framework.numpy32(framework.cast(framework.array(exact), dtype))
        np.testing.assert_array_equal(framework.numpy32(actual).view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("contract", ["bloom", "falcon"])
def test_unsigned_positions_do_not_wrap(framework: Framework, contract: str) -> None:
    far = np.asarray([7, 2**31, 3_000_000_001, 2**32 - 1], np.uint32)
    found = alibi_core.bias_from_positions(2, *framework.placed((far, far)), contract=contract)
    expected = alibi_core.bias_from_positions(2, *[far.astype(np.int64)] * 2, contract=contract)
    np.testing.assert_array_equal(framework.bits(found), expected.view(np.int32))


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
    actual = alibi_core.key_bias(12, 7, contract="geometric", dtype=slopes.dtype)
    np.testing.assert_array_equal(actual, alibi_core.key_bias(slopes, 7))


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
