"""The model: what one chip of many computes, moves and sends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Step(*(ours + theirs for ours, theirs in pairs))


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


def forward(chip: Chip, layer: Layer, plan: ShardPlan) -> Step:
    """Return what a forward pass costs."""
    found, tile = list(parts(plan)), BLOCK * layer.head_dim
    item = layer.item_bytes
    # A block of keys brings keys and values; a row takes queries, and leaves a result.
    compute = sum(_kernel(chip, inputs.FORWARD, x, tile * 2 * item, tile * 2 * item) for x in found)
    # Heads first: queries, keys, values there and the result back, read and written. Merged: two results read, one
    # written, each time something arrives.
    tensor = plan.shards.chunk_len * layer.head_dim
    moved = tensor * (4 * 2 * item * layer.heads + 3 * FLOAT32 * sum(x.heads for x in found[1:]))
    sent = _sent(layer, plan)
    return Step(compute, moved / chip.memory, _exchange(chip, layer, plan), sent)


def backward(chip: Chip, layer: Layer, plan: ShardPlan) -> Step:
    """Return what a backward pass costs."""
    found, tile = list(parts(plan)), BLOCK * layer.head_dim
    item = layer.item_bytes
    compute = 0.0
    for part in found:
        # Of a block of queries: queries, what comes back and the gradient; of a block of keys: keys, values and both
        # gradients.
        compute += _kernel(chip, inputs.OF_QUERIES, part, tile * 2 * item, tile * (2 * item + FLOAT32))
        compute += _kernel(chip, inputs.OF_KEYS, part, tile * 2 * item, tile * (2 * item + 2 * FLOAT32))
    # Five tensors with their heads first, and three gradients back; with each part, two float32 sums are added to.
    tensor = plan.shards.chunk_len * layer.head_dim
    moved = tensor * (8 * 2 * item * layer.heads + 2 * 3 * FLOAT32 * sum(x.heads for x in found[1:]))
    sent = BACKWARD_TIMES * _sent(layer, plan)
    return Step(compute, moved / chip.memory, BACKWARD_TIMES * _exchange(chip, layer, plan), sent)


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


def _kernel(chip: Chip, name: str, part: Part, block_bytes: float, row_bytes: float) -> float:
    """Return how long a kernel takes: its schedule, or its traffic with memory if that is longer."""
    schedule = chip.kernels[name]
    cycles = part.rows * schedule.row + (part.blocks + (inputs.MASKED - 1) * part.masked) * schedule.block
    moved = part.blocks * block_bytes + part.rows * row_bytes
    return max(cycles / chip.clock / chip.cores, moved / chip.memory)


def _sent(layer: Layer, plan: ShardPlan) -> float:
    return sum(sum(hop.tokens) for hop in plan.hops) * layer.head_dim * 2 * layer.item_bytes


def _exchange(chip: Chip, layer: Layer, plan: ShardPlan) -> float:
    """Return how long what arrives forward takes.

    Chips lie along a path of neighbours. All send at once, so that each link carries what as many chips send as it is
    on the way of: the distance.
    """
    links = sum(abs(hop.distance) * sum(hop.tokens) for hop in plan.hops)
    seconds = links * layer.head_dim * 2 * layer.item_bytes / chip.link
    return seconds + LATENCY * sum(abs(hop.distance) for hop in plan.hops)
