"""How a sequence is divided among devices, and which tokens the queries of a shard need beyond it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from alibi_core._arrays import Namespace, checks
from alibi_core._horizon import reach

HALO_SHARE = 0.25  # of the tolerance, for keys that are not sent; the rest is for keys that a kernel leaves out


@dataclass(frozen=True)
class Shards:
    """A sequence of ``length`` tokens, of which each of ``num_shards`` devices holds ``shard_len`` in a row.

    Args:
        num_shards: How many devices share the sequence.
        shard_len: Tokens in a shard.
        length: Tokens of the sequence; what lies beyond is padding. Default: as many as there is room for.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a number is out of range.

    Example:
        >>> shards = Shards(4, 3, 10)
        >>> [shards.tokens(shard) for shard in range(4)]
        [3, 3, 3, 1]
    """

    num_shards: int
    shard_len: int
    length: int | None = None

    def __post_init__(self) -> None:
        room = checks.positive_int("num_shards", self.num_shards) * checks.positive_int("shard_len", self.shard_len)
        if self.length is None:
            object.__setattr__(self, "length", room)
        if not 1 <= checks.integer("length", self.length) <= room:
            raise ValueError(
                f"length must be between 1 and the {room} tokens that {self.num_shards} shards of {self.shard_len} "
                f"have room for, got {self.length}"
            )
        checks.positions_fit(0, room, room)

    @property
    def has_padding(self) -> bool:
        """Whether there is room for more tokens than there are."""
        return self.length != self.num_shards * self.shard_len

    def tokens(self, shard: int) -> int:
        """Return how many tokens of a shard are no padding."""
        assert self.length is not None  # __post_init__ sets it
        return min(max(self.length - shard * self.shard_len, 0), self.shard_len)


def tokens_beyond(xp: Namespace, slopes: Any, excess: Any, tolerance: float, inside: Any, limit: Any) -> Any:
    """Return how many tokens beyond its shard each query needs on one side, as whole numbers of the dtype of slopes.

    By ``excess``, ``[..., num_heads, shard_len]``, a score may exceed what bounds the log-sum-exp from below; on that
    side each query has ``inside``, ``[shard_len]``, tokens of its shard and at most ``limit`` beyond it.
    """
    far = reach(xp, slopes, excess, tolerance) - 1 - inside
    far = xp.where(far < 0, xp.zeros_like(far), far)
    return xp.where(far < limit, far, limit)  # a NaN compares as too far


def check_shard_slopes(name: str, slopes: Any, heads: int, head_shards: int, owners: str) -> None:
    """Check that slopes are those of all shards' heads, of which each of ``head_shards`` owners has ``heads``.

    ``owners`` says what those are: ``"devices"`` or ``"processes"``.
    """
    total = heads * head_shards
    if checks.is_int(slopes):
        raise TypeError(f"{name} must be an array of all {owners}' slopes or None for the canonical ones, got {slopes}")
    if tuple(checks.array(name, slopes).shape) != (total,):
        among = f" on each of {head_shards} {owners}" if head_shards > 1 else ""
        raise ValueError(
            f"{name} must have shape ({total},), those of all {owners}' heads ({heads}{among}), got "
            f"{tuple(slopes.shape)}; local slopes would not tell whose heads they are"
        )
