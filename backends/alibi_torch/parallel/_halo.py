"""Keys and values that processes send each other, and the gradients that return."""

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
    """Tokens from ``first`` to ``stop`` of neighbouring key/value heads."""

    heads: slice
    first: int
    stop: int


class Piece(NamedTuple):
    """The tokens of a stretch that one process holds."""

    stretch: int  # index among the stretches of the process that sees it
    heads: slice
    first: int
    stop: int


@dataclass(frozen=True)
class Halo:
    """Which tokens each process's queries see, for each key/value head: this many before its shard, and after it.

    A process sees its own tokens too. Tokens before or after the whole sequence do not exist and are left out.
    """

    place: Place
    shards: Shards
    past: tuple[int, ...]
    future: tuple[int, ...]

    @cached_property
    def stretches(self) -> list[Stretch]:
        """What this process sees."""
        return self._stretches(self.place.rank)

    @cached_property
    def incoming(self) -> dict[int, list[Piece]]:
        """What each process holds of that, this one included."""
        here = self.place.rank
        return {rank: pieces for rank in range(self.place.size) if (pieces := self._pieces(here, rank))}

    @cached_property
    def outgoing(self) -> dict[int, list[Piece]]:
        """What this process holds of what each process sees, this one included."""
        here = self.place.rank
        return {rank: pieces for rank in range(self.place.size) if (pieces := self._pieces(rank, here))}

    def _stretches(self, rank: int) -> list[Stretch]:
        """Return what a process sees; nothing if it holds padding alone."""
        found: list[Stretch] = []
        size, start = self.shards.shard_len, 0
        if not self.shards.tokens(rank):
            return found
        for (past, future), run in itertools.groupby(zip(self.past, self.future, strict=True)):
            stop = start + len(list(run))
            ends = max(rank * size - past, 0), min((rank + 1) * size + future, self.shards.length)
            found.append(Stretch(slice(start, stop), *ends))
            start = stop
        return found

    def _pieces(self, target: int, source: int) -> list[Piece]:
        """Return what ``source`` holds of what ``target`` sees, in an order on which both agree."""
        found, size = [], self.shards.shard_len
        for index, seen in enumerate(self._stretches(target)):
            first, stop = max(seen.first, source * size), min(seen.stop, (source + 1) * size)
            if first < stop:
                found.append(Piece(index, seen.heads, first, stop))
        return found

    def held(self, tensors: Sequence[Tensor], pieces: Sequence[Piece]) -> list[Tensor]:
        """Return views of pieces of this process's own ``[batch, heads, shard_len, features]``."""
        start = self.place.rank * self.shards.shard_len
        return [x[:, piece.heads, piece.first - start : piece.stop - start] for piece in pieces for x in tensors]

    def seen(self, tensors: Sequence[Sequence[Tensor]], pieces: Sequence[Piece]) -> list[Tensor]:
        """Return views of pieces of what stretches see, ``[batch, heads of the stretch, its length, features]``."""
        firsts = [seen.first for seen in self.stretches]
        return [
            x[piece.stretch][:, :, piece.first - firsts[piece.stretch] : piece.stop - firsts[piece.stretch]]
            for piece in pieces
            for x in tensors
        ]

    def exchanged(
        self, outgoing: dict[int, list[Tensor]], incoming: dict[int, list[Tensor]]
    ) -> list[tuple[Tensor, Tensor]]:
        """Send tensors to processes, a message for each process, and receive others.

        Returns:
            Pairs of one of ``incoming``, which may be views and of another dtype, and the tensor that has arrived for
            it; what a process sends to itself is among them, and first.
        """
        if not outgoing:  # this process holds padding alone
            return []
        here, group, tag = self.place.rank, self.place.group, self.place.tag
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
    """Return, for each ``[batch, heads, shard_len, features]``, what each stretch sees of it on all processes.

    That is ``[batch, heads of the stretch, its length, features]``, in ``dtype``.
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
    """Give each stretch its keys and values; in the backward pass, send the gradients of these back."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, halo: Halo, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the keys of all stretches, and then their values, in ``dtype``."""
        ctx.halo, ctx.like = halo, (key.shape, key.dtype)
        keys, values = gathered(halo, (key, value), dtype)
        return (*keys, *values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Return the gradients of all processes' results by this one's keys and values."""
        if not grads:  # this process holds padding alone
            return None, None, None, None
        return *ReturnHalo.apply(ctx.halo, *ctx.like, *grads), None, None


class ReturnHalo(torch.autograd.Function):
    """Send gradients by others' keys and values back to them, and add those that arrive: GatherHalo transposed.

    It is a function of its own, so that autograd can differentiate it again.
    """

    @staticmethod
    def forward(ctx: Any, halo: Halo, shape: torch.Size, dtype: torch.dtype, *grads: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients by this process's keys, and by its values, summed over processes."""
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
        """Return what stretches see of second derivatives by keys and values."""
        return None, None, None, *GatherHalo.apply(by_key, by_value, ctx.halo, ctx.dtype)
