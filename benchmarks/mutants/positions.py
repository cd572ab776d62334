"""Mistakes in positions: offsets, alignment, packed rows, and integers that are too short."""

from __future__ import annotations

import dataclasses

import numpy as np

from benchmarks.mutants._mutant import mutant
from benchmarks.mutants.reference import Array, Call, Reference


def moved(call: Call, q_offset: Array | int) -> Call:
    """Return a call with other offsets."""
    return dataclasses.replace(call, q_offset=call.q_offset * 0 + q_offset)


TOP_LEFT = "top.left|q_offset.*(ignor|not (use|read|count)|0\\b)|ignor.*q_offset|from 0|first key"


@mutant("lengths", "offset", expected=TOP_LEFT)
class TopLeft(Reference):
    """The first query is at the first key, whatever q_offset says."""

    def q_positions(self, call: Call) -> Array:
        return super().q_positions(moved(call, 0))


@mutant("lengths", "offset", expected=TOP_LEFT)
class TopLeftBias(Reference):
    """The bias has the first query at the first key, the causal mask has it in its place."""

    def position_bias(self, call: Call) -> Array:
        bias = -self.by_head(call, call.slopes) * np.abs(self.ahead(moved(call, 0)))
        return bias.astype(self.working_dtype) if call.is_causal else super().position_bias(call)


@mutant("lengths", "offset", expected=TOP_LEFT + "|mask")
class TopLeftMask(Reference):
    """The causal mask has the first query at the first key, the bias has it in its place (PyTorch's is_causal)."""

    def visible_by_causality(self, call: Call) -> Array | bool:
        return super().visible_by_causality(moved(call, 0))


@mutant(
    "offset", expected="q_offset.*(ignor|not (use|read|count))|ignor.*q_offset|bottom.right|kv_len - q_len|last key"
)
class OffsetIgnored(Reference):
    """The last query is at the last key, whatever q_offset says."""

    def q_positions(self, call: Call) -> Array:
        return super().q_positions(moved(call, call.lengths[1] - call.lengths[0]))


@mutant("causal", "offset", expected="off by one|one (token|position|key|too)|shift|\\+ ?1|by 1")
class OffsetOneTooFar(Reference):
    """Queries are one position too far."""

    def q_positions(self, call: Call) -> Array:
        return super().q_positions(call) + 1


@mutant("causal", "offset", expected="off by one|one (token|position|key|too)|shift|- ?1|by 1")
class OffsetOneShort(Reference):
    """Queries are one position short."""

    def q_positions(self, call: Call) -> Array:
        return super().q_positions(call) - 1


@mutant("offset", expected="first (batch )?entry|batch|entry")
class FirstEntrysOffsetForAll(Reference):
    """Of offsets by batch entry, the first is taken for all."""

    def q_positions(self, call: Call) -> Array:
        return super().q_positions(moved(call, call.q_offset[:1]))


@mutant("offset", "lengths", expected="negative|below 0|clamp|less than 0|before the first key")
class NegativeOffsetsClamped(Reference):
    """Offsets are unsigned, and a negative one counts as 0."""

    def q_positions(self, call: Call) -> Array:
        return super().q_positions(moved(call, np.maximum(call.q_offset, 0)))


@mutant("offset", expected="q_offset.*(0|zero)|0 .*default|bottom.right|kv_len - q_len|ignor")
class OffsetZeroIsNone(Reference):
    """An offset of 0 counts as not given: ``q_offset or kv_len - q_len``."""

    def q_positions(self, call: Call) -> Array:
        default = call.lengths[1] - call.lengths[0]
        return super().q_positions(moved(call, np.where(call.q_offset == 0, default, call.q_offset)))


@mutant("offset", expected="q_offset.*twice|twice")
class OffsetCountedTwice(Reference):
    """Positions are given with their offset, and it is added to them again."""

    def q_positions(self, call: Call) -> Array:
        return super().q_positions(moved(call, 2 * call.q_offset))


@mutant("segments", expected="restart|segment", is_diagnosable=False)
class OnlyKeysRestart(Reference):
    """In packed rows the positions of keys restart with each segment, those of queries do not."""

    def kv_positions(self, call: Call) -> Array:
        return super().kv_positions(call) if call.segment_ids is None else restarted(call.segment_ids[1])


@mutant("segments", expected="restart|segment", is_diagnosable=False)
class PositionsOfBothRestart(Reference):
    """In packed rows all positions restart, even where queries and keys are cut into segments differently."""

    def kv_positions(self, call: Call) -> Array:
        return super().kv_positions(call) if call.segment_ids is None else restarted(call.segment_ids[1])

    def q_positions(self, call: Call) -> Array:
        if call.segment_ids is None:
            return super().q_positions(call)
        return restarted(call.segment_ids[0]).swapaxes(-1, -2)


def restarted(ids: Array) -> Array:
    """Return each token's index in its run of equal ids, ``[batch, 1, 1, length]``."""
    index = np.arange(ids.shape[1])
    begins = np.concatenate([np.ones_like(ids[:, :1], dtype=bool), ids[:, 1:] != ids[:, :-1]], axis=1)
    return (index - np.maximum.accumulate(np.where(begins, index, 0), axis=1))[:, None, None]


@mutant("precision", "long", "causal_bias", expected="int8|wrap|overflow|128|127|256")
class PositionsInInt8(Reference):
    """Distances are kept in 8 bits, and wrap."""

    def ahead(self, call: Call) -> Array:
        return super().ahead(call).astype(np.int8).astype(np.int64)

    def visible_by_causality(self, call: Call) -> Array | bool:
        return Reference.ahead(self, call) <= 0 if call.is_causal else True


@mutant("precision", expected="int16|wrap|overflow|32.?76|65.?53|far", is_diagnosable=False)
class PositionsInInt16(Reference):
    """Positions are kept in 16 bits, and wrap."""

    def q_positions(self, call: Call) -> Array:
        return super().q_positions(call).astype(np.int16).astype(np.int64)


@mutant(
    "precision",
    "offset",
    expected="clip|limit|clamp|at most|\\bmax|beyond|capp|table|satur|2047|2048",
)
class DistancesOfATable(Reference):
    """The bias comes from a table of 2048 distances, and what is farther away counts as the farthest of them."""

    def position_bias(self, call: Call) -> Array:
        distances = np.minimum(np.abs(self.ahead(call)), 2047)
        return (-self.steepness(call) * distances).astype(self.working_dtype)


@mutant("long", expected="clip|limit|clamp|at most|\\bmax|beyond|capp|table|satur|127|128")
class DistancesOfAShortTable(Reference):
    """The bias comes from a table of 128 distances, and what is farther away counts as the farthest of them."""

    def position_bias(self, call: Call) -> Array:
        distances = np.minimum(np.abs(self.ahead(call)), 127)
        return (-self.steepness(call) * distances).astype(self.working_dtype)
