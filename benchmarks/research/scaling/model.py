"""The model: what one chip of many computes, moves and sends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import add

import numpy as np

from alibi_core import ShardPlan
from benchmarks.research.scaling import inputs
from benchmarks.research.scaling.inputs import BLOCK, LATENCY, Chip, Layer

FLOAT32, BACKWARD_TIMES = 4, 3  # backward, keys and values go once more, and gradients of both return as float32


@dataclass(frozen=True)
class Part:
    """Keys that a chip attends to at once: its own, or those that a hop brings."""

    rows: int  # blocks of queries, in all heads of the part
    blocks: int  # blocks of keys that these visit
    masked: int  # how many of those are on the diagonal
    heads: int  # that have any


@dataclass(frozen=True)
class Step:
    """What a pass through the layer costs one chip in the middle of the sequence. In seconds, and bytes."""

    compute: float  # in kernels
    passes: float  # over whole tensors, between kernels
    exchange: float  # for what arrives
    sent: float  # bytes

    @property
    def seconds(self) -> float:
        """All of it, with nothing at the same time."""
        return self.compute + self.passes + self.exchange

    @property
    def seconds_overlapped(self) -> float:
        """All of it, if what is sent is sent while it computes."""
        return max(self.compute, self.exchange)

    def __add__(self, other: Step) -> Step:
        return Step(*map(add, vars(self).values(), vars(other).values()))


def parts(plan: ShardPlan, block: int = BLOCK) -> Iterator[Part]:
    """Yield the parts of a causal plan: own keys first, then those of each hop."""
    size, horizons = plan.shards.chunk_len, [past for past, _ in plan.horizons]
    starts = np.arange(0, size, block)  # of blocks of queries
    own = [np.maximum(starts - past, 0) // block for past in horizons]  # the first block of keys that each visits
    visited = sum(int((starts // block - first + 1).sum()) for first in own)
    yield Part(len(starts) * len(own), visited, len(starts) * len(own), len(own))
    for hop in plan.hops:
        tokens, end = max(hop.tokens), -(hop.distance - 1) * size  # of the part, and where it ends
        heads = [past for past, sent in zip(horizons, hop.tokens, strict=True) if sent]
        count = -(-tokens // block)
        first = [np.clip((starts - past - (end - tokens)) // block, 0, count) for past in heads]
        yield Part(len(starts) * len(heads), sum(int((count - x).sum()) for x in first), 0, len(heads))


def step(chip: Chip, layer: Layer, plan: ShardPlan, *, gradient: bool) -> Step:
    """Return what a forward pass costs, or with ``gradient`` a backward pass."""
    found, item = list(parts(plan)), layer.item_bytes
    # Bytes that a kernel moves for an element of a block, and of a row of blocks. Forward a block brings keys and
    # values; a row takes queries, and leaves a result. Of the gradients' kernels one goes over blocks of queries:
    # queries, what comes back and the gradient; one over blocks of keys: keys, values and both gradients.
    kernels = {inputs.FORWARD: (2 * item, 2 * item)}
    # Heads first: queries, keys, values there and the result back, read and written. Merged: two results read, one
    # written, each time something arrives.
    tensors, merged, times = 4, 3, 1
    if gradient:
        kernels = {inputs.OF_QUERIES: (2 * item, 2 * item + FLOAT32), inputs.OF_KEYS: (2 * item, 2 * (item + FLOAT32))}
        # Five tensors with their heads first, and three gradients back; with each part, two float32 sums are added to.
        tensors, merged, times = 8, 6, BACKWARD_TIMES
    compute = sum(_kernel(chip, layer, name, part, moved) for name, moved in kernels.items() for part in found)
    arriving = sum(part.heads for part in found[1:])
    moved = plan.shards.chunk_len * layer.head_dim * (tensors * 2 * item * layer.heads + merged * FLOAT32 * arriving)
    # Chips lie along a path of neighbours. All send at once, so that each link carries what as many chips send as it
    # is on the way of: the distance.
    sent = sum(sum(hop.tokens) for hop in plan.hops) * layer.head_dim * 2 * item
    links = sum(abs(hop.distance) * sum(hop.tokens) for hop in plan.hops) * layer.head_dim * 2 * item
    exchange = links / chip.link + LATENCY * sum(abs(hop.distance) for hop in plan.hops)
    return Step(compute, moved / chip.memory, times * exchange, times * sent)


def temporaries(layer: Layer, chips: int, *, gradient: bool) -> float:
    """Return what a program holds beside arguments and results, in bytes a chip."""
    return inputs.TEMPORARIES[gradient] * FLOAT32 * _elements(layer, chips)


def held(layer: Layer, chips: int, *, gradient: bool) -> float:
    """Return what a program holds in all, in bytes a chip."""
    tensors = 8 if gradient else 4  # query, key, value, result; with gradients as much again
    return tensors * layer.item_bytes * _elements(layer, chips) + temporaries(layer, chips, gradient=gradient)


def _elements(layer: Layer, chips: int) -> float:
    return layer.length / chips * layer.heads * layer.head_dim


def ring(chip: Chip, layer: Layer, chips: int, *, gradient: bool) -> Step:
    """Return what a full ring costs, with causal work evenly divided. It sends while it computes."""
    blocks = -(-layer.length // BLOCK)
    cycles = layer.heads * blocks * (blocks + 1) / 2 / chips * chip.ring[gradient]
    size = _elements(layer, chips) * 2 * layer.item_bytes
    sent = (chips - 1) * size * (BACKWARD_TIMES if gradient else 1)
    return Step(cycles / chip.clock / chip.cores, 0.0, sent / chip.link + (chips - 1) * LATENCY, sent)


def _kernel(chip: Chip, layer: Layer, name: str, part: Part, moved: tuple[int, int]) -> float:
    """Return how long a kernel takes: its schedule, or its traffic with memory if that is longer."""
    schedule, (of_block, of_row) = chip.kernels[name], moved
    cycles = part.rows * schedule.row + (part.blocks + (inputs.MASKED - 1) * part.masked) * schedule.block
    traffic = BLOCK * layer.head_dim * (part.blocks * of_block + part.rows * of_row)
    return max(cycles / chip.clock / chip.cores, traffic / chip.memory)
