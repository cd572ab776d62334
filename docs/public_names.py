"""The page of public names, made from the docstrings: ``python -m docs.public_names`` writes it anew."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "public_names.md"
BACKENDS = ("torch", "jax", "mlx")
ROOMS = {
    "alibi_core": ("plot", "conformance", "conformance.testing"),
    "alibi_torch": ("nn", "caches", "parallel", "transformers", "sentence_transformers", "conformance"),
    "alibi_jax": ("nn", "caches", "parallel", "conformance"),
    "alibi_mlx": ("nn", "caches", "conformance"),
}
# Packages by their name on the page. A name that several packages of a section share is one line.
SECTIONS = {"The core": {"": "alibi_core"}, "The backends": {name: f"alibi_{name}" for name in BACKENDS}}
CONSTANTS = {
    "ENTRY_POINTS": "The group of entry points under which packages register adapters.",
    "FEATURES": "The features that an attention may offer, each with the parameter that stands for it.",
    "LAWS": "The laws, in the order in which they are checked.",
    "MISTAKES": "The mistakes that the kit knows by name, each with a sentence.",
}


def public(package: str) -> Iterator[tuple[str, Any]]:
    """Yield the public names of a package and of its rooms, all but the layers and caches that it exports itself."""
    for room in ("", *ROOMS[package]):
        module = importlib.import_module(f"{package}.{room}".rstrip("."))
        for name in module.__all__ if room not in ("nn", "caches") else ():
            yield f"{room}.{name}".lstrip("."), getattr(module, name)


def callables(name: str, item: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, signature and documented object of a function, or of a class and its public methods."""
    if not inspect.isclass(item):
        yield name, item, item
        return
    yield name, item.__new__ if issubclass(item, tuple) else item.__init__, item
    for attribute in dir(item) if not item.__module__.startswith("alibi_core.conformance") else ():
        method = inspect.getattr_static(item, attribute)
        method = method.__func__ if isinstance(method, (classmethod, staticmethod)) else method
        own = inspect.isfunction(method) and method.__module__.startswith("alibi_")
        if own and attribute in ("forward", "__call__"):
            yield f"{name}.forward", method, method
        elif own and not attribute.startswith("_"):
            yield f"{name}.{attribute}", method, method


def arguments_of(function: Any) -> str:
    """Return the arguments of a function and their defaults, without types."""
    parameters = inspect.signature(function).parameters.values()
    taken = [x.replace(annotation=x.empty) for x in parameters if x.name not in ("self", "cls", "_cls")]
    text = re.sub(r"<function .*? at 0x\w+>", "...", str(inspect.Signature(taken)))
    return re.sub(r"<class '[\w.]*?(\w+)'>", r"\1", text)


def summary(item: Any) -> str:
    """Return the first paragraph of a docstring, in Markdown."""
    text = (inspect.getdoc(item) or "").partition("\n\n")[0]
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text.replace("``", "`").replace("\n", " "))


def surface() -> Iterator[str]:
    """Yield the page's lines: each public name with its arguments, the backends that have it, and its first paragraph.

    Where backends have the same arguments, the paragraph is that of the first.
    """
    for section, packages in SECTIONS.items():
        found: dict[tuple[str, str], tuple[list[str], str]] = {}
        for backend, package in packages.items():
            for public_name, item in public(package):
                if not callable(item):
                    found[public_name, ""] = [""], CONSTANTS[public_name.rpartition(".")[2]]
                    continue
                for name, made, documented in callables(public_name, item):
                    found.setdefault((name, arguments_of(made)), ([], summary(documented)))[0].append(backend)
        yield from (f"## {section}", "")
        for (name, arguments), (backends, sentence) in sorted(found.items(), key=lambda x: x[0][0]):
            where = f" ({', '.join(backends)})" if any(backends) else ""
            yield f"- `{name}{arguments}`{where}: {sentence}"
        yield ""


def page() -> str:
    """Return the page with its names made anew from the docstrings."""
    head, _, rest = PAGE.read_text(encoding="utf-8").partition("## The core\n")
    return head + "\n".join(surface()) + "\n## Commands\n" + rest.partition("## Commands\n")[2]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
