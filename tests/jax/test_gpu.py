"""The kernel for NVIDIA GPUs, interpreted: its numbers, what it reads, and that it lowers for CUDA.

None of this runs on a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

jax = pytest.importorskip("jax")
pytest.importorskip("jax.experimental.pallas.triton", reason="this JAX has no Pallas for Triton")

import jax.numpy as jnp  # noqa: E402

from alibi_core import AttentionCall  # noqa: E402
from alibi_core._call import LENGTH_FIRST  # noqa: E402
from alibi_core.conformance._cases.case import Case, Sizes, cases  # noqa: E402
from alibi_core.conformance._cases.oracle import assert_within  # noqa: E402
from alibi_jax._call.operands import Operands, Rules, take_apart  # noqa: E402
from alibi_jax._call.plan import NORM_BLOCK, needed_keys  # noqa: E402
from alibi_jax._gpu import backward_kernel as _gpu_backward  # noqa: E402
from alibi_jax._gpu import passes as _gpu  # noqa: E402
from alibi_jax._gpu.passes import GPU, KernelShape, inputs_of, refusal  # noqa: E402
from tests.jax.test_tiled import plain  # noqa: E402
from tests.support.frameworks import JAX, Backend  # noqa: E402

BACKEND = Backend(JAX, "alibi_jax", None)
SMALL = GPU(16, 16, interpret=True)
FEW_EXAMPLES = settings(max_examples=max(4, settings.default.max_examples // 5))  # a compiler is at work in each
QUICKLY = {"xla_backend_optimization_level": 0}
TENSORS = ("query", "key", "value")
LONGER = (Sizes(2, 2, 2, (50, 50), 5), Sizes(1, 1, 3, (37, 64), 16), Sizes(2, 3, 1, (64, 33), 4))


def operands_of(case: Case, dtype: str = "float32", tolerance: float | None = None) -> tuple[Rules, Operands]:
    tensors = [JAX.array(BACKEND.layout(case.arrays[name]), dtype) for name in TENSORS]
    arguments = {name: BACKEND._place(value) for name, value in case.arguments.items()} | {"scale": case.scale}
    call = AttentionCall.check(
        *tensors,
        JAX.array(case.arrays["slopes"], "float32"),
        **arguments,
        tolerance=tolerance,
        allow_negative_slopes=True,
        layout=LENGTH_FIRST,
        xp=jnp,
    )
    return take_apart(call, *tensors)


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICKLY)
def forward(static: tuple[Rules, GPU], operands: Operands) -> tuple[Any, Any]:
    rules, options = static
    return _gpu.forward(rules, operands, options, with_log_sum_exps=True)


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICKLY)
def forward_and_backward(static: tuple[Rules, GPU], operands: Operands, cotangent: Any) -> tuple[Any, ...]:
    """Return the result, the log-sum-exps and the five gradients."""
    rules, options = static
    result, sums = _gpu.forward(rules, operands, options, with_log_sum_exps=True)
    gradients = _gpu.backward(rules, operands, result, sums, cotangent, options, slopes_too=True)
    return result.astype(operands.query.dtype), sums, *gradients


def assert_exact(case: Case, dtype: str = "float32", options: GPU = SMALL) -> None:
    """Assert that the result and all gradients are within their budgets."""
    rules, operands = operands_of(case, dtype)
    cotangent = JAX.array(BACKEND.layout(case.arrays["cotangent"]), dtype)
    result, sums, *gradients = forward_and_backward((rules, options), operands, cotangent)
    assert (result.shape, result.dtype) == (operands.query.shape, operands.query.dtype)
    assert (sums.shape, sums.dtype) == ((case.sizes.batch, case.num_heads, case.sizes.lengths[0]), jnp.float32)
    for gradient, tensor in zip(gradients, operands[:3], strict=False):
        assert (gradient.shape, gradient.dtype) == (tensor.shape, tensor.dtype)
    problem = case.exact(dtype)
    assert_within(BACKEND.layout(JAX.numpy(result)), problem.output)
    np.testing.assert_array_equal(JAX.numpy(sums) == np.inf, ~np.isfinite(problem.bias).any(axis=-1))
    by_entry = dataclasses.replace(case, slopes_per_batch=True)  # so that gradients by slopes are not summed
    by_entry.__dict__.update(arrays=case.arrays, arguments=case.arguments)
    answers = by_entry.gradients(dtype)
    for name, gradient in zip(TENSORS, gradients[:3], strict=True):
        assert_within(BACKEND.layout(JAX.numpy(gradient)), answers[name])
    assert_within(JAX.numpy(gradients[3]), answers["slopes"])
    assert (gradients[4] is None) == ("future_slopes" not in case.arguments)
    if gradients[4] is not None:
        assert_within(JAX.numpy(gradients[4]), answers["future_slopes"])


def by_key(case: Case) -> Case:
    """Return the case with a mask of keys in place of any other."""
    mask = case.arguments.get("mask")
    if mask is None or mask.shape[-3:-1] == (1, 1):
        return case
    some = np.broadcast_to(mask[..., :1, :1, :], (case.sizes.batch, 1, 1, mask.shape[-1])).copy()
    return case.with_arguments(case.form, case.arguments | {"mask": some})


# --- Exact, with gradients -----------------------------------------------------------------------------------------


@FEW_EXAMPLES
@given(case=cases(), dtype=st.sampled_from(["float32", "bfloat16", "float16"]))
def test_it_is_exact_with_its_gradients(case: Case, dtype: str) -> None:
    assert_exact(by_key(case), dtype)


@settings(max_examples=max(2, settings.default.max_examples // 10))
@given(
    case=st.sampled_from(LONGER).flatmap(lambda sizes: cases(sizes=sizes)),
    blocks=st.sampled_from([(16, 16), (32, 16), (16, 32)]),
)
@example(case=plain(LONGER[0]), blocks=(16, 16))
@example(case=plain(LONGER[0], window_size=30), blocks=(16, 16))
@example(case=plain(LONGER[0], "symmetric"), blocks=(32, 16))
@example(case=plain(LONGER[0], "asymmetric", window_size=40), blocks=(16, 16))
def test_many_tiles_are_exact_with_their_gradients(case: Case, blocks: tuple[int, int]) -> None:
    slopes = np.resize(np.float32([1.0, 0.3, 4.0, 0.0]), case.arrays["slopes"].shape).astype(np.float64)
    assert_exact(by_key(case).with_arrays(slopes=slopes), options=GPU(*blocks, interpret=True))


@pytest.mark.parametrize(
    ("form", "q_offset"),
    [("causal", 2**31 - 128), ("causal", 128 - 2**31), ("asymmetric", 2**31 - 128), ("asymmetric", 128 - 2**31)],
)
def test_queries_far_from_all_keys(form: str, q_offset: int) -> None:
    case = plain(LONGER[0], form, q_offset=q_offset).with_arrays(slopes=np.asarray([1.0, 0.3, 2.0**-16, 0.0]))
    rules, operands = operands_of(case)
    result, _ = forward((rules, SMALL), operands)
    assert_within(BACKEND.layout(JAX.numpy(result)), case.exact("float32").output)


def test_padding_far_from_queries_costs_no_digits() -> None:
    # All keys but the first few are hidden; distances are counted from those.
    mask = np.arange(64) < 5
    case = plain(LONGER[1], "symmetric", q_offset=5000, mask=mask[None, None, None])
    assert_exact(case.with_arrays(slopes=np.asarray([1.0, 0.3, 4.0])))


def test_queries_that_see_nothing_have_no_part_in_anything() -> None:
    ids = np.repeat([7, 8, 9], [20, 20, 10])[None]
    case = plain(LONGER[0], "symmetric", segment_ids=(ids, np.where(ids == 8, 3, ids)))
    rules, operands = operands_of(case)
    result, sums, by_query, *_ = forward_and_backward((rules, SMALL), operands, jnp.ones_like(operands.query))
    for array in (result, by_query):
        assert not np.asarray(array)[:, 20:40].any()
    assert np.isinf(np.asarray(sums)[:, :, 20:40]).all()
    assert_exact(case)


@pytest.mark.parametrize("size", [1e4, 1e36])
def test_large_numbers_do_no_more_harm_than_to_the_dense_computation(size: float) -> None:
    case = plain(LONGER[0])
    case = case.with_arrays(value=np.sign(case.arrays["value"]) * size)
    rules, operands = operands_of(case)
    result, _ = forward((rules, SMALL), operands)
    assert np.isfinite(result).all()
    assert np.abs(result).max() <= size * (1 + 2.0**-20)


def test_negative_slopes() -> None:
    assert_exact(plain(LONGER[0]).with_arrays(slopes=np.asarray([-0.5, 0.3, -2.0, 0.0])))


def test_one_row_of_a_head_is_wider_than_the_power_of_two_before() -> None:
    assert_exact(plain(Sizes(1, 1, 2, (20, 20), 33)))


@pytest.mark.parametrize("form", ["causal", "asymmetric"])
def test_the_backward_pass_takes_smaller_tiles(form: str) -> None:
    # Each of its tiles has the keys of the wider one that it is part of: log-sum-exps are of those.
    case = plain(Sizes(1, 1, 2, (150, 170), 8), form, window_size=70)
    rules, operands = operands_of(case)
    shape = KernelShape.of(rules, operands, GPU())
    assert (shape.q_block, shape.of_backward.q_block) == (128, 64)
    assert_exact(case.with_arrays(slopes=np.asarray([1.0, 0.1])), options=GPU(interpret=True))


# --- What it reads -------------------------------------------------------------------------------------------------


def many_tokens(length: int, q_len: int, heads: tuple[int, int] = (4, 2), **arguments: Any) -> tuple[Rules, Operands]:
    rng = np.random.default_rng(0)
    query = jnp.asarray(rng.standard_normal((1, q_len, heads[0], 8), np.float32))
    key, value = jnp.asarray(rng.standard_normal((2, 1, length, heads[1], 8), np.float32))
    slopes = jnp.full((heads[0],), 0.5, jnp.float32)
    call = AttentionCall.check(query, key, value, slopes, **arguments, layout=LENGTH_FIRST, xp=jnp)
    rules, operands = take_apart(call, query, key, value)
    # Norms are given, so that no key has to be looked at for the plan.
    norms = jnp.linalg.norm(operands.key, axis=-1).max(axis=1)[..., None] * 1.001
    return rules, operands._replace(key_norms=jnp.broadcast_to(norms, (1, heads[1], -(-length // NORM_BLOCK))))


@pytest.mark.parametrize("is_causal", [True, False])
def test_nothing_but_the_needed_keys_is_read(is_causal: bool) -> None:
    rules, operands = many_tokens(400, 30, is_causal=is_causal, q_offset=200)
    cotangent = jnp.ones_like(operands.query)
    needed = jax.jit(lambda x: needed_keys(rules, x, SMALL.q_block, SMALL.kv_block))(operands)
    first, stop = int(needed.first.min()), int(needed.stop.max())
    assert first > 16
    assert stop <= 230 if is_causal else stop < 380
    expected = forward_and_backward((rules, SMALL), operands, cotangent)
    used = jnp.arange(400) >= first
    used = (used & (jnp.arange(400) < stop))[None, :, None, None]
    poisoned = {name: jnp.where(used, getattr(operands, name), jnp.nan) for name in ("key", "value")}
    actual = forward_and_backward((rules, SMALL), operands._replace(**poisoned), cotangent)
    for x, y in zip(actual, expected, strict=True):
        if y is not None:
            np.testing.assert_array_equal(x, y)


def test_all_that_need_a_key_are_turned_to() -> None:
    rules, operands = many_tokens(150, 200, is_causal=False, window_size=60)
    shape = KernelShape.of(rules, operands, SMALL)

    @jax.jit
    def tables(operands: Operands) -> tuple[Any, Any]:
        table = inputs_of(rules, operands, shape).table
        return table, _gpu_backward.queries_of_keys(table, shape)

    table, turned = map(np.asarray, tables(operands))
    turned = turned.reshape(4, shape.kv_tiles, -1)
    for head, (rows, spans) in enumerate(zip(table[0], turned, strict=True)):
        for block, (begin, end, *runs, least, most) in enumerate(spans):
            low, high = block * 16, block * 16 + 15
            needing = [i for i, (first, stop, _) in enumerate(rows) if first <= high and stop > low]
            assert (begin, end) == ((needing[0], needing[-1] + 1) if needing else (0, 0)), head
            for first, stop, _ in rows[needing]:
                assert least <= first
                assert stop <= most
            for (since, until), is_after in zip((runs[:2], runs[2:]), (False, True), strict=True):
                assert begin <= since <= until <= end
                for first, stop, start in rows[since:until]:
                    assert first <= low <= high < stop
                    assert (start >= high) if is_after else (start + 15 <= low)
                    assert max(abs(start + 15 - low), abs(high - start)) <= 60
    assert any(np.diff(turned[0, :, 2:4]).ravel() > 0)
    assert any(np.diff(turned[0, :, 4:6]).ravel() > 0)


def test_a_cache_is_read_in_its_own_layout() -> None:
    rules, operands = many_tokens(90, 3)
    expected, _ = forward((rules, SMALL), operands)
    turned = {name: jnp.swapaxes(getattr(operands, name), 1, 2) for name in ("key", "value")}
    actual, _ = forward((dataclasses.replace(rules, kv_heads_first=True), SMALL), operands._replace(**turned))
    np.testing.assert_array_equal(actual, expected)


# --- Options, refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"q_block": 48}, ValueError, "q_block must be a power of two, at least 16, got 48"),
        ({"kv_block": 8}, ValueError, "kv_block must be a power of two, at least 16, got 8"),
        ({"q_block": 0}, ValueError, "q_block must"),
        ({"kv_block": 16.0}, TypeError, "kv_block must"),
        ({"num_warps": 3}, ValueError, "num_warps must be a power of two, at most 32, got 3"),
        ({"num_warps": 64}, ValueError, "num_warps must be a power of two, at most 32, got 64"),
        ({"num_stages": 0}, ValueError, "num_stages must"),
        ({"interpret": 1}, TypeError, "interpret must"),
    ],
)
def test_options_are_checked(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        GPU(**options)


def test_what_it_cannot_run_it_refuses() -> None:
    _, operands = many_tokens(20, 20)
    assert refusal(operands) is None
    assert "head_dim of at most 256, got 257" in refusal(operands._replace(query=jnp.zeros((1, 20, 4, 257))))
    assert "mask of keys alone" in refusal(operands._replace(mask=jnp.ones((1, 1, 20, 20), bool)))
    assert "got int32" in refusal(operands._replace(query=jnp.zeros((1, 20, 4, 8), jnp.int32)))


# --- For CUDA ------------------------------------------------------------------------------------------------------


def lowered(function: Any, operands: Operands) -> str:
    """Return what a function becomes for CUDA, as text. Triton compiles it later, where the GPU is."""
    operands = jax.tree.map(np.asarray, operands)  # nothing that is on a device
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", ".*Pallas Triton", DeprecationWarning)  # since JAX 0.12
        if jax.__version_info__ >= (0, 11):  # which GPU it is has to be known
            sharding = jax.sharding
            device = sharding.AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu")
            mesh = sharding.AbstractMesh((1,), ("x",), axis_types=(sharding.AxisType.Auto,), abstract_device=device)
            stack.enter_context(sharding.use_abstract_mesh(mesh))
        return jax.jit(function).trace(operands).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("arguments", "dtype"),
    [
        ({}, "bfloat16"),
        ({"is_causal": False, "window_size": 900}, "float32"),
        ({"packed": True}, "bfloat16"),
        ({"masked": True}, "float16"),
    ],
    ids=str,
)
def test_it_lowers_for_cuda(arguments: dict[str, Any], dtype: str) -> None:
    length, heads, head_dim = 3001, 6, 80
    tensors = [jnp.zeros((1, length, n, head_dim), dtype) for n in (heads, 2, 2)]
    arguments = dict(arguments)
    if arguments.pop("packed", False):
        arguments["segment_ids"] = jnp.zeros((1, length), jnp.int32)
    if arguments.pop("masked", False):
        arguments["mask"] = jnp.ones((1, 1, 1, length), bool)
    rules, operands = take_apart(AttentionCall.check(*tensors, **arguments, layout=LENGTH_FIRST, xp=jnp), *tensors)

    def both(operands: Operands) -> tuple[Any, ...]:
        result, sums = _gpu.forward(rules, operands, GPU(), with_log_sum_exps=True)
        return _gpu.backward(rules, operands, result, sums, result, GPU(), slopes_too=True)

    text = lowered(both, operands)
    assert text.count("gpu$xla.gpu.triton") == 3
    # Of arrays with the lengths of queries and of keys both there are none but those of tiles.
    sizes = [[int(x) for x in re.findall(r"(\d+)x", shape)] for shape in re.findall(r"tensor<([\dx]+)", text)]
    assert max(int(np.prod(x)) for x in sizes if x) <= 2 * length * heads * head_dim
