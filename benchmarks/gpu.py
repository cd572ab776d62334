"""All measurements on one GPU, in sections.

  numerics   each implementation against float64, in bfloat16 and float32: results, gradients, decoding, and whether two
             runs give the same bits;
  attention  forward, with backward, and decoding at 2,048 to 65,536 tokens, causal, bfloat16, 32 heads of 128 and 8 of
             64, compared with each kernel of scaled_dot_product_attention without positions, FlexAttention with ALiBi's
             score_mod and causal blocks, and a dense bias: seconds of a call and of the GPU alone, of the first call
             (which compiles), and peak memory;
  kernels    "triton" in tiles of other sizes, at one length: what launch.TILES should say on this GPU;
  host       the host's time of a call, which the GPU need not wait for;
  models     a model of BLOOM-560m's shape at 8,192 tokens: unchanged, accelerated, and compiled;
  jax        attention in JAX.

"triton" never ran on a GPU. Two runs of six minutes say whether it is right, which tiles it wants, and how fast it is:
``--only numerics kernels host --within 330``, then ``--only attention --within 330``; beside them ``python -m pytest -m
'' tests/torch/triton_cases.py``.

All results are written after every row, and failures with their reason, so that an interrupted run loses nothing. Use
``--only`` to run each section in a separate process. ``--dry-run`` runs everything at small sizes on the CPU. The
package need not be installed:

    PYTHONPATH=.:backends python -m benchmarks.gpu --output DIR
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any
from unittest import mock

from benchmarks import harness
from benchmarks.attention import Contestant, Library, Reference, Shape, fixed, load, sample

LONGEST_CHECKED = 4096  # Beyond this many tokens, only this library's results are compared with float64.
HOST_MATTERS = 0.02  # In seconds: longer calls take the GPU as long as they take in all.
Row = dict[str, Any]


@dataclass(frozen=True)
class Scope:
    """The sizes and the extent of the measurements."""

    device: str = "cuda"
    shapes: tuple[tuple[int, int], ...] = ((32, 128), (8, 64))  # (heads, head_dim)
    lengths: tuple[int, ...] = (2048, 4096, 16_384, 65_536)
    checked: int = 2048  # tokens; all results and gradients at this length are compared with float64
    text: int = 8192
    divisor: int = 1  # the model's width is divided by this
    seconds: float = 0.1  # a call is repeated for at most this long


SMALL = Scope("cpu", ((2, 16),), (64,), 64, 64, 16, 0.0)


def numerics(scope: Scope) -> Iterator[Row]:
    """Compare each implementation of PyTorch with float64."""
    import alibi_torch

    library = load("torch", scope.device)
    names = ("triton", "flex", "sdpa", "dense") if scope.device == "cuda" else (None, "sdpa", "dense")
    if scope.device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        names = ("triton", *names)
    for dtype in ("bfloat16", "float32"):
        for is_causal in (True, False):
            shape = Shape(4, 64, scope.checked, dtype)
            tensors = library.tensors(shape)
            exact = Reference(tensors, library.as_float64, gradients=True, is_causal=is_causal)
            for name in names:
                attend = partial(alibi_torch.attention, is_causal=is_causal, implementation=name)
                contestant = Contestant(lambda *_, attend=attend: (attend, ()))
                row = {"name": name, "form": "causal" if is_causal else "symmetric", **asdict(shape)}
                try:
                    (result,), *same = run_twice(library.prepare(contestant, tensors, False))
                    gradients, *same_gradients = run_twice(library.prepare(contestant, tensors, True))
                    row |= {"error": exact.error(result), "errors of gradients": exact.gradient_errors(gradients)}
                    row["same bits, result and gradients"] = same + same_gradients
                except Exception as error:
                    row |= problem(error)
                yield row


# Rows, keys, warps and stages to try in place of launch.TILES.
TILES = {
    "attend": [(128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3)],
    "by_queries": [(128, 64, 8, 2), (64, 64, 4, 2), (64, 128, 8, 2)],
    "by_keys": [(32, 128, 8, 2), (64, 64, 4, 2), (64, 128, 8, 2)],
}


def kernels(scope: Scope) -> Iterator[Row]:
    """Time the kernels in Triton by the sizes of their tiles, with the plan and without it."""
    import alibi_torch

    if importlib.util.find_spec("triton") is None:
        yield {"skipped": "triton is not installed"}
        return
    from alibi_torch import _triton

    library = load("torch", scope.device)
    contestants = {
        tolerance: fixed(partial(alibi_torch.attention, implementation="triton", tolerance=tolerance))
        for tolerance in (None, 0.0)
    }
    for sizes in scope.shapes:
        shape = Shape(*sizes, scope.lengths[-1] if scope.device == "cpu" else 16_384, "bfloat16")
        tensors = library.tensors(shape)
        for kernel, tried in TILES.items():
            for tile in tried if scope.device == "cuda" else tried[:1]:
                replaced = dict.fromkeys(_triton.TILES[kernel], (_triton.Tile(*tile),) * 2)
                for tolerance, contestant in contestants.items():
                    row = {"kernel": kernel, "tile": tile, "tolerance": tolerance, **asdict(shape)}
                    backward = kernel != "attend"
                    make = partial(library.prepare, contestant, tensors, backward)
                    with mock.patch.dict(_triton.TILES, {kernel: replaced}):
                        yield row | measured(scope, library, make, None if backward else ("alibi_torch", tensors))


def _nothing(*_: Any) -> None:
    """Do nothing, faster than a mock."""


def host(scope: Scope) -> Iterator[Row]:
    """Time the host's part of a call: of "triton" on a CPU, with launches that do nothing."""
    import torch

    import alibi_torch

    if importlib.util.find_spec("triton") is None:
        yield {"skipped": "triton is not installed"}
        return
    library, (heads, head_dim) = load("torch", scope.device), scope.shapes[0]
    tensors = library.tensors(Shape(heads, head_dim, 2048, "bfloat16"))
    for name in ("triton", "flex") if scope.device == "cuda" else ("triton",):
        contestant = fixed(partial(alibi_torch.attention, implementation=name))
        for backward in (False, True):
            call, times = library.prepare(contestant, tensors, backward), []
            no_launch = mock.patch("alibi_torch._triton.launch.start", new=_nothing)
            with nullcontext() if scope.device == "cuda" else no_launch:
                for _ in range(200):
                    start = time.perf_counter()
                    call()
                    times.append(time.perf_counter() - start)
                    if scope.device == "cuda":
                        torch.cuda.synchronize()
            yield {"name": name, "gradients": backward, "host_seconds": statistics.median(times[10:])}


