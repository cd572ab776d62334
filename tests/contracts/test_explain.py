"""The output of ``explain``: which implementation runs, which keys its queries need, how far back, and why."""

from __future__ import annotations

import importlib
import math
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

import alibi_core
from alibi_core.conformance.testing import UNIT_ROUNDOFF
from tests.support.frameworks import LIBRARIES, Backend

EACH = pytest.mark.parametrize("backend", LIBRARIES)
NAMES = {"torch": ["tiled", "flex", "sdpa", "dense"], "jax": ["tiled", "dense"], "mlx": ["tiled", "dense"]}
IMPLEMENTATIONS = [
    pytest.param(*x.values, name, id=f"{x.id}-{name}", marks=x.marks) for x in LIBRARIES for name in NAMES[x.id]
]


def tensors(q_len: int = 9, kv_len: int | None = None, batch: tuple[int, ...] = (2,)) -> list[np.ndarray]:
    """Return query, key and value of 4 heads over 2 and 8 features, heads first."""
    rng, kv_len = np.random.default_rng(0), q_len if kv_len is None else kv_len
    return [rng.standard_normal((*batch, n, length, 8)) for n, length in ((4, q_len), (2, kv_len), (2, kv_len))]


def explain(backend: Backend, *arrays: Any, dtype: str = "float32", **arguments: Any) -> Any:
    return backend.explain(*arrays, dtype=dtype, **arguments)


@EACH
def test_printed_it_is_a_few_lines(backend: Backend) -> None:
    query, key, value = np.zeros((3, 2, 3, 8, 4))
    value[1, 2, 7, 3] = -5.0
    slopes = np.asarray([[1.0, 0.0, 8.0], [1.0, 0.0, 0.5]])
    lines = str(explain(backend, query, key, value, slopes, tolerance=0.25)).splitlines()
    assert [x for x in lines if not x.startswith("  not ")] == [
        "implementation: tiled",
        "tolerance: 0.25, which moves the result by at most 2.5",
        "scores: 140 needed, 64.8% of the 216 visible",
        "horizons, in tokens, of the heads: 2 all 5",
    ]


@pytest.mark.parametrize(("backend", "implementation"), IMPLEMENTATIONS)
def test_the_implementation_named_is_explained(backend: Backend, implementation: str) -> None:
    query, key, value = tensors(130)
    result = explain(backend, query, key, value, implementation=implementation, dtype="bfloat16")
    assert isinstance(result, importlib.import_module(backend.module).Explanation)
    assert result.implementation == implementation
    assert implementation != "tiled" or explain(backend, query, key, value).implementation == "tiled"  # by default
    assert set(result.refusals) <= {"tpu", "cudnn", "triton"}
    leaves_out = implementation in ("tiled", "flex")
    assert result.tolerance == (UNIT_ROUNDOFF["bfloat16"] if leaves_out else 0.0)
    assert result.error_bound == pytest.approx(2 * result.tolerance * np.abs(value).max(), rel=2.0**-8)
    assert np.isinf(result.horizons).all() or leaves_out
    assert result.scores_visible == 2 * 4 * 130 * 131 // 2
    assert result.share == 1 or leaves_out
    with pytest.raises(FrozenInstanceError):
        result.tolerance = 1.0


