"""The overhead of sequence parallelism: four processes that share the cores, against one process with all cores.

The processes of PyTorch communicate by gloo and have one thread each; the single process has one thread per core. Both
sides use the same machine, so the ratio is the overhead of sharding the sequence. Results and gradients are compared
with those of the single process first. Four minutes on two cores.
"""

from __future__ import annotations

import datetime
import json
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

import alibi_torch
from alibi_torch import parallel
from benchmarks import harness
from benchmarks.harness import Results

TIMEOUT = datetime.timedelta(minutes=5)
# Each side may skip 2**-24 of the softmax weight, and rounds about a thousand additions of numbers near 1.
MOST_APART = 2.0**-24 * 2000


def work(rank: int, folder: str, processes: int, shape: tuple[int, ...], pairs: int) -> None:
    """Run one of the processes. All run the same calls; rank 0 also runs alone, and writes the measurements."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=processes, timeout=TIMEOUT)
    drawn = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=drawn) for _ in range(4)]  # query, key, value and the result's gradient
    shards = [x.chunk(processes, dim=2)[rank].contiguous() for x in tensors]
    cores = harness.machine()["cores"]

    def pass_of(attention: Any, tensors: list[Any], backward: bool) -> list[Any]:
        leaves = [x.requires_grad_(backward) for x in tensors[:3]]
        result = attention(*leaves)
        return [result, *torch.autograd.grad(result, leaves, tensors[3])] if backward else [result]

    def shared(backward: bool) -> list[Any]:
        found = pass_of(parallel.attention, shards, backward)
        dist.barrier()
        return found

    def alone(backward: bool) -> list[Any]:
        if rank:
            return []  # other ranks wait in the barrier of the next shared pass
        torch.set_num_threads(cores)
        found = pass_of(alibi_torch.attention, tensors, backward)
        torch.set_num_threads(1)
        return found

    apart, expected = 0.0, alone(True)
    for index, found in enumerate(shared(True)):
        gathered = [torch.empty_like(found) for _ in range(processes)] if rank == 0 else None
        dist.gather(found.detach(), gathered)
        if gathered:
            apart = max(apart, (torch.cat(gathered, dim=2) - expected[index].detach()).abs().max().item())
    rows = [harness.paired(partial(shared, x), partial(alone, x), pairs) for x in (False, True)]
    if rank == 0:
        (Path(folder) / "found").write_text(json.dumps([apart, rows]), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit status."""
    options = harness.parser("parallel", __doc__).parse_args(arguments)
    processes, shape, pairs = (2, (1, 4, 2048, 16), 2) if options.quick else (4, (1, 8, 32_768, 64), 7)
    results = Results("parallel", options, "torch", processes=processes, shape=shape)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (folder, processes, shape, pairs), nprocs=processes)
        apart, rows = json.loads((Path(folder) / "found").read_text(encoding="utf-8"))
    if results.check("largest difference from one process", apart, MOST_APART):
        for kind, row in zip(("forward", "forward and backward"), rows, strict=True):
            results.add(f"One sequence of {shape[2]:,} tokens, {kind}", f"{processes} processes", "1 process", **row)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
