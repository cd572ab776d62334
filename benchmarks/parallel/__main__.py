"""What does it cost to divide one sequence among processes that share the cores, against one that has them all?

    python -m benchmarks.parallel

Numbers are checked first. The exit status is 1 if, at full size, a bar is not met or could not be measured.
"""

from __future__ import annotations

import sys
from dataclasses import asdict

from benchmarks import harness
from benchmarks.parallel import torch


def main(arguments: list[str] | None = None) -> int:
    options = harness.parser("parallel", __doc__, {}).parse_args(arguments)
    sizes = torch.QUICK if options.quick else torch.FULL
    return harness.conclude(
        harness.folder(options, True) / "parallel-torch.json",
        list(torch.measurements(sizes)),
        not options.quick,
        benchmark="parallel",
        backend="alibi_torch",
        sizes=asdict(sizes),
        machine=harness.machine(),
        versions=harness.versions(*torch.VERSIONS),
    )


if __name__ == "__main__":
    sys.exit(main())
