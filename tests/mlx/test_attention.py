"""MLX alone: its transformations, its modules, caches and files, and where MLX itself falls short."""

import functools
import threading

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="mlx is not installed")

import alibi_core  # noqa: E402
from alibi_core.backend.checks import namespace_of  # noqa: E402
from alibi_mlx import AlibiAttention, attention  # noqa: E402
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
@pytest.mark.parametrize("name", ["positions", "log_gates"])
def test_points_and_gates_are_mapped_compiled_and_checkpointed_with_gradients(name, implementation):
    query, key, value = mx.random.normal((3, 2, 4, 23, 8), key=mx.random.key(0))
    slopes, points = mx.array([0.5, 0.2, 0.1, 0.0]), mx.random.uniform(0, 9, (2, 23, 2), key=mx.random.key(1))
    gates = -mx.random.uniform(0, 1, (2, 4, 23), key=mx.random.key(2))
    array, rules = (points, {"law": "log", "is_causal": False}) if name == "positions" else (gates, {})

    def loss(query, key, value, slopes, array):
        rest = {name: array, "implementation": implementation} | rules
        return attention(query, key, value, slopes, **rest).square().sum()

    arguments = query, key, value, slopes, array
    moving = range(4 if name == "positions" else 5)
    gradient = mx.grad(loss, argnums=tuple(moving))
    expected = gradient(*arguments)
    mapped = list(mx.vmap(gradient, in_axes=(0, 0, 0, None, 0))(*arguments))
    mapped[3] = mapped[3].sum(axis=0)
    checkpointed = mx.checkpoint(lambda *x: loss(*x, *arguments[len(x) :]))
    again = mx.grad(checkpointed, argnums=tuple(moving))(*arguments[: len(moving)])
    for found in (mx.compile(gradient)(*arguments), mapped, again):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_compiled_attention_follows_its_arguments(implementation):
    function = mx.compile(lambda q, k, v, s, o: attention(q, k, v, s, q_offset=o, implementation=implementation))
    query, key, value = tensors()
    slopes = alibi_core.slopes(HEADS, xp=mx)
    for offset in (mx.array(6), mx.array([3, -2])):  # two shapes, two traces; then only the values change
        for step in (0, 1):
            arguments = (query + step, key, value, slopes * (step + 1), offset + step)
            expected = attention(*arguments[:4], q_offset=arguments[4], implementation=implementation)
            assert_close(function(*arguments), expected, terms=KV_LEN)


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
