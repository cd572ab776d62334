"""Every backend, and the core in every array library, before the laws of the conformance kit; and what they add."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

import alibi_core
from alibi_core.conformance import LAWS, BackendAdapter, Library, installed_adapters
from tests.support.frameworks import BACKENDS, DASK, GRADIENTS, JAX, MLX, STRICT, TORCH, Framework


def core_adapter(framework: Framework) -> BackendAdapter:
    """Return the core's reference on a library's arrays, which no backend of its own is asked for."""
    of_tensors = GRADIENTS.get(framework.name)

    def gradients(function: Any, arguments: Any, wrt: tuple[str, ...], weight: Any) -> Any:
        def result(*asked: Any) -> Any:
            return function(**{**arguments, **dict(zip(wrt, asked, strict=True))})

        return of_tensors(result, [arguments[name] for name in wrt], weight)

    library = Library(framework.xp, framework.array, framework.numpy32, gradients if of_tensors else None)
    return BackendAdapter(f"alibi_core[{framework.name}]", library, alibi_core.attention)


LIBRARIES = [x for x in (STRICT, TORCH, JAX, MLX, DASK) if importlib.util.find_spec(x.module.partition(".")[0])]
ADAPTERS = [*map(core_adapter, LIBRARIES), *installed_adapters(dtypes=None)]

# Default implementations keep all laws in float32 and bfloat16. JAX compiles each case, so it leaves out laws that
# other tests repeat: ``combined`` has the laws of one feature, tests/core slopes and biases, tests/contracts long rows
# and their gradients, points, and caches.
QUICK = ("alibi_core", "alibi_core[array_api_strict]", "alibi_torch[tiled]", "alibi_mlx[tiled]")
QUICK_IN_JAX = ["causal", "points", "large_gates", "combined", "precision", "nowhere", "empty"]
QUICK_IN_JAX += ["gradients", "slope_gradients", "decoding", "conduct"]
LARGE = ("large", "large_gradients", "long_decoding")  # take long; a cast to bfloat16 changes little in them


def is_quick(adapter: Any, law: str) -> bool:
    if adapter.name == "alibi_jax[tiled]":
        return adapter.dtype == "float32" and law in QUICK_IN_JAX
    return adapter.name in QUICK and adapter.dtype in (("float32",) if law in LARGE else ("float32", "bfloat16"))


def offered(adapter: Any, law: str) -> Any:
    marks = [] if is_quick(adapter, law) else [pytest.mark.slow]
    return pytest.param(adapter, law, id=f"{adapter.name}-{adapter.dtype}-{law}", marks=marks)


OFFERED = [
    offered(adapter, law.name)
    for adapter in ADAPTERS
    for law in LAWS
    if law.function == "any" or hasattr(adapter, law.function)
]


@pytest.mark.parametrize(("alibi_adapter", "alibi_law"), OFFERED, indirect=["alibi_law"])
def test_backends_obey_the_laws(alibi_adapter: Any, alibi_law: Callable[[], None]) -> None:
    alibi_law()


def test_every_implementation_that_runs_here_is_among_the_adapters() -> None:
    names = {adapter.name for adapter in ADAPTERS}
    for parameter in BACKENDS:
        backend = parameter.values[0]
        if not parameter.marks[0].args[0]:  # marked to skip: its framework is missing
            assert backend.name in names or backend.name == "alibi_core[numpy]"
    assert "alibi_core" in names
    for adapter in ADAPTERS:
        expected = {law.function for law in LAWS} - {"any"}
        expected -= {"decode_step"} if adapter.name.startswith("alibi_core") else set()
        if adapter.name not in ("alibi_core", "alibi_core[array_api_strict]", "alibi_core[dask]"):
            assert all(hasattr(adapter, function) for function in expected), adapter.name
