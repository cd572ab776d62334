"""What is there to learn of an NVIDIA GPU in nine minutes? All that this project wants to know of one, in order.

  attention  forward, decoding and backward, 2,048 to 65,536 tokens, 32 heads of 128, bfloat16, causal, beside each
             kernel of scaled_dot_product_attention, a dense bias and flash-attn;
  numerics   each implementation against float64, results and gradients, and whether two runs give the same bits;
  tests      pytest -m cuda;
  tuning     the same calls run in other ways: as a CUDA graph, compiled whole, with other blocks of the kernels;
  symmetric  the times of the symmetric form;
  narrow     those of 8 heads of 64, both forms;
  score_mod  FlexAttention with a score_mod and no blocks, beside all that;
  models     layers of BLOOM-560m's and MPT-7B's shape, as they are and accelerated, and compiled whole;
  jax        the same attention in JAX;
  kernels    what the compilers say of the kernels: registers, spills, shared memory (runs nothing).

Each step is a process of its own, with compiler caches of its own, so that first calls are cold; it has a budget of
seconds and gives what it leaves to those after it. After every figure all figures are written, so a run that is ended
loses none; what fails or is left out is written with its reason, and a GPU that has crashed ends its step alone. At the
end a table says what is asked of attention, and what was measured. Compilers take most of the time: where there is more
of it than nine minutes, let one run do attention, numerics and tests, and another the rest (--only).
With --dry-run all of it runs in small on the CPU. It needs NumPy, array-api-compat, PyTorch, hypothesis, rich and
safetensors; each step says what else it lacks. No installation is needed, and a package that is missing may lie in a
folder: PYTHONPATH=.:backends:FOLDER python -m benchmarks.cuda_session --output DIR
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SECONDS = 535
LONGEST_CHECKED = 16_384  # tokens of what is timed: float64 takes ten seconds over more
GPU = "name,driver_version,memory.total,clocks.sm,clocks.max.sm,power.limit,temperature.gpu"
OURS = "alibi_torch"
RESULT = r"\b(PASSED|FAILED|ERROR|SKIPPED)\b"  # of a test, in a line of pytest -v
Row = dict[str, Any]


@dataclass(frozen=True)
class Scope:
    """How much of it is to be done."""

    device: str  # "cuda" or "cpu"
    ends: float  # when a step has to come to an end, by ``time.monotonic``
    heads: tuple[tuple[int, int], ...] = ((32, 128), (8, 64))  # numbers of heads, and their sizes
    lengths: tuple[int, ...] = (2048, 4096, 16_384, 65_536)
    checked: int = 1024  # tokens of what is compared with float64 in whole, gradients too
    text: tuple[int, ...] = (8192, 2048)  # tokens that models are given
    narrow: int = 1  # by what the widths of the models are divided
    warm: float = 0.03  # seconds that a call is repeated for before it is timed: an idle GPU's clock is a sixth
    worth: float = 0.2  # and those that it is timed for, at most

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.ends


# --- Steps ------------------------------------------------------------------------------------------------------------


def tests(scope: Scope) -> Iterator[Row]:
    """Run the tests that need a GPU, by several processes where that is possible."""
    import importlib.util

    command = [sys.executable, "-m", "pytest", "-m", "cuda", "-v", "-rs", "--durations=8", "-p", "no:cacheprovider"]
    command += ["-W", "default"]  # a warning of other versions is to be read, and not to cost a result
    command += ["tests/torch/test_flex.py", "tests/torch/test_attention.py"]
    if scope.device == "cuda" and importlib.util.find_spec("xdist"):
        command += ["-n", "12", "--dist", "worksteal"]
    # There are as many processes as cores.
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    files = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, **files)
    log = ""
    for line in process.stdout:
        log += line
        if re.search(RESULT, line):
            yield _counted(log, None)
    yield _counted(log, process.wait())


def _counted(log: str, status: int | None) -> Row:
    results = re.findall(RESULT, log.split("short test summary")[0])
    counts = {each.lower(): results.count(each) for each in sorted(set(results))}
    failed = sorted(set(re.findall(r"(?:FAILED|ERROR) (tests/\S+)", log)))
    failed += [f"pytest ended with {status}"] if status and not failed else []
    return {"tests": counts, "status": status, "failed": failed, "log": log[-6000:]}


def numerics(scope: Scope) -> Iterator[Row]:
    """Compare each implementation with float64."""
    import numpy as np

    from benchmarks.attention import Reference, Shape, errors_of_gradients, load

    backend = load("torch", scope.device)
    long = 4 * scope.checked  # of fewer blocks FlexAttention leaves out none, and has no plan that could be wrong
    cases = [("bfloat16", is_causal, (4, 128), long) for is_causal in (True, False)]
    cases += itertools.product(("bfloat16",), (True, False), ((4, 128), (8, 64)), (scope.checked,))
    cases += itertools.product(("float32", "float16"), (True, False), ((8, 64),), (scope.checked,))
    for dtype, is_causal, (num_heads, head_dim), length in cases:
        shape = Shape(num_heads, head_dim, length, dtype)
        tensors = backend.tensors(shape, backward=True)
        every = np.arange(shape.length)
        form = {"is_causal": is_causal}
        reference = Reference.of(tensors, every, backend.as_float64, **form)
        plain = Reference.of(tensors, every, backend.as_float64, has_bias=False, **form)
        ours = backend.implementations(is_causal)
        subjects = [(each, reference) for each in ours if length < long or each.name.endswith("flex")]
        subjects += [(each, plain) for each in backend.everyone(is_causal) if each.name == "SDPA FLASH, no positions"]
        for contestant, exact in subjects:
            row = {"name": contestant.name, "form": _form(is_causal), **_of(shape)}
            try:
                if scope.device == "cpu" and contestant.name.endswith("flex"):
                    raise NotImplementedError("C++ takes a minute to compile")
                call = backend.prepare(contestant, tensors, False)
                first, second = call(), call()
                row |= {"error": asdict(exact.error(first)), "same_bits": _are_equal(first, second)}
                row["error_of_rounding"] = asdict(exact.rounding(dtype)) if dtype != "float32" else None
                if exact is reference and dtype == "bfloat16":
                    call = backend.prepare(contestant, tensors, True)
                    first, second = call(), call()
                    errors = errors_of_gradients(first, tensors[:3], tensors[3], backend.as_float64, **form)
                    row["gradients"] = {name: asdict(each) for name, each in errors.items()}
                    row["same_bits_of_gradients"] = _are_equal(first, second)
            except Exception as error:
                row |= _problem(error, exact is reference)
            yield row


def attention(scope: Scope, heads: slice = slice(1), forms: Sequence[bool] = (True,)) -> Iterator[Row]:
    """Time PyTorch's attention, ours and others', with some of the heads."""
    from benchmarks.attention import load

    backend, scope = load("torch", scope.device), replace(scope, heads=scope.heads[heads])
    for is_causal in forms:
        contestants = backend.everyone(is_causal)[:-1]
        yield from _passes(scope, backend, is_causal, contestants, (False,))
        yield from _decoding(scope, backend) if is_causal else ()
        yield from _passes(scope, backend, is_causal, contestants, (True,))


def score_mod(scope: Scope) -> Iterator[Row]:
    """Time the contestant that has to be compiled for each length by itself."""
    from benchmarks.attention import load

    backend = load("torch", scope.device)
    for is_causal in (True, False):
        yield from _passes(scope, backend, is_causal, backend.everyone(is_causal)[-1:])


# By pass: what the kernels may be told in place of the library's choice.
OPTIONS: dict[str, tuple[Row, ...]] = {
    "forward": (
        {"fwd_BLOCK_N": 128, "fwd_num_stages": 2},
        {"fwd_BLOCK_N": 128, "fwd_num_stages": 2, "fwd_USE_TMA": True},
        {"fwd_USE_TMA": True},
        {"fwd_num_stages": 2},
    ),
    "forward and backward": (
        {"bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 128, "bwd_BLOCK_M2": 128, "bwd_BLOCK_N2": 64, "bwd_num_stages": 3},
        {"bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64},
        {"WRITE_DQ": False},
    ),
    "decode": ({"SPLIT_KV": 8}, {"SPLIT_KV": 132}, {"num_stages": 3}, {"num_stages": 3, "num_warps": 4}),
}


def tuning(scope: Scope) -> Iterator[Row]:
    """Time calls of ours as they are, compiled whole and as CUDA graphs, and their kernels with other options."""
    import torch

    import alibi_core
    from alibi_torch import KVCache, attention
    from benchmarks.attention import Shape, load

    backend, heads, lengths = load("torch", scope.device), scope.heads[0], scope.lengths[::-1]
    both = "forward and backward"
    subjects = [("decode", lengths[0], False), *itertools.product(("forward", both), lengths, (False,))]
    # What has to be compiled again for each way comes after all that has not.
    subjects += ("forward", lengths[0], True), (both, lengths[1 % len(lengths)], True), ("decode", lengths[0], True)
    for kind, length, is_compiled in subjects:
        shape = Shape(*heads, length, "bfloat16")
        *tensors, grad = backend.tensors(shape, backward=True)
        tensors[0] = tensors[0][:, :, -1:] if kind == "decode" else tensors[0]
        # Slopes that lie there: those that are counted are copied to the GPU, which no graph may do.
        slopes = alibi_core.slopes(heads[0], xp=torch, device=scope.device)

        def attend(query: Any, key: Any, value: Any, slopes: Any = slopes, **options: Any) -> Any:
            return attention(query, key, value, slopes, **options)

        learns = kind == both
        leaves = [x.detach().requires_grad_(learns) for x in tensors]
        way = partial(_way, leaves=leaves, grad=grad if learns else None)
        ways = {"as it is": (way(attend), {})}
        if not is_compiled:
            ways["nothing measured"] = way(partial(attend, tolerance=0.0)), {}  # what the plan costs, and saves
        elif scope.device == "cuda":
            ways["compiled whole"] = way(torch.compile(attend, fullgraph=True, dynamic=False)), {}
        if kind == "decode":
            cache = KVCache(shape.batch, heads[0], length, heads[1], device=scope.device, dtype=tensors[1].dtype)
            cache.append(*tensors[1:])
            ways["with a cache"] = way(lambda query, *_, cache=cache, slopes=slopes: cache.attend(query, slopes)), {}
        if scope.device == "cuda":
            ways |= {f"{name}, as a graph": (partial(_graph, call), {}) for name, (call, _) in list(ways.items())}
            others = OPTIONS[kind] if is_compiled else ()
            ways |= {f"{each}, as a graph": (partial(_graph, way(attend)), each) for each in others}
        expected = None
        for name, (call, options) in ways.items():
            if scope.is_over:
                return
            row = {"name": name, "pass": kind, **_of(shape)}
            try:
                with told(options):
                    call = call() if isinstance(call, partial) else call
                    row |= _timed(scope, backend, call)
                result = call()
                result = [x.float() for x in (result if learns else [result])]
                expected = result if expected is None else expected
                row["apart"] = max((x - y).abs().max().item() for x, y in zip(result, expected, strict=True))
            except Exception as error:
                row |= _problem(error, is_ours=name == "as it is")
            yield row


def _way(attend: Callable[..., Any], leaves: Sequence[Any], grad: Any) -> Callable[[], Any]:
    """Return what attends, and where there is a gradient of the result, returns those of the leaves."""
    import torch

    if grad is None:
        return torch.no_grad()(lambda: attend(*leaves))
    return lambda: torch.autograd.grad(attend(*leaves), leaves, grad)


def _graph(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return what replays a call's kernels without the host, in the place of the call."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is compiled or chosen once happens before the capture
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


@contextlib.contextmanager
def told(options: Row) -> Iterator[None]:
    """Let FlexAttention's kernels be told something else than this library would tell them."""
    if not options:
        yield
        return
    from unittest import mock

    from alibi_torch._flex import kernel_options

    def other(*arguments: Any) -> Row:
        return kernel_options(*arguments) | options

    with mock.patch("alibi_torch._flex.kernels.kernel_options", other):
        yield


