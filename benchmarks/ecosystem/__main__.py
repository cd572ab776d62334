"""Who agrees with the paper? ``python -m benchmarks.ecosystem`` prints a table of what is installed.

Every implementation runs as it is, with random numbers and no download; those that are missing are listed as such. The
kit, ``alibi_core.conformance``, says which laws hold and what is done where they do not; how far off each is, is
measured beside it. The exit status is 0 whatever others do.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from tqdm import tqdm

from alibi_core import conformance
from benchmarks.ecosystem._rows import LEGEND, Row, markdown, notes, rich_table, rows_of
from benchmarks.ecosystem._subjects import SUBJECTS

WIDTH = 160  # columns that the table takes at least


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, write the files that are asked for, and return 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ecosystem", description=__doc__)
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table as Markdown")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="implementations whose names contain one of these")
    parser.add_argument("--profile", choices=("quick", "thorough", "none"), default="quick", help="of the kit")
    options = parser.parse_args(arguments)
    console = Console(width=max(Console().width, WIDTH))
    check = None if options.profile == "none" else partial(conformance.check, profile=options.profile)
    chosen = [x for x in SUBJECTS if not options.only or any(part.lower() in x.name.lower() for part in options.only)]
    rows: list[Row] = []
    for subject in tqdm(chosen, unit="implementation", disable=None, leave=False):
        rows += rows_of(subject, check)
    console.print(rich_table(rows))
    for line in (*LEGEND, *(f"{name}: {note}" for name, note in notes(rows).items())):
        console.print(line, markup=False, highlight=False)
    if options.markdown is not None:
        options.markdown.write_text(markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
