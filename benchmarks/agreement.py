"""Do all installed frameworks agree? ``python -m benchmarks.agreement`` prints a table and fails if they do not.

Bias: how many elements differ, bit by bit, from NumPy's. Attention: the largest error against float64, and what share
that is of the error that rounding may cause there (the budget that ``tests.oracle`` derives); 100% is the limit.
"""

from __future__ import annotations

import sys
from functools import cache

import numpy as np
from rich.console import Console
from rich.markup import escape
from tqdm import tqdm

import alibi_core
from alibi_core.conformance import Attention, Case, Sizes
from benchmarks import harness
from tests.support.frameworks import BACKENDS, FRAMEWORKS, JAX, MLX, NUMPY, TORCH, Backend, Framework

SIZES = Sizes(batch=1, num_kv_heads=6, group=2, lengths=(97, 113), head_dim=32)
FORMS = ("causal", "symmetric")
DTYPES = ("float32", "float16", "bfloat16")
COMPILED = (TORCH, JAX, MLX)


def bias_bits(framework: Framework, *, is_causal: bool, compiled: bool = False) -> np.ndarray:
    """Return the bits of a bias: 12 heads are no power of two, and the offset is far from 0."""

    def function(slopes: object) -> object:
        return alibi_core.bias(slopes, 97, 113, q_offset=100_000, is_causal=is_causal)

    slopes = framework.array(alibi_core.slopes(12))
    return framework.bits((framework.compiled(function) if compiled else function)(slopes))


def differing_elements(framework: Framework, *, compiled: bool) -> int:
    """Return how many elements of causal and symmetric biases are not NumPy's, bit by bit."""
    return sum(
        int((bias_bits(framework, is_causal=x, compiled=compiled) != bias_bits(NUMPY, is_causal=x)).sum())
        for x in (True, False)
    )


def errors(backend: Backend, case: Case, exact: Attention, dtype: str) -> tuple[float, float]:
    """Return the largest error of ``backend`` in ``dtype``, and the largest share of an error budget."""
    tensors = [case.arrays[name] for name in ("query", "key", "value", "slopes")]
    actual = backend.attention(*tensors, dtype=dtype, **case.arguments)
    error = np.abs(actual - exact.output.value)
    return float(error.max()), float((error / exact.output.budget).max())


def main() -> int:
    """Print the table; return 0 if all agree."""
    cases = [Case(SIZES, form, None, None, None, None, False, seed=7) for form in FORMS]
    frameworks, backends = (
        [parameter.values[0] for parameter in parameters if not parameter.marks[0].args[0]]  # marked to skip: missing
        for parameters in (FRAMEWORKS, BACKENDS)
    )
    columns = ("bias bits\nthat differ", "the same,\ncompiled", *(f"attention\n{dtype}" for dtype in DTYPES))
    table = harness.table("Agreement with NumPy's bias and with float64 attention", "implementation", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    bits = {
        framework: [differing_elements(framework, compiled=x) for x in (False, True) if not x or framework in COMPILED]
        for framework in frameworks
    }
    failed = [f"{framework.name}: the bias is not NumPy's" for framework in frameworks if any(bits[framework])]
    exact = cache(lambda case, dtype: case.exact(dtype))
    for backend in tqdm(backends, unit="implementation", disable=None, leave=False):
        cells = [str(x) for x in bits[backend.framework]] + ["-"] * (backend.framework not in COMPILED)
        for dtype in DTYPES:
            if dtype != "float32" and backend.framework not in COMPILED:
                cells.append("-")  # NumPy and the standard compute in no low precision
                continue
            pairs = [errors(backend, case, exact(case, dtype), dtype) for case in cases]
            error, share = (max(x) for x in zip(*pairs, strict=True))
            cells.append(f"{error:.0e} {share:4.0%}")
            if not share <= 1:
                failed.append(f"{escape(backend.name)}: {dtype} attention exceeds its budget")
        table.add_row(escape(backend.name), *cells)
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    console.print("Bias: nothing may differ. Attention: largest error, and the largest share of its error budget.")
    missing = {parameter.values[0].name for parameter in FRAMEWORKS} - {framework.name for framework in frameworks}
    if missing:
        console.print(f"Not installed, so not checked: {', '.join(sorted(missing))}.")
    for line in failed:
        console.print(f"[bold red]FAILED[/] {line}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
