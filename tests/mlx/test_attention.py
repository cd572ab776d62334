"""MLX alone: its transformations, its modules, caches and files, its costs, and where MLX itself falls short."""

import functools
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="mlx is not installed")

import alibi_core  # noqa: E402
from alibi_core.backend.checks import namespace_of  # noqa: E402
from alibi_mlx import AlibiAttention, _kernels, _plan, attention  # noqa: E402
from tests.support.frameworks import MLX  # noqa: E402
from tests.support.mlx import assert_close, normal  # noqa: E402

IMPLEMENTATIONS = ("tiled", "dense")
BATCH, HEADS, KV_HEADS, Q_LEN, KV_LEN, HEAD_DIM = 2, 6, 3, 5, 11, 7
EMBED_DIM = 13


def tensors():
    sizes = ((HEADS, Q_LEN), (KV_HEADS, KV_LEN), (KV_HEADS, KV_LEN))
    return [normal(BATCH, *size, HEAD_DIM, seed=seed) for seed, size in enumerate(sizes)]


# --- The core on MLX arrays -----------------------------------------------------------------------------------------


def test_float64_is_not_rounded_to_float32():
    x = np.linspace(-40, 0, 101)
    with mx.stream(mx.cpu):  # the device that has float64
        slopes = MLX.numpy(alibi_core.slopes(12, xp=mx, dtype=mx.float64))
        exponentials = MLX.numpy(namespace_of(xp=mx).exp(mx.array(x, dtype=mx.float64)))
    assert np.array_equal(slopes, alibi_core.slopes(12, dtype=np.float64))
    # The rounded constant e, raised to the power x, is off by |x| roundings.
    np.testing.assert_allclose(exponentials, np.exp(x), rtol=(2 + 40) * 2.0**-53)


def test_dtypes_of_other_libraries_are_refused():
    with pytest.raises(TypeError, match=r"dtype must be a real floating dtype of mlx\.core"):
        alibi_core.bias(HEADS, 3, xp=mx, dtype=np.float32)


# --- Implementations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"implementation": "dense"}, {"return_weights": True}, {"law": "log"}])
def test_nothing_is_reduced_without_keys(how, tmp_path):
    # MLX may never end a reduction over no elements: there must be none, neither here nor in the gradients.
    query, slopes, mask = normal(2, 3, 4, 5, seed=0), mx.ones((2, 3)), mx.zeros((4, 0), dtype=mx.bool_)

    def total(query, key, slopes):
        result = attention(query, key, key, slopes, is_causal=False, mask=mask, **how)
        return (result[0] if "return_weights" in how else result).sum()

    found = mx.value_and_grad(total, (0, 1, 2))(query, mx.zeros((2, 3, 0, 5)), slopes)
    mx.export_to_dot(str(tmp_path / "graph.dot"), found[0], *found[1])
    graph = (tmp_path / "graph.dot").read_text()
    reductions = re.findall('label ="(All|And|Any|Max|Min|Or|Prod|Sum)"', graph)
    assert reductions == ["Sum"], graph  # of the result
    assert not any(np.asarray(x).any() for x in found[1])


def test_streams_may_differ():
    query, key, value = tensors()
    streams = [mx.new_stream(mx.cpu) for _ in range(3)]
    moved = [mx.add(x, 0, stream=stream) for stream, x in zip(streams, (query, key, value), strict=True)]
    assert_close(attention(*moved), attention(query, key, value, implementation="dense"), terms=KV_LEN)


def test_what_another_thread_has_yet_to_compute_is_refused_by_name():
    made = []
    thread = threading.Thread(target=lambda: made.append(mx.random.normal((1, 2, 1100, 4)) + 0))
    thread.start()
    thread.join()
    query = key = mx.random.normal((1, 2, 1100, 4))
    with pytest.raises(ValueError, match="key must be computed on a stream of this thread"):
        attention(query, made[0], key)


@pytest.mark.parametrize("implementation", [None, *IMPLEMENTATIONS])
def test_no_queries_and_many_keys(implementation):
    # MLX crashes now and then in a product that has no rows.
    query, key = mx.zeros((2, 6, 0, 5)), normal(2, 3, 200, 5)
    attend = functools.partial(attention, query, implementation=implementation)
    for _ in range(50):
        assert attend(key, key).shape == (2, 6, 0, 5)
        assert not mx.any(mx.grad(lambda key: attend(key, key).sum())(key))


# --- Transformations ------------------------------------------------------------------------------------------------


def test_a_mapped_axis_may_be_empty():
    query, key, value = tensors()
    mapped = mx.zeros((0, *query.shape))
    function = mx.vmap(lambda query: attention(query, key, value, implementation="tiled"))
    assert function(mapped).shape == mapped.shape
    assert mx.grad(lambda query: function(query).sum())(mapped).shape == mapped.shape
    by_slopes = mx.vmap(lambda slopes: attention(query, key, value, slopes, implementation="tiled"))
    assert by_slopes(mx.zeros((0, HEADS))).shape == mapped.shape


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_checkpoints_keep_gradients_with_gates(implementation):
    query, key, value = mx.random.normal((3, 2, 4, 23, 8), key=mx.random.key(0))
    arguments = query, key, value, -mx.random.uniform(0, 1, (2, 4, 23), key=mx.random.key(2))

    def loss(query, key, value, gates):
        return attention(query, key, value, log_gates=gates, implementation=implementation).square().sum()

    found, expected = (mx.grad(f, argnums=(0, 1, 2, 3))(*arguments) for f in (mx.checkpoint(loss), loss))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


