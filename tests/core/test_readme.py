"""The examples of README and of the pages in docs/ run, links lead somewhere, and command lines of all files are taken.

A page's examples run in order, each on what the ones before it left. README's sections run each by itself: a reader
takes the one that goes with their framework.
"""

from __future__ import annotations

import argparse
import doctest
import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import alibi_core
from tests.support.cli import main

ROOT = Path(__file__).parents[2]
README, INDEX = ROOT / "README.md", ROOT / "docs" / "index.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
MOST_LINES = 150  # of README
BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.*)$", flags=re.MULTILINE)

# Modules that an example needs, each with a pattern of its text.
NEEDS = {
    "torch": r"\b(?:alibi_)?torch\b",
    "jax": r"\b(?:alibi_)?jax\b",
    "flax": r"\b(?:flax|alibi_jax)\b",
    "mlx.core": r"\b(?:alibi_)?mlx\b",
    "transformers": r"\btransformers\b",
    "safetensors": r"\b(?:safetensors|\w+_weights|load_checkpoint)\b",
    "hypothesis": r"\bhypothesis\b",
    "onnxscript": r"\bonnx\b",
    "onnxruntime": r"\bonnxruntime\b",
    "ndonnx": r"\bndonnx\b",
    "peft": r"\bpeft\b",
    "keras": r"\bkeras\b",
    "matplotlib": r"\bplot\b|\.figure\(",
}


def examples() -> list[Any]:
    """Return name and blocks of each page that has any, README's by section."""
    sections = re.split(r"^(?=#+ )", README.read_text(encoding="utf-8"), flags=re.MULTILINE)
    texts = {f"README, {HEADING.findall(section)[0]}": section for section in sections if BLOCK.search(section)}
    texts |= {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES[1:]}
    found = {name: BLOCK.findall(text) for name, text in texts.items()}
    marks = {name: [] if name.startswith("README") else [pytest.mark.slow] for name in found}
    return [pytest.param(name, blocks, id=name, marks=marks[name]) for name, blocks in found.items() if blocks]


