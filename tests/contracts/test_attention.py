"""The promises of attention and its layers in each framework's own idiom: batch axes, compilers, casts, training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from alibi_core.conformance.testing import Attention, Rules, penalties
from alibi_core.conformance.testing import assert_within_budget as assert_within
from tests.support.frameworks import LAYER_BACKENDS, LIBRARIES, Backend, slow_in_jax
from tests.support.layers import cast, make_layer

EACH = pytest.mark.parametrize("backend", LIBRARIES)
EACH_IMPLEMENTATION = pytest.mark.parametrize("backend", LAYER_BACKENDS)
HEADS, KV_HEADS, Q_LEN, KV_LEN, HEAD_DIM = 6, 3, 7, 11, 5


def tensors(*batch: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = (HEADS, Q_LEN), (KV_HEADS, KV_LEN), (KV_HEADS, KV_LEN)
    return [rng.standard_normal((*batch, *size, HEAD_DIM)).astype(np.float32) for size in sizes]


def exact(query: np.ndarray, key: np.ndarray, value: np.ndarray, rules: Rules) -> Any:
    bias = penalties(rules, len(query), HEADS, Q_LEN, KV_LEN)
    query, key, value = (x.astype(np.float64) for x in (query, key, value))
    return Attention(query, key, value, bias=bias, scale=HEAD_DIM**-0.5, dtype="float32").output


@EACH_IMPLEMENTATION
def test_batch_axes_fold_with_all_that_belongs_to_them(backend: Backend) -> None:
    rng = np.random.default_rng(1)
    query, key, value = tensors(2, 3)
    slopes = rng.uniform(0, 1, (2, 3, HEADS)).astype(np.float32)
    mask = rng.random((2, 1, 1, Q_LEN, KV_LEN)) < 0.5  # one for all of the second batch axis
    ids = np.sort(rng.integers(0, 2, (3, KV_LEN)).astype(np.int32))
    offsets = np.arange(6, dtype=np.int32).reshape(2, 3)
    folded = backend.attention(
        *(query, key, value, slopes),
        dtype="float32",
        mask=mask,
        segment_ids=(ids[:, :Q_LEN], ids),
        q_offset=offsets,
    )
    for first, second in np.ndindex(2, 3):
        rules = Rules(
            slopes[first, second],
            q_offset=int(offsets[first, second]),
            mask=mask[first],
            q_segment_ids=ids[None, second, :Q_LEN],
            kv_segment_ids=ids[None, second],
        )
        one = (x[first, second][None] for x in (query, key, value))
        assert_within(folded[first, second][None], exact(*one, rules))


@pytest.mark.parametrize("backend", slow_in_jax(LAYER_BACKENDS))
def test_two_runs_give_the_same_bits(backend: Backend) -> None:
    rng = np.random.default_rng(2)
    given = dict(zip(("query", "key", "value"), (rng.standard_normal((2, 4, 300, 16)) for _ in range(3)), strict=True))
    given["slopes"] = np.asarray([0.5, 0.25, 0.125, 0.0625])
    runs = []
    for _ in range(2):
        gradients = backend.gradients(given, np.sin(given["query"]), dtype="float32", is_causal=False)
        runs.append({"output": backend.attention(**given, dtype="float32", is_causal=False)} | gradients)
    for name, found in runs[0].items():
        np.testing.assert_array_equal(found, runs[1][name], err_msg=name)


@EACH_IMPLEMENTATION
@pytest.mark.parametrize("batch", [(), (0,), (2, 0)])
def test_any_number_of_batch_axes(backend: Backend, batch: tuple[int, ...]) -> None:
    query, key, value = tensors(*batch)
    result = backend.attention(query, key, value, dtype="float32")
    assert result.shape == query.shape
    if batch == ():
        one = backend.attention(*(x[None] for x in (query, key, value)), dtype="float32")[0]
        np.testing.assert_allclose(result, one, rtol=0, atol=2e-6)


@pytest.mark.parametrize("backend", LIBRARIES)
@pytest.mark.parametrize(
    "arguments",
    [
        {"q_offset": -1, "window_size": 3},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"is_causal": False}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_attention_compiles(backend: Backend, arguments: dict[str, Any]) -> None:
    inputs = backend.place(*tensors(2), np.asarray([0.5, 0.25, 0.3, 0.0, 1.0, 2.0**-8]), dtype="float32")
    function, framework = backend.function(**arguments), backend.framework
    compiled = framework.numpy(framework.compiled(function)(*inputs))
    np.testing.assert_allclose(compiled, framework.numpy(function(*inputs)), rtol=0, atol=2e-6)


def test_forward_mode_of_pytorch_is_dense_where_there_are_tangents_and_nowhere_else() -> None:
    torch, alibi_torch = pytest.importorskip("torch"), pytest.importorskip("alibi_torch")
    forward_ad, given = torch.autograd.forward_ad, [torch.from_numpy(x) for x in tensors(2)]
    given.append(torch.full((HEADS,), 0.5))
    with forward_ad.dual_level():
        dual = [forward_ad.make_dual(x, torch.ones_like(x)) for x in given]
        chosen = [alibi_torch.explain(*inputs).implementation for inputs in (given, dual)]
    assert chosen == ["tiled", "dense"]


# --- Layers --------------------------------------------------------------------------------------------------------


def x_of(backend: Backend, length: int = 7, dtype: str = "float32") -> Any:
    return backend.framework.array(np.random.default_rng(1).standard_normal((2, length, 24)), dtype)


def slopes_of(layer: Any) -> Any:
    """Return a layer's slopes; learnable ones are kept as their logarithms."""
    return layer.log_slopes if layer.slopes is None else layer.slopes