# --- What it evaluates, compiles and takes -------------------------------------------------------------------------


def test_a_tolerance_of_zero_evaluates_nothing() -> None:
    tensors = [mx.random.normal((1, 2, 1100, 4)) for _ in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, "eval", lambda *arrays: pytest.fail("evaluated"))
        result = attention(*tensors, tolerance=0.0)
    np.testing.assert_allclose(result, attention(*tensors, implementation="dense"), atol=2e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_of_decoding_evaluates_nothing_on_a_gpu(dtype: str) -> None:
    rng = np.random.default_rng(0)
    tensors = [mx.array(rng.standard_normal((1, 8, n, 64)), getattr(mx, dtype)) for n in (1, 33_000, 33_000)]
    expected = attention(*tensors, implementation="dense")
    with pytest.MonkeyPatch.context() as patch:
        for module in (_plan, _kernels):
            patch.setattr(module, "on_gpu", lambda: True)
        patch.setattr(mx, "eval", lambda *arrays: pytest.fail("evaluated"))
        result = attention(*tensors)
    exact = 2e-6 if dtype == "float32" else 1e-2
    np.testing.assert_allclose(*(x.astype(mx.float32) for x in (result, expected)), atol=exact)


COMPILED_AT_SEVERAL_LENGTHS = """
import pathlib, sys, tempfile
import mlx.core as mx
import alibi_mlx

both = lambda n: {"mask": mx.ones((1, 1, 1, n), mx.bool_), "is_causal": False, "future_slopes": mx.ones(2)}
for form in (lambda n: {}, both):
    loss = lambda *tensors: alibi_mlx.attention(*tensors, **form(tensors[0].shape[2])).sum()
    compiled = mx.compile(mx.value_and_grad(loss, argnums=(0, 1, 2, 3)))
    for length in (140, 240, 300):
        mx.eval(compiled(*mx.zeros((3, 1, 2, length, 4)), mx.ones(2)))
        print(len(list(pathlib.Path(tempfile.gettempdir()).rglob("*.so"))))
"""


@pytest.mark.slow
def test_a_new_length_has_no_kernel_compiled(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMPILED_AT_SEVERAL_LENGTHS]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # where MLX keeps the kernels that it has compiled
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    kernels = [int(x) for x in done.stdout.split()]
    assert 0 < kernels[0] == kernels[1] == kernels[2]
    assert kernels[3] == kernels[4] == kernels[5]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", [{}, "gates", pytest.param({"is_causal": False}, marks=pytest.mark.slow)])
def test_memory_grows_with_the_length_alone(form: Any, compiled: bool) -> None:
    wrap = mx.compile if compiled else lambda function: function
    rows = {}
    for length in (1024, 2048):
        tensors = [mx.random.normal((1, 2, length, 4)) for _ in range(3)]
        mx.eval(tensors)
        rules = {"log_gates": mx.zeros((1, 2, length))} if form == "gates" else form
        both = wrap(mx.value_and_grad(lambda *x, rules=rules: attention(*x, **rules).sum(), argnums=(0, 1, 2)))
        mx.eval(both(*tensors))  # what is made only once
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(both(*tensors))
        rows[length] = mx.get_peak_memory() - before
    scores = 4 * 2 * 2048**2
    assert rows[2048] < scores  # attention that holds all scores takes several times as much
    assert rows[2048] < 2.5 * rows[1024]


# --- The layer as an MLX module -------------------------------------------------------------------------------------


def layer_of(**arguments):
    mx.random.seed(0)
    return AlibiAttention(EMBED_DIM, HEADS, **{"num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, **arguments})


def test_learnable_slopes_of_low_precision_load_as_float32():
    layer = layer_of(learnable_slopes=True)
    values = mx.array([-0.5, -1.0, -2.25, -3.0, -4.0, -5.0]).astype(mx.bfloat16)
    layer.load_weights([("log_slopes", values)], strict=False)
    assert layer.log_slopes.dtype == mx.float32
    assert mx.array_equal(layer.log_slopes, values)


def test_given_slopes_may_be_a_numpy_shard():
    shard = alibi_core.slopes(2 * HEADS)[HEADS:]
    for slopes in (shard, shard.astype(np.float64), mx.array(shard)):
        assert np.array_equal(MLX.numpy(layer_of(slopes=slopes).slopes), shard)
        np.testing.assert_allclose(MLX.numpy(layer_of(slopes=slopes, learnable_slopes=True).slopes), shard, rtol=1e-6)


def test_an_array_without_derivatives_takes_no_gradient_of_another():
    query, key, value = mx.random.normal((3, 1, 2, 5, 4))
    offset, ids, mask = mx.array([0]), mx.zeros((1, 5), mx.int32), mx.ones((1, 1, 5, 5), mx.bool_)

    def loss(*x):
        rules = {"q_offset": x[1], "segment_ids": x[2], "mask": x[3], "implementation": "tiled"}
        return attention(x[0], key, value, **rules).sum()

    expected = mx.grad(loss)(query, offset, ids, mask)
    by_query, *others = mx.grad(loss, argnums=(0, 1, 2, 3))(query, offset, ids, mask)
    assert mx.array_equal(by_query, expected)
    for gradient, array in zip(others, (offset, ids, mask), strict=True):
        assert gradient.shape == array.shape
        assert not gradient.any()
