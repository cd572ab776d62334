"""The commands of the conformance kit: ``alibi-core conformance`` and ``alibi-core golden``."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alibi_core._arrays import checks
from alibi_core._cli.tables import print_table

DTYPES = ("float32", "float64", "float16", "bfloat16")


def add_commands(commands: Any) -> None:
    """Add the commands of this file to a parser."""
    check = commands.add_parser("conformance", help="hold implementations to the laws of ALiBi")
    check.add_argument(
        "names", nargs="*", metavar="NAME", help="backends, such as alibi_torch. Default: every installed one"
    )
    check.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="PACKAGE.MODULE:NAME",
        help="an adapter of your own, its class, or a function that returns one or several; may be repeated",
    )
    check.add_argument(
        "--dtype",
        action="append",
        choices=(*DTYPES, "all"),
        help="only adapters of this dtype; may be repeated. Default: float32, with --adapter all",
    )
    check.add_argument(
        "--profile", default="quick", choices=("quick", "thorough"), help="how much is checked (default quick)"
    )
    check.add_argument("--seed", type=int, default=0, help="seed of the drawn cases (default 0)")
    check.add_argument("--law", action="append", metavar="NAME", help="only this law; may be repeated")
    check.add_argument(
        "--time-limit", type=float, default=60.0, metavar="SECONDS", help="how long one call may take (default 60)"
    )
    check.add_argument("--json", metavar="FILE", help="also write the report to this file")
    check.set_defaults(run=_conformance)
    golden = commands.add_parser(
        "golden", help="write golden vectors, or check results, for implementations in any language"
    )
    actions = golden.add_subparsers(required=True, metavar="ACTION")
    write = actions.add_parser("write", help="write the golden vectors")
    write.add_argument(
        "directory", metavar="DIR", help="created; if it exists, it must be empty or hold golden vectors"
    )
    write.set_defaults(run=_write)
    verify = actions.add_parser(
        "check", help="check results that a program wrote; DIR/FORMAT.md tells how to write them"
    )
    verify.add_argument("directory", metavar="DIR", help="the golden vectors")
    verify.add_argument("results", metavar="RESULTS", help="the safetensors file of results")
    verify.add_argument(
        "--dtype", default="float32", choices=DTYPES, help="the dtype of the computation (default float32)"
    )
    verify.add_argument("--json", metavar="FILE", help="also write the report to this file")
    verify.set_defaults(run=_verify)


def _conformance(options: argparse.Namespace) -> int:
    from alibi_core.conformance import ENTRY_POINTS, LAWS, Report, supervised

    # Refuse unknown names before any adapter is loaded.
    registered = {entry.name: entry.value for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    laws = checks.some_of("--law", options.law or (), [law.name for law in LAWS])
    checks.some_of("NAME, unlike --adapter,", options.names, sorted(registered))
    if options.seed < 0:
        raise ValueError(f"--seed must not be negative, got {options.seed}")
    if not 0 < options.time_limit < 1e6:
        raise ValueError(f"--time-limit must be positive, below a million seconds, got {options.time_limit:g}")
    if options.json is not None:
        Path(options.json).touch()  # raises for an unwritable file before anything is checked
    asked = bool(options.names or options.adapter)
    # Default: every registered backend, in float32.
    sources = [registered[name] for name in (options.names if asked else sorted(registered))] + options.adapter
    dtypes = options.dtype or (["all"] if options.adapter else ["float32"])
    settings = {name: getattr(options, name) for name in ("profile", "seed", "time_limit")}
    settings |= {"laws": laws, "dtypes": [] if "all" in dtypes else dtypes}
    reports: list[tuple[str, Report]] = []  # each with its source
    missing: list[tuple[str, str]] = []
    for source in sources:
        print(f"checking {source} ...", file=sys.stderr)
        for found in supervised(source, **settings):
            missing += [(source, found)] if isinstance(found, str) else []
            reports += [(source, found)] if isinstance(found, Report) else []
    if reports:
        _print([report for _, report in reports])
    # A backend that is not installed is reported; if it was asked for, it is an error, below.
    for source, reason in () if asked else missing:
        print(f"Not checked: {source} ({reason}).")
    # Without a report, or without one of the adapters that were asked for, nothing has passed.
    passed = bool(reports) and not (missing and asked) and all(report.passed for _, report in reports)
    entries = [{"source": source, "passed": report.passed, "report": report.to_dict()} for source, report in reports]
    _write_json(options.json, {"passed": passed, "reports": entries})
    if missing and asked:
        raise ValueError(
            "NAME and --adapter must be of adapters in modules that can be imported here, got "
            + ", ".join(f"{source} ({reason})" for source, reason in missing)
        )
    if not reports:
        raise ValueError("there is no adapter to check" + (" of that dtype" if options.dtype else ""))
    if all(report.exit_status == 2 for _, report in reports):
        raise ValueError(f"no adapter offers what {', '.join(laws) or 'the laws'} would check")
    return 0 if passed else 1


def _print(reports: Sequence[Any]) -> None:
    """Print a table with a line for each adapter, and the reports of adapters that failed, or of a single adapter."""
    rows = []
    for report in reports:
        verdict = ("yes", "NO", "nothing to check")[report.exit_status]
        numbers = [*report.counts.values(), sum(law.calls for law in report.laws)]
        share = max((law.share for law in report.laws), default=0.0)
        names = (report.name, report.dtype, report.contract, verdict)
        rows.append((*names, *map(str, numbers), f"{share:.0%}", f"{report.seconds:.1f}"))
    counted = ("passed", "failed", "not offered")
    header = ("implementation", "dtype", "contract", "is ALiBi", *counted, "calls", "of budget", "seconds")
    print_table(header, rows)
    print("of budget: the largest error that passed, as a share of what rounding may cause")
    for report in reports:
        if len(reports) == 1 or not report.passed:
            print(f"\n{report}")


def _write(options: argparse.Namespace) -> int:
    from alibi_core.conformance import write_golden

    print(f"golden vectors in {write_golden(options.directory)}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    from alibi_core.conformance import check_golden

    report = check_golden(options.directory, options.results, dtype=options.dtype)
    print(report)
    _write_json(options.json, report.to_dict())
    return 0 if report.passed else 1


def _write_json(file: str | None, content: dict[str, Any]) -> None:
    if file is not None:
        Path(file).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
