"""The exchange of keys and values between processes, and of their gradients in the backward pass."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from alibi_core.backend.sharding import Shards
from alibi_torch.parallel._group import Place


class Stretch(NamedTuple):
    """The range of tokens, ``first`` to ``stop``, that a process sees for a run of key/value heads.

    A piece is the part of a stretch that is in one process's shard.
    """

    index: int  # among the stretches of the process that sees these tokens
    heads: slice
    first: int
    stop: int


@dataclass(frozen=True)
class Halo:
    """The tokens that a process sees, for each key/value head: ``past`` before its shard, and ``future`` after it.

    A process also sees its own tokens. Ranges end at the ends of the sequence.
    """

    place: Place
    shards: Shards
    past: tuple[int, ...]
    future: tuple[int, ...]

    @cached_property
    def stretches(self) -> list[Stretch]:
        """The stretches that this process sees."""
        return self._stretches(self.place.rank)

    @cached_property
    def incoming(self) -> dict[int, list[Stretch]]:
        """By source process, this one included, the pieces that this process receives."""
        here = self.place.rank
        return {rank: pieces for rank in range(self.place.size) if (pieces := self._pieces(here, rank))}

    @cached_property
    def outgoing(self) -> dict[int, list[Stretch]]:
        """By target process, this one included, the pieces that this process sends."""
        here = self.place.rank
        return {rank: pieces for rank in range(self.place.size) if (pieces := self._pieces(rank, here))}

    def _stretches(self, rank: int) -> list[Stretch]:
        """Return the stretches that a process sees; none if its shard is all padding."""
        found: list[Stretch] = []
        size, start = self.shards.shard_len, 0
        if not self.shards.tokens(rank):
            return found
        # Neighbouring heads with equal horizons share a stretch, and so one attention call.
        for (past, future), run in itertools.groupby(zip(self.past, self.future, strict=True)):
            stop = start + len(list(run))
            ends = max(rank * size - past, 0), min((rank + 1) * size + future, self.shards.length)
            found.append(Stretch(len(found), slice(start, stop), *ends))
            start = stop
        return found

    def _pieces(self, target: int, source: int) -> list[Stretch]:
        """Return the pieces that ``source`` sends to ``target``; the order is the same on both."""
        start, stop = source * self.shards.shard_len, (source + 1) * self.shards.shard_len
        cut = [x._replace(first=max(x.first, start), stop=min(x.stop, stop)) for x in self._stretches(target)]
        return [piece for piece in cut if piece.first < piece.stop]

    def held(self, tensors: Sequence[Tensor], pieces: Sequence[Stretch]) -> list[Tensor]:
        """Return views of the pieces in this process's shard ``[batch, heads, shard_len, features]``."""
        start = self.place.rank * self.shards.shard_len
        return [x[:, piece.heads, piece.first - start : piece.stop - start] for piece in pieces for x in tensors]

    def seen(self, tensors: Sequence[Sequence[Tensor]], pieces: Sequence[Stretch]) -> list[Tensor]:
        """Return views of the pieces in the stretches, ``[batch, heads of the stretch, its length, features]``."""
        starts = [self.stretches[piece.index].first for piece in pieces]
        return [
            x[piece.index][:, :, piece.first - start : piece.stop - start]
            for piece, start in zip(pieces, starts, strict=True)
            for x in tensors
        ]

    def exchanged(
        self, outgoing: dict[int, list[Tensor]], incoming: dict[int, list[Tensor]]
    ) -> list[tuple[Tensor, Tensor]]:
        """Send and receive tensors, one message per process.

        Returns:
            Pairs of a tensor of ``incoming`` (which may be a view or have another dtype) and the tensor received for
            it. The tensors that a process sends to itself come first.
        """
        if not outgoing:  # the shard is all padding
            return []
        here, group, tag = self.place.rank, self.place.group, self.place.tag
        # One flat message per peer; the receiver knows the sizes of the pieces in it.
        sent = {peer: torch.cat([x.flatten() for x in parts]) for peer, parts in outgoing.items() if peer != here}
        sizes = {peer: [x.numel() for x in parts] for peer, parts in incoming.items() if peer != here}
        arrived = {peer: outgoing[here][0].new_empty(sum(of_peer)) for peer, of_peer in sizes.items()}
        operations = [
            dist.P2POp(call, message, dist.get_global_rank(group, peer), group, tag)
            for call, messages in ((dist.irecv, arrived), (dist.isend, sent))
            for peer, message in messages.items()
        ]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        found = {here: outgoing[here]} | {peer: message.split(sizes[peer]) for peer, message in arrived.items()}
        return [
            (part, x.view(part.shape)) for peer in found for part, x in zip(incoming[peer], found[peer], strict=True)
        ]


def gathered(halo: Halo, tensors: Sequence[Tensor], dtype: torch.dtype) -> list[list[Tensor]]:
    """Return, for each ``[batch, heads, shard_len, features]``, the tokens of each stretch from all processes.

    Each result is ``[batch, heads of the stretch, its length, features]``, in ``dtype``.
    """
    results = [
        [
            x.new_empty((len(x), seen.heads.stop - seen.heads.start, seen.stop - seen.first, x.shape[-1]), dtype=dtype)
            for seen in halo.stretches
        ]
        for x in tensors
    ]
    outgoing = {peer: halo.held([x.detach() for x in tensors], pieces) for peer, pieces in halo.outgoing.items()}
    incoming = {peer: halo.seen(results, pieces) for peer, pieces in halo.incoming.items()}
    for part, arrived in halo.exchanged(outgoing, incoming):
        part.copy_(arrived)
    return results


class GatherHalo(torch.autograd.Function):
    """Gather the keys and values of each stretch; the backward pass returns their gradients to their processes."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, halo: Halo, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the keys of all stretches, and then their values, in ``dtype``."""
        ctx.halo, ctx.like = halo, (key.shape, key.dtype)
        keys, values = gathered(halo, (key, value), dtype)
        return (*keys, *values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Return the gradients of all processes' results with respect to this process's keys and values."""
        if not grads:  # the shard is all padding
            return None, None, None, None
        return *ReturnHalo.apply(ctx.halo, *ctx.like, *grads), None, None


class ReturnHalo(torch.autograd.Function):
    """The transpose of GatherHalo: send gradients to the processes of their keys and values, and sum received ones.

    It is a separate autograd.Function, so that it can be differentiated again.
    """

    @staticmethod
    def forward(ctx: Any, halo: Halo, shape: torch.Size, dtype: torch.dtype, *grads: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of this process's keys and of its values, summed over processes."""
        ctx.halo, ctx.dtype, count = halo, grads[0].dtype, len(halo.stretches)
        totals = [grads[0].new_zeros(shape, dtype=torch.promote_types(dtype, torch.float32)) for _ in range(2)]
        by_stretch = grads[:count], grads[count:]
        outgoing = {peer: halo.seen(by_stretch, pieces) for peer, pieces in halo.incoming.items()}
        incoming = {peer: halo.held(totals, pieces) for peer, pieces in halo.outgoing.items()}
        for total, arrived in halo.exchanged(outgoing, incoming):
            total.add_(arrived)
        return tuple(total.to(dtype) for total in totals)

    @staticmethod
    def backward(ctx: Any, by_key: Tensor, by_value: Tensor) -> tuple[Any, ...]:
        """Gather second derivatives for the stretches, as keys and values in the forward pass."""
        return None, None, None, *GatherHalo.apply(by_key, by_value, ctx.halo, ctx.dtype)