def models(scope: Scope) -> Iterator[Row]:
    """Time layers of transformers' models."""
    import copy

    import torch

    from alibi_torch.transformers import accelerate
    from benchmarks import transformers as subjects
    from benchmarks.attention import load

    backend = load("torch", scope.device)
    dtype = torch.bfloat16 if scope.device == "cuda" else torch.float32
    for length, kind in itertools.product(scope.text, ("bloom", "mpt")):
        if scope.is_over:
            return
        theirs = subjects.model_of(kind, scope.narrow, length).to(scope.device, dtype)
        tokens = subjects.tokens_of(1, length).to(scope.device)
        ours = accelerate(copy.deepcopy(theirs))
        calls = {
            "eager": partial(subjects.forward, theirs, tokens),
            "accelerated": partial(subjects.forward, ours, tokens),
        }
        if scope.device == "cuda" and length == scope.text[0]:  # half a minute
            calls["accelerated, compiled"] = partial(subjects.forward, torch.compile(ours), tokens)
        exact = subjects.forward(copy.deepcopy(theirs).float(), tokens)
        for name, call in calls.items():
            row = {"name": f"{kind}, {name}", "tokens": length}
            try:
                row |= _timed(scope, backend, call)
                row["apart_from_eager_float32"] = (call().float() - exact).abs().max().item()
            except Exception as error:
                row |= _problem(error, is_ours=name != "eager")
            yield row


