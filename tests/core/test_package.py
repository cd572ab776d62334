"""A user's installation: four packages, no framework imported by the core, doctests that run."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import itertools
import pkgutil
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from alibi_core.backend.checks import install_hint

ROOT = Path(__file__).parents[2]
FRAMEWORK_OF = {"alibi_core": "numpy", "alibi_torch": "torch", "alibi_jax": "jax", "alibi_mlx": "mlx"}
FRAMEWORKS = {"torch", "jax", "mlx", "flax", "tensorflow"}
FOLDERS = {name: ROOT / ("" if name == "alibi_core" else "backends") / name for name in FRAMEWORK_OF}
FILES = {package: sorted(folder.rglob("*.py")) for package, folder in FOLDERS.items()}


def imported(path: Path) -> set[str]:
    """Return the top-level names of all that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


def test_packages_import_their_framework_alone() -> None:
    for package, framework in FRAMEWORK_OF.items():
        assert FILES[package]
        for path in FILES[package]:
            assert imported(path) & FRAMEWORKS <= ({framework} if framework != "jax" else {"jax", "flax"}), path
            assert imported(path) & FRAMEWORK_OF.keys() <= {"alibi_core", package}, path


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_importing_a_package_loads_nothing_that_takes_long() -> None:
    for code, heavy in (
        ("import alibi_core; alibi_core.bias(8, 4)", FRAMEWORKS | {"hypothesis", "rich", "alibi_core.conformance"}),
        ("import alibi_core.conformance", FRAMEWORKS | {"hypothesis", "rich"}),
        ("import alibi_core._pytest_plugin", {"hypothesis"}),
        ("if importlib.util.find_spec('torch'): import alibi_torch", {"torch._dynamo"}),
    ):
        assert not heavy & set(run(f"import importlib.util, sys\n{code}\nprint(*sys.modules)").split())


def test_importing_the_core_takes_well_under_a_second() -> None:
    code = "import numpy, time; start = time.process_time(); import alibi_core; print(time.process_time() - start)"
    assert min(float(run(code)) for _ in range(3)) < 0.5


MISSING = [(package, framework, framework) for package, framework in list(FRAMEWORK_OF.items())[1:]]
MISSING += [("alibi_jax", "jax", name) for name in ("flax", "safetensors")]
MISSING += [("alibi_core.conformance.testing", "", "hypothesis")]


@pytest.mark.parametrize(("package", "extra", "missing"), MISSING)
def test_what_is_missing_is_named_with_the_remedy(package: str, extra: str, missing: str) -> None:
    code = f"""
import sys
sys.modules[{missing!r}] = None  # as good as not installed
try:
    import {package}
except ModuleNotFoundError as error:
    print(error)
"""
    remedy = install_hint(extra) if extra else f"install with pip install {missing}"
    assert re.fullmatch(rf"{package} needs .*; {re.escape(remedy)}\n", run(code))


def test_hints_name_extras_that_there_are_and_no_index() -> None:
    """No package index has this library: what a hint says has to work in a checkout."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert install_hint("torch") == "install with pip install '.[torch]' in a checkout of alibi-core"
    for path in itertools.chain(*FILES.values()):
        text = path.read_text(encoding="utf-8")
        assert "pip install 'alibi-core" not in text, path
        assert set(re.findall(r"install_hint\(['\"](\w+)['\"]\)", text)) <= extras.keys(), path


def test_what_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    declared = {re.split(r"[^\w.-]", text)[0].replace("_", "-") for text in texts}
    files = [*itertools.chain(*FILES.values()), *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    names = set().union(*map(imported, files))
    brought_by = {name: {x.replace("_", "-") for x in by} for name, by in packages_distributions().items()}
    brought_by |= {"triton": {"torch"}}  # on Linux
    undeclared = {x for x in names - {"docs"} if not brought_by.get(x, declared) & declared}
    assert undeclared == set()


def test_the_wheel_holds_exactly_four_packages(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    folders = {name.partition("/")[0] for name in names}
    assert {name for name in folders if not name.endswith(".dist-info")} == set(FRAMEWORK_OF)
    for package in FRAMEWORK_OF:
        assert f"{package}/py.typed" in names
        files = {f"{package}/{path.relative_to(FOLDERS[package])}" for path in FILES[package]}
        assert {name for name in names if name.startswith(f"{package}/") and name.endswith(".py")} == files


@pytest.mark.parametrize(
    "package", ["alibi_core", "alibi_torch", pytest.param("alibi_jax", marks=pytest.mark.slow), "alibi_mlx"]
)
def test_doctests_of_the_package_run(package: str) -> None:
    if importlib.util.find_spec(FRAMEWORK_OF[package]) is None:
        pytest.skip(f"{FRAMEWORK_OF[package]} is not installed")
    module = importlib.import_module(package)
    names = [name for _, name, _ in pkgutil.walk_packages(module.__path__, f"{package}.")]
    results = [doctest.testmod(importlib.import_module(name)) for name in names]
    assert sum(result.failed for result in results) == 0
    assert sum(result.attempted for result in results) > 0
