"""The command ``alibi-core``: its arguments, exit statuses and error messages.

Each command imports its requirements when it runs.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

import alibi_core
from alibi_core._cli import kit, tables

REFUSED = (TypeError, ValueError, OSError, ModuleNotFoundError)  # errors for wrong arguments and files, missing extras
INTERRUPTED, BROKEN_PIPE = 130, 141  # 128 plus the number of the signal, as in shells


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0 for success, 1 if a check failed, 2 if it could not run."""
    options = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names that the terminal's encoding lacks are no error
    try:
        status: int | None = options.run(options)
        print(end="", flush=True)  # unlike sys.stdout.flush(), also where standard output is closed
    except BrokenPipeError:  # as with "| head -1". Without dup2, Python flushes stdout at exit and prints an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except REFUSED as error:
        print(f"alibi-core: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("alibi-core: interrupted", file=sys.stderr)
        return INTERRUPTED
    return status or 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="alibi-core",
        description="ALiBi, attention with linear biases: its numbers as tables, and tests of implementations.",
    )
    parser.add_argument("--version", action="version", version=alibi_core.__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    tables.add_commands(commands)
    kit.add_commands(commands)
    return parser
