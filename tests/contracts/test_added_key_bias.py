"""What a call of PyTorch adds to the bias of single keys: every implementation honours it."""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from alibi_core import slopes
from alibi_core.backend import AttentionCall
from alibi_core.conformance.testing import U32, Answer, Attention, Rules, penalties
from alibi_core.conformance.testing import assert_within_budget as assert_within
from tests.support.frameworks import TORCH, Backend
from tests.support.full import first_of

HEADS, KV_HEADS, HEAD_DIM = 6, 3, 16
BACKENDS = [Backend(TORCH, "alibi_torch", name) for name in ("tiled", "flex", "sdpa", "dense")]


def result_of(backend: Backend, tensors: list[np.ndarray], added: np.ndarray) -> np.ndarray:
    """Return attention of a call that adds to the bias of keys, heads first."""
    pytest.importorskip(backend.framework.module, reason=f"{backend.framework.name} is not installed")
    array = backend.framework.array
    placed = [array(x, "float32") for x in tensors]
    call = AttentionCall.check(*placed, array(slopes(HEADS), "float32"), xp=backend.framework.xp)
    run = importlib.import_module(f"{backend.module}._attention").run
    result = run(replace(call, added_key_bias=array(added, "float32")), *placed, backend.implementation, None)
    return backend.framework.numpy(result)


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
@pytest.mark.parametrize("backend", first_of(BACKENDS), ids=lambda backend: backend.name)
def test_added_bias_is_honoured(backend: Backend, q_len: int, kv_len: int) -> None:
    tensors, added, expected = case(q_len, kv_len)
    assert_within(result_of(backend, tensors, added), expected)
