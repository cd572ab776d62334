"""Tables of what was measured without a TPU, and of the loops that it was read from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.harness import NOT_JUDGED, Measurement

try:
    from rich import box
    from rich.console import Console
    from rich.table import Table
except ModuleNotFoundError:
    Console = None

UNITS = ("MATMUL", "VALU", "EUP", "XLU", "VSTORE")  # those that a kernel for attention may be short of
LOOPS = "Loops with matrix products: all bundles, those for a key block, those of them between branches, and units used"


def show(
    console: Console | None, measurements: Sequence[Measurement], loops: Sequence[dict[str, Any]], judged: bool
) -> None:
    """Print a table for each group of measurements, their notes, and one of the loops."""
    for group in dict.fromkeys(each.group for each in measurements):
        members = [each for each in measurements if each.group == group]
        _table(
            console,
            group,
            ("", "against", "ours", "theirs", "ratio", "bar", ""),
            [_row(each, judged) for each in members],
        )
        for note in dict.fromkeys(each.note for each in members if each.note):
            print(f"  {note}")
    if loops:
        columns = ("", "kernel", "loop", "path", "straight", *UNITS, "main")
        _table(console, LOOPS, columns, [_loop(each) for each in loops])
    if not judged:
        print("Bars are judged at full size only.")


def _row(each: Measurement, judged: bool) -> list[str]:
    verdict = each.verdict(judged).replace(NOT_JUDGED, "")
    values = ("", "") if each.values is None else (_quantity(value, each.unit) for value in each.values)
    ratio = "" if each.ratio is None else f"{each.ratio:.3f}"
    return [each.candidate, each.baseline, *values, ratio, "" if each.bar is None else f"<= {each.bar:g}", verdict]


def _quantity(value: float, unit: str) -> str:
    return f"{value / 2**20:,.1f} MiB" if unit == "bytes" else f"{value:,.0f}"


def _loop(each: dict[str, Any]) -> list[str]:
    subject = f"{each['topology']}, {each['head_dim']}"
    counts = (f"{each[key]:,}" for key in ("loop_bundles", "path", "straight"))
    use = (f"{each['use'][unit]:.0%}" if unit in each["use"] else "" for unit in UNITS)
    return [subject, each["kernel"], *counts, *use, "main" if each["main"] else ""]


def _table(console: Console | None, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if console is None:
        print(f"\n{title}")
        for row in (columns, *rows):
            print("  " + "  ".join(filter(None, row)))
        return
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index > 1 else "left", no_wrap=index > 1)
    for row in rows:
        table.add_row(*row)
    console.print(table)
