"""Safetensors files: tensors as NumPy arrays, read one at a time, with every length checked first; and written."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # bytes; larger headers are refused, as in the format's own reader

# The supported dtypes, by their names in the format. NumPy has no bfloat16: its bits are a float32's upper half.
FLOATING = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
DTYPES = FLOATING | {"I64": "<i8", "I32": "<i4", "BOOL": "|b1"}
NAMES = {np.dtype(kind): name for name, kind in DTYPES.items() if name != "BF16"}


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor in a file, its dtype and its shape."""

    path: Path
    dtype: str  # name in the format: "F32", "BF16", ...
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file

    def check_dtype(self, name: str) -> None:
        """Check that the tensor has a supported floating dtype; ``name`` is for the message."""
        if self.dtype not in FLOATING:
            raise ValueError(
                f"{name} in {self.path} must be of dtype {', '.join(FLOATING)}, got {self.dtype}; "
                "save a quantized model in floating point first"
            )

    def read(self) -> Any:
        """Return a copy of the values in memory, bfloat16 as float32."""
        stored = np.fromfile(self.path, DTYPES[self.dtype], math.prod(self.shape), offset=self.offset)
        if self.dtype == "BF16":
            # bfloat16's bits are the upper half of a float32.
            stored = (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return stored.reshape(self.shape)


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a model, by name, from one file or from all files that an index lists."""
    if (directory / WHOLE).is_file():
        return tensors_in(directory / WHOLE)
    if not (directory / INDEX).is_file():
        raise FileNotFoundError(
            f"{directory} must hold {WHOLE} or {INDEX}; weights of another format become that with "
            "transformers' model.save_pretrained(directory)"
        )
    places = read_json(directory / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ValueError(
            f"{directory / INDEX} must map tensors to files under 'weight_map', got {type(places).__name__}"
        )
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(places.values())):
        if not file or Path(file).name != file:
            raise ValueError(f"{directory / INDEX} must name files of its own directory, got {file!r}")
        held = tensors_in(directory / file)
        # If several files hold a tensor, the index decides.
        tensors |= {name: tensor for name, tensor in held.items() if places.get(name, file) == file}
    absent = [name for name in places if name not in tensors]
    if absent:
        raise ValueError(f"{directory} must hold the tensors where its index says, got {some(absent)} missing")
    return tensors


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise FileNotFoundError(f"{path.parent} must hold {path.name}, as save_pretrained writes it") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be JSON, got {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def some(names: list[Any]) -> str:
    """Return a list of names or numbers as text: the first four, then a count."""
    return f"{names[:4]}" + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def content_of(tensors: dict[str, Any], metadata: dict[str, str]) -> bytes:
    """Return the content of a file with these NumPy arrays."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    start, parts = 0, []
    # Wide numbers first, so that each lies at a multiple of its size.
    for name, array in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        parts.append(array.tobytes())
        places = [start, start := start + len(parts[-1])]
        entries[name] = {"dtype": NAMES[array.dtype], "shape": array.shape, "data_offsets": places}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    return b"".join([len(header).to_bytes(8, "little"), header, *parts])


def tensors_in(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file, by name."""
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} must hold {path.name}, which its index names")
    size = path.stat().st_size
    with path.open("rb") as file:
        # Format: 8 bytes of header length, the JSON header, then the data.
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise _damaged(path, f"{size} bytes, too few for its header")
        try:
            entries = json.loads(file.read(length))
            tensors = {name: _stored(path, 8 + length, e) for name, e in entries.items() if name != "__metadata__"}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise _damaged(path, "a header that cannot be read") from None
    end = 0
    for (start, stop), name in sorted((entries[name]["data_offsets"], name) for name in tensors):
        if start != end:  # the format allows neither gaps nor overlaps
            raise _damaged(path, f"{name} from byte {start} of the data on, where {end} is the next")
        end = stop
    if size != 8 + length + end:
        raise _damaged(path, f"{size} bytes where its header tells of {8 + length + end}")
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            continue  # never read
        start, stop = entries[name]["data_offsets"]
        if stop - start != math.prod(tensor.shape) * np.dtype(DTYPES[tensor.dtype]).itemsize:
            raise _damaged(path, f"{stop - start} bytes for {name} of {tensor.dtype} and shape {tensor.shape}")
    return tensors


def _stored(path: Path, data: int, entry: dict[str, Any]) -> StoredTensor:
    start, stop = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(number) is int and number >= 0 for number in (start, stop, *shape)):
        raise ValueError
    return StoredTensor(path, str(entry["dtype"]), shape, data + start)


def _damaged(path: Path, found: str) -> ValueError:
    return ValueError(f"{path} must be a whole safetensors file, got {found}; copy or download it again")
