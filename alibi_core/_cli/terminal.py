"""Output on standard error: why a command cannot run, and a note while it is busy."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class UnusableError(Exception):
    """The command cannot do what it is asked for; the message says why and tells the fix."""


@contextmanager
def waiting(words: str) -> Iterator[None]:
    """Show ``words`` on standard error inside this context, if it is a terminal."""
    line = f"{words} ..." if sys.stderr.isatty() else ""
    print(line, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(f"\r{' ' * len(line)}\r" if line else "", end="", file=sys.stderr, flush=True)