def run_twice(call: Callable[[], Any]) -> tuple[tuple[Any, ...], bool]:
    """Return the tensors that a call returns, and whether a second run gives the same bits."""
    import torch

    first, second = (x if isinstance(x, tuple) else (x,) for x in (call(), call()))
    return first, all(map(torch.equal, first, second))


def attention(scope: Scope, name: str = "torch") -> Iterator[Row]:
    """Time the attention of all contestants in a framework."""
    library = load(name, scope.device)
    shapes = [Shape(*sizes, length, "bfloat16") for sizes in scope.shapes for length in scope.lengths]
    for shape in shapes:
        contestants = library.contestants(shape)
        tensors = library.tensors(shape)
        for backward in (False, True):
            for who, contestant in contestants.items():
                row = {"name": who, "pass": "forward and backward" if backward else "forward", **asdict(shape)}
                if (
                    contestant.bytes_needed * (1 + backward) > library.free_bytes()
                    or backward > contestant.has_backward
                ):
                    yield row | {"skipped": f"needs {contestant.bytes_needed / 2**30:.0f} GiB, or has no gradients"}
                    continue
                make = partial(library.prepare, contestant, tensors, backward)
                yield row | measured(scope, library, make, None if backward else (who, tensors))
        kind = {"pass": "decode", **asdict(shape)}
        try:
            tensors, calls = library.decode(shape)
        except Exception as error:
            yield kind | problem(error)
            continue
        for who, call in calls.items():
            yield {"name": who, **kind} | measured(scope, library, lambda call=call: call, (who, tensors))


