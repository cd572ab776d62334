"""Break lines of the library at random, run the tests that matter, and print what lives: ``python -m tests.mutants``.

A seeded draw changes a comparison, an operation, ``and`` or ``or``, an integer or a condition, one at a time, in a copy
of the repository. A mutant that lives is a line that no test needs, or a test that is missing. ``--only 3`` repeats
number 3 of a seed's draw.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hypothesis import seed

ROOT = Path(__file__).parent.parent
# Code of numbers; commands, pictures, layers and the kit have tests of another kind.
SOURCES = ("alibi_core/*.py", "alibi_core/_horizon/*.py", "alibi_core/_arrays/*.py", "backends/alibi_*/*.py")
SOURCES += ("backends/alibi_torch/_cpu/*.py", "backends/alibi_jax/_dispatch/*.py", "backends/alibi_jax/_tiled/*.py")
WITHOUT = ("plot.py", "__init__.py", "conformance.py", "_pytest_plugin.py", "_explain_model.py")
# By package: the folders of tests, the names of those that are run in them, and the libraries of the drawn property.
TESTS = {
    "alibi_core": (("tests/core", "tests/contracts", "tests/mlx"), "not jax", ("numpy", "torch", "mlx", "jax")),
    "alibi_torch": (("tests/contracts", "tests/torch"), "torch", ("torch",)),
    "alibi_jax": (("tests/contracts", "tests/jax"), "jax", ("jax",)),
    "alibi_mlx": (("tests/contracts", "tests/mlx"), "mlx", ("mlx",)),
}
UNKNOWN = "no answer"
SWAPS: dict[type, type] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Div},
}


@dataclass(frozen=True)
class Mutant:
    """A change of one expression."""

    path: str
    line: int
    old: str
    new: str
    span: tuple[int, int]  # in bytes of the file

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.old} -> {self.new}"


def changed(node: ast.AST) -> ast.AST | None:
    """Return a node in the place of this one, or None."""
    if isinstance(node, ast.Compare):
        return ast.Compare(node.left, [SWAPS[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        return ast.BinOp(node.left, SWAPS[type(node.op)](), node.right)
    if isinstance(node, ast.BoolOp):
        return ast.BoolOp(SWAPS[type(node.op)](), node.values)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return ast.Constant(node.value + 1)
    return ast.UnaryOp(ast.Not(), node.test) if isinstance(node, ast.IfExp | ast.If) else None


def mutants() -> Iterator[Mutant]:
    """Yield all mutants, file by file."""
    paths = sorted({path for pattern in SOURCES for path in ROOT.glob(pattern) if path.name not in WITHOUT})
    for path in paths:
        text = path.read_text()
        starts = [0]
        for line in text.encode().splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        for node in ast.walk(ast.parse(text)):
            if (new := changed(node)) is None:
                continue
            place = node.test if isinstance(node, ast.IfExp | ast.If) else node
            span = starts[place.lineno - 1] + place.col_offset, starts[place.end_lineno - 1] + place.end_col_offset
            old = " ".join(text.encode()[slice(*span)].decode().split())
            if '"' not in old:  # words of errors
                yield Mutant(str(path.relative_to(ROOT)), place.lineno, old, ast.unparse(new), span)


def judged(folder: Path, library: str) -> str:
    """Return what the drawn property finds in a copy of the library; empty if it passes. Compilers are left out."""
    sys.dont_write_bytecode, sys.path[:0] = True, [str(folder), str(folder / "backends")]
    os.environ["EXAMPLES"] = "15" if library == "jax" else "100"
    try:
        importlib.import_module("tests.conftest")  # Hypothesis's profile
        heart = importlib.import_module("tests.test_same_answer_everywhere")
        heart.COMPILED |= {"torch": 0, "mlx": 0}
        seed(1)(heart.test_attention_is_exact_with_its_gradients)(library=library)
    except BaseException as error:
        return f"{library}, {type(error).__name__}: {' '.join(str(error).split())[:150]}"
    return ""


def noticed_by(mutant: Mutant, folder: Path, heart_alone: bool, timeout: float) -> str | None:
    """Return what notices a mutant: the drawn property, or a test of the folders; None if it lives."""
    path = folder / mutant.path
    source, (start, end) = path.read_bytes(), mutant.span
    folders, names, libraries = TESTS[next(x for x in TESTS if x in mutant.path)]
    path.write_bytes(source[:start] + f"({mutant.new})".encode() + source[end:])
    try:
        for library in libraries:  # a fork has the frameworks imported, and imports the library anew
            with multiprocessing.get_context("fork").Pool(1) as pool:
                if found := pool.apply_async(judged, (folder, library)).get(timeout):
                    return found
        if heart_alone:
            return None
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--hypothesis-seed=1"]
        options = {"env": os.environ | {"PYTHONPATH": f"{folder}:{folder / 'backends'}"}, "timeout": timeout}
        run = subprocess.run([*command, "-k", names, *folders], cwd=folder, capture_output=True, text=True, **options)
        if run.returncode in (0, 5):
            return None
        lines = [x for x in run.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
        return lines[0].split(" - ")[0] if lines else (run.stdout + run.stderr)[-200:]
    except (multiprocessing.TimeoutError, subprocess.TimeoutExpired):
        return f"{UNKNOWN} in {timeout:.0f} s: it hangs, or the machine is slow"
    finally:
        path.write_bytes(source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="number of the one mutant of the draw to run")
    parser.add_argument("--heart", action="store_true", help="run the tests of the same answer everywhere alone")
    parser.add_argument("--timeout", type=float, default=1200, help="seconds for the tests of a mutant")
    options = parser.parse_args()
    drawn = random.Random(options.seed).sample(list(mutants()), options.count)
    living, unknown = 0, 0
    importlib.import_module("torch")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "alibi-core"
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", ".venv", "out", "__pycache__", ".*_cache"))
        for number, mutant in enumerate(drawn):
            if options.only in (None, number):
                notice = noticed_by(mutant, folder, options.heart, options.timeout)
                living, unknown = living + (notice is None), unknown + (notice or "").startswith(UNKNOWN)
                print(f"{number} {mutant}\n    {notice or 'LIVES'}", flush=True)
    print(f"{living} live, {unknown} unknown")


if __name__ == "__main__":
    main()
