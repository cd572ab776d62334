"""Folding: features that are exact, the attention they give through a kernel without a bias, and its error bound."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import alibi_core
from alibi_core.conformance.testing import U32, UNIT_ROUNDOFF
from tests.support.frameworks import COMPILERS, FRAMEWORKS, GRADIENTS, NUMPY, TORCH, Framework

NARROW = ("bfloat16", "float16")
DTYPES = (*NARROW, "float32")
SLOPES = np.float32([0.0, 2.0**-16, 0.01, 0.3, 0.70710678, 1.0, -0.3])


def in_dtypes(frameworks: list[Any], cases: Any) -> list[Any]:
    """Return each case, which begins with a dtype, with each framework that has it."""
    pairs = [(x, case) for x in frameworks for case in cases if case[0] in x.values[0].dtypes]
    return [pytest.param(*x.values, *case, id=f"{case}-{x.id}", marks=x.marks) for x, case in pairs]


def positions(q_len: int, kv_len: int) -> np.ndarray:
    """Return the positions of keys, counted from the middle of the queries."""
    return np.arange(kv_len) - (kv_len - 1 - min(q_len, kv_len) // 2)


# --- The features ---------------------------------------------------------------------------------------------------


LENGTHS = [(1, 1), (2, 257), (258, 258), (3, 70_000)]
MULTIPLIED = in_dtypes(FRAMEWORKS, [(dtype, *lengths) for dtype in DTYPES for lengths in LENGTHS])
# Operation by operation, JAX compiles for each shape: one is enough.
MULTIPLIED = [x for x in MULTIPLIED if "jax" not in x.id or "70000" in x.id]


@pytest.mark.parametrize(("framework", "dtype", "q_len", "kv_len"), MULTIPLIED)
def test_features_multiply_to_the_bias_exactly(framework: Framework, dtype: str, q_len: int, kv_len: int) -> None:
    head_dim = 16  # so that 1 / scale is a power of two, and nothing is rounded
    query, key = (framework.array(np.zeros((n, m, head_dim)), dtype) for n, m in ((len(SLOPES), q_len), (1, kv_len)))
    folded = alibi_core.fold(query, key, framework.array(SLOPES))
    assert [x.dtype for x in folded] == [query.dtype] * 2
    q, k = (framework.numpy(x)[..., head_dim:] for x in folded)
    assert q.shape[-1] == k.shape[-1] == alibi_core.fold_size(kv_len, query.dtype)
    if dtype == "float16":  # no key is lost to hardware that takes subnormal numbers for 0
        assert np.abs(k[k != 0]).min(initial=1) >= 2.0**-14
    np.testing.assert_array_equal(q, np.broadcast_to(q[:, :1], q.shape))
    exact = SLOPES.astype(np.float64)[:, None] * positions(q_len, kv_len)
    np.testing.assert_allclose(q[:, 0] @ k[0].T / 4, exact, rtol=1e-15, atol=0)


EAGER = in_dtypes(FRAMEWORKS, [(dtype, False) for dtype in DTYPES])


@pytest.mark.parametrize(("framework", "dtype", "is_compiled"), [*EAGER, *in_dtypes(COMPILERS, [("float32", True)])])
def test_features_have_the_same_bits_everywhere(framework: Framework, dtype: str, is_compiled: bool) -> None:
    if dtype == "bfloat16":
        pytest.importorskip("torch")
    reference, rng = TORCH if dtype == "bfloat16" else NUMPY, np.random.default_rng(1)
    slopes = (rng.random((2, 6)) * 2.0 ** rng.integers(-16, 1, (2, 6))).astype(np.float32)
    tensors = [rng.standard_normal((2, h, n, 11)) for h, n in ((6, 5), (3, 3000))]

    def folded(framework: Framework, function: Any) -> list[np.ndarray]:
        placed = [framework.array(x, dtype) for x in tensors] + [framework.array(slopes)]
        return [framework.numpy(x) for x in function(*placed)]

    function = framework.compiled(alibi_core.fold) if is_compiled else alibi_core.fold
    for actual, expected in zip(folded(framework, function), folded(reference, alibi_core.fold), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_the_number_of_features() -> None:
    found = {dtype: [alibi_core.fold_size(n, dtype) for n in (0, 257, 258, 2049, 2050, 131_329)] for dtype in DTYPES}
    assert found == {"bfloat16": [3, 3, 6, 6, 6, 9], "float16": [3, 3, 3, 3, 6, 6], "float32": [1] * 6}
    with pytest.raises(ValueError, match="kv_len must be at most 8390656 to be folded in float16, got 8390657"):
        alibi_core.fold_size(8_390_657, "float16")
    with pytest.raises(ValueError, match="slopes must be at most 4094 in size to be folded in float16, got"):
        alibi_core.fold(*np.ones((2, 1, 2, 1), np.float16), np.float32([5000]))
    with pytest.raises(TypeError, match="dtype must be one of float64, .*, got 'float8_e4m3fn'"):
        alibi_core.fold_size(5, "float8_e4m3fn")


# --- Attention ------------------------------------------------------------------------------------------------------


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


# --- Gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", COMPILERS)
def test_gradients_of_slopes_are_summed_in_float32(framework: Framework) -> None:
    length, head_dim = 257, 16  # whose sum bfloat16 would round to 256
    query, key = (framework.array(np.zeros((1, length, head_dim)), "bfloat16") for _ in range(2))
    next_to_centre = int(np.flatnonzero(positions(length, length) == 1)[0])

    def scores(slopes: Any) -> Any:
        query_, key_ = alibi_core.fold(query, key, slopes)
        return framework.cast(query_, "float32") * framework.cast(key_, "float32")[:, next_to_centre, None] / 4

    slopes, weight = (framework.array(x) for x in (np.float32([0.3]), np.float32(1.0)))
    (gradient,) = GRADIENTS[framework.name](scores, [slopes], weight)
    assert np.ravel(framework.numpy(gradient)).tolist() == [length]


@pytest.mark.parametrize("framework", COMPILERS)
def test_gradients_are_those_of_scores_with_a_bias(framework: Framework) -> None:
    rng, scale, kv_len = np.random.default_rng(8), 6**-0.5, 300
    tensors = [rng.standard_normal((n, m, 6)) for n, m in ((3, 20), (1, kv_len))]
    query, key = (framework.array(x, "float32") for x in tensors)
    slopes, weight = (framework.array(np.float32(x)) for x in ([0.3, 0.05, 0.0], rng.random((3, 20, kv_len))))

    def scores(*arrays: Any) -> Any:
        query, key = alibi_core.fold(*arrays, head_dim=16)
        return scale * (query @ key.swapaxes(-1, -2))

    found = map(framework.numpy, GRADIENTS[framework.name](scores, [query, key, slopes], weight))
    query, key, weight = (framework.numpy(x) for x in (query, key, weight))
    exact = [
        scale * weight @ key,
        scale * np.einsum("hij,hid->jd", weight, query)[None],
        (weight * positions(20, kv_len)).sum(axis=(1, 2)),
    ]
    for one, other in zip(found, exact, strict=True):  # sums of at most 3 * 20 * 300 terms, of one size
        np.testing.assert_allclose(one, other, rtol=0, atol=3 * 20 * kv_len * U32 * np.abs(other).max())


# --- Bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"key": np.ones((2, 7, 4))}, "query, key and value must have one dtype, got query float32, key float64"),
        ({"slopes": 3}, "slopes must count the heads of query, 2, got 3"),
        ({"slopes": np.float32([0.5, 1e20])}, "slopes must be at most 4.612e.18 in size .* float32"),
        ({"scale": 0}, "scale must not be 0"),
        ({"head_dim": 4}, "head_dim must be at least 5, those of query and of positions, got 4"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    query, key = (np.ones((2, n, 4), np.float32) for n in (5, 7))
    with pytest.raises((TypeError, ValueError), match=message):
        alibi_core.fold(**{"query": query, "key": key} | arguments)
