"""Hold every mutant to the laws: ``python -m benchmarks.mutants``.

The first table says of each mutant which laws kill it and what the kit says that it does; the second, of each law,
which mutants it alone kills. The exit status is 1 if a mutant survives, or if fewer than 35 are diagnosed rightly.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tqdm import tqdm

from alibi_core.conformance import LAWS
from benchmarks.mutants import MUTANTS, tried_by_name
from benchmarks.mutants._mutant import Outcome

DIAGNOSED = 35  # so many mutants must be diagnosed rightly, at least


def outcomes(names: Sequence[str], jobs: int) -> list[Outcome]:
    """Hold mutants to all laws, several at a time."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        found = pool.map(tried_by_name, names)
        return list(tqdm(found, total=len(names), unit="mutant", disable=None, leave=False))


def mutants_table(found: Sequence[Outcome]) -> Table:
    table = Table(title="Mutants: which laws kill them, and what the kit says that they do", title_justify="left")
    table.add_column("mutant", no_wrap=True)
    table.add_column("killed by", max_width=32)
    table.add_column("diagnosis", ratio=1)
    table.add_column("right")
    table.add_column("seconds", justify="right")
    for x in found:
        laws = f"{len(x.killed_by)} laws, first {x.killed_by[0]}" if len(x.killed_by) > 4 else ", ".join(x.killed_by)
        right = "yes" if x.is_right else "[bold red]no[/]"
        said = "\n".join(escape(sentence) for sentence in x.diagnoses)
        table.add_row(x.mutant, laws or "[bold red]SURVIVES[/]", said, right, f"{x.seconds:.1f}")
    return table


def laws_table(alone: dict[str, tuple[str, ...]]) -> Table:
    table = Table(title="Laws: which mutants no other law kills", title_justify="left")
    table.add_column("law", no_wrap=True)
    table.add_column("mutants", ratio=1)
    for name, mutants in alone.items():
        table.add_row(name, ", ".join(mutants) or "-")
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Print both tables; return 0 if all mutants are dead and enough are diagnosed rightly."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description="Hold every mutant to the laws.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what came of each mutant here, too")
    parser.add_argument("--only", nargs="+", metavar="MUTANT", help="names of mutants (default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time (default: all cores)")
    options = parser.parse_args(argv)
    unknown = set(options.only or ()) - {mutant.name for mutant in MUTANTS}
    if unknown:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
    chosen = [mutant.name for mutant in MUTANTS if not options.only or mutant.name in options.only]
    found = outcomes(chosen, options.jobs)
    alone = {law.name: tuple(x.mutant for x in found if x.killed_by == (law.name,)) for law in LAWS}
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(mutants_table(found))
    console.print(laws_table(alone))
    survivors = [x.mutant for x in found if not x.killed_by]
    right = sum(x.is_right for x in found)
    console.print(f"{len(found)} mutants, {len(found) - len(survivors)} killed, {right} diagnosed rightly.")
    for name in survivors:
        console.print(f"[bold red]SURVIVES[/] {name}")
    if options.json is not None:
        known = {"mutants": [asdict(x) for x in found], "killed_by_one_law": alone}
        options.json.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    return int(bool(survivors) or right < min(DIAGNOSED, len(found)))


if __name__ == "__main__":
    sys.exit(main())
