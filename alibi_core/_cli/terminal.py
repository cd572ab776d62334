"""What a command says on standard error: why it cannot run, and what takes time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class UnusableError(Exception):
    """The command cannot do what it is asked for; the message says why and tells the fix."""


@contextmanager
def waiting(words: str) -> Iterator[None]:
    """Say on standard error, where that is a terminal, what takes time, until it is done."""
    line = f"{words} ..." if sys.stderr.isatty() else ""
    print(line, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(f"\r{' ' * len(line)}\r" if line else "", end="", file=sys.stderr, flush=True)
