"""Folding: features that are exact, the attention they give through a kernel without a bias, and its error bound."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import alibi_core
from alibi_core.conformance.testing import U32, UNIT_ROUNDOFF, Answer, Attention, Case, cases
from alibi_core.conformance.testing import assert_within_budget as assert_within
from tests.support.frameworks import _GRADIENTS, COMPILERS, FRAMEWORKS, MLX, NUMPY, TORCH, Framework
from tests.support.full import first_of, in_full, once_in_jax, without

NARROW = ("bfloat16", "float16")
DTYPES = (*NARROW, "float32")
SLOPES = np.float32([0.0, 2.0**-16, 0.01, 0.3, 0.70710678, 1.0, -0.3])


def in_dtypes(frameworks: list[Any], cases: Any, keep: int = 1) -> list[Any]:
    """Return each case, which begins with a dtype, with each framework that has it; float64 MLX has on a CPU.

    Programs (cases that end with True) take long to make: but for float32's they are left to ``make test-full``.
    """
    found = once_in_jax(frameworks, cases, keep)
    found = [in_full(x) if x.values[-1] is True and x.values[1] != "float32" else x for x in found]
    return [x for x in found if x.values[1] in (*x.values[0].dtypes, *["float64"] * (x.values[0] is MLX))]


def positions(q_len: int, kv_len: int) -> np.ndarray:
    """Return what keys are to be counted as: from the middle of the queries."""
    return np.arange(kv_len) - (kv_len - 1 - min(q_len, kv_len) // 2)


def kernel(query: np.ndarray, key: np.ndarray, scale: float) -> np.ndarray:
    """Return scores as a fused kernel forms them: products and sums in float32, scaled at the end."""
    group = query.shape[-3] // key.shape[-3]
    key = np.repeat(key, group, axis=-3).astype(np.float32)
    return np.float32(scale) * (query.astype(np.float32) @ np.swapaxes(key, -1, -2))


def attend(scores: np.ndarray, value: np.ndarray, q_offset: int) -> np.ndarray:
    """Return causal attention in the precision of ``scores``; zeros where a query has no key."""
    *_, heads, q_len, kv_len = scores.shape
    hidden = np.arange(kv_len) > np.arange(q_len)[:, None] + q_offset
    scores = np.where(hidden, -np.inf, scores)
    highest = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(highest), highest, 0))
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / np.where(total == 0, 1, total)
    return weights @ np.repeat(value, heads // value.shape[-3], axis=-3).astype(scores.dtype)


# --- The features ---------------------------------------------------------------------------------------------------


LENGTHS = [(3, 2050), (1, 1), (5, 5), (2, 257), (258, 258), (1, 4096), (3, 70_000)]
MULTIPLIED = [
    (dtype, *lengths, head_dim)
    for lengths, head_dim in (*((x, 16) for x in LENGTHS), ((258, 258), 80), ((3, 70_000), 256))
    for dtype in ("float32", *NARROW, "float64")
]


@pytest.mark.parametrize(("framework", "dtype", "q_len", "kv_len", "head_dim"), in_dtypes(FRAMEWORKS, MULTIPLIED, 3))
def test_features_multiply_to_the_bias_exactly(
    framework: Framework, dtype: str, q_len: int, kv_len: int, head_dim: int
) -> None:
    query, key = (framework.array(np.zeros((n, m, head_dim)), dtype) for n, m in ((len(SLOPES), q_len), (1, kv_len)))
    folded = alibi_core.fold(query, key, framework.array(SLOPES))
    assert [x.dtype for x in folded] == [query.dtype] * 2
    q, k = (framework.numpy(x)[..., head_dim:] for x in folded)
    assert q.shape == (len(SLOPES), q_len, alibi_core.fold_size(kv_len, query.dtype))
    assert k.shape == (1, kv_len, alibi_core.fold_size(kv_len, dtype))
    assert np.all(np.isfinite(q))
    assert np.all(np.isfinite(k))
    if dtype == "float16":  # no key is lost to hardware that takes subnormal numbers for 0
        assert np.abs(k[k != 0]).min(initial=1) >= 2.0**-14
    np.testing.assert_array_equal(q, np.broadcast_to(q[:, :1], q.shape))
    if dtype in NARROW:  # each product is exact in float32
        for feature in range(q.shape[-1]):
            products = q[:, 0, feature, None] * k[0, None, :, feature]
            np.testing.assert_array_equal(products, products.astype(np.float32))
    bias = np.float64(head_dim**-0.5) * q[:, 0] @ k[0].T
    exact = SLOPES.astype(np.float64)[:, None] * positions(q_len, kv_len)
    is_power_of_two = head_dim != 80
    # Else 1 / scale is rounded once, and the product once. The sums here are float64's.
    rtol = 1e-15 if is_power_of_two or dtype == "float64" else 2 * U32
    np.testing.assert_allclose(bias, exact, rtol=rtol, atol=0)


WAYS = [(dtype, is_compiled) for is_compiled in (True, False) for dtype in ("float32", *NARROW)]


@pytest.mark.parametrize(("framework", "dtype", "is_compiled"), in_dtypes(FRAMEWORKS, WAYS))
def test_features_have_the_same_bits_everywhere(framework: Framework, dtype: str, is_compiled: bool) -> None:
    reference = NUMPY
    if dtype == "bfloat16":
        pytest.importorskip("torch")
        reference = TORCH
    rng = np.random.default_rng(1)
    slopes = (rng.random((2, 6)) * 2.0 ** rng.integers(-16, 1, (2, 6))).astype(np.float32)
    tensors = [rng.standard_normal((2, h, n, 11)) for h, n in ((6, 5), (3, 3000))]

    def folded(framework: Framework, compiled: bool) -> list[np.ndarray]:
        placed = [framework.array(x, dtype) for x in tensors] + [framework.array(slopes)]
        function = framework.compiled(alibi_core.fold) if compiled else alibi_core.fold
        return [framework.numpy(x) for x in function(*placed)]

    for actual, expected in zip(folded(framework, is_compiled), folded(reference, False), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("framework", without("mlx", COMPILERS))
def test_canonical_slopes_are_the_default_and_compile(framework: Framework) -> None:
    rng = np.random.default_rng(2)
    query, key = (framework.array(rng.standard_normal((3, n, 8)), "bfloat16") for n in (5, 300))
    expected = alibi_core.fold(query, key, alibi_core.slopes(3, xp=framework.xp))
    for slopes in (None, 3):
        actual = framework.compiled(lambda q, k, slopes=slopes: alibi_core.fold(q, k, slopes, head_dim=16))(query, key)
        for x, y in zip(actual, expected, strict=True):
            assert x.shape[-1] == 16
            np.testing.assert_array_equal(framework.numpy(x)[..., :14], framework.numpy(y))
            assert np.all(framework.numpy(x)[..., 14:] == 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_features_is_what_lengths_need_and_no_more(dtype: str) -> None:
    bits = {"bfloat16": 8, "float16": 11, "float32": 24}[dtype]
    rates = 1 if bits == 24 else 3
    for limbs in (1, 2):
        # The longest row whose positions are sums of ``limbs`` digits of ``bits`` bits and a sign.
        longest = 1 + 2**bits if limbs == 1 else 1 + 2 ** (2 * bits + 1) + 2**bits - 1
        if longest < 2**31:
            assert alibi_core.fold_size(longest, dtype) == limbs * rates
        if longest < 2**31 and (dtype, limbs) != ("float16", 2):
            assert alibi_core.fold_size(longest + 1, dtype) == (limbs + 1) * rates
    assert alibi_core.fold_size(0, dtype) == rates
    assert [alibi_core.fold_size(n, "bfloat16") for n in (67_239_680, 67_239_681, 2**30)] == [9, 12, 12]


@pytest.mark.parametrize(
    ("dtype", "kv_len"), first_of([("bfloat16", 131_329), ("float16", 8_390_656), ("float32", 2**24 + 2)])
)
def test_the_longest_rows_are_exact(dtype: str, kv_len: int) -> None:
    pytest.importorskip("torch")
    query, key = (TORCH.array(np.zeros((1, n, 1)), dtype) for n in (1, kv_len))
    q, k = alibi_core.fold(query, key, TORCH.array(np.float32([0.3])))
    bias = k[0, :, 1:].double() @ q[0, 0, 1:].double()
    np.testing.assert_array_equal(TORCH.numpy(bias), np.float64(np.float32(0.3)) * np.arange(1 - kv_len, 1))


# --- Attention ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Folded(Attention):
    """The same exact attention, with a budget for a computation whose scores are sums of folded products."""

    bound: np.ndarray  # [heads] or [batch, heads]
    features: int

    @property
    def _score_error(self) -> np.ndarray:
        # Beside the bound, products of query and key pass so many more additions.
        roundoff = UNIT_ROUNDOFF["float64"] if self.dtype == "float64" else U32
        products = abs(self.scale) * np.einsum("bhid,bhjd->bhij", np.abs(self.query), np.abs(self.keys))
        more = roundoff * self.features * np.where(np.isfinite(self.bias), products, 0)
        return super()._score_error + more.max(axis=-1, keepdims=True, initial=0) + self.bound[..., None, None]


@pytest.mark.parametrize(("framework", "dtype"), in_dtypes(FRAMEWORKS, ("float32", *NARROW)))
@given(
    case=cases(forms=("causal",), plain=True),
    scale=st.sampled_from([None, None, 0.37, -0.37]),
    sign=st.sampled_from([1, 1, -1]),
)
def test_folded_attention_is_alibi_attention(
    framework: Framework, dtype: str, case: Case, scale: float | None, sign: int
) -> None:
    slopes = sign * case.arrays["slopes"].astype(np.float32)
    case = dataclasses.replace(case, scaling=scale).with_arrays(**case.arrays | {"slopes": slopes.astype(np.float64)})
    tensors = [framework.array(case.arrays[name], dtype) for name in ("query", "key")]
    query, key = map(framework.numpy, alibi_core.fold(*tensors, framework.array(slopes), scale=scale))
    (q_len, kv_len), head_dim = case.sizes.lengths, case.sizes.head_dim
    bound = alibi_core.fold_error_bound(slopes, kv_len, head_dim=head_dim, dtype=dtype, q_len=q_len)
    exact = case.exact(dtype)
    exact = Folded(**vars(exact) | {"dtype": "float32"}, bound=bound, features=query.shape[-1] - head_dim)
    actual = attend(kernel(query, key, exact.scale), exact.value, kv_len - q_len)
    assert_within(actual, exact.output)


def test_a_kernel_of_pytorch_computes_alibi_from_folded_tensors() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(6)
    for dtype in DTYPES:
        query, key, value = (TORCH.array(rng.standard_normal((1, 4, 700, 64)), dtype) for _ in range(3))
        expected = alibi_core.attention(*(x.double() for x in (query, key, value)))
        folded = alibi_core.fold(query, key, head_dim=80)
        filled = torch.nn.functional.pad(value, (0, 16))
        actual = torch.nn.functional.scaled_dot_product_attention(*folded, filled, is_causal=True, scale=1 / 8)
        error = (actual[..., :64].double() - expected).norm() / expected.norm()
        bound = float(alibi_core.fold_error_bound(4, 700, head_dim=64, dtype=dtype, q_len=700).max())
        # Weights and result are stored in the dtype.
        assert error < 2 * UNIT_ROUNDOFF[dtype] + 2 * bound


# --- The bound ------------------------------------------------------------------------------------------------------


def added_in_order(query: np.ndarray, key: np.ndarray, scale: float, order: np.ndarray) -> np.ndarray:
    """Return scores of one head whose products are added one after the other, in float32."""
    total = np.zeros((query.shape[0], key.shape[0]), np.float32)
    for feature in order:
        total = total + query[:, None, feature].astype(np.float32) * key[None, :, feature].astype(np.float32)
    return np.float32(scale) * total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_len", "kv_len"), [(4, 200), (4, 4096), (4096, 4096), (3, 70_000)])
@pytest.mark.parametrize("head_dim", [16, 80])
def test_scores_are_within_the_bound_in_any_order(dtype: str, q_len: int, kv_len: int, head_dim: int) -> None:
    pytest.importorskip("torch")
    rng = np.random.default_rng(7)
    slopes, scale = SLOPES[[3, 5, 1]], head_dim**-0.5
    query, key = (TORCH.array(rng.standard_normal((3, n, head_dim)), dtype) for n in (q_len, kv_len))
    folded = [TORCH.numpy(x) for x in alibi_core.fold(query, key, TORCH.array(slopes))]
    query, key = TORCH.numpy(query)[:, :4], TORCH.numpy(key)
    bounds = alibi_core.fold_error_bound(slopes, kv_len, head_dim=head_dim, dtype=dtype, q_len=q_len)
    assert np.all(bounds <= alibi_core.fold_error_bound(slopes, kv_len, head_dim=head_dim, dtype=dtype))
    size = folded[0].shape[-1]
    orders = {"last": np.arange(size), "first": np.arange(size)[::-1], "random": rng.permutation(size)}
    for head, (slope, bound) in enumerate(zip(slopes.astype(np.float64), bounds, strict=True)):
        exact = scale * query[head] @ key[head].T + slope * positions(q_len, kv_len)
        plain = (size + 2) * U32 * scale * (np.abs(query[head]) @ np.abs(key[head]).T)
        for order in orders.values():
            actual = added_in_order(folded[0][head, :4], folded[1][head], scale, order)
            assert np.all(np.abs(actual - exact) <= plain + bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 256])
def test_the_bound_is_no_larger_than_it_must_be(dtype: str, head_dim: int) -> None:
    """Products that are each just too small to count after the bias come close to it."""
    pytest.importorskip("torch")
    kv_len, slope, scale = 4097, np.float32(1.0), head_dim**-0.5
    lost = -(2.0 ** (12 - 24)) / scale * 0.99  # half the spacing of numbers from 2**12 / scale
    query = TORCH.array(np.ones((1, 1, head_dim)), dtype)
    key = TORCH.array(np.full((1, kv_len, head_dim), lost), dtype)
    folded = [TORCH.numpy(x)[0] for x in alibi_core.fold(query, key, TORCH.array(slope[None]))]
    order = np.arange(folded[0].shape[-1])[::-1]
    actual = added_in_order(folded[0], folded[1][:1], scale, order)
    exact = scale * TORCH.numpy(key)[0, :1].sum() - 4096
    bound = float(alibi_core.fold_error_bound(slope[None], kv_len, head_dim=head_dim, dtype=dtype)[0])
    assert bound / 4 < abs(float(actual[0, 0]) - exact) < bound


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_bound_is_an_array_like_the_slopes(framework: Framework) -> None:
    arguments = {"head_dim": 64, "dtype": framework.xp.float32}
    slopes = np.float32([[0.5, 0.0], [-0.25, 1.0]])
    actual = alibi_core.fold_error_bound(framework.array(slopes), 4096, **arguments)
    assert type(actual) is type(framework.array(slopes))
    expected = alibi_core.fold_error_bound(slopes, 4096, head_dim=64, dtype=np.float32)
    np.testing.assert_allclose(framework.numpy(actual), expected, rtol=1e-6)
    np.testing.assert_allclose(expected, np.abs(slopes) * expected[1, 1], rtol=1e-6)
    canonical = alibi_core.fold_error_bound(2, 4096, **arguments)
    assert isinstance(canonical, np.ndarray)
    np.testing.assert_allclose(canonical, alibi_core.slopes(2) * expected[1, 1], rtol=1e-6)


def test_the_bound_grows_with_length_and_shrinks_with_precision() -> None:
    def bound(kv_len: int, dtype: str, **arguments: Any) -> float:
        return float(alibi_core.fold_error_bound(1, kv_len, head_dim=64, dtype=dtype, **arguments)[0])

    for dtype in DTYPES:
        assert bound(65_536, dtype) > 1.8 * bound(32_768, dtype)
        assert bound(65_536, dtype, q_len=65_536) < 0.55 * bound(65_536, dtype)
    assert bound(4096, "float64") < 1e-8 * bound(4096, "float32")
    assert bound(1, "float32") == bound(0, "float32") == 0


# --- Gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("framework", "dtype", "is_compiled"),
    in_dtypes(COMPILERS, [*WAYS, ("float64", True), ("float64", False)]),
)
def test_gradients_are_those_of_scores_with_a_bias(framework: Framework, dtype: str, is_compiled: bool) -> None:
    rng, wide = np.random.default_rng(8), "float64" if dtype == "float64" else "float32"
    heads, q_len, kv_len, head_dim, scale = 3, 20, 300, 6, 6**-0.5
    query, key = (framework.array(rng.standard_normal((n, m, head_dim)), dtype) for n, m in ((heads, 20), (1, 300)))
    slopes = framework.array(np.float32([0.3, 0.05, 0.0]), wide)
    weight = framework.array(rng.random((heads, q_len, kv_len)), wide)

    def fold(*arrays: Any) -> Any:
        return alibi_core.fold(*arrays, head_dim=16)

    fold = framework.compiled(fold) if is_compiled else fold

    def scores(*arrays: Any) -> Any:
        query, key = (framework.cast(x, wide) for x in fold(*arrays))
        return scale * (query @ key.swapaxes(-1, -2))

    tensors = [framework.numpy(x) for x in (query, key, weight)]
    actual = _GRADIENTS[framework.name](scores, [query, key, slopes], weight)
    query, key, weight = tensors
    distances = np.broadcast_to(positions(q_len, kv_len), weight.shape)
    exact = scale * weight @ key, scale * np.einsum("hij,hid->jd", weight, query)[None]
    size = scale * weight @ np.abs(key), scale * np.einsum("hij,hid->jd", weight, np.abs(query))[None]
    # Sums are of so many terms at most, and stored in the dtype; gradients of the features, too, each a sum over keys
    # of one limb of the position. Limbs may be larger than what they add up to, twice the lower one at most.
    rounding, stored = 2 * heads * kv_len * UNIT_ROUNDOFF[wide], UNIT_ROUNDOFF[dtype]
    for found, value, terms in zip(actual, exact, size, strict=False):
        assert_within(framework.numpy(found), Answer(value, rounding * terms + stored * np.abs(value)))
    limbs = np.abs(distances) + (2 * 256 if dtype == "bfloat16" else 0)
    budget = (rounding + 2 * stored) * (weight * limbs).sum(axis=(1, 2))
    answer = Answer((weight * distances).sum(axis=(1, 2)), budget)
    assert np.linalg.norm(budget) < np.linalg.norm(answer.value) / 4  # or none, or twice, would pass
    assert_within(framework.numpy(actual[2]), answer)


@pytest.mark.parametrize("framework", COMPILERS)
def test_gradients_of_slopes_are_summed_in_float32(framework: Framework) -> None:
    length, head_dim = 257, 16  # whose sum bfloat16 would round to 256
    query, key = (framework.array(np.zeros((1, length, head_dim)), "bfloat16") for _ in range(2))
    next_to_centre = int(np.flatnonzero(positions(length, length) == 1)[0])

    def scores(slopes: Any) -> Any:
        query_, key_ = alibi_core.fold(query, key, slopes)
        return framework.cast(query_, "float32") * framework.cast(key_, "float32")[:, next_to_centre, None] / 4

    slopes, weight = (framework.array(x) for x in (np.float32([0.3]), np.float32(1.0)))
    (gradient,) = _GRADIENTS[framework.name](scores, [slopes], weight)
    assert np.ravel(framework.numpy(gradient)).tolist() == [length]


# --- Bad input ------------------------------------------------------------------------------------------------------


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, dtype=np.float32)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"query": np.ones((2, 5, 4), np.int32)}, TypeError, "key must have the dtype of query, int32, got float32"),
        ({"key": np.ones((2, 7, 4))}, TypeError, "key must have the dtype of query, float32, got float64"),
        ({"query": ones(5, 4)}, ValueError, r"query must have axes \[.*heads.*\], got shape \(5, 4\)"),
        ({"key": ones(3, 2, 7, 4)}, ValueError, r"key must have the batch axes of query, \(\), got \(3,\)"),
        ({"key": ones(2, 7, 3)}, ValueError, "key must have the head_dim of query, 4, got 3"),
        ({"key": ones(3, 7, 4)}, ValueError, "num_kv_heads must divide num_heads, got 3 .* and 2"),
        ({"slopes": 3}, ValueError, "slopes must count the heads of query, 2, got 3"),
        ({"slopes": ones(3)}, ValueError, r"slopes must have shape \(2,\).*, got \(3,\)"),
        ({"slopes": np.float32([0.5, np.nan])}, ValueError, "slopes must be finite"),
        ({"slopes": np.float32([0.5, 1e20])}, ValueError, "slopes must be at most 4.612e.18 in size .* float32"),
        ({"scale": 0}, ValueError, "scale must not be 0"),
        ({"scale": float("nan")}, ValueError, "scale must be finite"),
        (
            {"head_dim": 4},
            ValueError,
            r"head_dim must be at least 5 \(4 features of query and 1 for positions\), got 4",
        ),
        ({"head_dim": 0}, ValueError, "head_dim must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        alibi_core.fold(**{"query": ones(2, 5, 4), "key": ones(2, 7, 4)} | arguments)


def test_slopes_that_float16_cannot_hold_are_refused() -> None:
    query, key = (np.ones((1, n, 4), np.float16) for n in (1, 3000))
    alibi_core.fold(query, key, np.float32([127.0]))
    with pytest.raises(
        ValueError, match=r"slopes must be at most 127.9 in size to be folded in float16, got \[-128.0\]"
    ):
        alibi_core.fold(query, key, np.float32([-128.0]))


def test_bad_lengths_and_dtypes_are_named() -> None:
    with pytest.raises(ValueError, match="kv_len must not be negative, got -1"):
        alibi_core.fold_size(-1, "float32")
    with pytest.raises(ValueError, match="kv_len must be at most 8390656 to be folded in float16, got 8390657"):
        alibi_core.fold_size(8_390_657, "float16")
    with pytest.raises(
        TypeError, match="dtype must be one of float64, float32, bfloat16, float16, got 'float8_e4m3fn'"
    ):
        alibi_core.fold_size(5, "float8_e4m3fn")
    with pytest.raises(ValueError, match="head_dim must be at least 1"):
        alibi_core.fold_error_bound(2, 5, head_dim=0, dtype="float32")
    with pytest.raises(ValueError, match=r"slopes must have shape \(..., num_heads\), got \(\)"):
        alibi_core.fold_error_bound(np.asarray(1.0), 5, head_dim=8, dtype="float32")
    with pytest.raises(TypeError, match="slopes must be an array"):
        alibi_core.fold_error_bound(0.5, 5, head_dim=8, dtype="float32")


def test_empty_lengths_are_folded() -> None:
    for q_len, kv_len in ((0, 0), (0, 3), (3, 0)):
        query, key = alibi_core.fold(ones(2, q_len, 4), ones(1, kv_len, 4), head_dim=8)
        assert (query.shape, key.shape) == ((2, q_len, 8), (1, kv_len, 8))
