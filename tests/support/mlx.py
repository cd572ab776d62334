"""Arrays of MLX for tests, and how far two ways of summing float32 terms may be apart."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.frameworks import MLX


def normal(*shape: int, seed: int = 0) -> Any:
    return MLX.array(np.random.default_rng(seed).standard_normal(shape))


def assert_close(actual: Any, expected: Any, *, terms: int) -> None:
    """Assert that float32 results differ by rounding alone: each has two sums, scores and values, of so many terms."""
    actual, expected = MLX.numpy(actual), MLX.numpy(expected)
    assert actual.shape == expected.shape
    size = max(1, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=4 * terms * 2.0**-24 * size)
