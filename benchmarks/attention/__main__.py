"""How fast is ALiBi attention, compared with attention without positions and with other implementations of ALiBi?

Results and gradients are first compared with float64; at each timed shape, a sample of queries is. Sections:

  forward   speed-up over causal attention without positions, by length, with other ALiBi where it fits in memory;
  backward  the same for forward and backward together;
  decode    one query over the keys of a layer's cache, which stores their norms, and by a call without a cache;
  memory    peak memory beyond arguments, result and gradients, in a separate process;
  layer     a PyTorch layer, forward, training and a cached step, compared with the same layer by PyTorch's function
            (no positions; in a step, a row of biases) or, with --beside, with another checkout of this library:
            processes that are timed by turns.

The exit status is 1 if a number is wrong. All sections take 25 minutes and 13 GB on two idle cores with PyTorch. The
attention of JAX and of MLX is dense on the CPU, so their lengths end at 8,192 tokens.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.attention import layer
from benchmarks.attention.exact import MOST_ERROR, ROUNDOFF, Reference, sample
from benchmarks.attention.libraries import LIBRARIES, Call, Library, Shape, load
from benchmarks.harness import Results

SECTIONS = ("forward", "backward", "decode", "memory", "layer")
PASSES = ("forward", "forward and backward")
LENGTHS = {  # for each framework: the timed lengths, and the largest length that is timed with gradients
    "torch": ((1, 32, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 65_536), 65_536),
    "jax": ((1024, 2048, 4096, 8192), 8192),
    "mlx": ((1024, 2048, 4096, 8192), 2048),
}
MEMORY = {"torch": (65_536, 65_536), "jax": (8192, 8192), "mlx": (4096, 2048)}  # tokens: forward, with gradients
LONGEST = Shape(4, 64, 2**20)  # Too long for any implementation with quadratic time or memory.
PEERS_LIMIT = 2.0**-9  # Above this relative error in float32, another implementation counts as wrong.
ROWS = 16  # This many queries per head are recomputed in float64 at each shape.


class Run:
    """The measurements of one framework."""

    def __init__(self, library: Library, results: Results, quick: bool, up_to: int) -> None:
        self.library, self.results, self.quick = library, results, quick
        lengths, self.most_backward = LENGTHS[library.name]
        self.lengths = (64, 256) if quick else tuple(n for n in lengths if n <= up_to)
        self.shape = Shape(4, 16, 256) if quick else Shape(8, 64, 2048)
        self.least_peers = 256 if quick else 1024  # below this many tokens, only this library is timed

    # --- Numbers ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Compare all results, and this library's gradients, with float64; then results in low precision."""
        library, shape = self.library, replace(self.shape, length=min(1024, self.shape.length))
        tensors = library.tensors(shape)
        shown = [library.heads_first(x) for x in tensors]
        exact = Reference(shown, library.as_float64, gradients=True)
        plain = Reference(shown, library.as_float64, biased=False)
        ours, *_ = contestants = library.contestants(shape)
        for name, contestant in contestants.items():
            limit = MOST_ERROR * ROUNDOFF["float32"] if name == ours else PEERS_LIMIT
            result = library.heads_first(library.prepare(contestant, tensors, False)())
            self.results.check(name, (plain if "no positions" in name else exact).error(result), limit)
        gradients = library.prepare(contestants[ours], tensors, True)()
        for kind, error in exact.gradient_errors([library.heads_first(x) for x in gradients]).items():
            self.results.check(f"{ours}, gradient of {kind}", error, MOST_ERROR * ROUNDOFF["float32"])
        for dtype in ("bfloat16", "float16"):
            low = replace(shape, dtype=dtype)
            if library.name == "jax" and (dtype, library.device) == ("float16", "cpu"):
                continue  # XLA on CPUs does not support float16 products
            for name in list(contestants)[:2]:
                self._check_rows(name, low, library.tensors(low))

    def _check_rows(self, name: str, shape: Shape, tensors: Sequence[Any], call: Call | None = None) -> bool:
        """Compare a sample of a contestant's queries with float64, and return whether they are right."""
        library = self.library
        call = call or library.prepare(library.contestants(shape)[name], tensors, False)
        shown = [library.heads_first(x) for x in tensors]
        rows, is_plain = sample(shown[0].shape[2], ROWS), "no positions" in name
        exact = Reference(shown, library.as_float64, rows, biased=not is_plain)
        subject = f"{name}, {shape.heads}, {shown[0].shape[2]:,} queries, {shape.length:,} keys"
        limit = MOST_ERROR * ROUNDOFF[shape.dtype] if name.startswith("alibi") else PEERS_LIMIT + ROUNDOFF[shape.dtype]
        return self.results.check(subject, exact.error(library.heads_first(call())), limit)

    # --- Time ---------------------------------------------------------------------------------------------------------

    def passes(self, backward: bool) -> None:
        """Time forward, or forward and backward, of all contestants against attention without positions."""
        for length in self.lengths:
            if not backward or 1 < length <= self.most_backward:
                self._time_pass(replace(self.shape, length=length), backward)
        if not backward and not self.quick and self.lengths[-1] >= 8192:
            self._time_pass(Shape(32, 128, 2048 if self.library.name == "jax" else 8192), False)

    def _time_pass(self, shape: Shape, backward: bool) -> None:
        library = self.library
        tensors, contestants = library.tensors(shape), library.contestants(shape)
        ours, plain, *_ = contestants
        group = f"Times faster than attention with no positions, {PASSES[backward]}: {shape.heads}"
        baseline = library.prepare(contestants[plain], tensors, backward)
        pairs = 2 if self.quick else max(2, min(301, 50_000 // shape.length))
        for name, contestant in contestants.items():
            row = group, f"{name}, {shape.length:,}", plain
            if (
                name == plain
                or (backward and not contestant.has_backward)
                or (name != ours and shape.length < self.least_peers)
            ):
                continue
            if contestant.bytes_needed > library.free_bytes():
                self.results.add(*row, note=f"needs {contestant.bytes_needed / 2**30:.0f} GiB")
                continue
            if backward or self._check_rows(name, shape, tensors):
                call, count = library.prepare(contestant, tensors, backward), pairs if name == ours else pairs // 5 + 1
                self.results.add(*row, **harness.paired(call, baseline, count, library.seconds))

    def decode(self) -> None:
        """Time one query over many keys."""
        if self.quick:
            shapes = [Shape(4, 16, 256)]
        elif self.library.name == "torch":
            shapes = [Shape(8, 64, n, x) for x in ("float32", "bfloat16") for n in (256, 1024, 4096, 16_384, 65_536)]
            shapes.append(Shape(32, 128, 65_536, "bfloat16"))
        else:
            shapes = [Shape(32, 128, 65_536, "bfloat16") if self.library.name == "jax" else Shape(32, 128, 32_768)]
        for shape in shapes:
            tensors, calls = self.library.decode(shape)
            plain = list(calls)[1]
            subject = f"one query over {shape.length:,} keys: batch 1, {shape.heads}"
            group = f"Times faster than attention with no positions, {subject}"
            for name, call in calls.items():
                if name != plain and self._check_rows(name, shape, tensors, call):
                    pairs = 2 if self.quick else max(9, 100_000 // shape.length)
                    timed = harness.paired(call, calls[plain], pairs, self.library.seconds)
                    self.results.add(group, name, plain, **timed)

    # --- Memory -------------------------------------------------------------------------------------------------------

    def memory(self) -> None:
        """Measure peak memory on the CPU, beyond arguments, result and gradients."""
        library = self.library
        if library.device != "cpu":
            return print("memory is measured on the CPU; benchmarks.gpu measures a GPU's", file=sys.stderr)
        lengths = (256, 256) if self.quick else MEMORY[library.name]
        shapes = [(replace(self.shape, length=length), bool(i)) for i, length in enumerate(lengths)]
        if library.name == "torch" and not self.quick:
            shapes.append((LONGEST, False))
        for shape, backward in shapes:
            group = f"Peak memory beyond arguments, result and gradients, {PASSES[backward]}: {shape.heads}"
            made = shape.tensor_bytes * (4 if backward else 1)
            ours, plain, *_ = library.contestants(shape)
            is_dense = library.name != "torch"  # their baseline attention stores all scores
            peaks = [
                harness.peak_growth(
                    "benchmarks.attention.libraries:alone", library.name, asdict(shape), backward, is_ours
                )
                - made
                for is_ours in ((True, False) if is_dense else (True,))
            ]
            beside = (plain, peaks[1]) if is_dense else ("arguments and result", 3 * shape.tensor_bytes + made)
            row = harness.compared(peaks[0], beside[1])
            self.results.add(group, f"{ours}, {shape.length:,}", beside[0], "bytes", **row)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit status."""
    parser = harness.parser("attention", __doc__, SECTIONS)
    parser.add_argument("--backend", choices=LIBRARIES, default="torch", help="whose attention (default %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda", "metal"), help="default the GPU's where there is one")
    parser.add_argument("--up-to", type=int, default=65_536, metavar="TOKENS", help="time no longer sequences")
    parser.add_argument("--beside", type=Path, metavar="DIR", help="another checkout, for the section layer")
    options = parser.parse_args(arguments)
    library = load(options.backend, options.device)
    about = {"device": library.device, "machine": library.machine(), "beside": options.beside and options.beside.name}
    results = Results(f"attention-{library.name}-{library.device}", options, *library.distributions, **about)
    run = Run(library, results, options.quick, options.up_to)
    sections = {"forward": lambda: run.passes(False), "backward": lambda: run.passes(True)}
    sections |= {"decode": run.decode, "memory": run.memory}
    sections["layer"] = lambda: layer.measure(results, options.beside, options.quick)
    if options.only != ["layer"]:
        run.check()
    for name in [] if results.wrong else options.only:
        if name != "layer" or library.name == "torch":
            sections[name]()
    draw(results, next(iter(library.contestants(run.shape))))
    return results.finish()


def draw(results: Results, ours: str) -> None:
    """Draw the speed-up over attention without positions, by length."""
    curves: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in results.found["measurements"]:
        kind, _, heads = row["group"].removeprefix("Times faster than attention with no positions, ").partition(": ")
        if kind in PASSES and "ratio" in row and not heads.startswith("32"):
            name, _, length = row["candidate"].rpartition(", ")
            curves.setdefault((kind, name), []).append((int(length.replace(",", "")), row["ratio"]))
    if not curves or not importlib.util.find_spec("matplotlib"):
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 5), layout="constrained")
    for ax, kind in zip(figure.subplots(1, 2, sharey=True), PASSES, strict=True):
        ax.axhline(1, color="#777777", label="attention with no positions")
        for name, points in ((name, points) for (own, name), points in curves.items() if own == kind):
            ax.plot(*zip(*points, strict=True), marker="o", linewidth=2.8 if name == ours else 1.6, label=name)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        ax.set(title=kind.capitalize(), xlabel="tokens")
        ax.xaxis.set_major_formatter("{x:,.0f}")
        ax.yaxis.set_major_formatter("{x:g}x")
        ax.legend(frameon=False)
    figure.savefig(results.path.with_suffix(".png"), dpi=150)


if __name__ == "__main__":
    sys.exit(main())
