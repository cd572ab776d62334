"""What ``explain`` says in JAX alone: of kernels for TPUs, and of programs that are compiled."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import jax.numpy as jnp  # noqa: E402

import alibi_jax  # noqa: E402
from alibi_core.conformance.testing import Sizes  # noqa: E402
from alibi_jax import TPU, explain  # noqa: E402
from tests.support.tpu_cases import plain, planned, ranges_of, tensors_of  # noqa: E402

KERNEL = TPU(128, 128, interpret=True)


def tensors(length: int = 1500, heads: int = 4, **changes: Any) -> list[jax.Array]:
    shape = (changes.get("batch", 1), length, heads, 8)
    return [jax.random.normal(jax.random.key(seed), shape, changes.get("dtype", jnp.float32)) for seed in range(3)]


@pytest.mark.full
def test_on_a_cpu_tiles_run_and_kernels_say_why_they_do_not() -> None:
    explanation = explain(*tensors(16))
    assert explanation.implementation == "tiled"
    assert set(explanation.refusals) == {"tpu"}
    assert "TPUs alone, got cpu" in explanation.refusals["tpu"]


def test_traced_arrays_are_refused_by_name() -> None:
    x = jnp.ones((1, 3, 2, 4))
    with pytest.raises(TypeError, match="future_slopes must have known values, got a traced array; explain .* outside"):
        jax.eval_shape(lambda slopes: explain(x, x, x, is_causal=False, future_slopes=slopes).horizons, jnp.ones(2))


def test_a_kernel_named_on_a_cpu_is_refused_with_what_would_run() -> None:
    for function in (explain, alibi_jax.attention, jax.jit(lambda *x: alibi_jax.attention(*x, implementation="tpu"))):
        arguments = {} if function not in (explain, alibi_jax.attention) else {"implementation": "tpu"}
        with pytest.raises(NotImplementedError, match="'tpu' runs on .* alone, got cpu.*'tiled' and 'dense' can run"):
            function(*tensors(16), **arguments)


@pytest.mark.full
@pytest.mark.parametrize("implementation", ["tiled", KERNEL], ids=str)
def test_steep_heads_compute_few_scores(implementation: Any) -> None:
    explanation = explain(*tensors(), jnp.asarray([1.0, 0.5, 0.25, 0.0]), implementation=implementation)
    horizons = np.asarray(explanation.horizons)[0]
    assert explanation.scores_visible == 4 * 1500 * 1501 // 2
    assert explanation.tolerance == 2.0**-24
    assert explanation.error_bound == pytest.approx(2.0**-23 * float(jnp.abs(tensors()[2]).max()))
    assert math.isinf(horizons[3])
    # Of normal data, heads look back some 35 / slope tokens; the last head computes about all it sees.
    assert (np.diff(horizons[:3]) > 0).all()
    assert 20 < horizons[0] < 60
    assert 0.25 < explanation.share < 0.9


@pytest.mark.full
def test_the_kernel_visits_what_it_is_said_to() -> None:
    case = plain(Sizes(1, 4, 1, (1500, 1500), 8), slopes=[1.0, 0.5, 0.25, 0.0])
    shape, inputs, *_ = planned(case)
    blocks = int(np.diff(ranges_of(inputs, shape), axis=-1).sum())
    explained = explain(**tensors_of(case, "float32"), scale=case.scale, implementation=KERNEL)
    assert explained.scores_computed == blocks * 128 * 128


@pytest.mark.full
def test_several_batch_axes_and_offsets() -> None:
    query, key, value = (x.reshape(1, 2, 750, 4, 8) for x in tensors(750, batch=2))
    explanation = explain(query[:, :, :1], key, value, q_offset=jnp.asarray([[0, 749]]))
    assert np.asarray(explanation.horizons).shape == (2, 4)
    assert explanation.scores_visible == 4 * (1 + 750)
