"""What a call adds to the bias of single keys: every implementation honours it, or refuses it by name."""

from __future__ import annotations

import importlib
from dataclasses import replace

import numpy as np
import pytest

from alibi_core import AttentionCall, slopes
from alibi_core._call import HEADS_FIRST, LENGTH_FIRST
from tests.support.frameworks import JAX, MLX, TORCH, Backend
from tests.support.full import first_of, in_full

HEADS, KV_HEADS, HEAD_DIM = 6, 3, 16
BACKENDS = (
    *(Backend(TORCH, "alibi_torch", name) for name in ("tiled", "flex", "sdpa", "dense")),
    *(Backend(JAX, "alibi_jax", name) for name in ("tiled", "dense", None)),
    *(Backend(MLX, "alibi_mlx", name) for name in ("tiled", "folded", "dense", None)),
)
IN_FULL = ("flex", "sdpa", "dense")
REFUSING = {("alibi_jax", "tiled"), ("alibi_jax", None), ("alibi_mlx", "folded")}


def result_of(backend: Backend, tensors: list[np.ndarray], added: np.ndarray) -> np.ndarray:
    """Return attention of a call that adds to the bias of keys, heads first."""
    pytest.importorskip(backend.framework.module, reason=f"{backend.framework.name} is not installed")
    array, layout = backend.framework.array, LENGTH_FIRST if backend.is_length_first else HEADS_FIRST
    placed = [array(backend.layout(x), "float32") for x in tensors]
    call = AttentionCall.check(*placed, array(slopes(HEADS), "float32"), layout=layout, xp=backend.framework.xp)
    run = importlib.import_module(f"{backend.module}._attention").run
    result = run(replace(call, added_key_bias=array(added, "float32")), *placed, backend.implementation, None)
    return backend.layout(backend.framework.numpy(result))


def by_hand(tensors: list[np.ndarray], added: np.ndarray) -> np.ndarray:
    """Compute the attention in float64 from its definition."""
    query, key, value = (x.astype(np.float32).astype(np.float64) for x in tensors)
    key, value = (x.repeat(HEADS // KV_HEADS, axis=1) for x in (key, value))
    q_len, kv_len = query.shape[2], key.shape[2]
    distance = np.arange(kv_len - q_len, kv_len)[:, None] - np.arange(kv_len)
    scores = query @ key.swapaxes(2, 3) * HEAD_DIM**-0.5 - np.asarray(slopes(HEADS))[:, None, None] * distance
    scores = np.where(distance >= 0, scores + added[:, :, None], -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ value


@pytest.mark.parametrize(("q_len", "kv_len"), first_of([(200, 1400), (40, 40), (1300, 1300), (1, 2000)]))
@pytest.mark.parametrize(
    "backend", [in_full(x) if x.implementation in IN_FULL else x for x in BACKENDS], ids=lambda backend: backend.name
)
def test_added_bias_is_honoured_or_refused_by_name(backend: Backend, q_len: int, kv_len: int) -> None:
    rng = np.random.default_rng(kv_len)
    tensors = [rng.standard_normal((2, n, m, HEAD_DIM)) for n, m in ((HEADS, q_len), *[(KV_HEADS, kv_len)] * 2)]
    added = 3 * rng.standard_normal((2, HEADS, kv_len))
    added[:, :, 5] = 40.0  # a key that matters to all after it
    if (backend.module, backend.implementation) in REFUSING:
        with pytest.raises(NotImplementedError, match=r"added_key_bias.*'dense'"):
            result_of(backend, tensors, added)
        return
    # The largest score is about 50: of that, float32 has 2**-18 left, which weights are wrong by, twice.
    np.testing.assert_allclose(result_of(backend, tensors, added), by_hand(tensors, added), rtol=0, atol=2.0**-16)
