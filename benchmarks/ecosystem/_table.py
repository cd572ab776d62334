"""The rows as a table for a terminal, and in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.markup import escape
from rich.table import Table

from benchmarks.ecosystem._magnitude import KV_LEN, Magnitude
from benchmarks.ecosystem._rows import Row

COLUMNS = (
    "implementation",
    "version",
    "dtype",
    "exact?",
    "its contract?",
    "departs how",
    "slopes",
    f"bias at {KV_LEN}",
    "output",
    "output, contract",
)
LEGEND = (
    "exact?: whether it keeps every law of the kit that applies to it, or which it breaks. its contract?: the same "
    "with the slopes and the bias of its own models, where those have a name in this library. In float16 and bfloat16 "
    "the kit lets tensors, weights and results be rounded, and no scores: most attention that is not fused rounds "
    "those too, with ALiBi or without.",
    f"Magnitudes are given for 8 / 12 heads and {KV_LEN} tokens. slopes: largest difference, relative. bias: largest "
    "difference, absolute, after subtracting what each query has at its own key, which softmax ignores. output: "
    "largest difference of the attention to normal queries, keys and values from float64, relative to the largest "
    "value; and to what the bias of its contract gives. - : slopes are the caller's, or there is no bias to be had.",
)


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of a row, as text."""
    if row.problem:
        return (row.name, row.version or "", row.dtype, "", "", row.problem, "", "", "", "")
    own = "" if row.own is None else f"{row.own.contract}: {row.own}"
    verdict = "" if row.exact is None else str(row.exact)
    numbers: list[Callable[[Magnitude], float | None]] = [
        lambda x: x.slopes,
        lambda x: x.bias,
        lambda x: x.output,
        lambda x: x.contract_output if row.own is not None else None,
    ]
    magnitudes = [" / ".join(_number(get(x)) for x in row.magnitudes) for get in numbers]
    magnitudes[-1] = "" if row.own is None else magnitudes[-1]
    return (row.name, row.version or "", row.dtype, verdict, own, "; ".join(row.departures), *magnitudes)


def rich_table(rows: Sequence[Row]) -> Table:
    """Return the table for a terminal."""
    table = Table(title="ALiBi as others have it", title_justify="left", show_lines=True)
    for column in COLUMNS:
        table.add_column(column, overflow="fold", ratio=4 if column == "departs how" else None)
    for row in rows:
        table.add_row(*map(escape, cells(row)))
    return table


def markdown(rows: Sequence[Row]) -> str:
    """Return the table and its notes in Markdown."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *map(cells, rows)]
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    notes = dict.fromkeys(f"- **{row.name}**: {row.note}" for row in rows if row.note)
    return "\n\n".join([table, *LEGEND, "\n".join(notes)]) + "\n"


def _number(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.1g}" if value < 1 else f"{value:.3g}"
