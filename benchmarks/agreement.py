"""Do all installed frameworks agree? ``python -m benchmarks.agreement`` prints a table and fails if they do not.

Bias: the number of elements whose bits differ from NumPy's. Attention: the relative error against float64, in units of
the dtype's roundoff.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from tqdm import tqdm

import alibi_core
from benchmarks import harness
from benchmarks.attention import MOST_ERROR, ROUNDOFF, attend, relative_error, slopes
from tests.support.frameworks import BACKENDS, FRAMEWORKS, JAX, MLX, NUMPY, TORCH, Backend, Framework

COMPILED = (TORCH, JAX, MLX)
NUM_HEADS, Q_LEN, KV_LEN, HEAD_DIM = 12, 97, 113, 32  # 12 heads: no power of two


def bias_bits(framework: Framework, *, is_causal: bool, compiled: bool) -> np.ndarray:
    """Return the bits of a bias whose offset is far from 0."""

    def function(rates: Any) -> Any:
        return alibi_core.bias(rates, Q_LEN, KV_LEN, q_offset=100_000, is_causal=is_causal)

    rates = framework.array(alibi_core.slopes(NUM_HEADS))
    return framework.bits((framework.compiled(function) if compiled else function)(rates))


def differing_elements(framework: Framework, *, compiled: bool) -> int:
    """Return the number of elements of the causal and the symmetric bias whose bits differ from NumPy's."""
    pairs = (
        [bias_bits(x, is_causal=is_causal, compiled=compiled and x is framework) for x in (framework, NUMPY)]
        for is_causal in (True, False)
    )
    return sum(int((ours != theirs).sum()) for ours, theirs in pairs)


def error(backend: Backend, dtype: str, *, is_causal: bool) -> float:
    """Return the relative error of attention, in units of roundoff, with grouped heads and queries at the end."""
    drawn = np.random.default_rng(7)
    sizes = (NUM_HEADS, Q_LEN), (NUM_HEADS // 2, KV_LEN), (NUM_HEADS // 2, KV_LEN)
    tensors = [drawn.standard_normal((1, heads, n, HEAD_DIM)) for heads, n in sizes]
    framework, options = backend.framework, {"is_causal": is_causal, "q_offset": KV_LEN - Q_LEN}
    found = backend.attention(*tensors, dtype=dtype, **options)[0]
    query, key, value = (framework.numpy(framework.array(x, dtype))[0] for x in tensors)  # rounded to the dtype
    positions = np.arange(KV_LEN - Q_LEN, KV_LEN)
    exact = [
        attend(query[head], key[head // 2], value[head // 2], rate, positions, is_causal=is_causal)[0]
        for head, rate in enumerate(slopes(NUM_HEADS))
    ]
    return relative_error(found, exact) / ROUNDOFF[dtype]


def main() -> int:
    """Print the table; return 0 if all agree."""
    frameworks, backends = (
        [parameter.values[0] for parameter in parameters if not parameter.marks[0].args[0]]  # skipped: not installed
        for parameters in (FRAMEWORKS, BACKENDS)
    )
    columns = ("bias bits\nthat differ", "the same,\ncompiled", *(f"attention\n{dtype}" for dtype in ROUNDOFF))
    table = harness.table("Agreement with NumPy's bias and with float64 attention", "implementation", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    failed, bits = [], {}
    for framework in frameworks:
        ways = (False, True) if framework in COMPILED else (False,)
        bits[framework] = [differing_elements(framework, compiled=compiled) for compiled in ways]
        if any(bits[framework]):
            failed.append(f"{framework.name}: the bias is not NumPy's")
    for backend in tqdm(backends, unit="implementation", disable=None, leave=False):
        is_low = backend.framework in COMPILED  # NumPy and the array API standard have no low precision
        cells = [str(x) for x in bits[backend.framework]] + ["-"] * (not is_low)
        for dtype in ROUNDOFF:
            if dtype != "float32" and not is_low:
                cells.append("-")
                continue
            worst = max(error(backend, dtype, is_causal=x) for x in (True, False))
            cells.append(f"{worst:.2f}")
            if not worst <= MOST_ERROR:
                failed.append(f"{escape(backend.name)}: {dtype} attention is {worst:.1f} units of roundoff off")
        table.add_row(escape(backend.name), *cells)
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    console.print(f"Bias: nothing may differ. Attention: relative error in units of roundoff, at most {MOST_ERROR}.")
    missing = {parameter.values[0].name for parameter in FRAMEWORKS} - {framework.name for framework in frameworks}
    if missing:
        console.print(f"Not installed, so not checked: {', '.join(sorted(missing))}.")
    for line in failed:
        console.print(f"[bold red]FAILED[/] {line}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
