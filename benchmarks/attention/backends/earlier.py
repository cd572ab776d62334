"""This library as another checkout has it, beside which calls are timed: in a process of its own, so that both can be.

It computes the default attention of PyTorch on the CPU, on numbers such as those of the other contestants.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


class Earlier:
    """A process that times calls of the library of a checkout."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process, self.name = process, f"alibi_torch of {folder.name}"

    def prepare(self, dims: Sequence[int], dtype: str, backward: bool) -> Timer:
        """Return a pass over tensors of such sizes, which has run once; the one before can run no longer."""
        self.ask({"dims": list(dims), "dtype": dtype, "backward": backward})
        return Timer(self)

    def ask(self, request: Any) -> Any:
        """Return the answer to a request."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self.name} must run, got exit status {self._process.wait()}")
        return json.loads(answer)


class Timer:
    """A pass of another process."""

    def __init__(self, earlier: Earlier) -> None:
        self._earlier = earlier

    def seconds(self) -> float:
        """Return how long it takes."""
        found: float = self._earlier.ask(None)
        return found


@contextmanager
def earlier_in(folder: Path) -> Iterator[Earlier]:
    """Start the library of a checkout, and end it."""
    # -P, as the folder of this file has modules by the names of frameworks.
    command = [sys.executable, "-P", __file__, str(folder.resolve())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Earlier(process, folder)
        process.communicate()


def _answer(folder: str, requests: IO[str]) -> None:
    sys.path[:0] = [folder, f"{folder}/backends"]
    import torch

    import alibi_torch

    if not Path(alibi_torch.__file__).is_relative_to(folder):
        raise SystemExit(f"--beside must be a checkout with backends/alibi_torch, got {folder}")
    call: Callable[[], Any] = lambda: None  # noqa: E731
    for line in requests:
        request = json.loads(line)
        if request is not None:
            tensors = [
                torch.randn(request["dims"], generator=torch.Generator().manual_seed(seed)).to(
                    getattr(torch, request["dtype"])
                )
                for seed in range(4)
            ]
            call = _pass(alibi_torch.attention, tensors, request["backward"])
        start = time.perf_counter()
        result = call()
        seconds = time.perf_counter() - start
        del result
        print(json.dumps(seconds), flush=True)


def _pass(attention: Callable[..., Any], tensors: list[Any], backward: bool) -> Callable[[], Any]:
    import torch

    *leaves, grad = tensors
    if not backward:
        return torch.no_grad()(lambda: attention(*leaves))
    leaves = [x.requires_grad_() for x in leaves]
    return lambda: torch.autograd.grad(attention(*leaves), leaves, grad)


if __name__ == "__main__":
    _answer(sys.argv[1], sys.stdin)
