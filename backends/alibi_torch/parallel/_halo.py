"""Keys and values on their way between processes, and their gradients on the way back."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alibi_core import Shards
from alibi_torch.parallel._group import Place


@dataclass(frozen=True)
class Stretch:
    """Tokens from ``first`` to ``stop`` of neighbouring key/value heads, which the queries of a chunk see."""

    chunk: int
    heads: slice
    first: int
    stop: int


@dataclass(frozen=True)
class Piece:
    """The part of a stretch that one chunk has."""

    stretch: int  # of the target shard
    source: int  # chunk
    heads: slice
    first: int
    stop: int


@dataclass(frozen=True)
class Halo:
    """Which tokens each chunk's queries see, for each key/value head: so many before the chunk, and after it.

    A chunk sees its own tokens too. What exists nowhere, before the sequence or after it, is left out.
    """

    shards: Shards
    past: tuple[int, ...]
    future: tuple[int, ...]

    def tokens(self, chunk: int) -> int:
        """Return how many tokens of a chunk are no padding."""
        size = self.shards.chunk_len
        return min(max(self.shards.length - chunk * size, 0), size)

    def stretches(self, shard: int) -> list[Stretch]:
        """Return what the chunks of a shard see; nothing if they are padding alone."""
        found, size = [], self.shards.chunk_len
        for chunk in self.shards.chunks(shard):
            if not self.tokens(chunk):
                continue
            start = 0
            for (past, future), run in itertools.groupby(zip(self.past, self.future, strict=True)):
                stop = start + len(list(run))
                ends = max(chunk * size - past, 0), min((chunk + 1) * size + future, self.shards.length)
                found.append(Stretch(chunk, slice(start, stop), *ends))
                start = stop
        return found

    def pieces(self, target: int, source: int) -> list[Piece]:
        """Return what a shard has of what another, or itself, sees, in an order on which both agree."""
        found, size = [], self.shards.chunk_len
        for index, seen in enumerate(self.stretches(target)):
            for chunk in self.shards.chunks(source):
                first, stop = max(seen.first, chunk * size), min(seen.stop, (chunk + 1) * size)
                if first < stop:
                    found.append(Piece(index, chunk, seen.heads, first, stop))
        return found


@dataclass(frozen=True)
class Exchange:
    """A halo, as one process has it."""

    halo: Halo
    place: Place

    @cached_property
    def stretches(self) -> list[Stretch]:
        """What this process's chunks see."""
        return self.halo.stretches(self.place.rank)

    @cached_property
    def incoming(self) -> dict[int, list[Piece]]:
        """What each process has of that, this one included."""
        here = self.place.rank
        return {shard: pieces for shard in range(self.place.size) if (pieces := self.halo.pieces(here, shard))}

    @cached_property
    def outgoing(self) -> dict[int, list[Piece]]:
        """What this process has of what others see."""
        here = self.place.rank
        others = (shard for shard in range(self.place.size) if shard != here)
        return {shard: pieces for shard in others if (pieces := self.halo.pieces(shard, here))}

    def held(self, tensor: Tensor, piece: Piece) -> Tensor:
        """Return a piece of this process's own ``[batch, heads, shard_len, features]``, a view."""
        shards = self.halo.shards
        start = shards.place(piece.source)[1] * shards.chunk_len - piece.source * shards.chunk_len
        return tensor[:, piece.heads, piece.first + start : piece.stop + start]

    def seen(self, tensor: Tensor, piece: Piece) -> Tensor:
        """Return a piece of what a stretch sees, ``[batch, heads of the stretch, its length, features]``, a view."""
        first = self.stretches[piece.stretch].first
        return tensor[:, :, piece.first - first : piece.stop - first]


