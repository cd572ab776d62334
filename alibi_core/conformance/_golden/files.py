"""Files of golden sets and of results: written with the same bytes everywhere, read without trust in what they say."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from alibi_core.conformance._cases import Values

MOST_BYTES = 2**28  # of one file; a golden set has a few million in all
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")

# As safetensors names them. NumPy has no bfloat16: its bits are the upper half of float32's.
_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "BOOL": "|b1"}
FLOATING = ("F64", "F32", "F16", "BF16")


class GoldenError(ValueError):
    """A golden set, or results, that cannot be used: which file, and why.

    Example:
        >>> from alibi_core.conformance import read_golden
        >>> try:
        ...     read_golden("nowhere")
        ... except GoldenError as error:
        ...     print(error)
        nowhere/index.json: there is no such file
    """


def dtype_name(array: Values) -> str:
    """Return what safetensors calls the dtype of an array."""
    return {np.dtype(own): name for name, own in _DTYPES.items() if name != "BF16"}[array.dtype.newbyteorder("<")]


def safetensors_bytes(tensors: Mapping[str, Values], metadata: Mapping[str, str]) -> bytes:
    """Return a safetensors file. Its library orders metadata by chance; here wide dtypes come first, then names count.

    Args:
        tensors: Arrays by name.
        metadata: Strings by name.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    parts: list[bytes] = []
    end = 0
    for name, array in ordered:
        kind = dtype_name(array)
        parts.append(np.ascontiguousarray(array).astype(_DTYPES[kind]).tobytes())
        start, end = end, end + len(parts[-1])
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def json_bytes(content: Any) -> bytes:
    """Return JSON with sorted keys, indented."""
    return (json.dumps(content, sort_keys=True, indent=1, ensure_ascii=True, allow_nan=False) + "\n").encode()


def file_in(directory: Path, name: object) -> Path:
    """Return the path of a file that lies in a directory itself, whatever its name says.

    Raises:
        GoldenError: If it does not, is missing, is no file, or is too large.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise GoldenError(f"{directory}: a file name must be letters, digits and . _ -, got {name!r}")
    path = directory / name
    try:
        if path.resolve().parent != directory.resolve():
            raise GoldenError(f"{path}: must lie in {directory}, but is a link that leads outside")
        if not path.is_file():
            raise GoldenError(f"{path}: there is no such file")
        size = path.stat().st_size
    except (OSError, RuntimeError) as error:  # RuntimeError, of links that lead in circles
        raise GoldenError(f"{path}: cannot be read, {type(error).__name__}") from None
    if size > MOST_BYTES:
        raise GoldenError(f"{path}: must have at most {MOST_BYTES} bytes, got {size}")
    return path


def read_bytes(path: Path) -> bytes:
    """Return what is in a file that :func:`file_in` found."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise GoldenError(f"{path}: cannot be read, {type(error).__name__}") from None


def read_json(path: Path, kind: str, versions: range) -> dict[str, Any]:
    """Return a JSON file of a format and version.

    Raises:
        GoldenError: If it is anything else.
    """
    try:
        content = json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise GoldenError(f"{path}: is no valid JSON, {str(error)[:200] or type(error).__name__}") from None
    if not isinstance(content, dict):
        raise GoldenError(f"{path}: must hold a JSON object, got {type(content).__name__}")
    if content.get("format") != kind:
        raise GoldenError(f"{path}: format must be {kind!r}, got {str(content.get('format'))[:50]!r}")
    found = content.get("version")
    if type(found) is not int or found not in versions:
        raise GoldenError(f"{path}: version must be one of {list(versions)}, got {str(found)[:50]!r}")
    return content


def read_safetensors(path: Path, content: bytes) -> dict[str, tuple[str, Values]]:
    """Return the tensors of a file with the names of their dtypes, bfloat16 as float32.

    Raises:
        GoldenError: If any part of the file is not as the format says.
    """
    try:
        stored = safetensors.deserialize(content)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise GoldenError(f"{path}: is no valid safetensors file, {str(error)[:200]}") from None
    tensors: dict[str, tuple[str, Values]] = {}
    for name, entry in stored:
        kind, data = entry["dtype"], entry["data"]
        if kind not in _DTYPES:
            raise GoldenError(f"{path}: {name!r} must have one of the dtypes {', '.join(_DTYPES)}, got {kind}")
        values = np.frombuffer(data, _DTYPES[kind])
        if kind == "BF16":
            values = (values.astype("<u4") << np.uint32(16)).view("<f4")
        tensors[name] = kind, np.asarray(values).reshape(entry["shape"])
    return tensors
