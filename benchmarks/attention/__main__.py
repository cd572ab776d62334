"""How fast is ALiBi attention, beside attention that knows no positions, and beside others' ALiBi?

Numerics come first: results and gradients, ours and others', are compared with float64 arithmetic on a small shape, and
at each shape some queries' are, before anything is timed. Then, in sections that --only picks from:

  accuracy  the worst error in float32, and in low precision the error relative to that of attention without positions;
  forward   times faster than attention without positions (on a GPU, the fastest there is), with the tile limit: how
            much faster it could be at best by leaving out keys that are proved not to matter. Peers, for
            information: a dense bias and, in PyTorch, FlexAttention and the eager attention of BLOOM, in MLX its
            module nn.ALiBi, where they fit in memory. In MLX a dense bias has bars of its own;
  backward  the same of forward and backward together;
  decode    one query over many keys, those of a layer's cache, which knows their norms, and without it;
  memory    the peak beyond arguments, result and gradients, in a process of its own; in JAX what XLA plans, too;
  million   a forward pass over 1,048,576 tokens, with sampled rows recomputed over all keys (PyTorch on the CPU).

The exit status is 1 if a number is wrong or, at full size, if a bar is not met. About 20 minutes on two cores;
JAX's own attention and MLX's are dense on the CPU, so their lengths end at 8,192 tokens.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import alibi_core
from benchmarks import harness
from benchmarks.attention.backend import Backend
from benchmarks.attention.numerics import Run, check, reason
from benchmarks.attention.sections import SECTIONS
from benchmarks.attention.sizes import FULL, SMALL, Sizes
from benchmarks.harness import MET, Measurement

# Where each is: a benchmarks.attention.backend.Backend that takes a device, or None for the best there is.
BACKENDS = {
    "torch": "benchmarks.attention.torch:Torch",
    "jax": "benchmarks.attention.jax:Jax",
    "mlx": "benchmarks.attention.mlx:Mlx",
}
DEVICES = ("cpu", "cuda", "metal")
VERSIONS = ("numpy", "array-api-compat")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        backend = _backend(options.backend)(options.device)
    except (AssertionError, RuntimeError) as error:  # AssertionError: PyTorch built without CUDA
        parser.error(f"--device must be one that there is, got {options.device}: {error}")
    machine = harness.machine() | backend.machine()  # first of all, while the load on it is that of others
    sizes: Sizes = SMALL[backend.name] if options.quick else FULL[backend.name][backend.device]
    if options.quick and backend.device != "cpu":
        sizes = replace(sizes, longest=None)  # that one is for the memory of a CPU
    run = Run(backend, sizes)
    with _progress() as run.report:
        measurements = list(_measure(run, options.only))

    judged = not options.quick
    missed = [f"{each.verdict(judged)}: {each.name}" for each in measurements if judged and each.bar is not None]
    missed = [line for line in missed if not line.startswith(MET)]
    harness.show(harness.console(), measurements, judged)
    is_whole = not options.quick and options.only == list(SECTIONS)
    output = options.output or (Path(__file__).parents[1] / "results" if is_whole else Path("out"))
    path = output / f"attention-{backend.name}-{backend.device}.json"
    harness.write_json(
        path,
        {
            "benchmark": "attention",
            "backend": backend.name,
            "device": backend.device,
            "quick": options.quick,
            "passed": not run.wrong and not missed,
            "sections": options.only,
            "sizes": asdict(sizes),
            "machine": machine,
            "versions": {"alibi-core": alibi_core.__version__} | harness.versions(*VERSIONS, *backend.distributions),
            "numerics": run.numerics,
            "limits": run.limits,
            "curves": run.curves,
            "measurements": harness.as_json(measurements, judged),
        },
    )
    written = [path, *_draw(run, machine, path.with_suffix(".png"))]
    print(f"Written to {', '.join(map(str, written))}; the load of the machine was {machine['load']} at the start.")
    for line in [f"wrong: {line}" for line in run.wrong] + missed:
        print(line, file=sys.stderr)
    return 1 if run.wrong or missed else 0


def _measure(run: Run, sections: Sequence[str]) -> Iterator[Measurement]:
    check(run)
    for name in () if run.wrong else sections:
        try:
            yield from SECTIONS[name](run)
        except RuntimeError as error:  # out of memory, here or in a process of its own: other sections are not lost
            run.wrong.append(f"{name}: {reason(error)}")


def _draw(run: Run, machine: dict[str, Any], path: Path) -> list[Path]:
    """Draw what there is to draw and return where it is."""
    if not run.curves:
        return []
    try:
        from benchmarks.attention.figure import draw
    except ModuleNotFoundError:
        print("There is no picture: it needs matplotlib.", file=sys.stderr)
        return []
    shape = run.sizes.timed[0].shape
    draw(run.curves, run.backend.ours, f"{shape.heads}   |   {machine.get('gpu') or machine['cpu']}", path)
    return [path]


def _backend(name: str) -> Callable[[str | None], Backend]:
    module, attribute = BACKENDS[name].split(":")
    return getattr(importlib.import_module(module), attribute)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yield what says what happens now: in a terminal with rich on one line, else on lines of their own."""
    console = harness.console()
    if console is None or not console.is_terminal:
        yield lambda line: print(line, file=sys.stderr, flush=True)
        return
    with console.status("") as status:
        yield status.update


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--backend", choices=BACKENDS, default="torch", help="whose attention (default %(default)s)")
    parser.add_argument("--device", choices=DEVICES, help="default the GPU's where there is one, else cpu")
    parser.add_argument("--quick", action="store_true", help="small shapes: checks numbers, judges no speed")
    parser.add_argument("--only", type=_sections, default=list(SECTIONS), metavar="SECTION,...",
                        help=f"of {', '.join(SECTIONS)} (default all)")  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="DIR", help="where attention-BACKEND-DEVICE.json and .png go "
                        "(default benchmarks/results, with --quick or --only out)")  # fmt: skip
    return parser


def _sections(text: str) -> list[str]:
    chosen = text.split(",")
    unknown = [name for name in chosen if name not in SECTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(f"must be of {', '.join(SECTIONS)}, got {', '.join(unknown)}")
    return [name for name in SECTIONS if name in chosen]


if __name__ == "__main__":
    sys.exit(main())