def measured(scope: Scope, library: Library, make: Callable[[], Any], checked: Any = None) -> Row:
    """Return the time and memory of a call, for its first run and later runs; or the reason why it does not run."""
    try:
        start = time.perf_counter()
        call = make()
        library.seconds(call)
        row: Row = {"first_call": time.perf_counter() - start}
        on_gpu = scope.device == "cuda" and library.name == "torch"
        times, start = [], time.perf_counter()
        while len(times) < 3 or (time.perf_counter() - start < scope.seconds and len(times) < 30):
            times.append(library.seconds(call))
        row |= {"seconds": statistics.median(times), "range": [min(times), max(times)]}
        if on_gpu:
            row["peak_bytes"] = library.peak(call)
            row["gpu_seconds"] = row["seconds"]
        if on_gpu and row["seconds"] < HOST_MATTERS:
            start = time.perf_counter()
            call()
            ahead = min(2 * (time.perf_counter() - start) + 1e-4, 0.05)  # the host's time, doubled
            row["gpu_seconds"] = statistics.median(library.seconds(call, ahead) for _ in range(min(len(times), 5)))
        if checked:
            who, tensors = checked
            shown = [library.heads_first(x) for x in tensors]
            if shown[1].shape[2] <= LONGEST_CHECKED or who.startswith("alibi"):
                rows, biased = sample(shown[0].shape[2], 8), "no positions" not in who
                exact = Reference(shown, library.as_float64, rows, biased=biased)
                row["error"] = exact.error(library.heads_first(call()))
        return row
    except Exception as error:  # unsupported, or out of memory: go on with others
        return problem(error)


def problem(error: BaseException) -> Row:
    """Return a row with the reason why there is no measurement."""
    return {"failed": f"{type(error).__name__}: {error}"[:600], "traceback": traceback.format_exc()[-3000:]}


def models(scope: Scope) -> Iterator[Row]:
    """Time a model of BLOOM-560m's shape, eager and compiled."""
    import torch

    from alibi_torch.transformers import accelerate
    from benchmarks.models import bloom, read

    library = load("torch", scope.device)
    model, tokens = bloom(scope.divisor, scope.text)
    model = model.eval().to(scope.device, torch.bfloat16 if scope.device == "cuda" else torch.float32)
    tokens, ours = tokens.to(scope.device), accelerate(copy.deepcopy(model))
    with torch.no_grad():
        exact = read(copy.deepcopy(model).float(), tokens)
    ways = {"its own": model, "accelerated": ours}
    if scope.device == "cuda":  # on a CPU, compilation takes minutes
        ways |= {f"{name}, compiled": torch.compile(each) for name, each in list(ways.items())}
    for name, each in ways.items():
        call = torch.no_grad()(partial(read, each, tokens))
        row = {"name": name, "tokens": scope.text} | measured(scope, library, lambda call=call: call)
        if "failed" not in row:
            row["from float32"] = (call().float() - exact).abs().max().item()
        yield row


SECTIONS: dict[str, Callable[[Scope], Iterator[Row]]] = {
    "numerics": numerics,
    "attention": attention,
    "kernels": kernels,
    "host": host,
    "models": models,
    "jax": partial(attention, name="jax"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all sections and return the exit status: 1 if something failed."""
    parser = harness.parser("gpu", __doc__, tuple(SECTIONS))
    parser.add_argument("--dry-run", action="store_true", help="in small, on the CPU")
    parser.add_argument("--within", type=float, default=float("inf"), help="seconds after which no row is begun")
    options = parser.parse_args(arguments)
    if options.dry_run:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # JAX would allocate most of the memory
    about = harness.versions("torch", "triton", "jax", "jaxlib", "transformers", "numpy")
    results: Row = {"dry_run": options.dry_run, "machine": harness.machine(), "versions": about, "sections": {}}
    scope = SMALL if options.dry_run or options.quick else Scope()
    results["machine"] |= load("torch", scope.device).machine()
    failed, start = False, time.monotonic()
    for name in options.only:
        rows = results["sections"].setdefault(name, {"rows": []})["rows"]
        try:
            for row in SECTIONS[name](scope):
                rows.append(row)
                print(json.dumps({x: y for x, y in row.items() if x != "traceback"}, default=str), flush=True)
                harness.write_json(options.output / "gpu.json", results)
                if time.monotonic() - start > options.within:
                    break
        except Exception as error:
            rows.append(problem(error))
        failed |= any("failed" in row for row in rows)
    harness.write_json(options.output / "gpu.json", results)
    return int(failed)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # compilers and GPUs may take minutes to shut down
