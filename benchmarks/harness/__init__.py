"""How benchmarks time, measure memory and write down what they found.

In go functions to compare. Out come medians, spreads and ratios, with versions and machine, as JSON.
"""

from benchmarks.harness.timing import (
    MET,
    NOT_JUDGED,
    Measurement,
    as_json,
    available_memory,
    console,
    machine,
    peak_growth,
    run_alone,
    seconds_of,
    show,
    versions,
    write_json,
)

__all__ = [
    "MET",
    "NOT_JUDGED",
    "Measurement",
    "as_json",
    "available_memory",
    "console",
    "machine",
    "peak_growth",
    "run_alone",
    "seconds_of",
    "show",
    "versions",
    "write_json",
]
