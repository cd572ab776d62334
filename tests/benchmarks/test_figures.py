"""The figures on pages are those of the runs that they cite, rounded to the digits that they show."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MIB, GIB = 2**20, 2**30
FASTER = "Times faster than attention with no positions, "
FORWARD, BACKWARD = FASTER + "forward: 8 heads of 64, float32", FASTER + "forward and backward: 8 heads of 64, float32"
PEAK, PEAK_BACKWARD = (
    f"Peak memory beyond arguments, result and gradients, {x}: 8 heads of 64, float32"
    for x in ("forward", "forward and backward")
)
LENGTHS = ("128", "512", "1,024", "2,048", "4,096", "8,192", "16,384", "65,536")


@cache
def measured(name: str) -> list[dict[str, Any]]:
    content = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content["measurements"] if "measurements" in content else content["sections"]["attention"]["rows"]


def ratio(library: str, group: str, candidate: str, key: str = "ratio") -> Any:
    """Return a number of one row of an attention benchmark on a CPU; None if it was not measured."""
    rows = [x for x in measured(f"attention-{library}-cpu") if (x["group"], x["candidate"]) == (group, candidate)]
    return rows[0].get(key) if rows else None


def on_gpu(heads: int, size: int, what: str, length: int) -> tuple[float, ...]:
    """Return how many times faster than the fastest attention without positions, and than FlexAttention, it was."""
    rows = [
        x
        for x in measured("gpu")
        if (x["num_heads"], x["head_dim"], x["pass"], x["length"]) == (heads, size, what, length) and "gpu_seconds" in x
    ]
    ours = min(x["gpu_seconds"] for x in rows if x["name"] in ("alibi_torch", "alibi_torch, the layer's cache"))
    others = [[x["gpu_seconds"] for x in rows if said in x["name"]] for said in ("no positions", "FlexAttention")]
    return tuple(min(found) / ours for found in others if found)


def rows_of_tables() -> Iterator[tuple[str, str, str, list[Any]]]:
    """Yield page, text before the table, first cell of a row, and its numbers."""
    cpu = "performance.md", "## What you feel"
    yield *cpu, "PyTorch, forward", [ratio("torch", FORWARD, f"alibi_torch, {n}") for n in LENGTHS]
    yield *cpu, "forward and backward", [ratio("torch", BACKWARD, f"alibi_torch, {n}") for n in LENGTHS]
    decoding = [f"{FASTER}one query over {n} keys: batch 1, 8 heads of 64, float32" for n in LENGTHS]
    cached = [ratio("torch", group, "alibi_torch, the layer's cache") for group in decoding]
    yield *cpu, "one query over a cache of as many keys", cached
    for said, kind in (("forward", "forward"), ("training", "training")):
        layer = [ratio("torch", f"A layer, AlibiAttention(512, 8), {kind}", f"{n} tokens") for n in LENGTHS]
        yield *cpu, f"a layer, {said}", layer
    yield *cpu, "JAX, forward", [ratio("jax", FORWARD, f"alibi_jax, {n}") for n in LENGTHS]
    jax = "performance.md", "| JAX, forward"
    yield *jax, "forward and backward", [ratio("jax", BACKWARD, f"alibi_jax, {n}") for n in LENGTHS]
    yield *cpu, "MLX, AVX2, forward", [ratio("mlx", FORWARD, f"alibi_mlx, {n}") for n in LENGTHS]
    lengths = 2048, 4096, 16_384, 65_536
    for heads, size in ((32, 128), (8, 64)):
        forward = f"{heads} heads of {size}, forward"
        yield "performance.md", "## On an NVIDIA GPU", forward, [on_gpu(heads, size, "forward", n) for n in lengths]
        backward = [on_gpu(heads, size, "forward and backward", n) for n in lengths]
        yield "performance.md", f"| {forward}", "forward and backward", backward
    yield (
        "performance.md",
        "## On an NVIDIA GPU",
        "one query over a `KVCache`",
        [on_gpu(32, 128, "decode", n) for n in lengths],
    )
    short = [ratio("torch", FORWARD, f"alibi_torch, {n}") for n in ("128", "512", "2,048", "8,192", "65,536")]
    yield "README.md", "## What is measured", "`alibi_torch`", short
    both = [[ratio(x, FORWARD, f"alibi_{x}, {n}") for x in ("jax", "mlx")] for n in ("128", "512", "2,048", "8,192")]
    yield "README.md", "## What is measured", "`alibi_jax`; `alibi_mlx`", [*both, [None, None]]
    for data, said in (("normal", "normal, 64 features"), ("trained", "three layers of a small trained model")):
        for tolerance in ("2**-24", "e**-10"):
            kept = {x["bound"]: 100 * x[tolerance] for x in measured("bounds") if x["data"] == data}
            numbers = [kept[name] for name in ("acp", "largest_norms", "ours", "oracle")]
            yield "horizon.md", "Share of the visible blocks", f"{said} | {tolerance}", numbers
    for said, positions in {
        "positions in the plane": "plane",
        "positions in reading order": "line",
        "no positions": "none",
        "no model: the colour of the nearest patch shown": "nearest patch shown",
    }.items():
        numbers = [x["accuracy"] for x in measured("patches") if x["positions"] == positions]
        yield "points.md", "share of hidden patches", said, numbers
    methods = json.loads((RESULTS / "extrapolation.json").read_text(encoding="utf-8"))["methods"]
    names = {
        "**ALiBi**": "alibi",
        "**forget gates**": "gates",
        "sinusoidal": "sinusoidal",
        "rotary": "rotary",
        "no positions": "none",
    }
    for before, kind in (("*Non-overlapping", "non_overlapping"), ("*Sliding", "sliding")):
        for said, name in names.items():
            losses = np.array(list(methods[name][kind].values()))  # [lengths, seeds]
            apart, means = np.ptp(losses, axis=1).max() / 2, losses.mean(axis=1)
            yield "extrapolation.md", before, said, [*means, means[-1] - means[0], apart]


def sentences() -> Iterator[tuple[str, str, list[float]]]:
    """Yield page, pattern of a sentence, and its numbers."""
    peaks = [ratio("torch", group, "alibi_torch, 65,536", "values")[0] / MIB for group in (PEAK, PEAK_BACKWARD)]
    ours, theirs = ratio("jax", PEAK, "alibi_jax, 8,192", "values")
    memory = r"tokens: (\S+) MiB forward, (\S+) MiB with backward.*JAX takes (\S+) MiB for 8,192 .* attention (\S+) GiB"
    yield "performance.md", memory, [*peaks, ours / MIB, theirs / GIB]
    for name, said in (("SDPA, dense bias", "built before takes"), ("FlexAttention", "compiled, takes")):
        found = [1 / x for n in LENGTHS if (x := ratio("torch", FORWARD, f"{name}, {n}"))]
        yield "performance.md", rf"{said} (\S+) to (\S+)\s+times", [min(found), max(found)]
    times = {x["candidate"]: x["ratio"] for x in measured("parallel-torch")}
    processes = [times[f"4 processes, 32768 tokens, measured{x}"] for x in ("", ", with gradients")]
    yield "parallel.md", r"took (\S+) times as long .* with gradients (\S+) times", processes


def page(name: str) -> str:
    return (ROOT / ("" if name == "README.md" else "docs") / name).read_text(encoding="utf-8")


def numbers_in(text: str) -> list[str]:
    return re.findall(r"[+-]?\d+(?:\.\d+)?", text)


def is_rounded(text: str, number: float) -> bool:
    """Whether a number as text is another, to the digits that it shows."""
    return abs(float(text) - number) <= 0.5 * 10.0 ** -len(text.partition(".")[2]) + 1e-9


@pytest.mark.parametrize(("name", "before", "row", "numbers"), [*rows_of_tables()])
def test_tables_are_those_of_their_runs(name: str, before: str, row: str, numbers: list[Any]) -> None:
    (line,) = re.findall(rf"^\| {re.escape(row)} \|(.*)\|$", page(name).partition(before)[2], re.MULTILINE)[:1]
    cells = [numbers_in(cell) for cell in line.split("|")]
    assert sum(map(len, cells)) > 0
    for cell, found in zip(cells, numbers, strict=True):
        known = found if isinstance(found, (list, tuple)) else [found]
        assert not cell or all(is_rounded(*pair) for pair in zip(cell, known, strict=True)), (cell, known)


@pytest.mark.parametrize(("name", "pattern", "numbers"), [*sentences()])
def test_sentences_have_the_numbers_of_their_runs(name: str, pattern: str, numbers: list[float]) -> None:
    (found,) = re.findall(pattern, page(name), re.DOTALL)
    assert all(is_rounded(*pair) for pair in zip(found, numbers, strict=True)), (found, numbers)
