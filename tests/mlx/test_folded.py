"""Folded attention in MLX: what a fused kernel would be given, in the float32 that such kernels add up in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

mx = pytest.importorskip("mlx.core", reason="mlx is not installed")

import alibi_core  # noqa: E402
from alibi_core.conformance.testing import SIZES, Answer, Case, Sizes, cases  # noqa: E402
from alibi_core.conformance.testing import assert_within_budget as assert_within  # noqa: E402
from alibi_mlx import attention  # noqa: E402
from alibi_mlx._metal import folded as _folded  # noqa: E402
from tests.support import tiles  # noqa: E402
from tests.support.frameworks import MLX, Backend  # noqa: E402

FOLDED = Backend(MLX, "alibi_mlx", "folded")
LOW = ("float16", "bfloat16")
# With the last query at the last key, and none before the first.
ALIGNED = (*(size for size in SIZES if size.lengths[0] <= size.lengths[1]), Sizes(1, 2, 3, (40, 300), 16))


def moved(case: Case, dtype: str, answer: Answer) -> Answer:
    """Return an answer that may be off by what folding may move scores by, besides rounding.

    Scores that move by at most ``e`` multiply each weight by a factor between ``exp(-2 e)`` and ``exp(2 e)``.
    """
    (q_len, kv_len), slopes = case.sizes.lengths, case.arrays["slopes"].astype(np.float32)
    bound = alibi_core.fold_error_bound(slopes, kv_len, head_dim=case.sizes.head_dim, dtype=dtype, q_len=q_len)
    largest = np.abs(case.arrays["value"]).max() * 1.01  # as it is once rounded
    return Answer(answer.value, answer.budget + 2 * np.expm1(2 * bound)[..., None, None] * largest)


@pytest.mark.parametrize("dtype", LOW)
@given(case=st.sampled_from(ALIGNED).flatmap(lambda sizes: cases(sizes=sizes, forms=("causal",), plain=True)))
def test_it_is_exact_to_rounding_with_its_gradients(dtype: str, case: Case) -> None:
    assert_within(tiles.attend(FOLDED, case, dtype), moved(case, dtype, case.exact(dtype).output))
    # The gradients are those of tiles. What went into them of the result was rounded to the dtype, as its budget says.
    tiles.assert_exact(FOLDED, case, dtype)


def test_low_precision_at_length_is_no_worse_than_attention_without_positions() -> None:
    shape, scale = (1, 2, 512, 64), 0.125
    tensors = [np.random.default_rng(n).standard_normal(shape) for n in range(3)]
    for dtype in (mx.bfloat16, mx.float16):
        low = [mx.array(x, mx.float32).astype(dtype) for x in tensors]
        rounded = [np.asarray(x.astype(mx.float32)).astype(np.float64) for x in low]
        errors = []
        slopes = alibi_core.slopes(2, dtype=np.float64)
        for actual, exactly in (
            (attention(*low, implementation="folded"), slopes),
            (mx.fast.scaled_dot_product_attention(*low, scale=scale, mask="causal"), slopes * 0),
        ):
            expected = alibi_core.attention(*rounded, exactly)
            errors.append(np.linalg.norm(np.asarray(actual.astype(mx.float32)) - expected) / np.linalg.norm(expected))
        assert errors[0] <= 1.1 * errors[1]


def test_mlx_is_given_one_call_without_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = mx.fast.scaled_dot_product_attention

    def watched(query: mx.array, key: mx.array, value: mx.array, **arguments: object) -> mx.array:
        calls.append((query, key, value, arguments))
        return real(query, key, value, **arguments)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", watched)
    query, key = mx.random.normal((2, 6, 5, 10)), mx.random.normal((2, 3, 7, 10))
    attention(query.astype(mx.bfloat16), key.astype(mx.bfloat16), key.astype(mx.bfloat16), implementation="folded")
    ((*tensors, arguments),) = calls
    assert [x.shape for x in tensors] == [(2, 6, 5, 13), (2, 3, 7, 13), (2, 3, 7, 13)]
    assert arguments == {"scale": 10**-0.5, "mask": "causal"}
    # What is multiplied on the CPU in float32 is what bfloat16 holds.
    assert all(mx.array_equal(x, x.astype(mx.bfloat16).astype(mx.float32)) for x in tensors)


@pytest.mark.parametrize("head_dim", [72, 80])
def test_features_are_filled_up_with_zeros(head_dim: int) -> None:
    call = alibi_core.AttentionCall.check(*[mx.random.normal((1, 2, 5, 64)).astype(mx.bfloat16)] * 3, xp=mx)
    tensors = [mx.random.normal((1, 2, 5, 64)).astype(mx.bfloat16) for _ in range(3)]
    exactly, filled = (_folded.folded_attention(call, *tensors, n, fused=False) for n in (67, head_dim))
    assert filled.shape == exactly.shape
    # As many zeros more in each sum change nothing; but MLX's BLAS may add in another order.
    np.testing.assert_allclose(*(np.asarray(x.astype(mx.float32)) for x in (filled, exactly)), rtol=2**-7)
