"""The PyTorch layer ``AlibiAttention(512, 8)``: forward, training and, against another checkout, a cached step.

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
KEYS = (256, 512, 1024, 2048, 4096)
ROOT = Path(__file__).parents[2]


def measure(results: Any, beside: Path | None, quick: bool) -> None:
    """Add rows that compare this checkout's layer with another checkout's, or with the layer without positions."""
    from benchmarks import harness

    lengths, keys = ((1, 64), (64,)) if quick else (LENGTHS, KEYS)
    work = [(kind, n) for kind in ("forward", "training") for n in lengths]
    work += [("step", n) for n in keys] if beside else []
    name = f"alibi_torch of {beside.resolve().name}" if beside else "the layer with no positions"
    with serving(ROOT, "alibi") as ours, serving(beside or ROOT, "alibi" if beside else "plain") as theirs:
        for kind, tokens in work:
            for side in (ours, theirs):
                side({"kind": kind, "tokens": tokens})
            # Time several calls per turn: at the first call after a wait, the threads of the process are asleep.
            calls = 2 if quick else max(1, min(30, 2000 // tokens if kind != "step" else 30))
            pairs = 2 if quick else 15 if tokens <= 2048 else 9
            row = harness.paired(ours, theirs, pairs, clock=lambda side, calls=calls: side({"calls": calls}))
            group = f"A layer, AlibiAttention({WIDTH}, {HEADS}), {kind}"
            results.add(group, f"{tokens:,} {'cached keys' if kind == 'step' else 'tokens'}", name, **row)


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
    """Return the same layer without positions."""
    import torch
    import torch.nn.functional as F

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj, self.out_proj = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x: Any) -> Any:
            heads = [f(x).unflatten(2, (HEADS, -1)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj)]
            attended = F.scaled_dot_product_attention(*heads, is_causal=True)
            return self.out_proj(attended.transpose(1, 2).flatten(2))

    return Layer()


def prepared(layer: Any, kind: str, tokens: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return the call to time, and a function to run after it, which is not timed."""
    import torch

    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1 if kind == "step" else tokens, WIDTH, generator=drawn)
    if kind == "training":
        x, grad = x.requires_grad_(), torch.randn(x.shape, generator=drawn)
        leaves = [x, *layer.parameters()]
        return lambda: torch.autograd.grad(layer(x), leaves, grad), lambda: None
    if kind == "forward":
        return torch.no_grad()(lambda: layer(x)), lambda: None
    cache = layer.make_cache(1, tokens + 8)
    with torch.no_grad():
        layer(torch.randn(1, tokens, WIDTH, generator=drawn), cache=cache)
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
