"""Golden vectors: files by which a program in any language is tested, with the same bytes on every machine."""

from __future__ import annotations

import hashlib
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from alibi_core.conformance._cases import Values
from alibi_core.conformance._golden.cases import GoldenCase, golden_cases
from alibi_core.conformance._golden.exact import DTYPES, Expected
from alibi_core.conformance._golden.files import (
    GoldenError,
    dtype_name,
    file_in,
    json_bytes,
    read_bytes,
    read_json,
    read_safetensors,
    safetensors_bytes,
)

GOLDEN_FORMAT, GOLDEN_VERSION = "alibi-golden", 1
INDEX, _FORMAT_FILE = "index.json", "FORMAT.md"


def read_golden(directory: str | Path) -> list[GoldenCase]:
    """Return the cases of a golden set, all of whose files are what the index says.

    Raises:
        GoldenError: If anything is not.

    Example:
        A set of no cases, which has no file but the index:

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     index = {"format": GOLDEN_FORMAT, "version": GOLDEN_VERSION, "files": [], "cases": []}
        ...     _ = Path(folder, "index.json").write_bytes(json_bytes(index))
        ...     read_golden(folder)
        []
    """
    directory = Path(directory)
    path = file_in(directory, INDEX)
    index = read_json(path, GOLDEN_FORMAT, range(GOLDEN_VERSION, GOLDEN_VERSION + 1))
    try:
        files = {entry["name"]: _verified(directory, entry) for entry in index["files"]}
        return [_case(entry, files[entry["file"]]) for entry in index["cases"]]
    except GoldenError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise GoldenError(f"{path}: is not as FORMAT.md says, {type(error).__name__}: {str(error)[:200]}") from None


def _verified(directory: Path, entry: Any) -> dict[str, Values]:
    path = file_in(directory, entry["name"])
    content = read_bytes(path)
    if len(content) != entry["bytes"]:
        raise GoldenError(f"{path}: must have {entry['bytes']} bytes, got {len(content)}")
    if (digest := hashlib.sha256(content).hexdigest()) != entry["sha256"]:
        raise GoldenError(f"{path}: must have the SHA-256 {str(entry['sha256'])[:64]!r}, got {digest}")
    if path.suffix != ".safetensors":
        return {}
    return {name: array for name, (_, array) in read_safetensors(path, content).items()}


def _case(entry: Any, tensors: dict[str, Values]) -> GoldenCase:
    return GoldenCase(
        name=entry["id"],
        description=entry["description"],
        features=entry["features"],
        default_slopes=entry["default_slopes"],
        arguments=entry["arguments"],
        inputs={name: tensors[stored["tensor"]] for name, stored in entry["inputs"].items()},
        expected={name: _result(tensors, stored) for name, stored in entry["expected"].items()},
    )


def _result(tensors: dict[str, Values], entry: Any) -> Expected:
    value = tensors[entry["tensor"]]
    size, budgets = np.abs(np.where(np.isfinite(value), value, 0)), {}
    for dtype in DTYPES:
        stored = entry["budgets"][dtype]
        is_tensor = "tensor" in stored
        budgets[dtype] = tensors[stored["tensor"]] if is_tensor else size * stored["relative"] + stored["absolute"]
    return Expected(value, budgets, entry["tensor"])


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

    Example:
        It takes some seconds, and replaces nothing but golden vectors:

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "notes.txt").write_text("mine")
        ...     try:
        ...         write_golden(folder)
        ...     except GoldenError as error:
        ...         print(str(error).removeprefix(f"{folder}: "))
        must be empty or hold golden vectors and nothing else, but has no index.json
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
    metadata = {"format": GOLDEN_FORMAT, "version": str(GOLDEN_VERSION)}
    about = resources.files(__package__).joinpath(_FORMAT_FILE).read_text(encoding="utf-8")
    tensors: dict[str, dict[str, Values]] = {}
    entries = [_entry(case, tensors.setdefault(f"{case.kind}.safetensors", {})) for case in golden_cases()]
    files = {_FORMAT_FILE: about.encode()}
    files |= {name: safetensors_bytes(found, metadata) for name, found in tensors.items()}
    index = {
        "format": GOLDEN_FORMAT,
        "version": GOLDEN_VERSION,
        "about": about.splitlines(),
        "files": [
            {"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in sorted(files.items())
        ],
        "cases": entries,
    }
    return files | {INDEX: json_bytes(index)}


def _entry(case: GoldenCase, tensors: dict[str, Values]) -> dict[str, Any]:
    """Return what the index says of a case, whose tensors go to those of its file."""

    def stored(name: str, array: Values) -> dict[str, Any]:
        tensors[f"{case.name}/{name}"] = array
        return {"tensor": f"{case.name}/{name}"}

    def budget(name: str, dtype: str, found: Values | tuple[float, float]) -> dict[str, Any]:
        if isinstance(found, tuple):
            return {"relative": found[0], "absolute": found[1]}
        return stored(f"budget/{dtype}/{name}", found)

    return {
        "id": case.name,
        "kind": case.kind,
        "description": case.description,
        "features": case.features,
        "default_slopes": case.default_slopes,
        "arguments": case.arguments,
        "file": f"{case.kind}.safetensors",
        "inputs": {
            name: stored(f"input/{name}", array) | {"dtype": dtype_name(array), "shape": list(array.shape)}
            for name, array in case.inputs.items()
        },
        "expected": {
            name: stored(name, result.value)
            | {
                "shape": list(result.value.shape),
                "budgets": {dtype: budget(name, dtype, x) for dtype, x in result.budgets.items()},
            }
            for name, result in case.expected.items()
        },
    }
