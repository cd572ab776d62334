"""Sequence-parallel attention of alibi_torch: processes that share a machine's cores, against one that has them all.

    python -m benchmarks.parallel --quick

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

from benchmarks import harness
from benchmarks.harness import Measurement

VERSIONS = ("torch", "numpy")
TIME_BAR = math.nextafter(1.0, math.inf)
TIMEOUT = datetime.timedelta(minutes=5)


@dataclass(frozen=True)
class Sizes:
    """What is measured. Lengths are in tokens."""

    length: int = 32_768
    processes: int = 4
    heads: int = 8
    head_dim: int = 64
    pairs: int = 7


FULL = Sizes()
QUICK = Sizes(length=2048, processes=2, heads=4, head_dim=16, pairs=2)


def together(work: Callable[..., Any], processes: int, *arguments: Any) -> Any:
    """Run ``work(rank, *arguments)`` in processes that talk through gloo; return what the first returns, as JSON."""
    import torch.multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, processes, work, arguments)
        torch.multiprocessing.spawn(_process, arguments, nprocs=processes)  # raises what any of them raises
        return json.loads((Path(folder) / "found").read_text(encoding="utf-8"))


def _process(rank: int, folder: str, processes: int, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=processes, timeout=TIMEOUT)
    found = work(rank, *arguments)
    dist.barrier()
    if rank == 0:
        (Path(folder) / "found").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def measurements(sizes: Sizes) -> Iterator[Measurement]:
    """Yield times of all processes together against those of one."""
    yield from (Measurement(**each) for each in together(_work, sizes.processes, sizes))


def _work(rank: int, sizes: Sizes) -> list[dict[str, Any]]:
    """Be one of the processes. All do the same; only the first, which also computes alone, has times that count."""
    import torch
    import torch.distributed as dist

    import alibi_torch
    from alibi_torch import parallel

    generator = torch.Generator().manual_seed(0)
    shape = 1, sizes.heads, sizes.length, sizes.head_dim
    whole = [torch.randn(shape, generator=generator) for _ in range(4)]
    mine = [x.chunk(sizes.processes, dim=2)[rank].contiguous() for x in whole]

    def result_of(call: Callable[..., Any], tensors: list[Any], gradient: bool, **options: Any) -> list[Any]:
        leaves = [x.requires_grad_(gradient) for x in tensors[:3]]
        result = call(*leaves, **options)
        return [result, *torch.autograd.grad(result, leaves, tensors[3])] if gradient else [result]

    def shared(gradient: bool) -> list[Any]:
        found = result_of(parallel.attention, mine, gradient)
        dist.barrier()
        return found

    def alone(gradient: bool) -> list[Any]:
        if rank:
            return []
        torch.set_num_threads(harness.machine()["cores"] or 1)
        found = result_of(alibi_torch.attention, whole, gradient)
        torch.set_num_threads(1)
        return found

    expected = alone(True)
    for index, x in enumerate(shared(True)):
        parts = [torch.empty_like(x) for _ in range(sizes.processes)] if rank == 0 else None
        dist.gather(x.detach(), parts)
        if parts:
            # Each leaves out 2**-24 of the weight, and rounds some thousand additions, of numbers near 1.
            theirs = expected[index].detach()
            torch.testing.assert_close(torch.cat(parts, dim=2), theirs, rtol=0, atol=2.0**-24 * 2000)

    found = []
    for gradient in (False, True):
        name = f"{sizes.processes} processes, {sizes.length} tokens{', with gradients' * gradient}"
        empty = Measurement("Time of one sequence", name, "1 process", "seconds", TIME_BAR)
        # Others than the first wait in the barrier of the next call, as long as it computes alone.
        found.append(asdict(empty.timed(partial(shared, gradient), partial(alone, gradient), sizes.pairs)))
    return found