# Who casts the state of a layer in JAX casts what it has learnt, too.
CAST = [
    pytest.param(*x.values, learnable, id=f"{x.id}-{'learnable' if learnable else 'fixed'}", marks=x.marks)
    for x in LIBRARIES
    for learnable in ([False] if x.id == "jax" else [False, True])
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("backend", "learnable"), CAST)
def test_slopes_stay_float32_when_the_model_is_cast(backend: Backend, learnable: bool, dtype: str) -> None:
    name, framework = backend.framework.name, backend.framework
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


def torch_steps(layer: Any, x: Any, rates: list[float]) -> list[float]:
    import torch

    losses = []
    for rate in rates:
        loss = layer(x).square().mean()
        losses.append(loss.item())
        layer.zero_grad()
        loss.backward()
        torch.optim.SGD(layer.parameters(), lr=rate).step()
    return losses


def jax_steps(layer: Any, x: Any, rates: list[float]) -> list[float]:
    import jax
    from flax import nnx

    @nnx.jit
    def step(layer: Any, rate: float) -> Any:
        loss, gradients = nnx.value_and_grad(lambda layer: (layer(x) ** 2).mean())(layer)
        nnx.update(layer, jax.tree.map(lambda p, g: p - rate * g, nnx.state(layer, nnx.Param), gradients))
        return loss

    return [float(step(layer, rate)) for rate in rates]


def mlx_steps(layer: Any, x: Any, rates: list[float]) -> list[float]:
    from mlx import nn, optimizers

    step, losses = nn.value_and_grad(layer, lambda: (layer(x) ** 2).mean()), []
    for rate in rates:
        loss, gradients = step()
        optimizers.SGD(learning_rate=rate).update(layer, gradients)
        losses.append(loss.item())
    return losses


STEPS: dict[str, Callable[..., list[float]]] = {"torch": torch_steps, "jax": jax_steps, "mlx": mlx_steps}


@EACH
@pytest.mark.parametrize("learnable", [True, False])
def test_learnable_slopes_learn_and_stay_positive_and_fixed_ones_stay(backend: Backend, learnable: bool) -> None:
    name, numpy = backend.framework.name, backend.framework.numpy
    layer = make_layer(name, embed_dim=24, num_heads=6, learnable_slopes=learnable)
    before, train = numpy(slopes_of(layer)), functools.partial(STEPS[name], layer, x_of(backend))
    losses = train([0.1] * 4)
    assert losses[3] < losses[2] < losses[0]
    assert np.any(numpy(slopes_of(layer)) != before) if learnable else np.array_equal(numpy(slopes_of(layer)), before)
    train([1e3])
    assert layer.slopes is None or np.all(numpy(layer.slopes) >= 0)  # where they are kept as their logarithms
