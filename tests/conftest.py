"""Hypothesis's profiles, ``quick`` and, on demand, ``HYPOTHESIS_PROFILE=thorough``; ``EXAMPLES=1000`` sets the number.

Each run draws anew. In CI the seed is the day, which all jobs of a day share; a failure says how to repeat it.
"""

import gc
import os
import re
import shutil
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# A first call in JAX or torch.compile compiles: there is no deadline that means anything. Fixtures patch a library,
# alike for all examples.
_HEALTHY = [HealthCheck.too_slow, HealthCheck.differing_executors, HealthCheck.function_scoped_fixture]
_COMMON = {"deadline": None, "suppress_health_check": _HEALTHY}
settings.register_profile("quick", max_examples=int(os.environ.get("EXAMPLES", "20")), **_COMMON)
settings.register_profile("thorough", max_examples=int(os.environ.get("EXAMPLES", "400")), **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or "quick")

# Where the TPU's compiler is installed but no accelerator is, JAX would look for one, and complain at length.
if not any(any(Path("/dev").glob(pattern)) for pattern in ("accel*", "vfio", "nvidiactl")):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

COUNTS: Counter[str] = Counter()  # printed at the end: work that does not depend on the machine


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="I/N", help="run one of N parts of the tests, the same tests each time")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of a shard."""
    if config.getoption("shard"):
        number, count = map(int, config.getoption("shard").split("/"))
        dropped = {x for x in items if zlib.crc32(x.nodeid.encode()) % count != number % count}
        config.hook.pytest_deselected(items=list(dropped))
        items[:] = [x for x in items if x not in dropped]


@pytest.hookimpl(tryfirst=True)  # before Hypothesis reads its seed
def pytest_configure(config: pytest.Config) -> None:
    """Draw with the day's seed in CI. Let the processes of a run, and its modules, share programs compiled by JAX."""
    if os.environ.get("CI") and config.getoption("hypothesis_seed") is None:
        config.option.hypothesis_seed = time.strftime("%Y%m%d", time.gmtime())
    if not hasattr(config, "workerinput") and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="alibi-jax-")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[Any]:
    """Say of a failure with a given seed how to repeat it; count drawn examples."""
    report = yield
    drawn = re.findall(r"- (\d+) passing,", getattr(item, "hypothesis_statistics", ""))
    COUNTS["drawn examples"] += sum(map(int, drawn)) * (call.when == "teardown")
    if report.failed and (seed := item.config.getoption("hypothesis_seed")) is not None:
        line = f"EXAMPLES={settings().max_examples} python -m pytest -m '' --hypothesis-seed={seed} '{item.nodeid}'"
        report.sections.append(("To repeat", line))
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if "torch._dynamo.utils" in sys.modules:
        COUNTS["graphs of torch.compile"] += sys.modules["torch._dynamo.utils"].counters["stats"]["unique_graphs"]
    vars(session.config).get("workeroutput", {})["counts"] = dict(COUNTS)  # of a process of xdist


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    COUNTS.update(getattr(node, "workeroutput", {}).get("counts", {}))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(", ".join(f"{count:,} {name}" for name, count in COUNTS.items()))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Leave out what is imported and collected when garbage is looked for: it stays, and is much to look through."""
    gc.disable()
    try:
        return (yield)
    finally:
        if "jax" in sys.modules:
            sys.modules["jax"].monitoring.register_event_duration_secs_listener(
                lambda event, *_, **__: COUNTS.update({"programs of JAX": "backend_compile" in event})
            )
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def alibi_profile() -> str:
    """The conformance kit's profile that goes with Hypothesis's."""
    return "thorough" if settings().max_examples > 100 else "quick"


@pytest.fixture(scope="session")
def alibi_seed(pytestconfig: pytest.Config) -> int:
    """The seed of the kit's draws: Hypothesis's, if it is given; reports name it."""
    seed = pytestconfig.getoption("hypothesis_seed")
    return time.time_ns() % 10**6 if seed is None else int(seed)


@pytest.fixture(scope="module", autouse=True)
def _no_compiled_programs_left() -> Iterator[None]:
    """Forget JAX's compiled programs: a process that keeps those of all modules takes gigabytes, and may crash."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
