"""How benchmarks time, measure memory and write down what they found.

In go functions to compare. Out come medians, spreads and ratios, with versions and machine, as JSON.
"""

from benchmarks.harness.timing import (
    Measurement,
    available_memory,
    conclude,
    folder,
    machine,
    parser,
    peak_growth,
    report,
    run_alone,
    seconds_of,
    table,
    versions,
    write_json,
)

__all__ = [
    "Measurement",
    "available_memory",
    "conclude",
    "folder",
    "machine",
    "parser",
    "peak_growth",
    "report",
    "run_alone",
    "seconds_of",
    "table",
    "versions",
    "write_json",
]
