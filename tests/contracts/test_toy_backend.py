"""The contract is enough: a backend of sixty lines, by docs/backend.md alone, keeps the laws of the kit."""

from __future__ import annotations

import numpy as np
import pytest

import alibi_core
from alibi_core.conformance import BackendAdapter, check
from tests.support import toy_backend

FLOAT32, FLOAT64 = toy_backend.adapters()


@pytest.mark.parametrize("adapter", [FLOAT32, pytest.param(FLOAT64, marks=pytest.mark.slow)], ids=lambda x: x.dtype)
def test_a_toy_backend_keeps_all_laws(adapter: BackendAdapter, alibi_profile: str, alibi_seed: int) -> None:
    report = check(adapter, profile=alibi_profile, seed=alibi_seed)
    assert report.passed, str(report)


def test_a_toy_backend_leaves_keys_out() -> None:
    query, key, value = np.random.default_rng(0).standard_normal((3, 1, 4, 500, 8)) / 4
    key[:, :, 0], value[:, :, :20] = 0.0, np.nan  # read and weighed with 0, a NaN would make NaN
    steep = np.asarray([4.0, 2.0, 1.0, 0.5])
    assert toy_backend.explain(query, key, value, steep).share < 0.3
    result = toy_backend.attention(query, key, value, steep)
    value[:, :, :20] = 0.0
    expected = alibi_core.attention(query, key, value, steep)
    np.testing.assert_allclose(result[:, :, 400:], expected[:, :, 400:], atol=1e-12)
