"""The contract is enough: a backend of sixty lines, by docs/backend.md alone, keeps the laws of the kit."""

from __future__ import annotations

import numpy as np
import pytest

import alibi_core
from alibi_core.backend import horizon
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


@pytest.mark.parametrize("rows", [(2, 16), (3, 6), (64, 64)], ids=str)
def test_tiles_of_rows_that_do_not_divide_a_block_miss_no_key(
    rows: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toy_backend, "TILING", horizon.Tiling(q_block=4, kv_block=2, rows=rows))
    query, key, value = np.random.default_rng(0).standard_normal((3, 1, 4, 100, 8))
    query[:, :, ::3] *= 20  # blocks of queries with wide horizons beside blocks with narrow ones
    steep = np.asarray([4.0, 2.0, 1.0, 0.5])
    result, expected = (f(query, key, value, steep) for f in (toy_backend.attention, alibi_core.attention))
    np.testing.assert_allclose(result, expected, atol=1e-12)