def jax(scope: Scope) -> Iterator[Row]:
    """Time JAX's attention, ours and others'."""
    from benchmarks.attention import load

    backend = load("jax", scope.device)
    yield from _passes(scope, backend, True, backend.everyone(True))
    yield from _decoding(scope, backend)


def kernels(scope: Scope) -> Iterator[Row]:
    """Compile kernels, and say what the compilers say."""
    from benchmarks.research import cuda_static

    if scope.device == "cpu":
        yield {"skipped": "it takes a minute, and is the same everywhere: python -m benchmarks.research.cuda_static"}
        return
    passes = itertools.product(scope.heads, ("forward", "backward", "decode"), (True, False), (False, True))
    for (num_heads, head_dim), kind, has_bias, varies in passes:
        subject = cuda_static.Subject(90, kind, num_heads, head_dim, has_bias, varies=varies)
        try:
            yield asdict(subject) | {"kernels": cuda_static.compiled(subject)}
        except RuntimeError as error:
            yield asdict(subject) | {"skipped": _reason(error)}


STEPS: dict[str, tuple[Callable[[Scope], Iterator[Row]], int]] = {
    "attention": (attention, 150),
    "numerics": (numerics, 70),
    "tests": (tests, 90),
    "tuning": (tuning, 90),
    "symmetric": (partial(attention, forms=(False,)), 25),
    "narrow": (partial(attention, heads=slice(-1, None), forms=(True, False)), 30),
    "score_mod": (score_mod, 20),
    "models": (models, 25),
    "jax": (jax, 30),
    "kernels": (kernels, 5),
}


