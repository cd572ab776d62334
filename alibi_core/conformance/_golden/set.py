"""A golden set, read and verified."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from alibi_core.conformance._cases import Values
from alibi_core.conformance._golden.exact import DTYPES
from alibi_core.conformance._golden.files import GoldenError, file_in, read_bytes, read_json, read_safetensors

GOLDEN_FORMAT, GOLDEN_VERSION = "alibi-golden", 1
INDEX = "index.json"

_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class Result:
    """One expected result.

    Attributes:
        tensor: What it is called in files, its own and those of results.
        value: Exact, in float64.
        budgets: By dtype, how far results may be off, of the value's shape.
    """

    tensor: str
    value: Values
    budgets: dict[str, Values]


@dataclass(frozen=True)
class StoredCase:
    """One case of a golden set, as its files have it."""

    name: str
    kind: str
    description: str
    features: frozenset[str]
    default_slopes: bool
    arguments: dict[str, Any]
    inputs: dict[str, Values]
    expected: dict[str, Result]


def read_golden(directory: str | Path) -> list[StoredCase]:
    """Return the cases of a golden set, all of whose files are what the index says.

    Raises:
        GoldenError: If anything is not.
    """
    directory = Path(directory)
    path = file_in(directory, INDEX)
    index = read_json(path, GOLDEN_FORMAT, range(GOLDEN_VERSION, GOLDEN_VERSION + 1))
    tensors: dict[str, dict[str, Values]] = {}
    for number, entry in enumerate(field(path, index, "files", list)):
        where = f"{path}: files[{number}]"
        name = field(where, entry, "name", str)
        if name in tensors:
            raise GoldenError(f"{where}: the name {name!r} stands twice")
        tensors[name] = _verified(directory, where, entry)
    cases = [_case(f"{path}: cases[{n}]", entry, tensors) for n, entry in enumerate(field(path, index, "cases", list))]
    names = [case.name for case in cases] + [result.tensor for case in cases for result in case.expected.values()]
    if len(set(names)) < len(names):
        raise GoldenError(f"{path}: no two cases may have one id, and no two results one tensor")
    return cases


def field(where: object, entry: Any, name: str, kind: type[_Kind]) -> _Kind:
    """Return what an object of a JSON file has by a name, if it is of this kind.

    Raises:
        GoldenError: If it is not.
    """
    if not isinstance(entry, dict):
        raise GoldenError(f"{where}: must be an object, got {type(entry).__name__}")
    value = entry.get(name)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise GoldenError(f"{where}: {name} must be {kind.__name__}, got {str(value)[:200]!r}")
    return value


def _verified(directory: Path, where: str, entry: Any) -> dict[str, Values]:
    path = file_in(directory, field(where, entry, "name", str))
    size, digest = field(where, entry, "bytes", int), field(where, entry, "sha256", str)
    content = read_bytes(path)
    if len(content) != size:
        raise GoldenError(f"{path}: must have {size} bytes, got {len(content)}")
    if hashlib.sha256(content).hexdigest() != digest:
        raise GoldenError(f"{path}: must have the SHA-256 {digest[:64]!r}, got {hashlib.sha256(content).hexdigest()}")
    if path.suffix != ".safetensors":
        return {}
    return {name: array for name, (_, array) in read_safetensors(path, content).items()}


def _case(where: str, entry: Any, files: dict[str, dict[str, Values]]) -> StoredCase:
    file = field(where, entry, "file", str)
    if file not in files:
        raise GoldenError(f"{where}: file must be one of {', '.join(sorted(files))}, got {file!r}")
    tensors = files[file]
    inputs = {
        name: _tensor(f"{where}: inputs {name!r}", tensors, stored, field(where, stored, "shape", list))
        for name, stored in field(where, entry, "inputs", dict).items()
    }
    expected = {
        name: _result(f"{where}: expected {name!r}", tensors, stored)
        for name, stored in field(where, entry, "expected", dict).items()
    }
    return StoredCase(
        name=field(where, entry, "id", str),
        kind=field(where, entry, "kind", str),
        description=field(where, entry, "description", str),
        features=frozenset(map(str, field(where, entry, "features", list))),
        default_slopes=field(where, entry, "default_slopes", bool),
        arguments=field(where, entry, "arguments", dict),
        inputs=inputs,
        expected=expected,
    )


def _result(where: str, tensors: dict[str, Values], entry: Any) -> Result:
    shape = field(where, entry, "shape", list)
    value = _tensor(where, tensors, entry, shape)
    budgets = {}
    for dtype in DTYPES:
        stored = field(where, field(where, entry, "budgets", dict), dtype, dict)
        if "tensor" in stored:
            budget = _tensor(where, tensors, stored, shape)
        else:
            relative, absolute = (field(where, stored, name, float) for name in ("relative", "absolute"))
            budget = np.abs(np.where(np.isfinite(value), value, 0)) * relative + absolute
        if not (np.isfinite(budget) & (budget >= 0)).all():
            raise GoldenError(f"{where}: budgets must be finite and not negative")
        budgets[dtype] = budget
    if np.isnan(value).any() or (value == math.inf).any():
        raise GoldenError(f"{where}: results must be numbers or -inf")
    return Result(field(where, entry, "tensor", str), value, budgets)


def _tensor(where: str, tensors: dict[str, Values], entry: Any, shape: list[Any]) -> Values:
    name = field(where, entry, "tensor", str)
    if name not in tensors:
        raise GoldenError(f"{where}: there is no tensor {name!r} in its file")
    if list(tensors[name].shape) != shape:
        raise GoldenError(f"{where}: {name!r} must have shape {shape}, got {list(tensors[name].shape)}")
    return tensors[name]
