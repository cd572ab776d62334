"""All that the model is told: the layer, the chips, and the schedules of kernels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from alibi_core import ShardPlan, Shards, shard_plan

SCHEDULES = Path(__file__).parents[2] / "results" / "tpu-static.json"
FORWARD, OF_QUERIES, OF_KEYS = "alibi_forward", "alibi_backward_of_queries", "alibi_backward_of_keys"
KERNELS = (FORWARD, OF_QUERIES, OF_KEYS)


@dataclass(frozen=True)
class Layer:
    """The attention layer, of one sequence. Lengths are in tokens."""

    length: int = 2**20
    heads: int = 32
    head_dim: int = 128
    item_bytes: int = 2
    score_bound: float = 14.0
    tolerance: float = 2.0**-24
    chips: tuple[int, ...] = (8, 16, 32, 64, 128, 256)

    def plan(self, chips: int) -> ShardPlan:
        """Return what those chips send each other."""
        shards = Shards.of_length(self.length, chips)
        return shard_plan(self.heads, shards, score_bound=self.score_bound, tolerance=self.tolerance)


@dataclass(frozen=True)
class Schedule:
    """Bundles of a kernel's inner loop, one a cycle: for a block of keys, and for a block of queries besides.

    (In the kernel of the keys' gradients it is the other way round.)
    """

    block: int
    row: int = 0


@dataclass(frozen=True)
class Chip:
    """A TPU chip: published figures, and schedules."""

    name: str
    peak: float  # bfloat16 operations a second
    cores: int
    units: int  # matrix units a core
    side: int  # of a matrix unit
    memory: float  # bytes a second to and from HBM
    capacity: float  # bytes of HBM
    interconnect: float  # bytes a second, both directions of all ports together
    ports: int  # to neighbours
    kernels: dict[str, Schedule]  # of ours, by name
    ring: tuple[int, int]  # bundles for a block in splash attention: forward, and all of its (fused) backward pass

    @property
    def clock(self) -> float:
        """Cycles a second: a matrix unit multiplies and adds in all of its cells once a cycle."""
        return self.peak / (2 * self.cores * self.units * self.side**2)

    @property
    def link(self) -> float:
        """Bytes a second from a chip to one neighbour."""
        return self.interconnect / (2 * self.ports)


BLOCK = 512  # queries, and keys, of a kernel's block; the default of alibi_jax.TPU
MASKED = 1.7  # a block on the diagonal, in blocks; read from the schedules too, see benchmarks/README.md
LATENCY = 1e-6  # seconds a link, assumed
# float32 tensors of a chip's tokens that a program holds beside arguments and results, without and with gradients: read
# from that for COMPILED chips
TEMPORARIES, COMPILED = (6.17, 10.06), 16
DOCUMENTS = "cloud.google.com/tpu/docs/NAME"  # of each chip, by its name
_V5E = Chip("v5e", 197e12, 1, 4, 128, 819e9, 16e9, 400e9, 4, {}, (0, 0))
_V5P = Chip("v5p", 459e12, 2, 4, 128, 2765e9, 95e9, 1200e9, 6, {}, (0, 0))
# Not v6e: its peak would make the clock of two units of 256 x 256 run at 3.5 GHz, so one of these means something else.


def chips(head_dim: int) -> tuple[Chip, ...]:
    """Return the chips, with the schedules of kernels for heads of that size.

    Raises:
        ValueError: There are no schedules for such heads in the file.
    """
    loops = json.loads(SCHEDULES.read_text(encoding="utf-8"))["loops"]
    return tuple(_with_schedules(chip, loops, head_dim) for chip in (_V5E, _V5P))


def _with_schedules(chip: Chip, loops: list[dict[str, Any]], head_dim: int) -> Chip:
    found = [loop for loop in loops if loop["topology"].startswith(chip.name) and loop["head_dim"] == head_dim]
    if not found:
        raise ValueError(f"head_dim must be one whose schedules were read, got {head_dim} for {chip.name}")
    kernels = {}
    for name in KERNELS:
        ours = [loop for loop in found if loop["kernel"] == name]
        block = next(loop["path"] for loop in ours if loop["main"])
        around = next(loop["path"] for loop in ours if not loop["main"])  # one of its ways passes the inner loop once
        kernels[name] = Schedule(block, around - block)
    splash = [loop for loop in found if loop["program"] == "splash"]
    forward = next(loop["path"] for loop in splash if loop["pass"] == "forward")
    fused = sum(loop["path"] for loop in splash if loop["options"] == [True])
    return replace(chip, kernels=kernels, ring=(forward, fused))


def table(layer: Layer, all_chips: tuple[Chip, ...]) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Yield all inputs: what, its value for each chip (or one for all), and where it is from."""

    def each(form: Any) -> tuple[str, ...]:
        return tuple(form(chip) for chip in all_chips)

    yield "sequence", (f"{layer.length:,} tokens, batch 1, causal",), "chosen"
    yield "heads", (f"{layer.heads} of {layer.head_dim}, bfloat16, canonical slopes",), "chosen: MPT-7B's"
    yield "score bound", (f"{layer.score_bound:g}",), "as benchmarks.parallel: normal data, trained models"
    yield "tolerance", (f"2**{layer.tolerance.hex().split('p')[1]}",), "chosen: float32's rounding"
    yield "block of a kernel", (f"{BLOCK} x {BLOCK}",), "default of alibi_jax.TPU"
    yield "block on the diagonal", (f"{MASKED} blocks",), "schedules, benchmarks/README.md"
    yield "latency of a link", (f"{LATENCY * 1e6:g} us",), "assumed"
    held = f"{TEMPORARIES[0]} float32 tensors; {TEMPORARIES[1]} with gradients"
    yield "temporaries", (held,), f"the program compiled for {COMPILED} chips"
    yield "peak, bfloat16", each(lambda chip: f"{chip.peak / 1e12:g} TFLOP/s"), DOCUMENTS
    yield "cores x matrix units", each(lambda chip: f"{chip.cores} x {chip.units} of {chip.side}"), DOCUMENTS
    yield "clock", each(lambda chip: f"{chip.clock / 1e9:.2f} GHz"), "peak / (2 * cores * units * side ** 2)"
    yield "memory", each(lambda chip: f"{chip.capacity / 1e9:g} GB"), DOCUMENTS
    yield "bandwidth of memory", each(lambda chip: f"{chip.memory / 1e9:g} GB/s"), DOCUMENTS
    yield "interconnect", each(lambda chip: f"{chip.interconnect / 1e9:g} GB/s, {chip.ports} ports"), DOCUMENTS
    yield "to one neighbour", each(lambda chip: f"{chip.link / 1e9:g} GB/s"), "interconnect / (2 * ports)"
    for name in KERNELS:
        cells = each(lambda chip, name=name: f"{chip.kernels[name].block:,} + {chip.kernels[name].row:,}")
        yield f"{name}, bundles", cells, "results/tpu-static.json: a block + a row of blocks"
    for index, name in enumerate(("forward", "backward, fused")):
        cells = each(lambda chip, index=index: f"{chip.ring[index]:,}")
        yield f"splash {name}, bundles", cells, "results/tpu-static.json: a block"