# --- What steps share -------------------------------------------------------------------------------------------------


def _passes(
    scope: Scope, backend: Any, is_causal: bool, contestants: Sequence[Any], backwards: Sequence[bool] = (False, True)
) -> Iterator[Row]:
    """Yield a row for each contestant, at each length, forward and backward."""
    from benchmarks.attention import Shape, sample

    for (num_heads, head_dim), backward, length in itertools.product(scope.heads, backwards, scope.lengths):
        if scope.is_over:
            return
        shape = Shape(num_heads, head_dim, length, "bfloat16")
        tensors = backend.tensors(shape, backward)
        exact = _exact(backend, tensors, sample(length, 8), is_causal)
        kind = {"pass": "forward and backward" if backward else "forward", "form": _form(is_causal)} | _of(shape)
        for contestant in contestants:
            row = {"name": contestant.name, **kind}
            try:
                if contestant.bytes_needed(shape) > backend.free_bytes():
                    raise MemoryError(f"it needs {contestant.bytes_needed(shape) / 2**30:.0f} GiB")
                if backward and backend.device not in contestant.backward_on:
                    raise NotImplementedError(f"no backward pass on {backend.device}")
                if backend.device == "cpu" and "score_mod alone" in contestant.name:
                    raise NotImplementedError("C++ takes a minute to compile")
                start = time.perf_counter()
                call = backend.prepare(contestant, tensors, backward)
                row["prepared"] = time.perf_counter() - start  # JAX compiles here, PyTorch in the first call
                row |= {"planned_bytes": backend.planned} if hasattr(backend, "planned") else {}
                row |= _timed(scope, backend, call)
                if contestant.name == OURS:
                    row["same_bits"] = _are_equal(call(), call())
                if not backward and length <= LONGEST_CHECKED:
                    row["error"] = asdict(exact(contestant.name).error(call()))
            except Exception as error:
                row |= _problem(error, contestant.name.startswith("alibi"))
            yield row


