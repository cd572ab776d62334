"""A pytest plugin: the laws of ALiBi as tests of an adapter.

A test with the fixture ``alibi_law`` becomes one test for each law. It checks the adapter that the fixture
``alibi_adapter`` returns; you define that fixture::

    @pytest.fixture
    def alibi_adapter():
        return MyAdapter()

    def test_my_kernel_is_alibi(alibi_law):
        alibi_law()

A law that the adapter does not offer is skipped, with the reason. Override the fixtures ``alibi_profile`` and
``alibi_seed`` for thorough checks or other cases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.hookimpl(trylast=True)  # after parametrized adapters are known
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test for each law, unless the test chooses laws itself; without an adapter one test, which fails."""
    if "alibi_law" not in metafunc.fixturenames:
        return
    # A test that parametrizes alibi_law itself is left alone. pytest takes the names by position or by keyword.
    marks = metafunc.definition.iter_markers("parametrize")
    chosen = [mark.args[0] if mark.args else mark.kwargs["argnames"] for mark in marks]
    names = [name.strip() for names in chosen for name in (names.split(",") if isinstance(names, str) else names)]
    if "alibi_law" not in names and _has_adapter(metafunc):
        from alibi_core.conformance import LAWS

        metafunc.parametrize("alibi_law", [law.name for law in LAWS], indirect=True)


def _has_adapter(metafunc: pytest.Metafunc) -> bool:
    """Whether a test has its own fixture ``alibi_adapter``, not this file's; pytest has no public API for it."""
    fixtures = metafunc._arg2fixturedefs.get("alibi_adapter", ())
    return any(fixture.func.__module__ != __name__ for fixture in fixtures)


@pytest.fixture
def alibi_adapter() -> Any:
    """Fail, because every project must define its own adapter."""
    pytest.fail(
        "alibi_adapter must be a fixture of yours that returns an adapter, got none; write, here or in conftest.py,\n\n"
        "    @pytest.fixture\n    def alibi_adapter():\n        return MyAdapter()",
        pytrace=False,
    )


@pytest.fixture(scope="session")
def alibi_profile() -> str:
    """The profile of checks, ``"quick"`` or ``"thorough"``."""
    return "quick"


@pytest.fixture(scope="session")
def alibi_seed() -> int:
    """The seed of the random cases."""
    return 0


@pytest.fixture
def alibi_law(
    request: pytest.FixtureRequest, alibi_adapter: Any, alibi_profile: str, alibi_seed: int
) -> Callable[[], None]:
    """Return a function that checks the adapter of the fixture ``alibi_adapter`` against one law."""
    from alibi_core.conformance import check

    def hold() -> None:
        __tracebackhide__ = True
        report = check(alibi_adapter, laws=[request.param], profile=alibi_profile, seed=alibi_seed)
        (law,) = report.laws
        if law.status == "not offered":
            pytest.skip(law.reason)
        if law.status != "passed":
            pytest.fail(str(report), pytrace=False)

    return hold
