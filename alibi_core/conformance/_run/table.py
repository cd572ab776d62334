"""Reports as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from alibi_core.conformance._report import LawReport, Report
from alibi_core.conformance._run.supervisor import Outcome

_STYLES = {"passed": "green", "failed": "bold red", "not run": "yellow"}


def summary(outcomes: Sequence[Outcome]) -> Table:
    """Return one line for each adapter.

    Example:
        >>> from alibi_core.conformance import check, numpy_adapters
        >>> table = summary([Outcome("mine", check(numpy_adapters()[0], laws=["slopes"]))])
        >>> str(table.columns[0].header), list(table.columns[0].cells), table.row_count
        ('implementation', ['alibi_core'], 1)
    """
    table = Table(title="Is it ALiBi?", title_justify="left")
    table.add_column("implementation", no_wrap=True)
    for column in ("dtype", "contract", "verdict"):
        table.add_column(column, no_wrap=True)
    for column in ("passed", "failed", "not\noffered", "calls", "of budget", "seconds"):
        table.add_column(column, justify="right", no_wrap=True)
    golden = any(outcome.golden is not None for outcome in outcomes)
    if golden:
        table.add_column("golden", no_wrap=True)
    for outcome in outcomes:
        table.add_row(*_cells(outcome.source, outcome.report), *([_golden(outcome)] if golden else []))
    return table


def _cells(source: str, report: Report | None) -> list[str]:
    if report is None:
        return [escape(source), "", "", "[bold red]FAILED[/]", "", "", "", "", "", ""]
    counts = [str(sum(law.status == status for law in report.laws)) for status in ("passed", "failed", "not offered")]
    share = max((law.share for law in report.laws), default=0.0)
    calls = str(sum(law.calls for law in report.laws))
    verdict = ("[green]yes[/]", "[bold red]NO[/]", "nothing to check")[report.exit_status]
    name = escape(report.name or source)
    return [name, report.dtype, report.contract, verdict, *counts, calls, f"{share:.0%}", f"{report.seconds:.1f}"]


def _golden(outcome: Outcome) -> str:
    if outcome.golden is None:
        return ""
    return "[green]yes[/]" if outcome.golden["passed"] else "[bold red]NO[/]"


def details(outcome: Outcome, *, every_law: bool) -> Group:
    """Return what is known of an adapter: what it does instead, then its laws (all, or those it does not keep).

    Example:
        >>> from alibi_core.conformance import Mistaken, check
        >>> outcome = Outcome("mine", check(Mistaken("negated slopes"), laws=["slopes"]))
        >>> print(details(outcome, every_law=False).renderables[1])
        → They are negative: distance would be rewarded, where -slope * distance is added.
    """
    report = outcome.report
    if report is None:
        return Group()
    parts: list[Table | Text] = [Text(f"{report.name}, {report.dtype}, contract {report.contract}", style="italic")]
    if report.crash:
        parts.append(Text(f"It crashed: {report.crash}", style="bold red"))
    parts += [Text(f"→ {x.sentence}", style="bold") for x in report.diagnoses]
    if outcome.golden is not None and not outcome.golden["passed"]:
        failed = [case["id"] for case in outcome.golden["cases"] if case["status"] == "failed"]
        parts.append(Text(f"Golden vectors that it misses: {', '.join(failed)}", style="bold red"))
    shown = [law for law in report.by_urgency if every_law or law.status != "passed"]
    if shown:
        table = Table("law", "", "what it says; what was found")
        for law in shown:
            table.add_row(law.name, Text(law.status, style=_STYLES[law.status]), _told(law))
        parts.append(table)
    if every_law and report.not_offered:
        parts.append(Text(report.not_offered, style="dim"))
    return Group(*parts)


def _told(law: LawReport) -> Text:
    text = Text(law.statement)
    if law.counterexample is not None:
        text.append(f"\n{law.counterexample}", style="red")
    elif law.reason:
        text.append(f"\n{law.reason}", style="dim")
    return text
