"""One row an implementation and precision: what the kit says of it, and how far it is off; and the table of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from alibi_core import conformance
from benchmarks.ecosystem._magnitude import HEADS, KV_LEN, Magnitude, measure
from benchmarks.ecosystem._subjects import Subject

NOT_INSTALLED = "not installed"
COLUMNS = ("implementation", "version", "dtype", "exact?", "its contract?", "departs how", "slopes",
           f"bias at {KV_LEN}", "output", "output, contract")  # fmt: skip
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


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    subject: Subject
    dtype: str = ""
    exact: str = ""  # whether it is the paper's ALiBi
    own: str = ""  # whether it is what its contract says; empty if that is the paper's
    departures: tuple[str, ...] = ()  # what it does instead, in the kit's words; without the kit, in ours
    magnitudes: tuple[Magnitude, ...] = ()
    problem: str = ""  # why there is nothing to tell


Check = Callable[[Any], conformance.Report]


def rows_of(subject: Subject, check: Check | None = conformance.check) -> Iterator[Row]:
    """Yield the rows of one implementation, with what the kit says of it; None leaves the kit out."""
    if subject.version is None:
        yield Row(subject, problem=NOT_INSTALLED)
        return
    for dtype in subject.dtypes:
        try:
            yield _row(subject, dtype, check)
        except ImportError as error:  # it needs something else that is missing
            yield Row(subject, dtype, problem=f"{NOT_INSTALLED}: {error}")
        except Exception as error:  # of a version that its adapter was not written for: the others shall be told of
            yield Row(subject, dtype, problem=f"raised {type(error).__name__}: {error}")


def _row(subject: Subject, dtype: str, check: Check | None) -> Row:
    contracts = dict.fromkeys(["exact", subject.contract])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other people's
        adapters = [subject.make(dtype, contract) for contract in contracts]
        sizes = {"contract": subject.contract, "bias_max": subject.bias_max}
        magnitudes = tuple(measure(adapters[0], num_heads, **sizes) for num_heads in HEADS)
        if check is None or subject.bias_max != 8:  # the kit knows no other
            return Row(subject, dtype, departures=(subject.note,), magnitudes=magnitudes)
        reports = [check(adapter) for adapter in adapters]
    exact, *own = map(_verdict, reports)
    departures = tuple(dict.fromkeys(sentence for report in reports for sentence in _departures(report)))
    return Row(subject, dtype, exact, f"{subject.contract}: {own[0]}" if own else "", departures, magnitudes)


def _verdict(report: conformance.Report) -> str:
    held = [law for law in report.laws if law.status in ("passed", "failed")]
    failed = [law.name for law in held if law.status == "failed"]
    if report.passed:
        return "yes"
    return f"no: {', '.join(failed)}" if len(failed) < 4 else f"no, {len(failed)} of {len(held)} laws"


def _departures(report: conformance.Report) -> list[str]:
    """Return what is done instead, in words; of what has none, how far off it is."""
    failed = [law for law in report.laws if law.status == "failed"]
    sentences = [x.sentence for law in failed for x in law.diagnoses]
    return sentences + [f"{law.name}: {law.counterexample.problem}" for law in failed if not law.diagnoses]


# --- The table --------------------------------------------------------------------------------------------------------


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of a row, as text."""
    head = (row.subject.name, row.subject.version or "", row.dtype)
    if row.problem:
        return (*head, "", "", row.problem, "", "", "", "")
    kinds = ("slopes", "bias", "output", *(["contract_output"] if row.own else []))
    numbers = [" / ".join(_number(getattr(x, kind)) for x in row.magnitudes) for kind in kinds]
    return (*head, row.exact, row.own, "; ".join(row.departures), *numbers, *([] if row.own else [""]))


def rich_table(rows: Sequence[Row]) -> Table:
    """Return the table for a terminal."""
    table = Table(title="ALiBi as others have it", title_justify="left", show_lines=True)
    for column in COLUMNS:
        table.add_column(column, overflow="fold", ratio=4 if column == "departs how" else None)
    for row in rows:
        table.add_row(*map(escape, cells(row)))
    return table


def notes(rows: Sequence[Row]) -> dict[str, str]:
    """Return what a reader should know of each implementation, by name."""
    return {row.subject.name: row.subject.note for row in rows if row.subject.note}


def markdown(rows: Sequence[Row]) -> str:
    """Return the table and its notes in Markdown."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *map(cells, rows)]
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    told = "\n".join(f"- **{name}**: {note}" for name, note in notes(rows).items())
    return "\n\n".join([table, *LEGEND, told]) + "\n"


def _number(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.1g}" if value < 1 else f"{value:.3g}"
