"""What a command says on standard error: why it cannot run, and what takes time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class UnusableError(Exception):
    """The command cannot do what it is asked for; the message says why and tells the fix."""


@contextmanager
def waiting(words: str) -> Iterator[None]:
    """Say on standard error what takes time, until it is done: a spinner where rich is installed, else plain text.

    Where standard error is no terminal, nothing is printed.
    """
    if not sys.stderr.isatty():
        yield
        return
    try:
        from rich.console import Console
        from rich.markup import escape
    except ModuleNotFoundError:
        line = f"{words} ..."
        print(line, end="", file=sys.stderr, flush=True)
        try:
            yield
        finally:
            print(f"\r{' ' * len(line)}\r", end="", file=sys.stderr, flush=True)
    else:
        with Console(stderr=True).status(escape(f"{words} …")):
            yield
