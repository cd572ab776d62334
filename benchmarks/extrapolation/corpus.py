"""Text to train on and other text to be tested on, as bytes."""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# The encodings are tables, one much like the next: held-out ones would be no news.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}


@dataclass(frozen=True)
class Corpus:
    """Two texts that share nothing, ``[length]`` uint8 each."""

    name: str
    training: Tensor
    held_out: Tensor

    @property
    def digest(self) -> str:
        """SHA-256 of both texts: whether two runs saw the same."""
        return hashlib.sha256(self.training.numpy().tobytes() + self.held_out.numpy().tobytes()).hexdigest()


def standard_library(max_bytes: int, held_out_bytes: int) -> Corpus:
    """Return the source of Python's standard library, code and docstrings, split by file.

    Files come in the order of a hash of their paths: the same on every machine, and no part of the alphabet is cut
    off. The first ones are held out; training takes the following ones, up to ``max_bytes`` in all.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path.relative_to(root) for path in root.rglob("*.py")]
    paths = [path for path in paths if not LEFT_OUT.intersection(path.parts)]
    held_out, training = bytearray(), bytearray()
    for path in sorted(paths, key=lambda path: hashlib.sha256(path.as_posix().encode()).digest()):
        (held_out if len(held_out) < held_out_bytes else training).extend((root / path).read_bytes())
        if len(held_out) + len(training) >= max_bytes:
            break
    version = ".".join(platform.python_version_tuple()[:2])
    return _corpus(f"Python {version} standard library", training, held_out[:held_out_bytes], held_out_bytes)


def text_file(path: Path, held_out_bytes: int, least_held_out: int) -> Corpus:
    """Return a file of any encoding: its last tenth is held out, more if that is too little, less if that will do.

    Raises:
        ValueError: If the file is too short to hold out ``least_held_out`` bytes and train on four times as many.
    """
    text, least = path.read_bytes(), 5 * least_held_out
    if len(text) < least:
        got = f"{len(text):,} in {path.name}; use a longer text"
        raise ValueError(f"text must have at least {least:,} bytes, got {got}")
    held = min(max(len(text) // 10, least_held_out), held_out_bytes)
    return _corpus(path.name, text[:-held], text[-held:], least_held_out)


def _corpus(name: str, training: bytes, held_out: bytes, least_held_out: int) -> Corpus:
    for part, text in (("held-out text", held_out), ("training text", training)):
        if len(text) < least_held_out:
            got = f"{len(text):,} in {name}; use a longer text"
            raise ValueError(f"{part} must have at least {least_held_out:,} bytes, got {got}")
    return Corpus(name, *(torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (training, held_out)))
