"""The promises of attention and its layers in each framework: batch axes, compilers, dense features, casts, dropout."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

import numpy as np
import pytest

import alibi_core
from tests.support.frameworks import JAX, LAYER_BACKENDS, LIBRARIES, TORCH, Backend, param, slow_in_jax
from tests.support.layers import cast, make_layer

EACH = pytest.mark.parametrize("backend", LIBRARIES)
HEADS, KV_HEADS, Q_LEN, KV_LEN, HEAD_DIM = 6, 3, 7, 11, 5


def tensors(*batch: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = (HEADS, Q_LEN), (KV_HEADS, KV_LEN), (KV_HEADS, KV_LEN)
    return [rng.standard_normal((*batch, *size, HEAD_DIM)).astype(np.float32) for size in sizes]


@pytest.mark.parametrize("backend", slow_in_jax(LAYER_BACKENDS))
def test_two_runs_give_the_same_bits(backend: Backend) -> None:
    rng = np.random.default_rng(2)
    given = {name: rng.standard_normal((2, 4, 300, 16)) for name in ("query", "key", "value")}
    given["slopes"] = np.asarray([0.5, 0.25, 0.125, 0.0625])
    runs = []
    for _ in range(2):
        gradients = backend.gradients(given, np.sin(given["query"]), dtype="float32", is_causal=False)
        runs.append({"output": backend.attention(**given, dtype="float32", is_causal=False)} | gradients)
    np.testing.assert_equal(*runs)


TPU_KERNEL = param(Backend(JAX, "alibi_jax", "tpu"), "alibi_jax[tpu]", JAX, pytest.mark.slow)
# Rules by which each of five queries sees its own key alone; by the other rule, 128 queries see 128 equal keys.
OWN_KEY = {"window_size": 0, "segment_ids": np.arange(5, dtype=np.int32), "mask": np.eye(5, dtype=bool)[None, None]}
# The last three are finite in base e and not in base 2, and not finite in float32.
SCORES = np.asarray([-1e29, -1e31, -2e38, -3e38, -1e40, 1e40])


@pytest.mark.parametrize("backend", [*LAYER_BACKENDS, TPU_KERNEL])
@pytest.mark.parametrize("rule", ["q_offset", *OWN_KEY])
def test_equal_values_are_the_result_whatever_the_scores(backend: Backend, rule: str) -> None:
    is_kernel = backend.implementation == "tpu"
    if is_kernel:
        rule = "segment_ids" if rule == "mask" else rule  # it takes masks of keys alone, as segments
        implementation = importlib.import_module("tests.support.tpu_cases").INTERPRETED
        backend = dataclasses.replace(backend, implementation=implementation)
    shape = len(SCORES), 1, 5 if rule in OWN_KEY else 128, 1
    value, cotangent = np.random.default_rng(0).standard_normal((2, *shape)).astype(np.float32)
    value[...] = value if rule in OWN_KEY else value[:, :, :1]
    size, sign = (np.broadcast_to(x[:, None, None, None], shape) for x in (np.abs(SCORES) ** 0.5, np.sign(SCORES)))
    given = {"query": size, "key": sign * size, "value": value}
    finite = slice(0, 3 if is_kernel else 4)
    if rule == "q_offset":
        result = backend.attention(**given, dtype="float32", q_offset=300)
        np.testing.assert_allclose(result[finite], value[finite], rtol=2.0**-17)
    else:
        result = backend.attention(**given, dtype="float32", **{rule: OWN_KEY[rule]})
        gradients = backend.gradients(given, cotangent, dtype="float32", **{rule: OWN_KEY[rule]})
        np.testing.assert_array_equal(result[finite], value[finite])
        np.testing.assert_array_equal(gradients["value"][finite], cotangent[finite])
        for name in ("query", "key"):  # zeros, but for the rounding of a product that the other one multiplies
            assert np.all(np.abs(gradients[name] / size)[finite] < 2.0**-20)
    if backend.framework is TORCH and backend.implementation != "dense":
        assert not result[4].any()  # PyTorch's kernel says that
        assert np.isnan(result[5]).all()
    else:
        assert np.isnan(result[finite.stop :]).all()


def test_forward_mode_of_pytorch_is_dense_where_there_are_tangents_and_nowhere_else() -> None:
    torch, alibi_torch = pytest.importorskip("torch"), pytest.importorskip("alibi_torch")
    forward_ad, given = torch.autograd.forward_ad, [torch.from_numpy(x) for x in tensors(2)]
    given.append(torch.full((HEADS,), 0.5))
    with forward_ad.dual_level():
        dual = [forward_ad.make_dual(x, torch.ones_like(x)) for x in given]
        chosen = [alibi_torch.explain(*inputs).implementation for inputs in (given, dual)]
    assert chosen == ["tiled", "dense"]


# --- What "dense" alone offers: a bias of one's own, dropout, weights as output --------------------------------------

SLOPES = np.asarray([1.0, 0.5, 0.3, 0.1, 0.05, 0.02], np.float32)
OTHERS = [b for b in LAYER_BACKENDS if b.values[0].implementation != "dense"]


@functools.cache
def added() -> np.ndarray:
    """Return a bias of either sign; -inf hides some keys, and all keys from one query."""
    rng = np.random.default_rng(1)
    bias = rng.standard_normal((HEADS, Q_LEN, KV_LEN)).astype(np.float32)
    bias[rng.random(bias.shape) < 0.2] = -np.inf
    bias[1, 3] = -np.inf
    return bias


def called(backend: Backend, **arguments: Any) -> Any:
    return backend.function(**backend.framework.placed(arguments))(*backend.place(*tensors(2), SLOPES, dtype="float32"))


@EACH
def test_gradients_reach_a_bias(backend: Backend) -> None:
    query, key, value = tensors(2)
    given = {"query": query, "key": key, "value": value, "slopes": SLOPES, "added_bias": np.zeros((1, 1, 1, KV_LEN))}
    found = backend.gradients(given, np.sin(9 * query), dtype="float32", wanted=["added_bias"])["added_bias"]
    assert np.abs(found).max() > 0.1
    assert abs(found.sum()) < 1e-5  # a constant that is added to all keys changes nothing


@EACH
def test_weights_are_dropped_out(backend: Backend) -> None:
    keys: dict[str, Any] = {}
    if backend.framework.name != "torch":
        library = importlib.import_module("jax" if backend.framework.name == "jax" else "mlx.core")
        keys = {"dropout_key": library.random.key(0)}
    if backend.framework.name == "jax":
        with pytest.raises(ValueError, match="dropout_key must be given with a dropout above 0"):
            called(backend, dropout=0.5)
    rng, long = np.random.default_rng(0), 200
    query, key, value = (rng.standard_normal((1, n, long, 1)).astype(np.float32) for n in (HEADS, KV_HEADS, KV_HEADS))
    attention = backend.function(dropout=0.25, return_weights=True, is_causal=False, **keys)
    attention = library.jit(attention) if backend.framework is JAX else attention
    found = attention(*backend.place(query, key, value, SLOPES * 1e-3, dtype="float32"))
    result, dropped = backend.layout(backend.framework.numpy(found[0])), backend.framework.numpy(found[1])
    _, whole = alibi_core.attention(query, key, value, SLOPES * 1e-3, return_weights=True, is_causal=False)
    kept = dropped != 0
    np.testing.assert_allclose(dropped[kept], whole[kept] / 0.75, rtol=1e-4)
    # Five standard deviations of a binomial frequency.
    assert abs(kept.mean() - 0.75) < 5 * (0.25 * 0.75 / kept.size) ** 0.5
    np.testing.assert_allclose(result, dropped @ np.repeat(value, 2, axis=1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", OTHERS)
@pytest.mark.parametrize("name", ["added_bias", "dropout", "return_weights"])
def test_other_implementations_name_dense(backend: Backend, name: str) -> None:
    given = {"added_bias": added(), "dropout": 0.5, "return_weights": True}[name]
    arguments = {name: given}
    if name == "dropout" and backend.framework.name != "torch":
        arguments["dropout_key"] = added()
    with pytest.raises(NotImplementedError, match="(takes no|has no|returns no) .*; 'dense' can run this call"):
        called(backend, **arguments)
    said = backend.explain(*tensors(2), SLOPES, dtype="float32", **arguments)
    assert said.implementation == "dense"
    assert backend.implementation in said.refusals


# --- Layers --------------------------------------------------------------------------------------------------------


def x_of(backend: Backend, length: int = 7, dtype: str = "float32") -> Any:
    return backend.framework.array(np.random.default_rng(1).standard_normal((2, length, 24)), dtype)


def slopes_of(layer: Any) -> Any:
    """Return a layer's slopes, or the logarithms of learnable ones."""
    return layer.log_slopes if layer.slopes is None else layer.slopes