@EACH
@pytest.mark.parametrize(
    "arguments", [{"implementation": "fast"}, {"slopes": np.ones(3)}, {"mask": np.ones((9, 9))}, {"tolerence": 0.0}]
)
def test_bad_arguments_raise_what_the_call_raises(backend: Backend, arguments: dict[str, Any]) -> None:
    module, framework = importlib.import_module(backend.module), backend.framework
    inputs = dict(zip(("query", "key", "value"), map(framework.array, map(backend.layout, tensors())), strict=True))
    inputs |= {name: framework.array(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()}
    with pytest.raises((TypeError, ValueError)) as expected:
        module.attention(**inputs)
    with pytest.raises(expected.type) as actual:
        module.explain(**inputs)
    assert str(actual.value) == str(expected.value) or "unexpected keyword argument" in str(actual.value)


@EACH
def test_horizons_are_the_cores_and_spans_hold_what_queries_need(backend: Backend) -> None:
    query, key, value = tensors(700, 800)
    query[:], slopes = 0, np.asarray([4.0, 1.0, 0.2, 0.0], np.float32)  # no score exceeds another
    result = explain(backend, query, key, value, slopes, tolerance=0.01)
    expected = alibi_core.horizon(slopes, 0.0, tolerance=0.01)
    assert (np.abs(result.horizons[:, :3] - expected[:3]) <= 1).all()
    assert np.isinf(result.horizons[:, 3]).all()
    query, key, value = tensors(1100, 1200)
    offsets = np.asarray([100, 0])
    result = explain(backend, query, key, value, slopes, q_offset=offsets.astype(np.int32))
    spans, distance = result.spans, (offsets[:, None] + np.arange(1100))[..., None] - np.arange(1200)
    scores = 8**-0.5 * query @ key.repeat(2, axis=1).swapaxes(-1, -2) - slopes[:, None, None] * distance[:, None]
    weights = np.exp(np.where(distance[:, None] >= 0, scores, -np.inf))
    weights /= weights.sum(axis=-1, keepdims=True)
    for block, (start, stop) in enumerate(zip(spans.edges[:-1], spans.edges[1:], strict=True)):
        assert spans.visible[:, block].tolist() == [[0, 100 + stop], [0, stop]]
        for entry, head in np.ndindex(2, 4):
            first, last = spans.needed[entry, head, block]
            assert weights[entry, head, start:stop, first:last].sum(axis=-1).min() > 1 - 1e-6
    behind = np.where(distance[:, None] >= result.horizons[..., None, None], weights, 0).sum(axis=-1)
    assert behind.max() <= result.tolerance
    assert result.scores_visible == 4 * (distance >= 0).sum()
    assert result.scores_needed < 0.5 * result.scores_visible
    windowed = explain(backend, query, key, value, slopes, window_size=20, implementation="dense")
    assert (windowed.horizons == 21).all()  # a key 20 tokens back is seen, one 21 back is not
    assert windowed.scores_visible == windowed.scores_needed == 2 * 4 * 1100 * 21


@EACH
@pytest.mark.parametrize(("batch", "lengths"), [((), (0, 0)), ((2,), (0, 5)), ((2, 3), (5, 0)), ((2, 0), (9, 9))])
def test_nothing_is_explained_as_nothing(backend: Backend, batch: tuple[int, ...], lengths: tuple[int, int]) -> None:
    result = explain(backend, *tensors(*lengths, batch))
    assert (result.implementation, result.scores_visible, result.scores_needed, result.share) == ("dense", 0, 0, 0.0)
    assert result.horizons.tolist() == [[0.0] * 4] * math.prod(batch)
    with pytest.raises(
        NotImplementedError, match="^implementation 'tiled' returns no weights; 'dense' can run this call$"
    ):
        explain(backend, *tensors(*lengths, batch), implementation="tiled", return_weights=True)


def test_refusals_say_why_not() -> None:
    torch = pytest.importorskip("torch")
    explain = importlib.import_module("alibi_torch").explain
    query, key, value = (torch.randn(2, heads, 9, 8) for heads in (4, 2, 2))
    assert explain(query.requires_grad_(), key, value).refusals == {"flex": "has no gradients on a CPU"}
    with pytest.raises(NotImplementedError, match="implementation 'flex' .*'tiled' and 'sdpa' and 'dense' can"):
        explain(query, key, value, implementation="flex")
    with pytest.raises(ValueError, match="query must hold values, which are measured"):
        explain(*(x.to("meta") for x in (query, key, value)))


def test_traced_arrays_are_refused() -> None:
    jax = pytest.importorskip("jax")
    explain, x = importlib.import_module("alibi_jax").explain, jax.numpy.ones((1, 3, 2, 4))
    with pytest.raises(ValueError, match="must hold values, which are measured"):
        jax.jit(lambda query: explain(query, x, x).horizons)(x)
