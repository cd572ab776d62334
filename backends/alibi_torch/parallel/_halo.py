"""Keys and values that processes send each other, and the gradients that return."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alibi_core.backend.sharding import Shards
from alibi_torch.parallel._group import Place


@dataclass(frozen=True)
class Stretch:
    """Tokens from ``first`` to ``stop`` of neighbouring key/value heads, which the queries of a process see."""

    heads: slice
    first: int
    stop: int


@dataclass(frozen=True)
class Piece:
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
        """What this process holds of what others see."""
        here = self.place.rank
        others = (rank for rank in range(self.place.size) if rank != here)
        return {rank: pieces for rank in others if (pieces := self._pieces(rank, here))}

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

    def held(self, tensor: Tensor, piece: Piece) -> Tensor:
        """Return a piece of this process's own ``[batch, heads, shard_len, features]``, a view."""
        start = self.place.rank * self.shards.shard_len
        return tensor[:, piece.heads, piece.first - start : piece.stop - start]

    def seen(self, tensor: Tensor, piece: Piece) -> Tensor:
        """Return a piece of what a stretch sees, ``[batch, heads of the stretch, its length, features]``, a view."""
        first = self.stretches[piece.stretch].first
        return tensor[:, :, piece.first - first : piece.stop - first]

    def exchanged(self, outgoing: dict[int, Tensor], incoming: dict[int, int], like: Tensor) -> dict[int, Tensor]:
        """Send flat tensors to processes, and return those received, of these numbers of elements."""
        arrived = {peer: like.new_empty(size) for peer, size in incoming.items()}
        group, tag = self.place.group, self.place.tag
        operations = [
            dist.P2POp(call, tensor, dist.get_global_rank(group, peer), group, tag)
            for call, messages in ((dist.irecv, arrived), (dist.isend, outgoing))
            for peer, tensor in messages.items()
        ]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        return arrived


def gathered(halo: Halo, tensors: Sequence[Tensor], dtype: torch.dtype) -> list[list[Tensor]]:
    """Return, for each ``[batch, heads, shard_len, features]``, what each stretch sees of it on all processes.

    That is ``[batch, heads of the stretch, its length, features]``, in ``dtype``.
    """
    tensors, here = [tensor.detach() for tensor in tensors], halo.place.rank
    outgoing = {
        peer: torch.cat([halo.held(tensor, piece).flatten() for piece in pieces for tensor in tensors])
        for peer, pieces in halo.outgoing.items()
    }
    incoming = {peer: sum(_sizes(tensors, pieces)) for peer, pieces in halo.incoming.items() if peer != here}
    arrived = halo.exchanged(outgoing, incoming, tensors[0])
    results = [
        [
            x.new_empty((len(x), seen.heads.stop - seen.heads.start, seen.stop - seen.first, x.shape[-1]), dtype=dtype)
            for seen in halo.stretches
        ]
        for x in tensors
    ]
    for peer, pieces in halo.incoming.items():
        parts = _parts(tensors, pieces, arrived[peer]) if peer in arrived else None
        for piece, (index, tensor) in itertools.product(pieces, enumerate(tensors)):
            part = halo.held(tensor, piece) if parts is None else next(parts)
            halo.seen(results[index][piece.stretch], piece).copy_(part)
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
        ctx.halo, ctx.dtype = halo, grads[0].dtype
        count, here = len(halo.stretches), halo.place.rank
        by_stretch = grads[:count], grads[count:]
        totals = [grads[0].new_zeros(shape, dtype=torch.promote_types(dtype, torch.float32)) for _ in by_stretch]
        back = {
            peer: torch.cat([halo.seen(x[piece.stretch], piece).flatten() for piece in pieces for x in by_stretch])
            for peer, pieces in halo.incoming.items()
            if peer != here
        }
        sizes = {peer: sum(_sizes(totals, pieces)) for peer, pieces in halo.outgoing.items()}
        arrived = halo.exchanged(back, sizes, grads[0])
        for piece, (stretches, total) in itertools.product(
            halo.incoming.get(here, []), zip(by_stretch, totals, strict=True)
        ):
            halo.held(total, piece).add_(halo.seen(stretches[piece.stretch], piece))
        for peer, pieces in halo.outgoing.items():
            parts = _parts(totals, pieces, arrived[peer])
            for piece, total in itertools.product(pieces, totals):
                halo.held(total, piece).add_(next(parts))
        return tuple(total.to(dtype) for total in totals)

    @staticmethod
    def backward(ctx: Any, by_key: Tensor, by_value: Tensor) -> tuple[Any, ...]:
        """Return what stretches see of second derivatives by keys and values."""
        return None, None, None, *GatherHalo.apply(by_key, by_value, ctx.halo, ctx.dtype)


def _shapes(tensors: Sequence[Tensor], pieces: Sequence[Piece]) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of the parts of a message."""
    for piece, tensor in itertools.product(pieces, tensors):
        yield len(tensor), piece.heads.stop - piece.heads.start, piece.stop - piece.first, tensor.shape[-1]


def _sizes(tensors: Sequence[Tensor], pieces: Sequence[Piece]) -> list[int]:
    return [torch.Size(shape).numel() for shape in _shapes(tensors, pieces)]


def _parts(tensors: Sequence[Tensor], pieces: Sequence[Piece], message: Tensor) -> Iterator[Tensor]:
    """Yield the parts of a message."""
    parts = message.split(_sizes(tensors, pieces))
    return (part.view(shape) for part, shape in zip(parts, _shapes(tensors, pieces), strict=True))
