"""Sequence-parallel attention of alibi_torch: processes that share a machine's cores, against one that has them all.

    python -m benchmarks.parallel --backend torch --quick

Processes talk through gloo, each with one thread; the one that they are compared with has as many threads as there are
cores. So nothing is won by more of the machine, and what is measured is what dividing the sequence costs. Numbers are
checked first: results and gradients are those of one process.
"""

from __future__ import annotations

import datetime
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import harness
from benchmarks.harness import Measurement

VERSIONS = ("torch", "numpy")
TIME_BAR, RING_BAR = math.nextafter(1.0, math.inf), 5.0
TIMEOUT = datetime.timedelta(minutes=5)


@dataclass(frozen=True)
class Sizes:
    """What is measured. Lengths are in tokens."""

    length: int = 32_768
    processes: int = 4
    heads: int = 8
    head_dim: int = 64
    score_bound: float = 30.0
    pairs: int = 7


FULL = Sizes()
QUICK = Sizes(length=2048, processes=2, heads=4, head_dim=16, pairs=2)


def measurements(sizes: Sizes) -> Iterator[Measurement]:
    """Yield times of all processes together against those of one, and bytes against those of a full ring."""
    import torch.multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_work, (folder, sizes), nprocs=sizes.processes)  # raises what any of them raises
        found = json.loads((Path(folder) / "found").read_text(encoding="utf-8"))
    yield from (Measurement(**each) for each in found)


def _work(rank: int, folder: str, sizes: Sizes) -> None:
    """Be one of the processes. The first measures, and tells the others what to do next."""
    import torch
    import torch.distributed as dist

    import alibi_torch
    from alibi_torch import parallel

    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=sizes.processes, timeout=TIMEOUT)
    generator = torch.Generator().manual_seed(0)
    shape = 1, sizes.heads, sizes.length, sizes.head_dim
    whole = [torch.randn(shape, generator=generator) for _ in range(4)]
    mine = [x.chunk(sizes.processes, dim=2)[rank].contiguous() for x in whole]
    whole = whole if rank == 0 else []

    def result_of(call: Callable[..., Any], tensors: list[Any], gradient: bool, **options: Any) -> list[Any]:
        leaves = [x.requires_grad_(gradient) for x in tensors[:3]]
        result = call(*leaves, **options)
        return [result, *torch.autograd.grad(result, leaves, tensors[3])] if gradient else [result]

    def shared(gradient: bool, bound: float | None) -> list[Any]:
        return result_of(parallel.attention, mine, gradient, score_bound=bound)

    def alone(gradient: bool) -> list[Any]:
        torch.set_num_threads(harness.machine()["cores"] or 1)
        found = result_of(alibi_torch.attention, whole, gradient)
        torch.set_num_threads(1)
        return found

    def gathered() -> list[list[Any]]:
        """Return what all processes have of the result and the gradients; to the first of them."""
        found = []
        for x in shared(True, sizes.score_bound):
            found.append([torch.empty_like(x) for _ in range(sizes.processes)] if rank == 0 else None)
            dist.gather(x.detach(), found[-1])
        return found

    def counted() -> list[Any] | None:
        """Return how many bytes each process sends; to the first of them."""
        sent = [None] * sizes.processes if rank == 0 else None
        dist.gather_object(_bytes_sent(dist, lambda: shared(True, sizes.score_bound)), sent)
        return sent

    def step(gradient: bool, bound: float | None) -> list[Any]:
        """Make a call, and wait for all processes."""
        result = shared(gradient, bound)
        dist.barrier()
        return result

    together = {"gather": gathered, "count": counted, "step": step}

    def all_do(name: str, *arguments: Any) -> Any:
        """Have all processes do something at once."""
        dist.broadcast_object_list([(name, arguments)])
        return together[name](*arguments)

    while rank:
        told: list[Any] = [None]
        dist.broadcast_object_list(told)
        if told[0] is None:
            return
        name, arguments = told[0]
        together[name](*arguments)

    for parts, theirs in zip(all_do("gather"), alone(True), strict=True):
        # Each leaves out 2**-24 of the weight, and rounds some thousand additions, of numbers near 1.
        torch.testing.assert_close(torch.cat(parts, dim=2), theirs.detach(), rtol=0, atol=2.0**-24 * 2000)

    found = []
    name = f"{sizes.processes} processes, {sizes.length} tokens"
    for gradient in (False, True):
        for bound in (sizes.score_bound, None):
            how = f"{name}, {'measured' if bound is None else f'score_bound={bound:g}'}{', with gradients' * gradient}"
            timed = Measurement("Time of one sequence", how, "1 process", "seconds", TIME_BAR if bound else None)
            ours, theirs = partial(all_do, "step", gradient, bound), partial(alone, gradient)
            found.append(timed.timed(ours, theirs, sizes.pairs))
    shards = parallel.Shards.of_length(sizes.length, sizes.processes)
    plan = parallel.shard_plan(sizes.heads, shards, score_bound=sizes.score_bound)
    ring = 2 * plan.bytes_of_ring(sizes.head_dim, 4)
    fewer = Measurement("Bytes sent", "full ring", f"{name}, with gradients", "bytes", RING_BAR, faster=True)
    found.append(fewer.weighed(ring, sum(all_do("count"))))
    dist.broadcast_object_list([None])
    (Path(folder) / "found").write_text(json.dumps([asdict(each) for each in found]), encoding="utf-8")


def _bytes_sent(dist: Any, call: Callable[[], Any]) -> int:
    """Return how many bytes of keys, values and gradients this process sends during a call."""
    sent, batch = [], dist.batch_isend_irecv

    def count(operations: Any) -> Any:
        sent.extend(x.tensor.nbytes for x in operations if x.op is dist.isend)
        return batch(operations)

    with mock.patch.object(dist, "batch_isend_irecv", count):
        call()
    return sum(sent)
