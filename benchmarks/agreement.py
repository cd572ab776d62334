"""Do all installed frameworks agree? ``python -m benchmarks.agreement`` prints a table and fails if they do not.

Bias: the number of elements whose bits differ from NumPy's. Attention: the relative error against float64, in units of
the dtype's roundoff.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from tqdm import tqdm

import alibi_core
from alibi_core.capabilities import LIBRARIES
from alibi_core.conformance import installed_adapters
from alibi_core.conformance.testing import rounded
from benchmarks import harness
from benchmarks.attention import MOST_ERROR, ROUNDOFF, attend, relative_error, slopes

NUM_HEADS, Q_LEN, KV_LEN, HEAD_DIM = 12, 97, 113, 32  # 12 heads: no power of two
# By namespace: how a function is compiled.
COMPILERS: dict[str, Callable[[Any, Any], Any]] = {
    "torch": lambda torch, function: torch.compile(function, fullgraph=True, backend="aot_eager"),
    "jax.numpy": lambda _, function: importlib.import_module("jax").jit(function),
    "mlx.core": lambda mx, function: mx.compile(function),
}


def bias_bits(library: str, *, is_causal: bool, compiled: bool = False) -> np.ndarray:
    """Return the bits of a bias whose offset is far from 0."""
    xp = importlib.import_module(library)

    def function(rates: Any) -> Any:
        return alibi_core.bias(rates, Q_LEN, KV_LEN, q_offset=100_000, is_causal=is_causal)

    rates = alibi_core.slopes(NUM_HEADS, xp=xp, dtype="float32")
    bias = np.asarray((COMPILERS[library](xp, function) if compiled else function)(rates))
    assert bias.dtype == np.float32, f"{library}: {bias.dtype}"
    return np.ascontiguousarray(bias).view(np.int32)


def differing_elements(library: str, *, compiled: bool) -> int:
    """Return the number of elements of the causal and the symmetric bias whose bits differ from NumPy's."""
    pairs = (
        (bias_bits(library, is_causal=x, compiled=compiled), bias_bits("numpy", is_causal=x)) for x in (True, False)
    )
    return sum(int((ours != theirs).sum()) for ours, theirs in pairs)


def error(adapter: Any, *, is_causal: bool) -> float:
    """Return the relative error of attention, in units of roundoff, with grouped heads and queries at the end."""
    drawn = np.random.default_rng(7)
    sizes = (NUM_HEADS, Q_LEN), (NUM_HEADS // 2, KV_LEN), (NUM_HEADS // 2, KV_LEN)
    tensors = [rounded(drawn.standard_normal((1, heads, n, HEAD_DIM)), adapter.dtype) for heads, n in sizes]
    rates = alibi_core.slopes(NUM_HEADS, dtype="float64" if adapter.dtype == "float64" else "float32")
    given = [x.astype("float64" if adapter.dtype == "float64" else "float32") for x in tensors]
    found = adapter.attention(*given, rates, is_causal=is_causal, q_offset=KV_LEN - Q_LEN)[0]
    query, key, value = (x[0] for x in tensors)
    positions = np.arange(KV_LEN - Q_LEN, KV_LEN)
    exact = [
        attend(query[head], key[head // 2], value[head // 2], rate, positions, is_causal=is_causal)[0]
        for head, rate in enumerate(slopes(NUM_HEADS))
    ]
    return relative_error(found, exact) / ROUNDOFF[adapter.dtype]


def main() -> int:
    """Print the table; return 0 if all agree."""
    known = [x for x in LIBRARIES if x != "ndonnx"]  # its arrays hold no numbers
    libraries = [x for x in known if importlib.util.find_spec(x.partition(".")[0])]
    columns = ("bias bits\nthat differ", "the same,\ncompiled", *(f"attention\n{dtype}" for dtype in ROUNDOFF))
    table = harness.table("Agreement with NumPy's bias and with float64 attention", "implementation", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    failed = []
    for library in libraries:
        ways = (False, True) if library in COMPILERS else (False,)
        bits = [differing_elements(library, compiled=compiled) for compiled in ways]
        table.add_row(library, *map(str, bits), *["-"] * (len(columns) - len(bits)))
        if any(bits):
            failed.append(f"{library}: the bias is not NumPy's")
    errors: dict[str, dict[str, float]] = {}
    for adapter in tqdm(installed_adapters(dtypes=None), unit="implementation", disable=None, leave=False):
        if adapter.dtype in ROUNDOFF:
            worst = max(error(adapter, is_causal=x) for x in (True, False))
            errors.setdefault(adapter.name, {})[adapter.dtype] = worst
            if not worst <= MOST_ERROR:
                failed.append(f"{escape(adapter.name)}: {adapter.dtype} attention is {worst:.1f} units of roundoff off")
    for name, found in errors.items():
        table.add_row(escape(name), "-", "-", *(f"{found[x]:.2f}" if x in found else "-" for x in ROUNDOFF))
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    console.print(f"Bias: nothing may differ. Attention: relative error in units of roundoff, at most {MOST_ERROR}.")
    missing = set(known) - set(libraries)
    if missing:
        console.print(f"Not installed, so not checked: {', '.join(sorted(missing))}.")
    for line in failed:
        console.print(f"[bold red]FAILED[/] {line}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
