"""What ``explain`` says in MLX alone: of float64 and of what is traced."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="mlx is not installed")

from alibi_mlx import attention, explain  # noqa: E402


def tensors(length: int = 9, *, batch: int = 2, heads: tuple[int, int] = (4, 2), dtype: Any = mx.float32) -> list[Any]:
    """Return query, key and value of 8 features."""
    rng = np.random.default_rng(0)
    shapes = [(batch, n, length, 8) for n in (heads[0], heads[1], heads[1])]
    return [mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype) for shape in shapes]


def test_float64_is_dense_and_the_others_say_why_they_are_not():
    with mx.stream(mx.cpu):
        inputs = [x.astype(mx.float64) for x in tensors(8, heads=(3, 3))]
        result = explain(*inputs, window_size=3)
    assert str(result).splitlines() == [
        "implementation: dense",
        "  not tiled: it cannot compute in float64 (MLX's attention takes its scale and exponential in float32)",
        "tolerance: 0, which moves the result by at most 0",
        "scores: 384 computed, 246.2% of the 156 visible",
        "horizons, in tokens, of the heads: 4 4 4",
    ]


def test_what_is_refused_raises_what_the_call_raises():
    inputs, rules = [x.astype(mx.float64, stream=mx.cpu) for x in tensors()], {"window_size": 3}
    with mx.stream(mx.cpu):
        for function in (attention, explain):
            with pytest.raises(NotImplementedError, match="implementation 'tiled' .*'dense' can run this call"):
                function(*inputs, implementation="tiled", **rules)
        assert "tiled" in explain(*inputs, **rules).refusals


def test_it_leaves_the_tensors_as_they_are_and_stands_within_a_gradient():
    inputs = tensors(1100, batch=1, heads=(1, 1))
    before = [np.array(x) for x in inputs]
    said = []

    def function(query):
        said.append(explain(query, *inputs[1:]))
        return (query * query).sum()

    gradient = mx.grad(function)(inputs[0])
    assert np.array_equal(np.array(gradient), 2 * before[0])
    assert all(np.array_equal(x, y) for x, y in zip(map(np.array, inputs), before, strict=True))
    assert np.array_equal(said[0].horizons, explain(*inputs).horizons)


@pytest.mark.parametrize("transform", [mx.compile, mx.vmap])
def test_what_has_no_values_to_measure_is_refused(transform):
    query, key, value = tensors(5)
    key, value = (key, value) if transform is mx.compile else (key[0], value[0])
    with pytest.raises(ValueError, match="query and key must hold values, which are measured; got traced arrays"):
        transform(lambda query: explain(query, key, value).horizons)(query)
