"""Cases long enough for several tiles, and what `alibi_jax.attention` and the oracle make of them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

import alibi_jax
from alibi_core.conformance.testing import SMALLEST, UNIT_ROUNDOFF, Answer, Case
from alibi_core.conformance.testing import assert_within_budget as assert_within
from alibi_jax import TPU
from tests.support.frameworks import JAX

INTERPRETED = TPU(128, 128, interpret=True)
QUICKLY = {"xla_backend_optimization_level": 0}  # kernels take seconds to compile, and moments to run
TENSORS = ("query", "key", "value")
BOTH = pytest.mark.parametrize(
    "implementation", ["tiled", pytest.param(INTERPRETED, marks=pytest.mark.slow)], ids=["tiled", "tpu"]
)


# --- What the oracle says -------------------------------------------------------------------------------------------


def answers(case: Case, dtype: str, tolerance: float) -> dict[str, Answer]:
    """Return the exact result and gradients, which may be off by rounding, and by what a share of weight can move."""
    by_entry = dataclasses.replace(case, slopes_per_batch=case.arrays["slopes"].ndim > 1)
    by_entry.__dict__.update(arrays=case.arrays, arguments=case.arguments)
    found = {"result": case.exact(dtype, tolerance).output} | by_entry.gradients(dtype, tolerance)
    # Each product of a sum may be subnormal, and become 0, also where the sum is not.
    q_len, kv_len = case.sizes.lengths
    terms = {"result": kv_len, "query": kv_len, "key": q_len * case.sizes.group, "value": q_len * case.sizes.group}
    underflow = {name: terms.get(name, q_len * kv_len) * SMALLEST[dtype] for name in found}
    return {name: Answer(x.value, x.budget + underflow[name]) for name, x in found.items()}


# --- What JAX says --------------------------------------------------------------------------------------------------


def _split(arguments: dict[str, Any]) -> tuple[dict[str, Any], tuple[tuple[str, Any], ...]]:
    """Return arguments that may be traced, and the others."""
    arrays = {name: JAX.placed(x) for name, x in arguments.items() if isinstance(x, (np.ndarray, tuple))}
    return arrays, tuple((name, x) for name, x in arguments.items() if name not in arrays)


def tensors_of(case: Case, dtype: str) -> dict[str, jax.Array]:
    """Return the inputs that have gradients, length first."""
    tensors = {name: JAX.array(np.swapaxes(case.arrays[name], 1, 2), dtype) for name in TENSORS}
    tensors["slopes"] = JAX.array(case.arrays["slopes"])
    if "future_slopes" in case.arguments:
        tensors["future_slopes"] = JAX.array(case.arguments["future_slopes"])
    return tensors


@functools.partial(jax.jit, static_argnames=("rest",), compiler_options=QUICKLY)
def _result_and_gradients(tensors: Any, arrays: Any, cotangent: Any, rest: Any) -> Any:
    def attend(tensors: Any) -> jax.Array:
        return alibi_jax.attention(**tensors, **arrays, **dict(rest))

    result, pull = jax.vjp(attend, tensors)
    return {"result": result, "without gradients": attend(tensors)} | pull(cotangent)[0]


def computed(
    case: Case, dtype: str = "float32", *, tolerance: float | None = None, implementation: Any = INTERPRETED
) -> dict[str, np.ndarray]:
    """Return the result, once more without gradients, and all gradients as the oracle lays them out, float64."""
    arguments = {name: x for name, x in case.arguments.items() if name != "future_slopes"}
    arrays, rest = _split(arguments)
    rest += (("tolerance", tolerance), ("implementation", implementation), ("scale", case.scale))
    cotangent = JAX.array(np.swapaxes(case.arrays["cotangent"], 1, 2), dtype)
    found = _result_and_gradients(tensors_of(case, dtype), arrays, cotangent, rest)
    assert found["result"].dtype == found["without gradients"].dtype == dtype
    return {name: JAX.numpy(x) if "slopes" in name else np.swapaxes(JAX.numpy(x), 1, 2) for name, x in found.items()}


def assert_exact(
    case: Case, dtype: str = "float32", *, tolerance: float | None = None, implementation: Any = INTERPRETED
) -> dict[str, np.ndarray]:
    """Assert that result and gradients are exact to rounding, and to the tolerance."""
    found = computed(case, dtype, tolerance=tolerance, implementation=implementation)
    share = UNIT_ROUNDOFF[dtype] if tolerance is None else tolerance
    exact = answers(case, dtype, share)
    for name, answer in (exact | {"without gradients": exact["result"]}).items():
        try:
            assert_within(found[name], answer)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
    return found
