"""The PyTorch layer ``AlibiAttention(512, 8)``: forward, training and a cached step.

Each side is a process that times calls on request, so that two checkouts of this library can be timed by turns. This
file, run as a program, is such a process: it imports nothing of this checkout except the timed code.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

WIDTH, HEADS = 512, 8
LENGTHS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
KEYS = (256, 1024, 4096, 16_384)
STEPS = {"step": "float32", "step in bfloat16": "bfloat16"}
ROOT = Path(__file__).parents[2]


def measure(results: Any, beside: Path | None, quick: bool) -> None:
    """Add rows that compare this checkout's layer with another checkout's, or with the layer by SDPA alone.

    SDPA is PyTorch's ``scaled_dot_product_attention``: without positions, in a cached step with a row of biases.
    """
    from benchmarks import harness

    lengths, keys = ((1, 64), (64,)) if quick else (LENGTHS, KEYS)
    work = [(kind, n) for kind in ("forward", "training") for n in lengths]
    work += [(kind, n) for kind in STEPS for n in keys]
    with serving(ROOT, "alibi") as ours, serving(beside or ROOT, "alibi" if beside else "plain") as theirs:
        for kind, tokens in work:
            for side in (ours, theirs):
                side({"kind": kind, "tokens": tokens})
            # Time several calls per turn: at the first call after a wait, the threads of the process are asleep.
            calls = 2 if quick else max(1, min(30, 2000 // tokens if kind not in STEPS else 30))
            pairs = 2 if quick else 15 if tokens <= 2048 else 9
            row = harness.paired(ours, theirs, pairs, clock=lambda side, calls=calls: side({"calls": calls}))
            group = f"A layer, AlibiAttention({WIDTH}, {HEADS}), {kind}"
            name = "the layer with a row of biases" if kind in STEPS else "the layer with no positions"
            name = f"alibi_torch of {beside.resolve().name}" if beside else name
            results.add(group, f"{tokens:,} {'cached keys' if kind in STEPS else 'tokens'}", name, **row)


@contextlib.contextmanager
def serving(folder: Path, whose: str) -> Iterator[Callable[[dict[str, Any]], Any]]:
    """Start a process that times the layer of a checkout; yield a function that sends a request and returns a reply."""
    paths = [str(folder.resolve() / part) for part in ("", "backends")]
    # -P keeps the folder of this file out of sys.path.
    command = [sys.executable, "-P", str(Path(__file__).resolve()), whose]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, cwd=folder, **pipes) as process:

        def ask(request: dict[str, Any]) -> Any:
            print(json.dumps(request), file=process.stdin, flush=True)
            answer = process.stdout.readline()
            if not answer:
                raise RuntimeError(f"the layer of {folder} must answer, got exit status {process.wait()}")
            return json.loads(answer)

        try:
            yield ask
        finally:
            process.stdin.close()


# --- In the process ---------------------------------------------------------------------------------------------------


def plain_layer() -> Any:
    """Return the same layer without positions, and in its cached steps, of one token, with a row of biases."""
    import torch
    import torch.nn.functional as F

    class Cache:
        def __init__(self, length: int, dtype: Any) -> None:
            self.keys, self.values = torch.zeros(2, 1, HEADS, length, WIDTH // HEADS, dtype=dtype).unbind()
            rates = 2.0 ** (-8 / HEADS * torch.arange(1, HEADS + 1))
            self.row = (-rates[:, None] * torch.arange(length - 1, -1, -1))[None, :, None]  # [1, HEADS, 1, length]
            self.length = 0

        def truncate(self, length: int) -> None:
            self.length = length

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            projections = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
            self.q_proj, self.k_proj, self.v_proj, self.out_proj = projections

        def make_cache(self, batch_size: int, length: int) -> Cache:
            return Cache(length, self.q_proj.weight.dtype)

        def forward(self, x: Any, cache: Cache | None = None) -> Any:
            query, key, value = (
                f(x).unflatten(2, (HEADS, -1)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj)
            )
            if cache is None:
                attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            else:
                start, cache.length = cache.length, cache.length + x.shape[1]
                cache.keys[:, :, start : cache.length], cache.values[:, :, start : cache.length] = key, value
                key, value = cache.keys[:, :, : cache.length], cache.values[:, :, : cache.length]
                attended = F.scaled_dot_product_attention(query, key, value, cache.row[..., -cache.length :])
            return self.out_proj(attended.transpose(1, 2).flatten(2))

    return Layer()


def prepared(layer: Any, kind: str, tokens: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return the call to time, and a function to run after it, which is not timed."""
    import torch

    drawn = torch.Generator().manual_seed(0)
    dtype = getattr(torch, STEPS.get(kind, "float32"))
    layer, x = layer.to(dtype), torch.randn(1, 1 if kind in STEPS else tokens, WIDTH, generator=drawn).to(dtype)
    if kind == "training":
        x, grad = x.requires_grad_(), torch.randn(x.shape, generator=drawn)
        leaves = [x, *layer.parameters()]
        return lambda: torch.autograd.grad(layer(x), leaves, grad), lambda: None
    if kind == "forward":
        return torch.no_grad()(lambda: layer(x)), lambda: None
    cache = layer.make_cache(1, tokens + 8)
    with torch.no_grad():
        layer(torch.randn(1, tokens, WIDTH, generator=drawn).to(dtype), cache=cache)
    return torch.no_grad()(lambda: layer(x, cache=cache)), lambda: cache.truncate(tokens)


def serve(whose: str) -> None:
    """Serve requests, one per line of the input: prepare a call, or time it several times and answer the median."""
    import torch

    torch.manual_seed(0)
    if whose == "plain":
        layer = plain_layer()
    else:
        import alibi_torch

        layer = alibi_torch.AlibiAttention(WIDTH, HEADS)
    for line in sys.stdin:
        request = json.loads(line)
        if "kind" in request:
            call, after = prepared(layer, request["kind"], request["tokens"])
            calls = 2
        else:
            calls = request["calls"] + (request["calls"] > 1)  # the first wakes the threads
        times = []
        for _ in range(calls):
            start = time.perf_counter()
            result = call()
            times.append(time.perf_counter() - start)
            del result
            after()
        print(json.dumps(statistics.median(times[calls > 1 :])), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
