"""What a call adds to the bias of single keys: every implementation honours it, or refuses it by name."""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from alibi_core import AttentionCall, slopes
from alibi_core._call import HEADS_FIRST, LENGTH_FIRST
from alibi_core.conformance.testing import U32, Answer, Attention, Rules, penalties
from alibi_core.conformance.testing import assert_within_budget as assert_within
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


@cache
def case(q_len: int, kv_len: int) -> tuple[list[np.ndarray], np.ndarray, Answer]:
    """Return query, key and value, what is added, and what is right."""
    rng = np.random.default_rng(kv_len)
    tensors = [rng.standard_normal((2, n, m, HEAD_DIM)) for n, m in ((HEADS, q_len), *[(KV_HEADS, kv_len)] * 2)]
    added = 3 * rng.standard_normal((2, HEADS, kv_len))
    added[:, :, 5] = 40.0  # a key that matters to all after it
    bias = penalties(Rules(slopes(HEADS), kv_len - q_len), 2, HEADS, q_len, kv_len)
    exact = [x.astype(np.float32).astype(np.float64) for x in (*tensors, added)]
    answer = Attention(*exact[:3], bias=bias + exact[3][:, :, None], scale=HEAD_DIM**-0.5, dtype="float32")
    return tensors, added, answer.output_without(U32)


@pytest.mark.parametrize(("q_len", "kv_len"), first_of([(200, 1400), (40, 40), (1300, 1300), (1, 2000)]))
@pytest.mark.parametrize(
    "backend", [in_full(x) if x.implementation in IN_FULL else x for x in BACKENDS], ids=lambda backend: backend.name
)
def test_added_bias_is_honoured_or_refused_by_name(backend: Backend, q_len: int, kv_len: int) -> None:
    tensors, added, expected = case(q_len, kv_len)
    if (backend.module, backend.implementation) in REFUSING:
        with pytest.raises(NotImplementedError, match=r"added_key_bias.*'dense'"):
            result_of(backend, tensors, added)
    else:
        assert_within(result_of(backend, tensors, added), expected)
