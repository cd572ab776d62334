"""Shards of a sequence on several devices, and the tokens that the queries of a shard need from other shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from alibi_core._arrays import Namespace, checks
from alibi_core._arrays import divided_along as divided_along
from alibi_core._horizon import reach

HALO_SHARE = 0.25  # share of the tolerance for keys that are not sent; the rest is for keys that a kernel skips


@dataclass(frozen=True)
class Shards:
    """A sequence of ``length`` tokens in contiguous shards of ``shard_len`` tokens on ``num_shards`` devices.

    The rest of the shards is padding. The default length is ``num_shards * shard_len``.
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
        """Whether the shards have room for more tokens than the sequence has."""
        return self.length != self.num_shards * self.shard_len

    def tokens(self, shard: int) -> int:
        """Return the number of tokens in a shard, without padding."""
        assert self.length is not None  # __post_init__ sets it
        return min(max(self.length - shard * self.shard_len, 0), self.shard_len)


def tokens_beyond(xp: Namespace, slopes: Any, excess: Any, tolerance: float, inside: Any, limit: Any) -> Any:
    """Return the number of tokens beyond its shard that each query needs on one side, in the dtype of slopes.

    ``excess``, ``[..., num_heads, shard_len]``, is the most by which a score exceeds the lower bound of the query's
    log-sum-exp. On that side each query has ``inside``, ``[shard_len]``, tokens in its shard and at most ``limit``
    beyond it.
    """
    # Needed distances end at horizon - 1; tokens inside the shard are there already.
    far = reach(xp, slopes, excess, tolerance) - 1 - inside
    far = xp.where(far < 0, xp.zeros_like(far), far)
    return xp.where(far < limit, far, limit)  # a NaN compares as too far


def check_shard_slopes(name: str, slopes: Any, heads: int, head_shards: int, owners: str) -> None:
    """Check that slopes have one entry for each head of all shards: ``heads * head_shards``.

    ``owners`` names the owners of head shards in messages: ``"devices"`` or ``"processes"``.
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
