"""How a sequence is divided among devices, and which of them have tokens for which others.

A sequence is cut into *chunks* of one length, and a shard is one chunk or two, so that what one chunk needs of another
depends on nothing but how many chunks the two are apart, wherever they lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from alibi_core._arrays import checks

PLACEMENTS = ("contiguous", "zigzag")
Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Shards:
    """A sequence that is divided among devices, of which each holds as many tokens.

    ``"contiguous"``: shard ``r`` is chunk ``r`` of ``num_shards``. ``"zigzag"``: shard ``r`` is the chunks ``r`` and
    ``2 * num_shards - 1 - r`` of ``2 * num_shards``, which evens out what causal attention costs where few keys are out
    of reach. Each of its chunks gets what it needs by itself, so that devices send up to twice as much. Of 4 shards::

        contiguous   0     1     2     3
        zigzag       0 7   1 6   2 5   3 4

    Args:
        num_shards: How many devices share the sequence.
        chunk_len: Tokens in a chunk.
        placement: Which chunks a shard is made of.
        length: Tokens of the sequence; what lies beyond is padding. Default: as many as there is room for.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a number is out of range.

    Example:
        >>> Shards(2, 3, "zigzag").order().tolist()
        [0, 1, 2, 9, 10, 11, 3, 4, 5, 6, 7, 8]
    """

    num_shards: int
    chunk_len: int
    placement: str = "contiguous"
    length: int = -1

    def __post_init__(self) -> None:
        checks.positive_int("num_shards", self.num_shards)
        checks.positive_int("chunk_len", self.chunk_len)
        checks.one_of("placement", self.placement, PLACEMENTS)
        if checks.integer("length", self.length) == -1:
            object.__setattr__(self, "length", self.padded_length)
        if not 1 <= self.length <= self.padded_length:
            raise ValueError(
                f"length must be between 1 and the {self.padded_length} tokens that {self.num_shards} shards of "
                f"{self.shard_len} have room for, got {self.length}"
            )
        checks.positions_fit(0, self.padded_length, self.padded_length)

    @classmethod
    def of_length(cls, length: int, num_shards: int, placement: str = "contiguous") -> Shards:
        """Divide ``length`` tokens, padding the end if it does not divide."""
        slots = _slots(checks.one_of("placement", placement, PLACEMENTS))
        chunks = checks.positive_int("num_shards", num_shards) * slots
        return cls(num_shards, -(-checks.positive_int("length", length) // chunks), placement, length)

    @classmethod
    def of_shard_len(
        cls, shard_len: int, num_shards: int, placement: str = "contiguous", length: int | None = None
    ) -> Shards:
        """Describe shards of ``shard_len`` tokens.

        Raises:
            ValueError: If they cannot be cut into as many chunks as they are to have.
        """
        slots = _slots(checks.one_of("placement", placement, PLACEMENTS))
        if checks.positive_int("shard_len", shard_len) % slots:
            raise ValueError(f"shard_len must be even where placement is {placement!r}, got {shard_len}")
        return cls(num_shards, shard_len // slots, placement, -1 if length is None else length)

    @property
    def slots(self) -> int:
        """How many chunks a shard has."""
        return _slots(self.placement)

    @property
    def num_chunks(self) -> int:
        """How many chunks there are."""
        return self.num_shards * self.slots

    @property
    def shard_len(self) -> int:
        """Tokens in a shard."""
        return self.slots * self.chunk_len

    @property
    def padded_length(self) -> int:
        """Tokens in all shards, padding included."""
        return self.num_chunks * self.chunk_len

    def chunks(self, shard: int) -> tuple[int, ...]:
        """Return which chunks a shard holds, in its order."""
        return (shard,) if self.slots == 1 else (shard, self.num_chunks - 1 - shard)

    def place(self, chunk: int) -> tuple[int, int]:
        """Return which shard holds a chunk, and in which of its slots."""
        return (chunk, 0) if chunk < self.num_shards else (self.num_chunks - 1 - chunk, 1)

    def pairs(self, distance: int, source_slot: int, target_slot: int, *, cyclic: bool = False) -> Pairs:
        """Return the shards ``(source, target)`` whose chunks in these slots are ``distance`` chunks apart.

        Args:
            distance: How many chunks the source is before the target; negative if after it.
            source_slot: Of the chunk that is sent.
            target_slot: Of the chunk that needs it. Chunks of padding alone neither send nor need anything.
            cyclic: Count the last chunk as the one before the first, so that every chunk sends and receives.
        """
        result = []
        for target in range(self.num_shards):
            chunk = self.chunks(target)[target_slot]
            source = (chunk - distance) % self.num_chunks if cyclic else chunk - distance
            if cyclic or (source >= 0 and max(source, chunk) * self.chunk_len < self.length):
                shard, slot = self.place(source)
                if slot == source_slot:
                    result.append((shard, target))
        return tuple(result)

    def order(self) -> Any:
        """Return the position of each token in the order of the shards: int64 ``[padded_length]``, NumPy."""
        chunks = np.asarray([chunk for shard in range(self.num_shards) for chunk in self.chunks(shard)])
        return (chunks[:, None] * self.chunk_len + np.arange(self.chunk_len)).reshape(-1)


def _slots(placement: str) -> int:
    return 2 if placement == "zigzag" else 1