def _decoding(scope: Scope, backend: Any) -> Iterator[Row]:
    """Yield a row for each who answers one query, at each length."""
    import numpy as np

    from benchmarks.attention import Shape

    for (num_heads, head_dim), length in itertools.product(scope.heads, reversed(scope.lengths)):
        if scope.is_over:
            return
        shape = Shape(num_heads, head_dim, length, "bfloat16")
        try:
            found = backend.decode(shape)
        except Exception as error:
            yield {"name": "our cache", "pass": "decode", **_of(shape)} | _problem(error, is_ours=True)
            continue
        exact = _exact(backend, found.tensors, np.arange(1))
        subjects = {
            "our cache": found.cached,
            "our attention": found.bare,
            found.baseline_name: found.baseline,
            found.row_name: found.with_row,
        }
        for name, call in subjects.items():
            row = {"name": name, "pass": "decode", **_of(shape)}
            try:
                row |= _timed(scope, backend, call)
                if length <= LONGEST_CHECKED:
                    row["error"] = asdict(exact(name).error(call()))
            except Exception as error:
                row |= _problem(error, name.startswith("our"))
            yield row


def _exact(backend: Any, tensors: Sequence[Any], rows: Any, is_causal: bool = True) -> Callable[[str], Any]:
    """Return what gives the exact results of some rows, for a contestant by its name; each is computed once."""
    from benchmarks.attention import Reference

    of = functools.cache(partial(Reference.of, tensors, rows, backend.as_float64, is_causal=is_causal))
    return lambda name: of(has_bias="no positions" not in name)


