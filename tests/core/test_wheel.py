"""An installation of the built wheel with one extra alone: the command line works, and README's examples run.

Nothing is downloaded. The packages of an extra are linked from this environment, and no others can be imported.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.core.test_readme import BLOCK, NEEDS, README, ROOT

pytestmark = pytest.mark.slow
EXTRAS = ("", "torch", "jax", "mlx", "transformers", "plot")
REPOSITORY = {"GITHUB_SERVER_URL": "https://host", "GITHUB_REPOSITORY": "a/b", "GITHUB_REF_NAME": "v1"}
RUN_BLOCKS = """
import doctest, json, sys
runner, names = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE), {}
for block in json.load(sys.stdin):
    test = doctest.DocTestParser().get_doctest(block, names, "README", None, 0)
    runner.run(test, clear_globs=False)
    names = test.globs
sys.exit(runner.failures)
"""


def declared(extra: str) -> Iterator[importlib.metadata.Distribution]:
    """Yield what the package needs with an extra, and what that needs in turn."""
    requirements = pytest.importorskip("packaging.requirements")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name: list(listed) for name, listed in project["optional-dependencies"].items()} | {"": []}
    waiting = [(text, "") for text in project["dependencies"] + extras[extra]]
    seen = set()
    while waiting:
        text, of_extra = waiting.pop()
        requirement = requirements.Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": of_extra}):
            continue
        if requirement.name == project["name"]:
            waiting += [(text, "") for name in requirement.extras for text in extras[name]]
            continue
        for wanted in {"", *requirement.extras}:
            if (requirement.name, wanted) not in seen:
                seen.add((requirement.name, wanted))
                try:
                    found = importlib.metadata.distribution(requirement.name)
                except importlib.metadata.PackageNotFoundError:
                    pytest.skip(f"{requirement.name} is not installed")
                waiting += [(text, wanted) for text in found.requires or ()]
                yield found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=os.environ | REPOSITORY)
    (built,) = folder.glob("*.whl")
    return built


def test_the_page_of_the_package_is_valid_and_links_to_files(wheel: Path) -> None:
    metadata = pytest.importorskip("packaging.metadata").Metadata
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        found = metadata.from_email(archive.read(name), validate=True)
    links = [*re.findall(r"\]\(([^)]+)\)", found.description), *found.project_urls.values()]
    files = [x for x in links if x not in ("https://arxiv.org/abs/2108.12409", "https://host/a/b")]
    for link in files:
        place = re.fullmatch(r"https://host/a/b/(?:blob|raw)/v1/([^#]+)(?:#.*)?", link)
        assert place, link
        assert (ROOT / place[1]).is_file(), link
    assert len(files) > 25
    assert found.author == "The alibi-core authors"


@pytest.mark.parametrize("extra", EXTRAS, ids=lambda extra: extra or "core")
def test_the_wheel_works_with_one_extra_alone(extra: str, wheel: Path, tmp_path: Path) -> None:
    packages = list(declared(extra))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True)
    python = tmp_path / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", "--no-deps", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    (site,) = tmp_path.glob("lib/python*/site-packages")
    for package in packages:
        for name in {path.parts[0] for path in package.files or ()} - {"..", "__pycache__"}:
            if not (site / name).exists():
                os.symlink(Path(str(package.locate_file(name))), site / name)

    def run(*command: str, text: str = "") -> subprocess.CompletedProcess[str]:
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
        return subprocess.run(
            [str(x) for x in command], input=text, capture_output=True, text=True, env=environment, cwd=tmp_path
        )

    def needs(section: str) -> set[str]:
        blocks = BLOCK.findall(section)
        return {module.partition(".")[0] for module, said in NEEDS.items() if any(re.search(said, x) for x in blocks)}

    sections = re.split(r"^(?=## )", README.read_text(encoding="utf-8"), flags=re.MULTILINE)
    able = [x for x in sections if BLOCK.search(x) and all((site / module).exists() for module in needs(x))]
    assert len(able) == (2 if extra in ("", "plot") else 4 if extra == "transformers" else 3)
    for section in able:
        found = run(python, "-I", "-c", RUN_BLOCKS, text=json.dumps(BLOCK.findall(section)))
        assert found.returncode == 0, found.stdout + found.stderr
    command = str(tmp_path / "bin" / "alibi-core")
    assert run(command, "--version").stdout.strip() == wheel.name.split("-")[1]
    assert "0.00390625" in run(command, "slopes", "8").stdout
    assert run(command, "explain", "--help").returncode == 0
    assert run(command, "conformance", "alibi_core", "--law", "causal").returncode == 0
    picture = run(python, "-I", "-c", "from alibi_core import plot; plot.bias(2, 3).savefig('picture.png')")
    assert ("'.[plot]'" in picture.stderr) == (extra != "plot")
    assert (tmp_path / "picture.png").exists() == (extra == "plot")
