"""Packed sequences told apart: each is a call of its own, whose bias follows from distance alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from alibi_core import AttentionCall

LEAST_MEAN_LENGTH = 32  # tokens: of shorter sequences, calls of their own cost more than masks


def sequences(call: AttentionCall) -> list[list[slice]] | None:
    """Return the tokens of each sequence, by batch entry, or None where the call does not fall apart into them.

    It does where queries and keys are the same tokens and those of a segment stand together.
    """
    ids = call.q_segment_ids
    if ids is None or torch.compiler.is_compiling() or ids.device.type != "cpu" or call.mask is not None:
        return None
    if not call.shares_ids or call.q_len != call.kv_len or call.has_offset_array or call.q_offset != 0:
        return None
    found = []
    for row in ids.expand(call.batch[0], call.q_len):
        starts = [0, *(1 + (row[1:] != row[:-1]).nonzero()[:, 0]).tolist(), call.q_len]
        runs = [slice(start, stop) for start, stop in itertools.pairwise(starts)]
        if call.q_len < LEAST_MEAN_LENGTH * len(runs) or len(row[starts[:-1]].unique()) < len(runs):
            return None
        found.append(runs)
    return found


def parts_of(
    call: AttentionCall, entries: list[list[slice]], *tensors: Tensor
) -> Iterator[list[tuple[AttentionCall, Tensor, Tensor, Tensor]]]:
    """Yield the calls of the ``sequences`` of each batch entry, with what of query, key and value is theirs."""
    for index, runs in enumerate(entries):
        entry, heads = slice(index, index + 1), slice(0, call.num_heads)
        tiles = [call.tile(batch=entry, heads=heads, queries=run, keys=run) for run in runs]
        alone = [replace(tile, q_segment_ids=None, kv_segment_ids=None, shares_ids=False) for tile in tiles]
        query, key, value = (x[entry] for x in tensors)
        yield [(one, query[:, :, s], key[:, :, s], value[:, :, s]) for one, s in zip(alone, runs, strict=True)]
