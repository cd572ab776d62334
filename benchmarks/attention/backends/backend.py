"""What the attention benchmark needs of a library: data, clocks, contestants and a cache."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.attention.exact import Reference, sample
from benchmarks.attention.sizes import Shape

Call = Callable[[], Any]
BACKENDS = {"torch": "Torch", "jax": "Jax", "mlx": "Mlx"}  # each is a class in a module of that name
ALONE = "benchmarks.attention.backends.backend:alone"  # what is run in a process of its own
SHARE_OF_MEMORY = 0.6  # of what is free: a contestant that needs more is left out, lest the machine swap


@dataclass(frozen=True)
class Contestant:
    """Something that computes attention."""

    name: str
    prepare: Callable[..., Any]  # takes query, key and value; the backend's ``prepare`` makes a call of what it returns
    bytes_needed: Callable[[Shape], int] = lambda shape: 0  # by a pass, beyond its arguments
    backward_on: tuple[str, ...] = ("cpu", "cuda", "metal")  # devices on which it has a backward pass
    note: str = ""  # how it is called
    is_dense: bool = False  # it computes the scores of keys after the query, too, only to mask them


@dataclass(frozen=True)
class Decode:
    """One query over the keys of a layer's cache: what there is, and who answers it."""

    tensors: tuple[Any, Any, Any]  # query, key and value; the query is the last token
    cached: Call  # the layer's cache, which knows the norms of its keys
    bare: Call  # the attention function, which has to measure them
    baseline: Call  # attention without positions
    with_row: Call  # the same with ALiBi's one row of biases a head
    baseline_name: str
    row_name: str


class Backend:
    """A library on one kind of device. Tensors are ``[batch, num_heads, length, head_dim]``, or look as if."""

    name: str  # as on the command line
    device: str  # "cpu", "cuda" or "metal"
    ours: Contestant  # this library, as it is by default
    peers: tuple[Contestant, ...]  # others who compute ALiBi attention; the first, with a dense bias
    distributions: tuple[str, ...]  # whose versions belong to the results

    def machine(self) -> dict[str, Any]:
        """Describe what is special about the device."""
        return {}

    def normal(self, shape: Shape, seed: int) -> Any:
        """Return normally distributed numbers."""
        raise NotImplementedError

    def tensors(self, shape: Shape, backward: bool = False) -> tuple[Any, ...]:
        """Return normally distributed query, key, value and, with ``backward``, gradient of the result, else None."""
        return (*(self.normal(shape, seed) for seed in range(3)), self.normal(shape, 3) if backward else None)

    def as_float64(self, tensor: Any) -> np.ndarray:
        """Return a piece of a tensor as a NumPy array."""
        raise NotImplementedError

    def free_bytes(self) -> float:
        """Return how much memory a contestant may take; on a Mac the GPU's is that of the machine."""
        return SHARE_OF_MEMORY * harness.available_memory()

    def seconds(self, call: Call) -> float:
        """Return how long a call takes, until its result is there."""
        return harness.seconds_of(call)

    def baseline(self, tensors: Sequence[Any], backward: bool) -> Contestant:
        """Return the fastest causal attention with no positions."""
        raise NotImplementedError

    def prepare(self, contestant: Contestant, tensors: Sequence[Any], backward: bool) -> Call:
        """Return the call to time, on ``tensors``, which returns the result, or with ``backward`` the gradients."""
        raise NotImplementedError

    def fastest(self, calls: Mapping[Any, Callable[[], Call]]) -> Any:
        """Return the key of the fastest call, of those that can be made and do run."""
        if len(calls) == 1:
            return next(iter(calls))
        times = {}
        for key, make in calls.items():
            with suppress(RuntimeError, ValueError):  # it does not take these, or needs too much memory
                call = make()
                times[key] = statistics.median([self.seconds(call) for _ in range(5)][2:])
        return min(times, key=times.__getitem__)

    def decode(self, shape: Shape) -> Decode:
        """Fill a layer's cache and return who attends to it with one query."""
        raise NotImplementedError

    def weights(self, shape: Shape, backward: bool) -> Iterator[tuple[str, int, int, str]]:
        """Yield peaks of memory of a pass beyond its arguments, its result and its gradients.

        Each with how it was found: that of ours, what it is weighed against, and what that is called.
        """
        raise NotImplementedError

    def peak_on_cpu(self, shape: Shape, backward: bool, is_ours: bool = True) -> int:
        """Return the peak of a pass, of ours or of the baseline, in a process of its own."""
        peak: int = harness.run_alone(ALONE, self.name, asdict(shape), backward, is_ours)["peak"]
        return peak - made_in(shape, backward)

    def longest(self, shape: Shape, rows: int) -> dict[str, float]:
        """Return ``seconds`` and ``extra`` bytes of a very long forward pass on the CPU, and the error of some rows."""
        done = harness.run_alone(ALONE, self.name, asdict(shape), False, True, rows)
        return {"seconds": done["seconds"], "extra": done["peak"] - made_in(shape, False)} | done["found"]


def load(name: str, device: str | None) -> Backend:
    """Return a backend on a device, or on the best there is."""
    return getattr(importlib.import_module(f"benchmarks.attention.backends.{name}"), BACKENDS[name])(device)


def made_in(shape: Shape, backward: bool) -> int:
    """Return the bytes of what a pass makes that is not extra: the result and, going backward, three gradients."""
    return shape.tensor_bytes * (4 if backward else 1)


def alone(
    name: str, sizes: dict[str, Any], backward: bool, is_ours: bool, rows: int = 0
) -> tuple[Call, Callable[[Any], dict[str, float]]]:
    """Prepare a pass on the CPU in a process of its own, and what tells the errors of so many rows of its result.

    Arguments are made, and a small call starts whatever starts only once.
    """
    backend, shape = load(name, "cpu"), Shape(**sizes)
    for each in (replace(shape, length=min(256, shape.length), batch=1), shape):
        tensors = backend.tensors(each, backward)
        contestant = backend.ours if is_ours else backend.baseline(tensors, backward)
        call = backend.prepare(contestant, tensors, backward)
        if each is not shape:
            call()

    def examine(result: Any) -> dict[str, float]:
        return asdict(Reference.of(tensors, sample(shape.length, rows), backend.as_float64).error(result))

    return call, examine if rows else lambda result: {}