@dataclass
class Travelling:
    """Messages under way. Tensors are held until they have arrived."""

    works: list[dist.Work]
    sent: list[Tensor]
    arriving: dict[int, Tensor]  # by process: all its pieces, flat

    @classmethod
    def start(
        cls, exchange: Exchange, tensors: Sequence[Tensor], *, outgoing: dict[int, Tensor], incoming: dict[int, int]
    ) -> Travelling:
        """Send flat tensors to processes, and receive so many elements from others, like ``tensors[0]``."""
        place = exchange.place
        arriving = {peer: tensors[0].new_empty(size) for peer, size in incoming.items()}
        operations = [
            dist.P2POp(call, tensor, dist.get_global_rank(place.group, peer), place.group, place.tag)
            for call, messages in ((dist.irecv, arriving), (dist.isend, outgoing))
            for peer, tensor in messages.items()
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        return cls(works, list(outgoing.values()), arriving)

    def wait(self) -> dict[int, Tensor]:
        """Return what has arrived."""
        for work in self.works:
            work.wait()
        self.sent = []
        return self.arriving


def start(exchange: Exchange, tensors: Sequence[Tensor]) -> Travelling:
    """Send what others see of this process's ``[batch, heads, shard_len, features]``, of each of several tensors."""
    tensors = [tensor.detach() for tensor in tensors]
    outgoing = {
        peer: torch.cat([exchange.held(tensor, piece).flatten() for piece in pieces for tensor in tensors])
        for peer, pieces in exchange.outgoing.items()
    }
    others = (item for item in exchange.incoming.items() if item[0] != exchange.place.rank)
    incoming = {peer: sum(_sizes(tensors, pieces)) for peer, pieces in others}
    return Travelling.start(exchange, tensors, outgoing=outgoing, incoming=incoming)


def assembled(
    exchange: Exchange, tensors: Sequence[Tensor], travelling: Travelling, dtype: torch.dtype
) -> list[list[Tensor]]:
    """Return, of each tensor, what each stretch sees: ``[batch, heads of the stretch, its length, features]``."""
    arrived = travelling.wait()
    results = [
        [
            tensor.new_empty(
                (len(tensor), seen.heads.stop - seen.heads.start, seen.stop - seen.first, tensor.shape[-1]), dtype=dtype
            )
            for seen in exchange.stretches
        ]
        for tensor in tensors
    ]
    for peer, pieces in exchange.incoming.items():
        parts = _parts(tensors, pieces, arrived[peer]) if peer in arrived else None
        for piece, (index, tensor) in itertools.product(pieces, enumerate(tensors)):
            part = exchange.held(tensor, piece) if parts is None else next(parts)
            exchange.seen(results[index][piece.stretch], piece).copy_(part)
    return results


class GatherHalo(torch.autograd.Function):
    """Give each stretch its keys and values; in the backward pass, send the gradients of these back."""

    @staticmethod
    def forward(
        ctx: Any, key: Tensor, value: Tensor, exchange: Exchange, travelling: Travelling, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Return the keys of all stretches, and then their values, in ``dtype``."""
        ctx.exchange, ctx.like = exchange, (key.shape, key.dtype)
        keys, values = assembled(exchange, (key, value), travelling, dtype)
        return (*keys, *values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Return the gradients of all processes' results by this one's keys and values."""
        if not grads:  # padding alone
            return None, None, None, None, None
        return *ReturnHalo.apply(ctx.exchange, *ctx.like, *grads), None, None, None


class ReturnHalo(torch.autograd.Function):
    """Send what belongs to others' keys and values back to them, and add what comes: the transpose of GatherHalo.

    A function of its own, so that second derivatives are not left out.
    """

    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange, shape: torch.Size, dtype: torch.dtype, *grads: Tensor
    ) -> tuple[Tensor, ...]:
        """Return what all processes have for this one's keys, and for its values."""
        ctx.exchange, ctx.dtype = exchange, grads[0].dtype
        count = len(exchange.stretches)
        statistics = torch.promote_types(dtype, torch.float32)
        by_stretch = grads[:count], grads[count:]
        totals = [grads[0].new_zeros(shape, dtype=statistics) for _ in by_stretch]
        pairs = list(zip(by_stretch, totals, strict=True))
        rank = exchange.place.rank
        back = {
            peer: torch.cat([exchange.seen(x[piece.stretch], piece).flatten() for piece in pieces for x in by_stretch])
            for peer, pieces in exchange.incoming.items()
            if peer != rank
        }
        sizes = {peer: sum(_sizes(totals, pieces)) for peer, pieces in exchange.outgoing.items()}
        travelling = Travelling.start(exchange, grads, outgoing=back, incoming=sizes)
        for piece, (stretches, total) in itertools.product(exchange.incoming.get(rank, []), pairs):
            exchange.held(total, piece).add_(exchange.seen(stretches[piece.stretch], piece))
        arrived = travelling.wait()
        for peer, pieces in exchange.outgoing.items():
            parts = _parts(totals, pieces, arrived[peer])
            for piece, total in itertools.product(pieces, totals):
                exchange.held(total, piece).add_(next(parts))
        return tuple(total.to(dtype) for total in totals)

    @staticmethod
    def backward(ctx: Any, by_key: Tensor, by_value: Tensor) -> tuple[Any, ...]:
        """Return what stretches see of second derivatives by keys and values."""
        travelling = start(ctx.exchange, (by_key, by_value))
        return None, None, None, *GatherHalo.apply(by_key, by_value, ctx.exchange, travelling, ctx.dtype)


def _shapes(tensors: Sequence[Tensor], pieces: Sequence[Piece]) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of what a message is made of."""
    for piece, tensor in itertools.product(pieces, tensors):
        yield len(tensor), piece.heads.stop - piece.heads.start, piece.stop - piece.first, tensor.shape[-1]


def _sizes(tensors: Sequence[Tensor], pieces: Sequence[Piece]) -> list[int]:
    return [torch.Size(shape).numel() for shape in _shapes(tensors, pieces)]


def _parts(tensors: Sequence[Tensor], pieces: Sequence[Piece], message: Tensor) -> Iterator[Tensor]:
    """Yield what a message is made of."""
    parts = message.split(_sizes(tensors, pieces))
    return (part.view(shape) for part, shape in zip(parts, _shapes(tensors, pieces), strict=True))