@EACH
@pytest.mark.parametrize("learnable", [False, True])
def test_slopes_stay_float32_when_the_model_is_cast(backend: Backend, learnable: bool) -> None:
    name, framework = backend.framework.name, backend.framework
    if name == "jax" and learnable:
        pytest.skip("a cast of the state of a layer of Flax casts all its parameters")
    for dtype in ("bfloat16", "float16"):
        layer = make_layer(name, embed_dim=24, num_heads=12, learnable_slopes=learnable)
        before = framework.bits(slopes_of(layer))
        cast(name, layer, dtype)
        assert np.array_equal(framework.bits(slopes_of(layer)), before)
        assert str(layer(x_of(backend, dtype=dtype)).dtype).endswith(dtype)


@EACH
def test_dropout_acts_only_in_training(backend: Backend) -> None:
    layer, x = make_layer(backend.framework.name, embed_dim=24, num_heads=6, dropout=0.5), x_of(backend, 50)
    numpy = backend.framework.numpy
    layer.train()
    dropped = numpy(layer(x))
    assert 0.4 < (dropped == 0).mean() < 0.6
    assert np.any(numpy(layer(x)) != dropped)
    layer.eval()
    kept = numpy(layer(x))
    assert np.all(kept != 0)
    np.testing.assert_allclose(dropped[dropped != 0], 2 * kept[dropped != 0], rtol=1e-6)
