"""The bias: its numbers, the same bits in every library and compiler, and explicit positions."""

from __future__ import annotations

import itertools
import math
import sys
from typing import Any

import numpy as np
import pytest

import alibi_core
from tests.support.frameworks import FRAMEWORKS, JAX, Framework

INF = float("inf")
RNG = np.random.default_rng(0)
SLOPES = np.asarray([0.0, 2.0**-16, 0.01, 0.3, 0.70710678, 3.0], dtype=np.float32)


@pytest.mark.parametrize("framework", [f for f in FRAMEWORKS if "float16" in f.values[0].dtypes])
def test_penalties_beyond_float16_are_minus_infinity_without_a_warning(framework: Framework) -> None:
    slopes, options = framework.array(np.ones(1, np.float32)), {"dtype": "float16"}
    far, near = framework.array(np.asarray([100_000], np.int32)), framework.array(np.asarray([0, 99_999], np.int32))
    for actual in (
        alibi_core.bias(slopes, 1, 2, q_offset=100_000, **options),
        alibi_core.bias_from_positions(slopes, far, near, **options),
        alibi_core.key_bias(slopes, 100_001, **options)[..., ::99_999],
    ):
        assert framework.numpy(actual)[..., 0] == -INF
    farther = framework.array(np.asarray([2**25], np.int32))
    reward = alibi_core.bias_from_positions(1, farther, farther, contract="bloom", **options)
    assert framework.numpy(reward) == INF


def test_float64_bias_is_formed_in_float64() -> None:
    slopes = np.asarray([1 / 3])
    np.testing.assert_array_equal(alibi_core.bias(slopes, 1, 8)[0, 0], slopes * -np.arange(7, -1, -1))
    np.testing.assert_array_equal(alibi_core.bias(12, 1, 8, dtype=np.float64)[8, 0, 0], -7 * 2**-0.5)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_key_bias_is_exact_to_float32_at_a_million_keys(framework: Framework) -> None:
    kv_len = 1_000_000
    actual = framework.numpy(alibi_core.key_bias(framework.array(SLOPES[3:5]), kv_len))
    exact = SLOPES[3:5].astype(np.float64)[:, None, None] * np.arange(1 - kv_len, 1)
    np.testing.assert_array_equal(actual, exact.astype(np.float32))


