"""Files of golden sets and of results: written with the same bytes everywhere, read without trust in what they say."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from alibi_core.conformance._cases import Values

MOST_BYTES = 2**28  # of one file; a golden set has a few million in all
_MOST_HEADER_BYTES = 2**24
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")

# As safetensors names them. NumPy has no bfloat16: its bits are the upper half of float32's.
_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "BOOL": "|b1"}
FLOATING = ("F64", "F32", "F16", "BF16")


class GoldenError(ValueError):
    """A golden set, or results, that cannot be used: which file, and why."""


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
    content = _parsed(path, read_bytes(path))
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
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(len(content) - 8, _MOST_HEADER_BYTES):
        raise GoldenError(f"{path}: is cut off, or no safetensors file: {len(content)} bytes, header of {length}")
    header = _parsed(path, content[8 : 8 + length])
    header.pop("__metadata__", None)
    data = memoryview(content)[8 + length :]
    tensors: dict[str, tuple[str, Values]] = {}
    spans: list[tuple[int, int]] = []
    for name, entry in header.items():
        kind, shape, (start, end) = _entry(path, name, entry)
        if end > len(data):
            raise GoldenError(f"{path}: {name!r} must end within the file's {len(data)} bytes of data, got {end}")
        spans.append((start, end))
        tensors[name] = kind, _array(kind, data[start:end]).reshape(shape)
    ends = [0, *(end for _, end in sorted(spans))]
    if [start for start, _ in sorted(spans)] != ends[:-1] or ends[-1] != len(data):
        raise GoldenError(f"{path}: tensors must fill the file without gap or overlap")
    return tensors


def _array(kind: str, data: memoryview) -> Values:
    if kind == "BOOL":
        return np.asarray(np.frombuffer(data, np.uint8) != 0)
    if kind == "BF16":
        return np.asarray((np.frombuffer(data, "<u2").astype("<u4") << np.uint32(16)).view("<f4"))
    return np.frombuffer(data, _DTYPES[kind])


def _entry(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    def refuse(rule: str) -> NoReturn:
        raise GoldenError(f"{path}: {name!r} must have {rule}, got {str(entry)[:200]!r}")

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        refuse("dtype, shape and data_offsets")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in _DTYPES:
        refuse(f"one of the dtypes {', '.join(_DTYPES)}")
    if not _are_sizes(shape) or len(shape) > 8 or math.prod(max(n, 1) for n in shape) > MOST_BYTES:
        refuse(f"a shape of at most 8 whole numbers and {MOST_BYTES} elements")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        refuse("a start and an end for data_offsets")
    if math.prod(shape) * np.dtype(_DTYPES[kind]).itemsize != offsets[1] - offsets[0]:
        refuse("as many bytes as its shape needs")
    return kind, tuple(shape), (offsets[0], offsets[1])


def _are_sizes(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(n) is int and n >= 0 for n in numbers)


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
        if twice is not None:
            raise ValueError(f"the name {twice!r} stands twice")
        return dict(pairs)

    def refused(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no number of JSON")

    try:
        content = json.loads(text.decode(), object_pairs_hook=unique, parse_constant=refused)
    except (ValueError, RecursionError) as error:
        raise GoldenError(f"{path}: is no valid JSON, {str(error)[:200] or type(error).__name__}") from None
    if not isinstance(content, dict):
        raise GoldenError(f"{path}: must hold a JSON object, got {type(content).__name__}")
    return content