def _timed(scope: Scope, backend: Any, call: Callable[[], Any]) -> Row:
    """Return the seconds of the first call, which compiles, of those after it, and of the host; and the memory."""
    start = time.perf_counter()
    backend.seconds(call)
    first = time.perf_counter() - start
    start, least = time.perf_counter(), backend.seconds(call)
    while time.perf_counter() - start < scope.warm:
        least = backend.seconds(call)
    count = max(2, min(30, int(scope.worth / max(least, 1e-6))))
    times = [backend.seconds(call) for _ in range(count)]
    row = {"seconds": statistics.median(times), "range": [min(times), max(times)], "first_call": first}
    start = time.perf_counter()
    result = call()
    row["host"] = time.perf_counter() - start  # until all is asked for, which a GPU may still have to do
    del result
    if scope.device == "cuda" and hasattr(backend, "peak"):
        ahead = min(2 * row["host"] + 1e-4, 0.05)
        row["gpu_seconds"] = statistics.median(backend.seconds(call, ahead) for _ in range(min(count, 10)))
        row["peak_bytes"] = backend.peak(call)  # its result too; nothing for a graph, which keeps all it needs
    return row


def _are_equal(first: Any, second: Any) -> bool:
    """Return whether two results in PyTorch, or two sequences of gradients, have the same bits."""
    import torch

    pairs = [(first, second)] if isinstance(first, torch.Tensor) else zip(first, second, strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def _of(shape: Any) -> Row:
    return {"heads": shape.num_heads, "head_dim": shape.head_dim, "tokens": shape.length, "dtype": shape.dtype}


def _form(is_causal: bool) -> str:
    return "causal" if is_causal else "symmetric"


def _problem(error: Exception, is_ours: bool) -> Row:
    """Return why there is no figure: it was left out, or what is ours failed."""
    if not is_ours or isinstance(error, NotImplementedError | MemoryError | ImportError):
        return {"skipped": _reason(error)}
    return {"failed": _reason(error), "traceback": traceback.format_exc()[-3000:]}


def _crash() -> str:
    """Return why the GPU takes no more calls of this process; nothing where it does."""
    torch = sys.modules.get("torch")
    try:
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError as error:
        return _reason(error)
    return ""


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' / '.join(dict.fromkeys([*lines[:1], *lines[-2:]]))[:600]}"


# --- What is asked ----------------------------------------------------------------------------------------------------

# By pass and tokens: how many times as fast as the fastest kernel of scaled_dot_product_attention with no positions.
SPEEDS = {
    **{("forward", tokens): least for tokens, least in ((2048, 1.0), (4096, 2.0), (16_384, 5.0), (65_536, 15.0))},
    **{
        ("forward and backward", tokens): least
        for tokens, least in ((2048, 0.9), (4096, 1.8), (16_384, 4.5), (65_536, 13.0))
    },
    ("decode", 65_536): 20.0,
}
MOST_ERROR = 1.1  # beside that kernel's own
MOST_GROWTH = 2.0  # of the memory of a token, from one length to four times that: 1 where it is linear, 4 where not


