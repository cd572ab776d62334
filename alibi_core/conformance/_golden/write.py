"""Golden vectors: files by which a program in any language is tested, with the same bytes on every machine."""

from __future__ import annotations

import hashlib
from importlib import resources
from pathlib import Path
from typing import Any

from alibi_core.conformance._cases import Values
from alibi_core.conformance._golden.cases import KINDS, GoldenCase, golden_cases
from alibi_core.conformance._golden.exact import Expected
from alibi_core.conformance._golden.files import (
    GoldenError,
    dtype_name,
    file_in,
    json_bytes,
    read_json,
    safetensors_bytes,
)
from alibi_core.conformance._golden.set import GOLDEN_FORMAT, GOLDEN_VERSION, INDEX

_FORMAT_FILE = "FORMAT.md"


def write_golden(directory: str | Path) -> Path:
    """Write golden vectors: slopes, biases, attention with gradients, decoding, and how far each may be off.

    The files, of 4 MB in all, have the same bytes on every machine. ``FORMAT.md`` among them says what is where.

    Args:
        directory: Where to. It is made; if it is there, it must be empty or hold golden vectors and nothing else, which
            are replaced.

    Returns:
        The directory.

    Raises:
        GoldenError: If the directory holds anything else.
    """
    directory = Path(directory)
    stale = _own_files(directory)
    files = _files()
    directory.mkdir(parents=True, exist_ok=True)
    for name in (INDEX, *sorted(stale - set(files))):  # without an index, a set half written is none
        (directory / name).unlink(missing_ok=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return directory


def _own_files(directory: Path) -> set[str]:
    """Return the names of the files of a golden set that may be replaced."""
    if not directory.exists() and not directory.is_symlink():
        return set()
    if not directory.is_dir():
        raise GoldenError(f"{directory}: must be a directory")
    found = {path.name for path in directory.iterdir()}
    if not found:
        return set()
    refusal = f"{directory}: must be empty or hold golden vectors and nothing else"
    if INDEX not in found:
        raise GoldenError(f"{refusal}, but has no {INDEX}")
    index = read_json(file_in(directory, INDEX), GOLDEN_FORMAT, range(1, GOLDEN_VERSION + 1))
    listed = index.get("files")
    entries = listed if isinstance(listed, list) else []
    own = {INDEX, *(str(entry.get("name")) for entry in entries if isinstance(entry, dict))}
    others = sorted(name for name in found if name not in own or (directory / name).is_symlink())
    others += [name for name in sorted(found) if not (directory / name).is_file()]
    if others:
        raise GoldenError(f"{refusal}, but has {others[0]!r}")
    return found


def _files() -> dict[str, bytes]:
    """Return what is in every file, the index last."""
    cases = list(golden_cases())
    metadata = {"format": GOLDEN_FORMAT, "version": str(GOLDEN_VERSION)}
    about = resources.files(__package__).joinpath(_FORMAT_FILE).read_text(encoding="utf-8")
    files = {_FORMAT_FILE: about.encode()}
    for kind in KINDS:
        tensors: dict[str, Values] = {}
        for case in cases:
            if case.kind == kind:
                tensors |= _tensors(case)
        files[_file_of(kind)] = safetensors_bytes(tensors, metadata)
    index = {
        "format": GOLDEN_FORMAT,
        "version": GOLDEN_VERSION,
        "about": about.splitlines(),
        "files": [
            {"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in sorted(files.items())
        ],
        "cases": [_entry(case) for case in cases],
    }
    return files | {INDEX: json_bytes(index)}


def _file_of(kind: str) -> str:
    return f"{kind}.safetensors"


def _tensors(case: GoldenCase) -> dict[str, Values]:
    inputs = {_input_name(case, name): array for name, array in case.inputs.items()}
    expected = {f"{case.name}/{name}": result.value for name, result in case.expected.items()}
    budgets = {
        _budget_name(case, name, dtype): budget
        for name, result in case.expected.items()
        for dtype, budget in result.budgets.items()
        if not isinstance(budget, tuple)
    }
    return inputs | expected | budgets


def _entry(case: GoldenCase) -> dict[str, Any]:
    return {
        "id": case.name,
        "kind": case.kind,
        "description": case.description,
        "features": case.features,
        "default_slopes": case.default_slopes,
        "arguments": case.arguments,
        "file": _file_of(case.kind),
        "inputs": {
            name: {"tensor": _input_name(case, name), "dtype": dtype_name(array), "shape": list(array.shape)}
            for name, array in case.inputs.items()
        },
        "expected": {
            name: {
                "tensor": f"{case.name}/{name}",
                "shape": list(result.value.shape),
                "budgets": _budgets(case, name, result),
            }
            for name, result in case.expected.items()
        },
    }


def _budgets(case: GoldenCase, name: str, result: Expected) -> dict[str, Any]:
    return {
        dtype: {"relative": budget[0], "absolute": budget[1]}
        if isinstance(budget, tuple)
        else {"tensor": _budget_name(case, name, dtype)}
        for dtype, budget in result.budgets.items()
    }


def _input_name(case: GoldenCase, name: str) -> str:
    return f"{case.name}/input/{name}"


def _budget_name(case: GoldenCase, name: str, dtype: str) -> str:
    return f"{case.name}/budget/{dtype}/{name}"