# --- Explicit positions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_sums_of_gates_are_exact_however_long_the_text(framework: Framework) -> None:
    """Tiny gates beside large ones, whose running sum is a million, and closed ones: two units in the last place."""
    kv_len, q_len = 65_536, 3
    gates = -np.exp(RNG.normal(0, 2, (2, kv_len))).astype(np.float32)
    gates[:, ::7] *= 50
    gates[:, ::5] *= 1e-9
    gates[1, kv_len // 3] = -INF
    through = framework.compiled if framework is JAX else lambda f: f  # each step by itself is compiled, too
    actual = framework.numpy(through(lambda x: alibi_core.bias_from_gates(x, q_len))(framework.array(gates)))
    for head, row in itertools.product(range(2), range(q_len)):
        place = kv_len - q_len + row
        near = np.arange(place - 300, place + 1)
        for key in {*near.tolist(), *RNG.integers(0, place, 100).tolist()}:
            exact = math.fsum(gates[head, key + 1 : place + 1].astype(np.float64))
            found = actual[head, row, key]
            assert found == exact or abs(found - exact) <= 2 * np.spacing(np.float32(abs(exact))), (head, row, key)
        assert np.isneginf(actual[head, row, place + 1 :]).all()


@pytest.mark.parametrize("bad", [0.1, np.nan])
def test_gates_are_logarithms(bad: float) -> None:
    with pytest.raises(ValueError, match="log_gates must be numbers at most 0"):
        alibi_core.bias_from_gates(np.asarray([[-1.0, bad]]))
    with pytest.raises(ValueError, match=r"log_gates must have axes \[..., num_heads, kv_len\]"):
        alibi_core.bias_from_gates(np.asarray([-1.0]))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_positions_may_have_batch_axes_and_restart(framework: Framework) -> None:
    # Two rows: packed sequences of 2 and 3 tokens; and 2 tokens of padding before 3 of text.
    positions = framework.array(np.asarray([[0, 1, 0, 1, 2], [0, 0, 0, 1, 2]], dtype=np.int32))
    ids = framework.array(np.asarray([[1, 1, 2, 2, 2], [0, 0, 1, 1, 1]], dtype=np.int32))
    slopes = framework.array(np.asarray([1.0, 0.5], dtype=np.float32))
    actual = alibi_core.bias_from_positions(slopes, positions, positions, q_segment_ids=ids, kv_segment_ids=ids)
    alone = {n: alibi_core.bias(np.asarray([1.0, 0.5]), n) for n in (2, 3)}
    expected = np.full((2, 2, 5, 5), -INF)
    expected[0, :, :2, :2], expected[0, :, 2:, 2:] = alone[2], alone[3]
    expected[1, :, :2, :2], expected[1, :, 2:, 2:] = 0.0, alone[3]
    np.testing.assert_array_equal(framework.numpy(actual), expected)


@pytest.mark.parametrize("dtype", ["int8", "int16", "uint8", "uint32", "int64", "uint64"])
def test_positions_of_any_integer_type_are_subtracted_without_wrapping(dtype: str) -> None:
    low, high = np.asarray([0, 100], dtype=dtype), np.asarray([100, 0], dtype=dtype)
    actual = alibi_core.bias_from_positions(np.asarray([1.0]), low, high, is_causal=False)
    np.testing.assert_array_equal(actual, [[[-100, 0], [0, -100]]])


FAR_INT32 = np.asarray([-(2**31), -1_500_000_001, -(2**24) - 1, 0, 3, 2**24 + 1, 1_500_000_000, 2**31 - 1], np.int32)
FAR_UINT32 = np.asarray([0, 1, 2**24 + 1, 2**31 - 1, 2**31, 3_000_000_001, 2**32 - 1], np.uint32)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("far", [FAR_INT32, FAR_UINT32], ids=["int32", "uint32"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_distances_of_32_bit_positions_are_exact_however_far_apart(
    framework: Framework, far: np.ndarray, is_causal: bool
) -> None:
    slopes = np.asarray([1.0, 0.3], np.float32)
    relative = far.astype(np.int64) - far.astype(np.int64)[::-1, None]
    expected = slopes[:, None, None] * (0 - np.abs(relative)).astype(np.float32)
    if is_causal:
        expected[:, relative > 0] = -INF

    def between(slopes: Any, q_positions: Any, kv_positions: Any) -> Any:
        return alibi_core.bias_from_positions(slopes, q_positions, kv_positions, is_causal=is_causal)

    arrays = framework.placed((slopes, far[::-1].copy(), far))
    for call in (between, framework.compiled(between)):
        np.testing.assert_array_equal(framework.bits(call(*arrays)), expected.view(np.int32))


def test_positions_beyond_int32_are_refused_rather_than_wrapped() -> None:
    for q_offset in (2**31, -(2**40)):
        with pytest.raises(ValueError, match="q_offset and lengths must stay within 2147483647 tokens"):
            alibi_core.bias(np.ones(1), 2, 2, q_offset=q_offset)
    with pytest.raises(ValueError, match="must stay within"):
        alibi_core.key_bias(np.ones(1), 2**31)
    for apart in (np.asarray([2**63 - 1, -5]), np.asarray([2**64 - 1], np.uint64)):
        with pytest.raises(ValueError, match=r"q_positions and kv_positions must be less than 2\*\*63 apart"):
            alibi_core.bias_from_positions(np.ones(1), apart, apart)
    far = np.asarray([2**32 - 1], dtype=np.uint32)
    np.testing.assert_array_equal(alibi_core.bias_from_positions(np.ones(1), far, far * 0), [[[-(2.0**32 - 1)]]])
    farthest = np.asarray([2.0**62], np.float32)
    np.testing.assert_array_equal(alibi_core.bias_from_positions(np.ones(1), farthest, farthest * 0), [[[-(2.0**62)]]])
    far = np.asarray([2**40, 2**40 + 1])  # far from 0, and close to each other
    np.testing.assert_array_equal(alibi_core.bias_from_positions(np.ones(1), far, far), [[[0, -INF], [-1, 0]]])


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.uint64])
def test_lengths_and_offsets_may_be_numpy_integers_of_any_kind(kind: type) -> None:
    expected = alibi_core.bias(3, 5, 3)
    np.testing.assert_array_equal(alibi_core.bias(kind(3), kind(5), kind(3)), expected)
    np.testing.assert_array_equal(alibi_core.bias(3, 5, 3, q_offset=np.int8(-2)), expected)


def test_slopes_of_keys_may_differ_by_batch_entry() -> None:
    slopes = np.asarray([[1.0, 0.5], [0.25, 2.0], [0.0, 3.0]])
    np.testing.assert_array_equal(alibi_core.key_bias(slopes, 5), np.stack([alibi_core.key_bias(s, 5) for s in slopes]))


# --- Attributes, and the equality of forms -----------------------------------------------------------------------


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_namespace_and_dtype_are_those_of_the_slopes(framework: Framework) -> None:
    slopes = alibi_core.slopes(3, xp=framework.xp)
    positions = framework.array(np.arange(4, dtype=np.int32))
    results = [alibi_core.bias_from_positions(given, positions, positions) for given in (slopes, 3)]
    results += [
        alibi_core.bias(slopes, 2, 4),
        alibi_core.bias(3, 2, 4, xp=framework.xp),
        alibi_core.key_bias(slopes, 4),
    ]
    for result in results:
        assert type(result) is type(slopes)
        assert result.dtype == framework.xp.float32


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_namespace_and_dtype_may_be_given_by_name(framework: Framework) -> None:
    xp, name = framework.xp, framework.xp.__name__
    extra = {"torch": "pytorch", "jax": "jax", "mlx": "mlx"}.get(framework.name, name)  # which installs the library
    assert type(alibi_core.slopes(4, xp=extra)) is type(alibi_core.slopes(4, xp=xp))
    by_name = alibi_core.bias(4, 3, xp=name, dtype="float32")
    assert type(by_name) is type(alibi_core.bias(4, 3, xp=xp))
    assert by_name.dtype == alibi_core.slopes(4, xp=name, dtype="float32").dtype == xp.float32
    compiled = framework.compiled(lambda x: x + alibi_core.key_bias(4, 3, xp=name, dtype="float32"))
    assert compiled(framework.array(np.ones(1))).dtype == xp.float32
    if not hasattr(xp, "bfloat16"):
        with pytest.raises(TypeError, match="dtype must be a real floating dtype of .*, got 'bfloat16'"):
            alibi_core.slopes(4, xp=xp, dtype="bfloat16")


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # as if it were missing, wherever it is not
    with pytest.raises(ModuleNotFoundError, match="xp must name a library that is installed, got 'cupy'"):
        alibi_core.slopes(4, xp="cupy")


def test_the_device_is_that_of_the_slopes_or_the_one_asked_for() -> None:
    torch = pytest.importorskip("torch")
    slopes, positions = alibi_core.slopes(3, xp=torch, device="meta"), torch.arange(3, device="meta")
    biases = alibi_core.bias(3, 2, xp=torch, device="meta"), alibi_core.key_bias(slopes, 2)
    for made in (slopes, *biases, alibi_core.bias_from_positions(3, positions, positions)):
        assert made.device.type == "meta"


@pytest.mark.slow
def test_slopes_of_numpy_are_constants_of_a_compiled_program() -> None:
    torch = pytest.importorskip("torch")
    slopes = np.asarray([0.5, 0.2], np.float32)
    compiled = torch.compile(lambda x: x + alibi_core.bias(slopes, 3, xp=torch), fullgraph=True, backend="eager")
    assert np.array_equal(compiled(torch.zeros(())).numpy(), alibi_core.bias(slopes, 3))
