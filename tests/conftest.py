"""Hypothesis profiles: ``quick`` by default, ``ci`` (the same draws every time) in CI, ``thorough`` on demand.

Choose one with ``HYPOTHESIS_PROFILE=thorough``.
"""

import gc
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# A first call in JAX or torch.compile compiles: there is no deadline that means anything.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.differing_executors]}
settings.register_profile("quick", max_examples=20, **_COMMON)
settings.register_profile("ci", max_examples=20, derandomize=True, print_blob=True, **_COMMON)
settings.register_profile("thorough", max_examples=400, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "quick"))

# Where the TPU's compiler is installed but no accelerator is, JAX would look for one, and complain at length.
if not any(any(Path("/dev").glob(pattern)) for pattern in ("accel*", "vfio", "nvidiactl")):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


def pytest_configure(config: pytest.Config) -> None:
    """Let the processes of a run, and its modules, share the programs that JAX has compiled."""
    if not hasattr(config, "workerinput") and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="alibi-jax-")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Leave out what is imported and collected when garbage is looked for: it stays, and is much to look through."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def alibi_profile() -> str:
    """The conformance kit's profile that goes with Hypothesis's."""
    return "thorough" if settings().max_examples > 100 else "quick"


@pytest.fixture(scope="session")
def alibi_seed() -> int:
    """The same draws every time in CI; reports name the seed."""
    return 0 if settings().derandomize else time.time_ns() % 10**6


@pytest.fixture(scope="module", autouse=True)
def _no_compiled_programs_left() -> Iterator[None]:
    """Forget JAX's compiled programs: a process that keeps those of all modules takes gigabytes, and may crash."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