def bars(steps: Row) -> list[Row]:
    """Return what is asked of attention, and what was measured of it: None where there is no figure."""
    places: dict[tuple[str, int], list[Row]] = {}
    for row in steps.get("attention", {}).get("rows", ()):
        places.setdefault((row["pass"], row["tokens"]), []).append(row)
    found = [_speed(place, least, places.get(place, [])) for place, least in SPEEDS.items()]
    for (kind, tokens), rows in places.items():
        ours, plain = _ours(rows), _fastest(rows, "seconds")
        if "error" in ours and "error" in plain:
            ratio = ours["error"]["relative"] / plain["error"]["relative"]
            found.append(_bar(f"error, {kind}, {tokens:,} tokens", MOST_ERROR, ratio, plain["name"]))
        fewer = _ours(places.get((kind, tokens // 4), []))
        if "peak_bytes" in ours and "peak_bytes" in fewer and kind != "decode":
            ratio = ours["peak_bytes"] / tokens / (fewer["peak_bytes"] / fewer["tokens"])
            found.append(_bar(f"memory of a token, {kind}, {tokens:,}", MOST_GROWTH, ratio, f"{tokens // 4:,} tokens"))
    rows = [row for name in ("attention", "numerics") for row in steps.get(name, {}).get("rows", ())]
    ours = [row for row in rows if row.get("name") in (OURS, f"{OURS}, flex")]
    equal = [row[name] for row in ours for name in ("same_bits", "same_bits_of_gradients") if name in row]
    share = sum(equal) / len(equal) if equal else None
    return [*found, _bar("share of calls with the same bits twice", 1.0, share, f"{len(equal)} calls", is_least=True)]


def _speed(place: tuple[str, int], least: float, rows: Sequence[Row]) -> Row:
    """Return how many times as fast a pass is: as it is called, and for the GPU alone, which the host runs ahead of."""
    ours, clocks = _ours(rows), ("seconds", "gpu_seconds")
    plain = {clock: _fastest(rows, clock) for clock in clocks}
    called, alone = (plain[x][x] / ours[x] if plain[x] and x in ours else None for x in clocks)
    what, beside = f"times as fast, {place[0]}, {place[1]:,} tokens", plain["seconds"].get("name", "")
    return _bar(what, least, called, beside, is_least=True) | {"gpu_alone": alone}


def _ours(rows: Sequence[Row]) -> Row:
    return next((row for row in rows if row["name"] in (OURS, "our cache")), {})


def _fastest(rows: Sequence[Row], clock: str) -> Row:
    """Return the row of the fastest attention with no positions."""
    plain = [x for x in rows if x["name"].startswith("SDPA") and x["name"].endswith("no positions") and clock in x]
    return min(plain, key=lambda row: row[clock], default={})


def _bar(what: str, bar: float, measured: float | None, beside: str, is_least: bool = False) -> Row:
    is_met = None if measured is None else (measured >= bar if is_least else measured <= bar)
    return {"what": what, "bar": bar, "is_least": is_least, "measured": measured, "beside": beside, "is_met": is_met}


def _table(rows: Sequence[Row]) -> str:
    """Return bars as text."""
    verdicts = {True: "met", False: "MISSED", None: "not measured"}
    lines = [f"{'':<50} {'bar':>7} {'measured':>9} {'GPU alone':>9}"]
    for row in rows:
        numbers = ("" if x is None else f"{x:.2f}" for x in (row["measured"], row.get("gpu_alone")))
        bar = f"{'>=' if row['is_least'] else '<='} {row['bar']:g}"
        cells = " ".join(f"{number:>9}" for number in numbers)
        lines.append(f"{row['what']:<50} {bar:>7} {cells}  {verdicts[row['is_met']]:<12}  {row['beside']}".rstrip())
    return "\n".join(lines)


# --- The run ----------------------------------------------------------------------------------------------------------


def run_step(name: str, scope: Scope, path: Path) -> None:
    """Run one step, in a process of its own, and write all that was found after each of its rows."""
    results, rows, start = json.loads(path.read_text(encoding="utf-8")), [], time.monotonic()
    found = results["steps"][name] = {"rows": rows}

    def write() -> None:
        found["seconds"] = time.monotonic() - start
        _write(path, results)

    try:
        for row in STEPS[name][0](scope):
            if name == "tests":
                rows.clear()  # each row of it holds all there was before
            rows.append(row)
            write()
            if scope.is_over and name != "tests":
                break
            if row.keys() & {"failed", "skipped"} and (crash := _crash()):
                found["failed"] = f"the GPU takes no more calls: {crash}"
                break
        if scope.is_over and name != "tests":
            found["cut"] = "the time was over"
    except (ImportError, AssertionError) as error:  # AssertionError: PyTorch without CUDA
        found |= {"skipped": _reason(error), "traceback": traceback.format_exc()[-3000:]}
    except Exception:
        found["failed"] = traceback.format_exc()[-6000:]
    write()


def _write(path: Path, found: Any) -> None:
    """Write JSON at once or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found, indent=1, default=str) + "\n", encoding="utf-8")
    part.replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the session and return its exit status: 1 if a step failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cuda_session",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, default=Path("out"), metavar="DIR", help="where cuda-session.json goes")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything (default %(default)s)")
    parser.add_argument("--only", default=",".join(STEPS), metavar="STEP,...", help="of %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, in small")
    parser.add_argument("--step", nargs=2, metavar=("STEP", "PATH"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.step:
        name, path = options.step
        ends = time.monotonic() + options.seconds
        sizes = {"heads": ((2, 16),), "lengths": (64,), "checked": 64, "text": (64,), "narrow": 16}
        small = Scope("cpu", ends, warm=0.0, worth=0.0, **sizes)
        scope = small if options.dry_run else Scope("cuda", ends)
        run_step(name, scope, Path(path))
        return 0
    names = options.only.split(",")
    if unknown := [name for name in names if name not in STEPS]:
        parser.error(f"--only must be of {', '.join(STEPS)}, got {', '.join(unknown)}")
    options.output.mkdir(parents=True, exist_ok=True)
    return _session(names, (options.output / "cuda-session.json").resolve(), options.seconds, options.dry_run)


def _session(names: Sequence[str], path: Path, seconds: float, is_dry: bool) -> int:
    """Run steps one after the other, each of which writes what it finds while it runs."""
    ends = time.monotonic() + seconds
    results: dict[str, Any] = {"dry_run": is_dry, "machine": _machine(), "steps": {}}
    _write(path, results)
    for index, name in enumerate(names):
        after = sum(STEPS[each][1] for each in names[index + 1 :])
        budget = max(STEPS[name][1] / 3, ends - time.monotonic() - after)  # with what those before have left
        budget = min(budget, ends - time.monotonic())
        print(f"{name}: {budget:.0f} seconds", flush=True)
        ended = _step(name, path, budget, is_dry)
        results = json.loads(path.read_text(encoding="utf-8"))
        found = results["steps"].setdefault(name, {"rows": []})
        found |= ended
        results["bars"] = bars(results["steps"])
        _write(path, results)
        reason = found.get("skipped") or (found.get("failed") or found.get("cut") or "done").strip().splitlines()[-1]
        print(f"  {len(found['rows'])} rows, {reason}", flush=True)
    print(_table(results["bars"]))
    print(f"Written to {path}")
    steps = results["steps"].values()
    return int(any(found.get("failed") for step in steps for found in (step, *step["rows"])))


def _step(name: str, path: Path, budget: float, is_dry: bool) -> Row:
    """Run a step in a process, which is ended a little after its time is over, and return how that went."""
    command = [sys.executable, "-m", "benchmarks.cuda_session", "--step", name, str(path), "--seconds", f"{budget - 5}"]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "backends"), os.environ.get("PYTHONPATH", "")])
    if is_dry:
        command, environment["JAX_PLATFORMS"] = [*command, "--dry-run"], "cpu"
    if name == "kernels":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # a GPU is described to the compilers, whether there is one or not
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as caches, tempfile.TemporaryFile("w+") as log:
        environment |= {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
        files = {"stdout": log, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **files)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(budget, 0))
        was_ended = process.poll() is None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with whatever compiles for it
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits for a GPU may outlive its end
            process.wait(timeout=15)
        log.seek(0)
        ended: Row = {"said": log.read()[-4000:]}
    if was_ended:
        ended["cut"] = "the time was over, and the step was ended"
    elif process.returncode:
        ended["failed"] = f"the process ended with {process.returncode}\n{ended['said']}"
    return ended


def _machine() -> Row:
    """Return versions and the GPU, without a context on it."""
    from benchmarks import harness

    found: Row = harness.versions("torch", "triton", "jax", "jaxlib", "transformers", "flash-attn", "numpy")
    found["compiler"] = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")  # without it, no Triton
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        command = ["nvidia-smi", f"--query-gpu={GPU}", "--format=csv"]
        found["gpu"] = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    return found


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # not by way of what compilers and GPUs do at the end, which may take minutes
