"""The features of ``"dense"`` alone, in all backends: a bias of one's own, dropout of weights, weights as output."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np
import pytest

import alibi_core
from alibi_core.conformance.testing import Attention, Rules, penalties
from alibi_core.conformance.testing import assert_within_budget as assert_within
from tests.support.frameworks import BACKENDS, JAX, LAYER_BACKENDS, LIBRARIES, Backend

HEADS, KV_HEADS, Q_LEN, KV_LEN, HEAD_DIM = 4, 2, 5, 7, 3
SLOPES = np.asarray([1.0, 0.5, 0.3, 0.1], np.float32)
DENSE = [b for b in BACKENDS if b.values[0].implementation in (None, "dense") and "dask" not in b.id]
OTHERS = [b for b in LAYER_BACKENDS if b.values[0].implementation != "dense"]


def tensors() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = (HEADS, Q_LEN), (KV_HEADS, KV_LEN), (KV_HEADS, KV_LEN)
    return [rng.standard_normal((2, *size, HEAD_DIM)).astype(np.float32) for size in sizes]


@functools.cache
def added() -> np.ndarray:
    """Return a bias by head, of either sign; -inf hides some keys, and all keys from one query."""
    rng = np.random.default_rng(1)
    bias = rng.standard_normal((HEADS, Q_LEN, KV_LEN)).astype(np.float32)
    bias[rng.random(bias.shape) < 0.2] = -np.inf
    bias[1, 3] = -np.inf
    return bias


def called(backend: Backend, **arguments: Any) -> Any:
    """Return attention of the tensors, of the backend's own arrays."""
    return backend.function(**backend.framework.placed(arguments))(*backend.place(*tensors(), SLOPES, dtype="float32"))


@pytest.mark.parametrize("backend", DENSE)
def test_a_bias_is_added_to_the_scores_and_weights_come_out(backend: Backend) -> None:
    query, key, value = (x.astype(np.float64) for x in tensors())
    bias = penalties(Rules(SLOPES, KV_LEN - Q_LEN), 2, HEADS, Q_LEN, KV_LEN) + added()
    identity = np.broadcast_to(np.eye(KV_LEN), (2, KV_HEADS, KV_LEN, KV_LEN))  # values to which weights are the answer
    exact, weighted = (
        Attention(query, key, x, bias=bias, scale=HEAD_DIM**-0.5, dtype="float32").output for x in (value, identity)
    )
    result, weights = called(backend, added_bias=added(), return_weights=True)
    assert weights.dtype == result.dtype
    result, weights = backend.layout(backend.framework.numpy(result)), backend.framework.numpy(weights)
    assert_within(result, exact)
    assert_within(weights, weighted)
    assert not weights[:, 1, 3].any()
    assert not result[:, 1, 3].any()
    chosen = importlib.import_module(backend.module).attention(
        *backend.place(*tensors(), SLOPES, dtype="float32"), added_bias=backend.framework.array(added())
    )
    assert np.array_equal(backend.layout(backend.framework.numpy(chosen)), result)


@pytest.mark.parametrize("backend", LIBRARIES)
def test_gradients_reach_a_bias(backend: Backend) -> None:
    names = ("query", "key", "value")
    found = backend.gradients(
        dict(zip(names, tensors(), strict=True)) | {"slopes": SLOPES, "added_bias": np.zeros((1, 1, 1, KV_LEN))},
        np.random.default_rng(2).standard_normal((2, HEADS, Q_LEN, HEAD_DIM)),
        dtype="float32",
        wanted=["added_bias"],
    )["added_bias"]
    assert np.abs(found).max() > 0.1
    assert abs(found.sum()) < 1e-5  # what is added to all keys alike changes nothing


@pytest.mark.parametrize("backend", LIBRARIES)
def test_weights_are_dropped_out(backend: Backend) -> None:
    keys = {}
    if backend.framework.name != "torch":
        library = importlib.import_module("jax" if backend.framework.name == "jax" else "mlx.core")
        keys = {"dropout_key": library.random.key(0)}
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
    said = backend.explain(*tensors(), SLOPES, dtype="float32", **arguments)
    assert said.implementation == "dense"
    assert backend.implementation in said.refusals


def test_jax_asks_for_a_key() -> None:
    pytest.importorskip("jax")
    backend = next(b.values[0] for b in LIBRARIES if b.id == "jax")
    with pytest.raises(ValueError, match="dropout_key must be given with a dropout above 0"):
        called(backend, dropout=0.5)


@pytest.mark.parametrize(
    ("bias", "error", "message"),
    [
        (np.ones((Q_LEN, KV_LEN), bool), TypeError, "added_bias must be floating, got .*bool; booleans are a mask"),
        (np.ones((3, 1, 1), np.float32), ValueError, "added_bias must broadcast to"),
    ],
    ids=str,
)
def test_a_bias_is_refused(bias: np.ndarray, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        alibi_core.attention(*tensors(), added_bias=bias)
