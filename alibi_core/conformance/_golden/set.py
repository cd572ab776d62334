"""A golden set, read and verified."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from alibi_core.conformance._cases import Values
from alibi_core.conformance._golden.exact import DTYPES
from alibi_core.conformance._golden.files import GoldenError, file_in, read_bytes, read_json, read_safetensors

GOLDEN_FORMAT, GOLDEN_VERSION = "alibi-golden", 1
INDEX = "index.json"


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


def _case(entry: Any, tensors: dict[str, Values]) -> StoredCase:
    return StoredCase(
        name=entry["id"],
        kind=entry["kind"],
        description=entry["description"],
        features=frozenset(entry["features"]),
        default_slopes=entry["default_slopes"],
        arguments=entry["arguments"],
        inputs={name: tensors[stored["tensor"]] for name, stored in entry["inputs"].items()},
        expected={name: _result(tensors, stored) for name, stored in entry["expected"].items()},
    )


def _result(tensors: dict[str, Values], entry: Any) -> Result:
    value = tensors[entry["tensor"]]
    budgets = {}
    for dtype in DTYPES:
        stored = entry["budgets"][dtype]
        if "tensor" in stored:
            budgets[dtype] = tensors[stored["tensor"]]
        else:
            size = np.abs(np.where(np.isfinite(value), value, 0))
            budgets[dtype] = size * stored["relative"] + stored["absolute"]
    return Result(entry["tensor"], value, budgets)
