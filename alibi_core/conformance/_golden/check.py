"""The check of results, written by a program in any language, against golden vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from alibi_core._arrays import checks
from alibi_core.conformance._cases import Answer, Values, excess
from alibi_core.conformance._golden.cases import GoldenCase
from alibi_core.conformance._golden.exact import DTYPES, Expected
from alibi_core.conformance._golden.files import (
    FLOATING,
    GoldenError,
    file_in,
    read_bytes,
    read_json,
    read_safetensors,
)
from alibi_core.conformance._golden.report import CaseResult, GoldenReport, Worst
from alibi_core.conformance._golden.set import GOLDEN_VERSION, read_golden
from alibi_core.conformance._trial import MASKED

RESULTS_FORMAT, RESULTS_VERSION = "alibi-golden-results", 1
RESULTS_INDEX = "results.json"

_Kind = TypeVar("_Kind")


def check_golden(directory: str | Path, results: str | Path) -> GoldenReport:
    """Compare results that a program wrote with golden vectors.

    What is not offered is reported as such and fails nothing; an element that is not finite where it should be fails
    its case.

    Args:
        directory: Golden vectors, as :func:`write_golden` writes them.
        results: A directory with ``results.json`` and the files that it names; ``FORMAT.md`` beside the golden vectors
            says what they hold.

    Returns:
        What came of every case.

    Raises:
        GoldenError: If either directory cannot be used: a file is missing, damaged, of another format or version, or
            outside the directory; a result has no golden counterpart, or another shape; nothing is offered.

    Example:
        The whole way, of which the first step takes some seconds::

            write_golden("golden")
            golden_results(adapter, "golden", "results")  # or a program in any language writes them
            print(check_golden("golden", "results"))

        A path that is not there is told:

        >>> try:
        ...     check_golden("nowhere", "results")
        ... except GoldenError as error:
        ...     print(error)
        nowhere/index.json: there is no such file
    """
    cases, results = read_golden(directory), Path(results)
    path = file_in(results, RESULTS_INDEX)
    index = read_json(path, RESULTS_FORMAT, range(RESULTS_VERSION, RESULTS_VERSION + 1))
    if field(path, index, "golden_version", int) != GOLDEN_VERSION:
        raise GoldenError(f"{path}: golden_version must be {GOLDEN_VERSION}, got {str(index['golden_version'])[:50]}")
    dtype, program = field(path, index, "dtype", str), field(path, index, "program", str)
    try:
        checks.one_of("dtype", dtype, DTYPES)
    except ValueError as error:
        raise GoldenError(f"{path}: {error}") from None
    failures = field(path, {"failures": {}} | index, "failures", dict)
    unknown = sorted(set(failures) - {case.name for case in cases})
    if unknown:
        raise GoldenError(f"{path}: failures must be of golden cases, got {unknown[0]!r}")
    offered = _read(results, path, field(path, index, "files", list), cases)
    if not offered and not failures:
        raise GoldenError(f"{path}: must offer some result, got none")
    judged = tuple(_judged(case, offered, dtype, failures.get(case.name)) for case in cases)
    return GoldenReport(program, dtype, GOLDEN_VERSION, judged)


def field(path: Path, index: dict[str, Any], name: str, kind: type[_Kind]) -> _Kind:
    """Return what an index of results has by a name, if it is of this kind.

    Raises:
        GoldenError: If it is not.
    """
    value = index.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise GoldenError(f"{path}: {name} must be {kind.__name__}, got {str(value)[:200]!r}")
    return value


def _read(directory: Path, index: Path, names: list[Any], cases: list[GoldenCase]) -> dict[str, Values]:
    """Return all results, in float64."""
    known = {result.tensor: result for case in cases for result in case.expected.values()}
    offered: dict[str, Values] = {}
    seen: set[str] = set()
    for name in names:
        path = file_in(directory, name)
        if name in seen:
            raise GoldenError(f"{index}: the file {name!r} stands twice")
        seen.add(name)
        for tensor, (kind, array) in read_safetensors(path, read_bytes(path)).items():
            if tensor not in known:
                raise GoldenError(f"{path}: {tensor!r} is no result of the golden vectors")
            if tensor in offered:
                raise GoldenError(f"{path}: {tensor!r} is in another file, too")
            if kind not in FLOATING:
                raise GoldenError(f"{path}: {tensor!r} must have one of the dtypes {', '.join(FLOATING)}, got {kind}")
            if array.shape != known[tensor].value.shape:
                expected = list(known[tensor].value.shape)
                raise GoldenError(f"{path}: {tensor!r} must have shape {expected}, got {list(array.shape)}")
            offered[tensor] = array.astype(np.float64)
    return offered


def _judged(case: GoldenCase, offered: dict[str, Values], dtype: str, failure: Any) -> CaseResult:
    found = {name: result for name, result in case.expected.items() if result.tensor in offered}
    missing = tuple(name for name in case.expected if name not in found)
    known = case.name, case.description
    if failure is not None:
        return CaseResult(*known, "failed", missing=missing, remark=str(failure)[:500])
    if not found:
        return CaseResult(*known, "not offered", missing=missing)
    elements = [_worst(offered[result.tensor], result, dtype) for result in found.values()]
    worst = max((x for x in elements if x is not None), key=lambda x: x.ratio, default=None)
    status = "passed" if worst is None or worst.ratio <= 1 else "failed"
    return CaseResult(*known, status, worst, missing)


def _worst(actual: Values, result: Expected, dtype: str) -> Worst | None:
    if actual.size == 0:
        return None
    expected, budget = result.value, np.asarray(result.budgets[dtype])
    ratio = excess(np.where(np.isneginf(expected) & (actual <= MASKED), -np.inf, actual), Answer(expected, budget))
    index = tuple(int(i) for i in np.unravel_index(ratio.argmax(), ratio.shape))
    numbers = (float(array[index]) for array in (expected, actual, budget, ratio))
    return Worst(result.tensor, index, *numbers)
