"""The model, held against what can be measured without the chips."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace

from alibi_core import ShardPlan, Shards, shard_plan
from benchmarks import harness, parallel
from benchmarks.harness import Measurement
from benchmarks.research import tpu_static
from benchmarks.research.scaling.inputs import COMPILED, Layer
from benchmarks.research.scaling.model import BACKWARD_TIMES, parts, temporaries

BAR, EXACTLY = 1.25, 1.0 + 1e-9
BFLOAT16, FLOAT32 = 2.0**-8, 2.0**-24  # what kernels leave out if nothing is said


@dataclass(frozen=True)
class Cases:
    """What is measured."""

    chips: tuple[int, ...] = (16, 256)  # for how many the program is compiled
    visited: tuple[tuple[int, int], ...] = ((16_384, 128), (65_536, 128))  # lengths and head sizes of plans
    known: int = 8192  # a length whose time on one thread is measured
    # How many processes share a sequence of how many tokens: the times that are predicted.
    shared: tuple[tuple[int, int], ...] = ((2, 16_384), (4, 16_384), (2, 32_768), (4, 32_768))
    pairs: int = 3  # how often each is timed


FULL = Cases()
QUICK = Cases((16,), ((4096, 128),), 1024, ((2, 2048),), 2)


def off(group: str, name: str, unit: str, predicted: float, measured: float, bar: float = BAR) -> Measurement:
    """Return how far a prediction is off: the larger of the two over the smaller."""
    ratio = predicted / measured
    found = Measurement(group, name, "measured", unit, bar).weighed(max(ratio, 1 / ratio), 1)
    return replace(found, values=(predicted, measured))


def compiled(layer: Layer, cases: Cases) -> Iterator[Measurement]:
    """Hold bytes that all chips send, and temporaries, against compiled programs."""
    for chips in cases.chips:
        planned = layer.plan(chips).bytes_exchanged(layer.head_dim, layer.item_bytes)
        for gradient in (False, True):
            name = f"{chips} chips of v5e{', with gradients' * gradient}"
            harness.report(f"compiling for {name}")
            arguments = layer.heads, layer.head_dim, layer.score_bound, layer.tolerance, gradient
            found = parallel.program(chips, layer.length, *arguments)
            sent = sum(x["bytes"] for x in found["collectives"] if not x["is_fallback"])
            times = 1 + BACKWARD_TIMES * gradient
            yield off("Bytes sent, predicted", name, "bytes", times * planned, sent, EXACTLY)
            if chips != COMPILED:  # where what is predicted is from
                predicted = temporaries(layer, chips, gradient=gradient)
                yield off("Temporaries, predicted", name, "bytes", predicted, found["temporaries"])


def visited(layer: Layer, cases: Cases) -> Iterator[Measurement]:
    """Hold blocks against the plan that the kernel makes of normally distributed data."""
    for length, head_dim in cases.visited:
        shards = Shards.of_length(length, 1)
        plan = shard_plan(tpu_static.HEADS, shards, score_bound=layer.score_bound, tolerance=BFLOAT16)
        predicted = sum(part.blocks for part in parts(plan))
        measured, _ = tpu_static.visits(length, head_dim)
        name = f"{length:,} tokens, {tpu_static.HEADS} heads of {head_dim}, one chip"
        yield off("Key blocks visited, predicted", name, "blocks", predicted, measured)


def timed(layer: Layer, cases: Cases) -> Iterator[Measurement]:
    """Hold times against processes, of one thread each, that share a sequence and this machine's cores."""
    bandwidth, cores = link(), harness.machine()["cores"]
    measured, speeds = [], [rates(cases)]
    for processes, length in cases.shared:
        sizes = replace(parallel.FULL, length=length, processes=processes, pairs=cases.pairs)
        harness.report(f"timing {processes} processes, {length:,} tokens")
        found = [x for x in parallel.measurements(sizes) if x.unit == "seconds" and x.bar is not None]
        measured.append((sizes, [x.values[0] for x in found if x.values]))
        speeds.append(rates(cases))  # again and again, as a machine is slower for a while
    typical = [statistics.median(column) for column in zip(*speeds, strict=True)]
    for sizes, seconds in measured:
        for gradient, speed, each in zip((False, True), typical, seconds, strict=True):
            # All wait for the one that has most to compute, and take turns if there are more than cores.
            most = _plan(sizes, sizes.processes).work().max() * max(1.0, sizes.processes / cores)
            sent = _plan(sizes, sizes.processes, sizes.score_bound).bytes_exchanged(sizes.head_dim, 4)  # forward
            exchanged = (1 + BACKWARD_TIMES * gradient) * sent / bandwidth
            name = f"{sizes.processes} processes, {sizes.length:,} tokens{', with gradients' * gradient}"
            yield off("Time, predicted", name, "seconds", most / speed + exchanged, each)


def rates(cases: Cases) -> list[float]:
    """Return how many pairs of queries and keys a thread computes in a second, without and with gradients: medians."""
    import torch

    import alibi_torch

    sizes = replace(parallel.FULL, length=cases.known)
    tensors = list(torch.randn(4, 1, sizes.heads, sizes.length, sizes.head_dim, generator=torch.manual_seed(0)))
    threads, found = torch.get_num_threads(), []
    torch.set_num_threads(1)
    for gradient in (False, True):
        inputs = [x.requires_grad_(gradient) for x in tensors[:3]]

        def call(inputs: list[torch.Tensor] = inputs, gradient: bool = gradient) -> None:
            result = alibi_torch.attention(*inputs)
            if gradient:
                torch.autograd.grad(result, inputs, tensors[3])

        seconds = [harness.seconds_of(call) for _ in range(1 + cases.pairs)][1:]  # the first is to warm up
        found.append(float(_plan(sizes, 1).work().sum()) / statistics.median(seconds))
    torch.set_num_threads(threads)
    return found


def _plan(sizes: parallel.Sizes, processes: int, score_bound: float = Layer.score_bound) -> ShardPlan:
    shards = Shards.of_length(sizes.length, processes)
    return shard_plan(sizes.heads, shards, score_bound=score_bound, tolerance=FLOAT32)


def link(size: int = 2**25, times: int = 9) -> float:
    """Return how many bytes a second two processes of gloo send one way: the median of several times."""
    return size / statistics.median(parallel.together(_send, 2, size, times))


def _send(rank: int, size: int, times: int) -> list[float]:
    import torch
    import torch.distributed as dist

    data, seconds = torch.zeros(size // 4), []
    for _ in range(times + 1):
        dist.barrier()
        seconds.append(harness.seconds_of(lambda: dist.send(data, 0) if rank else dist.recv(data, 1)))
    return seconds[1:]  # the first time is to warm up