@pytest.mark.parametrize(("name", "blocks"), examples())
def test_examples_run(name: str, blocks: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # where an example writes files
    # Environment of an example of several processes, for one process; and Keras needs a backend to be imported.
    one = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    for variable, value in {**one, "KERAS_BACKEND": "torch"}.items():
        monkeypatch.setenv(variable, value)
    for module, said in NEEDS.items():
        if any(re.search(said, block) for block in blocks):
            pytest.importorskip(module, reason=f"the examples of {name} need {module}")
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    names: dict[str, Any] = {}
    output: list[str] = []
    for block in blocks:
        if ">>> " in block:
            test = doctest.DocTestParser().get_doctest(block, names, name, None, 0)
            runner.run(test, out=output.append, clear_globs=False)
            names = test.globs
        else:
            exec(compile(block, name, "exec"), names)
    assert runner.failures == 0, "".join(output)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for text, target in links(page):
        path, _, anchor = target.partition("#")
        if path.startswith(("https://", "http://")):
            continue
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert text.strip(), f"{target} has no text"
        if anchor:
            assert anchor in anchors(file), target


def test_the_list_of_pages_names_each() -> None:
    listed = {(INDEX.parent / target.partition("#")[0]).resolve() for _, target in links(INDEX)}
    assert set(PAGES[1:]) - {INDEX} <= listed


def test_the_reference_has_each_public_name_of_the_core() -> None:
    """The other packages' pages take all names of theirs, by ``automodule``."""
    page = (ROOT / "docs" / "reference" / "alibi_core.md").read_text(encoding="utf-8").partition("## For backends")[0]
    assert set(re.findall(r"^\.\. auto(?:function|class):: (\w+)$", page, re.MULTILINE)) == set(alibi_core.__all__)


def test_readme_is_short_and_names_the_two_commands() -> None:
    text = README.read_text(encoding="utf-8")
    assert text.count("\n") <= MOST_LINES
    assert "make test" in text
    assert "make demo" in text


# --- Command lines ---

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"].keys()
TEXTS = [*PAGES, *ROOT.glob("*.md"), ROOT / "benchmarks/README.md", ROOT / "alibi_core/conformance/FORMAT.md"]
SCRIPTS = [ROOT / "Makefile", ROOT / ".ci/run", *(ROOT / ".github").rglob("*.yml")]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
PROGRAM = r"(?:\S*/)?(?:python3?|\$\(\w+\)) -m (\S+)|(?:\S*/)?(alibi-core|make|pip install)\b|\$\((PIP|PYTEST)\)"
COMMAND = re.compile(rf"(?:\w+=\S+ )*(?:{PROGRAM})(.*)")


def commands() -> Iterator[Any]:
    """Yield program and arguments of each command line: in code and consoles of pages, in scripts at the start."""
    for path in dict.fromkeys(TEXTS + SCRIPTS):
        text = path.read_text(encoding="utf-8")
        lines = re.findall(r"^\$ (.*)$", text, re.MULTILINE)
        lines += re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
        if path in SCRIPTS:  # the Makefile's help has several columns
            lines += re.split(r"\n|&&|\s{2,}|# |- run: ", text)
        for line in lines if path.name != "CHANGELOG.md" else ():
            if found := COMMAND.match(line.strip().replace("\n", " ")):
                program, arguments = found[1] or found[2] or found[3].lower(), shlex.split(found[4], comments=True)
                yield pytest.param(program, arguments, id=f"{path.name}: {shlex.join([program, *arguments])}")


@pytest.mark.parametrize(("program", "arguments"), [*commands()])
def test_command_lines_are_taken(program: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the real parsers, where they are this project's."""
    parse = argparse.ArgumentParser.parse_args

    def only_parse(*given: Any) -> Any:
        raise InterruptedError(parse(*given))

    if program in ("alibi-core", "alibi_core"):
        if all(re.fullmatch("[a-z]+", word) for word in arguments):  # the name of a command, without its arguments
            arguments = [*arguments, "--help"]
        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", only_parse)
        with pytest.raises((InterruptedError, SystemExit)) as found:
            main(arguments)
        assert found.type is InterruptedError or found.value.code == 0
        (options,) = found.value.args
        names = {name for name in getattr(options, "names", ()) if name != "NAME" and "$" not in name}
        assert names <= PROJECT["entry-points"]["alibi_core.conformance"].keys()
    elif program.startswith("benchmarks.") and program != "benchmarks.NAME":
        is_file = (ROOT / f"{program.replace('.', '/')}.py").exists()
        module = pytest.importorskip(program if is_file else f"{program}.__main__")
        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", only_parse)
        if program != "benchmarks.agreement":  # it takes no arguments
            with pytest.raises(InterruptedError):
                module.main(arguments)
    elif program == "make":
        assert {word for word in arguments if re.fullmatch(r"[a-z-]+", word)} <= TARGETS
    elif "pip" in program:
        extras = re.findall(r"\.\[([\w,-]+)\]", " ".join(arguments))
        assert {extra for listed in extras for extra in listed.split(",")} <= EXTRAS
    elif program == "pytest":
        assert all((ROOT / word).exists() for word in arguments if word.startswith("tests"))
    elif program.startswith("tests."):
        assert importlib.util.find_spec(program)


def test_readme_and_the_list_of_pages_name_the_extras_of_users() -> None:
    for page in (README, INDEX):
        ((first, others),) = re.findall(
            r"^\$ pip install '\.\[(\w+)\]' .*; or (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE
        )
        assert {first, *others.split(", ")} == EXTRAS - {"test", "docs", "tpu", "triton", "bench", "dev"}


def links(page: Path) -> list[tuple[str, str]]:
    """Return text and target of each link and picture; one to this repository's address as the path it stands for."""
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "code", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", text)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = project.get("urls", {}).get("Repository")
    if address is None:
        return found
    own = re.compile(re.escape(address) + r"/(?:blob|raw)/[^/]+/")
    return [(said, own.sub(f"{ROOT}/", target)) for said, target in found]


def anchors(page: Path) -> set[str]:
    """Return the anchors that a page's headings make."""
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(page.read_text(encoding="utf-8"))]
    return {heading.strip().replace(" ", "-") for heading in plain}
