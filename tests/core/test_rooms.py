"""How the source hangs together: rooms entered by their doors, in one direction, and one contract of core and backends.

A room is a folder; its door is its ``__init__.py``. Imports are read, not run.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BACKENDS = ("alibi_torch", "alibi_jax", "alibi_mlx")
FOLDERS = {"alibi_core": ROOT, "benchmarks": ROOT} | dict.fromkeys(BACKENDS, ROOT / "backends")
FOR_BACKENDS = re.compile(r"alibi_core(\.conformance|\.backend(\.\w+)?)?")


def name_of(path: Path, folder: Path) -> str:
    parts = path.relative_to(folder).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path, root): path for package, root in FOLDERS.items() for path in (root / package).rglob("*.py")}
ROOMS = {name for name, path in MODULES.items() if path.name == "__init__.py" and "." in name}


@cache
def names_at(door: str) -> frozenset[str]:
    """Return the names that a module exports, by ``__all__``, by imports ``as`` themselves, or all of its files'."""
    found: set[str] = set()
    for node in ast.parse(MODULES[door].read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            found |= set(ast.literal_eval(node.value))
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names if alias.asname == alias.name}
            if node.names[0].name == "*" and node.module in MODULES:
                inside = ast.parse(MODULES[node.module].read_text(encoding="utf-8")).body
                found |= names_at(node.module) | {name for x in inside if (name := getattr(x, "name", ""))}
    return frozenset(found)


@cache
def imports(module: str) -> tuple[str, ...]:
    """Return the modules of this project that a module imports, anywhere in its text."""

    found: list[str] = []
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.append(name if name in MODULES and alias.name not in names_at(node.module) else node.module)
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name in MODULES]
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node):
            found += [name for name in MODULES if f"'{name}'" in ast.unparse(node)]
    return tuple(found)


def is_in(module: str, room: str) -> bool:
    return module == room or module.startswith(f"{room}.")


def package_of(module: str) -> str:
    return module.partition(".")[0]


def test_rooms_are_entered_by_their_doors() -> None:
    for module, target in ((x, y) for x in sorted(MODULES) for y in imports(x)):
        # A module whose name has no underscore is public, and a door of its own.
        closed = [room for room in ROOMS if is_in(target, room) and not is_in(module, room) and "._" in target]
        door = min(closed, key=len, default=target)
        assert target == door, f"{module} imports {target}: let the door {door} export what it needs, and import that"


def test_backends_import_of_the_core_what_is_meant_for_them() -> None:
    for module, target in ((x, y) for x in sorted(MODULES) if package_of(x) in BACKENDS for y in imports(x)):
        assert package_of(target) in (package_of(module), "alibi_core"), f"{module} imports {target}, another backend's"
        if package_of(target) == "alibi_core":
            assert FOR_BACKENDS.fullmatch(target), f"{module} imports {target}: the contract is alibi_core.backend"


def test_the_core_imports_a_backend_in_one_command_alone() -> None:
    found = {(x, y) for x in MODULES if package_of(x) == "alibi_core" for y in imports(x) if package_of(y) in BACKENDS}
    assert found == {("alibi_core._cli.tables", "alibi_torch")}  # alibi-core explain DIR --tokens FILE


def test_nothing_but_tests_imports_tests() -> None:
    for module, path in MODULES.items():
        found = re.search(r"^\s*(from|import) tests\b", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert found is None, f"{module} imports tests, which users of a wheel do not have"


@pytest.mark.parametrize("room", [*FOLDERS, *sorted(ROOMS)])
def test_imports_go_one_way(room: str) -> None:
    """Among the files and rooms of one room there is no circle."""

    def part_of(module: str) -> str:
        return ".".join(module.split(".")[: room.count(".") + 2])

    graph: dict[str, set[str]] = {}
    for module in MODULES:
        if module != room and is_in(module, room):
            below = {part_of(target) for target in imports(module) if target != room and is_in(target, room)}
            graph.setdefault(part_of(module), set()).update(below - {part_of(module)})
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"imports in {room} go in a circle: {' imports '.join(reversed(error.args[1]))}") from None
