"""Which keys each shard of a sequence needs of the others, and what sending them costs, known from slopes alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from alibi_core._arrays import Array, Namespace, checks, host_values
from alibi_core._bias import slopes as canonical_slopes
from alibi_core._horizon import LARGEST_TOLERANCE, reach
from alibi_core._sharding.shards import Shards

PIECE = 16  # tokens that are sent or left together
HALO_SHARE = 0.25  # of the tolerance, for what is not sent; the rest is for what a backend does with what there is


@dataclass(frozen=True)
class Hop:
    """One exchange: each chunk gets tokens of the one that is ``distance`` chunks before it (after it, if negative).

    Attributes:
        distance: In chunks.
        tokens: For each key/value head of a device, how many: the last ones of a chunk before, the first of one after.

    Example:
        Only flat heads need keys of the chunk before the last one:

        >>> plan = shard_plan(8, Shards(8, 8192), score_bound=14.0)
        >>> plan.hops[1]
        Hop(distance=2, tokens=(0, 0, 0, 0, 0, 0, 0, 1440))
    """

    distance: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class ShardPlan:
    """What sequence-parallel attention sends, as :func:`shard_plan` returns it. Lengths are in tokens.

    Attributes:
        shards: How the sequence is divided.
        past: For each key/value head of a device, how many tokens before a chunk its queries need.
        future: Likewise after it; zeros if attention is causal.
        head_shards: Among how many devices heads are divided besides.
        tolerance: The share of softmax weight that may be left out.
        is_causal: Whether keys after a query are masked.
        window_size: Keys farther than this are masked.
        horizons: For each query head of all devices: how far back, and ahead, keys count.
        num_kv_heads: Key/value heads of all devices.

    Example:
        An encoder looks both ways; the steep one of two heads needs far fewer tokens of its neighbours:

        >>> plan = shard_plan(2, Shards(4, 4096), score_bound=14.0, is_causal=False)
        >>> plan.past, plan.future
        ((568, 9795), (568, 9795))
        >>> [hop.distance for hop in plan.hops]
        [1, -1, 2, -2, 3, -3]
    """

    shards: Shards
    past: tuple[int, ...]
    future: tuple[int, ...]
    head_shards: int
    tolerance: float
    is_causal: bool
    window_size: int | None
    horizons: tuple[tuple[int, int], ...]
    num_kv_heads: int

    @property
    def hops(self) -> tuple[Hop, ...]:
        """The exchanges, nearest chunks first."""
        found = []
        for distance in range(1, self.shards.num_chunks):
            for sign, needs in ((1, self.past), (-1, self.future)):
                tokens = tuple(self._of_hop(need, distance, PIECE) for need in needs)
                if any(tokens):
                    found.append(Hop(sign * distance, tokens))
        return tuple(found)

    @property
    def is_complete(self) -> bool:
        """Whether everything that masks let anybody see is sent, so that no horizon matters."""
        ahead = 0 if self.is_causal else 1
        limit = self.shards.padded_length - self.shards.chunk_len
        limit = limit if self.window_size is None else min(limit, self.window_size)
        return min(self.past) >= limit and min(self.future) >= ahead * limit

    def covered(self, sign: int) -> tuple[int, ...]:
        """Return how many tokens before (after, if ``sign`` is -1) a chunk are sent, for each key/value head."""
        hops = [hop.tokens for hop in self.hops if hop.distance * sign > 0]
        return tuple(sum(tokens) for tokens in zip(*hops, strict=True)) if hops else (0,) * len(self.past)

    def needs(self, shard: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield what a shard needs of others: ``(source shard, kv head, first position, position after the last)``."""
        size = self.shards.chunk_len
        for hop in self.hops:
            for chunk in self.shards.chunks(shard):
                source = chunk - hop.distance
                if not (0 <= source < self.shards.num_chunks) or self.shards.place(source)[0] == shard:
                    continue
                for head, tokens in enumerate(hop.tokens):
                    start = source * size + (size - tokens if hop.distance > 0 else 0)
                    if tokens and max(start, chunk * size) < self.shards.length:
                        yield self.shards.place(source)[0], head, start, min(start + tokens, self.shards.length)

    def bytes_exchanged(self, head_dim: int, itemsize: int) -> int:
        """Return how many bytes of keys and values all devices send together, for one batch entry, forward."""
        tokens = sum(sum(hop.tokens) * self._senders(hop.distance) for hop in self.hops)
        return 2 * tokens * self.head_shards * head_dim * itemsize

    def bytes_required(self, head_dim: int, itemsize: int) -> int:
        """Return the bytes that horizons ask for: each head's own, to the token, at the whole tolerance."""
        group = len(self.horizons) // self.num_kv_heads
        tokens = 0
        for sign in (1, -1):
            needs = np.asarray(self.horizons)[:, 0 if sign > 0 else 1].reshape(-1, group).max(axis=1)
            for distance in range(1, self.shards.num_chunks):
                sent = sum(self._of_hop(int(need), distance, 1) for need in needs)
                tokens += sent * self._senders(sign * distance)
        return 2 * tokens * head_dim * itemsize

    def bytes_of_ring(self, head_dim: int, itemsize: int) -> int:
        """Return the bytes of a full ring, in which each device sends its shard on until all have seen it."""
        n = self.shards.num_shards
        return 2 * n * (n - 1) * self.shards.shard_len * self.num_kv_heads * head_dim * itemsize

    def work(self) -> Any:
        """Return how many pairs of queries and keys, in all heads, each shard computes: int64 ``[num_shards]``."""
        length = self.shards.length
        positions = np.arange(self.shards.padded_length)
        pairs = np.zeros_like(positions)
        for past, future in self.horizons:
            pairs += np.minimum(positions, past) + 1 + np.clip(length - 1 - positions, 0, future)
        pairs[length:] = 0
        return pairs[self.shards.order()].reshape(self.shards.num_shards, -1).sum(axis=1)

    def _of_hop(self, need: int, distance: int, piece: int) -> int:
        size = self.shards.chunk_len
        rest = min(max(need - (distance - 1) * size, 0), size)
        return min(-(-rest // piece) * piece, size)

    def _senders(self, distance: int) -> int:
        """Return how many chunks are sent to another device in a hop."""
        slots = range(self.shards.slots)
        pairs = [pair for a in slots for b in slots for pair in self.shards.pairs(distance, a, b)]
        return sum(source != target for source, target in pairs)


def shard_plan(
    slopes: int | Array,
    shards: Shards,
    *,
    score_bound: float,
    tolerance: float | None = None,
    is_causal: bool = True,
    future_slopes: Array | None = None,
    window_size: int | None = None,
    num_kv_heads: int | None = None,
    head_shards: int = 1,
) -> ShardPlan:
    """Return which keys shards of a sequence have to send each other, from slopes and a bound of scores.

    The queries of a chunk need the keys within the horizon of their head before it (and after it, if not causal), so a
    steep head sends a few tokens to a neighbour, and a flat one perhaps whole chunks to several. A quarter of the
    tolerance is for the keys that are not sent.

    Devices that have different heads run one program: where heads are divided too, each key/value head of a device
    gets the farthest horizon of those that have its place on any device.

    Args:
        slopes: ``[num_heads]``, those of all devices together, whose values can be read, or an int for that many
            canonical slopes.
        shards: How the sequence is divided.
        score_bound: By how much the scaled score of any key may exceed the logarithm of the sum of what its query's
            keys weigh, such as that of the key at the query's own position; as for :func:`alibi_core.horizon`.
        tolerance: The share of softmax weight that may be left out. Default ``2**-24``. With 0 all is sent.
        is_causal: Whether keys after the query are masked.
        future_slopes: With ``is_causal=False``, the slopes for keys after the query. Default ``slopes``.
        window_size: Keys farther than this are masked.
        num_kv_heads: Key/value heads of all devices together. Default ``num_heads``.
        head_shards: Among how many devices heads are divided, in order.

    Raises:
        TypeError: If an argument is of the wrong kind, or slopes cannot be read.
        ValueError: If a value or shape is wrong.

    Example:
        Eight shards of 8,192 tokens, eight heads:

        >>> plan = shard_plan(8, Shards(8, 8192), score_bound=14.0)
        >>> plan.past
        (65, 134, 273, 557, 1136, 2316, 4720, 9617)
        >>> [(hop.distance, sum(hop.tokens)) for hop in plan.hops]
        [(1, 17440), (2, 1440)]
        >>> f"{plan.bytes_of_ring(64, 2) / plan.bytes_exchanged(64, 2):.1f}"
        '28.1'

    References:
        Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers", arXiv 2310.01889, for the full ring.
    """
    if not isinstance(shards, Shards):
        raise TypeError(f"shards must be alibi_core.Shards, got {type(shards).__name__}")
    checks.direction(is_causal, future_slopes)
    bound = checks.non_negative_number("score_bound", score_bound)
    tolerance = 2.0**-24 if tolerance is None else checks.non_negative_number("tolerance", tolerance)
    tolerance = min(tolerance, LARGEST_TOLERANCE)
    window = None if window_size is None else checks.window(window_size)
    behind = _values("slopes", slopes)
    ahead = behind if future_slopes is None else _values("future_slopes", future_slopes, len(behind))
    num_kv_heads = len(behind) if num_kv_heads is None else checks.positive_int("num_kv_heads", num_kv_heads)
    devices = checks.positive_int("head_shards", head_shards)
    if len(behind) % num_kv_heads:
        raise ValueError(f"num_kv_heads must divide num_heads, got {num_kv_heads} and {len(behind)}")
    if num_kv_heads % devices:
        raise ValueError(f"head_shards must divide num_kv_heads, got {devices} and {num_kv_heads}")

    def needed(values: Any, share: float) -> Any:
        """Return how far keys count, in tokens, at most as far as there are any."""
        side = share * tolerance * (1.0 if is_causal else 0.5)
        limit = shards.padded_length if window is None else min(shards.padded_length, window)
        with np.errstate(over="ignore"):
            tokens = reach(np, values, np.asarray(bound), side) - 1
        return np.clip(tokens, 0, limit).astype(np.int64)

    def of_device(values: Any) -> tuple[int, ...]:
        by_place = needed(values, HALO_SHARE).reshape(devices, num_kv_heads // devices, -1)
        return tuple(by_place.max(axis=(0, 2)).tolist())

    past = of_device(behind)
    exact = [needed(values, 1.0) for values in (behind, ahead)]
    return ShardPlan(
        shards=shards,
        past=past,
        future=(0,) * len(past) if is_causal else of_device(ahead),
        head_shards=devices,
        tolerance=tolerance,
        is_causal=bool(is_causal),
        window_size=window,
        horizons=tuple(zip(exact[0].tolist(), (exact[1] * (not is_causal)).tolist(), strict=True)),
        num_kv_heads=num_kv_heads,
    )


def tokens_beyond(xp: Namespace, slopes: Any, excess: Any, tolerance: float, inside: Any, limit: Any) -> Any:
    """Return how many tokens beyond its chunk each query needs on one side, as whole numbers of the dtype of slopes.

    By ``excess``, ``[..., num_heads, chunk_len]``, a score may exceed what bounds the log-sum-exp from below; on that
    side each query has ``inside``, ``[chunk_len]``, tokens of its chunk and at most ``limit`` beyond it.
    """
    far = reach(xp, slopes, excess, tolerance) - 1 - inside
    far = xp.where(far < 0, xp.zeros_like(far), far)
    return xp.where(far < limit, far, limit)  # a NaN compares as too far


def _values(name: str, slopes: Any, num_heads: int | None = None) -> Any:
    """Return slopes as float64 values of NumPy."""
    if checks.is_int(slopes):
        return np.asarray(canonical_slopes(checks.positive_int(name, slopes)), np.float64)
    values = host_values(checks.array(name, slopes))
    if values is None:
        raise TypeError(f"{name} must have values that can be read when the plan is made, got {type(slopes).__name__}")
    if values.ndim != 1 or (num_heads is not None and len(values) != num_heads):
        expected = "[num_heads]" if num_heads is None else f"({num_heads},)"
        raise ValueError(f"{name} must have shape {expected}, got {values.shape}")
    checks.slopes_values(name, slopes, allow_negative=True)
    return values.astype(np.float64)
