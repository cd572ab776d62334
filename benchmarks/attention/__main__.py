"""How fast is ALiBi attention, beside attention that knows no positions, and beside others' ALiBi?

Numerics come first: results and gradients, ours and others', are compared with float64 arithmetic on a small shape, and
at each shape some queries' are, before anything is timed. Then, in sections that --only picks from:

  accuracy  the worst error in float32, and in low precision the error relative to that of attention without positions;
  forward   times faster than attention without positions (on a GPU, the fastest there is), with the tile limit: how
            much faster it could be at best by leaving out keys that are proved not to matter. Peers, for
            information: a dense bias and, in PyTorch, FlexAttention and the eager attention of BLOOM, in MLX its
            module nn.ALiBi, where they fit in memory. In MLX a dense bias has bars of its own;
  backward  the same of forward and backward together;
  decode    one query over few and many keys, those of a layer's cache, which knows their norms, and without it;
  memory    the peak beyond arguments, result and gradients, in a process of its own; in JAX what XLA plans, too;
  million   a forward pass over 1,048,576 tokens, with sampled rows recomputed over all keys (PyTorch on the CPU).

The exit status is 1 if a number is wrong or, at full size, if a bar is not met. About 20 minutes on two cores;
JAX's own attention and MLX's are dense on the CPU, so their lengths end at 8,192 tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import harness
from benchmarks.attention.backends import BACKENDS, earlier_in, load
from benchmarks.attention.numerics import Run, check, reason
from benchmarks.attention.sections import SECTIONS
from benchmarks.attention.sizes import sizes_of
from benchmarks.harness import Measurement


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit status."""
    parser = harness.parser("attention", __doc__, SECTIONS)
    parser.add_argument("--backend", choices=BACKENDS, default="torch", help="whose attention (default %(default)s)")
    parser.add_argument("--up-to", type=int, metavar="TOKENS", help="time no longer sequences")
    devices = ("cpu", "cuda", "metal")
    parser.add_argument("--device", choices=devices, help="default the GPU's where there is one, else cpu")
    checkout = "another checkout of this project, beside whose attention each pass is timed, too (PyTorch on the CPU)"
    parser.add_argument("--beside", type=Path, metavar="DIR", help=checkout)
    options = parser.parse_args(arguments)
    try:
        backend = load(options.backend, options.device)
    except (AssertionError, RuntimeError) as error:  # AssertionError: PyTorch built without CUDA
        parser.error(f"--device must be one that there is, got {options.device}: {error}")
    machine = harness.machine() | backend.machine()  # first of all, while the load on it is that of others
    sizes = sizes_of(backend.name, backend.device, options.quick)
    run = Run(backend, sizes if options.up_to is None else sizes.up_to(options.up_to))
    if options.beside is None:
        measurements = list(_measure(run, options.only))
    elif (backend.name, backend.device) != ("torch", "cpu"):
        parser.error(f"--beside must go with PyTorch on the CPU, got {backend.name} on {backend.device}")
    else:
        with earlier_in(options.beside) as run.earlier:
            measurements = list(_measure(run, options.only))
    is_whole = options.only == list(SECTIONS) and options.up_to is None and options.beside is None
    path = harness.folder(options, is_whole) / f"attention-{backend.name}-{backend.device}.json"
    status = harness.conclude(
        path,
        measurements,
        not options.quick,
        run.wrong,
        benchmark="attention",
        backend=backend.name,
        device=backend.device,
        sections=options.only,
        sizes=asdict(run.sizes),
        machine=machine,
        versions=harness.versions("numpy", "array-api-compat", *backend.distributions),
        numerics=run.numerics,
        limits=run.limits,
        curves=run.curves,
    )
    if not run.curves:
        return status
    try:
        from benchmarks.attention.figure import draw
    except ModuleNotFoundError:
        print("There is no picture: it needs matplotlib.", file=sys.stderr)
        return status
    place = machine.get("gpu") or ", ".join(filter(None, (machine["cpu"], machine["vectors"])))
    draw(run.curves, backend.ours.name, f"{sizes.timed[0].shape.heads}   |   {place}", path.with_suffix(".png"))
    return status


def _measure(run: Run, sections: Sequence[str]) -> Iterator[Measurement]:
    check(run)
    for name in () if run.wrong else sections:
        try:
            yield from SECTIONS[name](run)
        except RuntimeError as error:  # out of memory, here or in a process of its own: other sections are not lost
            run.wrong.append(f"{name}: {reason(error)}")


if __name__ == "__main__":
    sys.exit(main())
