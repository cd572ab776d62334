"""What the caches of all backends decide and say alike, in numbers alone: above all, when a key may be dropped."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from alibi_core._arrays import Namespace, checks, host_values, namespace_of
from alibi_core._horizon import LARGEST_TOLERANCE, UNIT_ROUNDOFF, horizon

EPS, TINY = 2.0**-23, 2.0**-126  # of float32: the spacing at 1, and the least normal number


@dataclass(frozen=True)
class HeadGroup:
    """Key/value heads that share their storage, for their slopes are within a factor of 2."""

    heads: tuple[int, ...]  # indices of the key/value heads
    query_heads: tuple[int, ...]  # and of the query heads that read them, in their order
    slope: float  # the least of those


@dataclass
class HeldTokens:
    """The keys and values of some heads: the last ``count`` tokens, in order, with room for more behind them.

    Of a library whose arrays can be assigned to in part; a backend says how they are moved.
    """

    which: HeadGroup
    key: Any
    value: Any
    count: int = 0

    @staticmethod
    def moved(array: Any, last: slice, room: int) -> Any:
        """Return the tokens ``last`` of an array, with room for so many in all."""
        raise NotImplementedError

    @property
    def held(self) -> tuple[Any, Any]:
        """Keys and values, without the room."""
        return self.key[:, :, : self.count], self.value[:, :, : self.count]

    def make_room(self, need: int, new: int, wanted: int) -> bool:
        """Make room for ``new`` tokens beside the last ``need``, and return whether others were dropped for it."""
        if self.count + new <= self.key.shape[2] <= 4 * wanted:
            return False
        last = slice(self.count - need, self.count)
        self.key, self.value = (self.moved(x, last, wanted) for x in (self.key, self.value))
        dropped, self.count = self.count > need, need
        return dropped

    def add(self, key: Any, value: Any) -> None:
        """Store further tokens, for which there is room."""
        end = self.count + key.shape[2]
        self.key[:, :, self.count : end] = key
        self.value[:, :, self.count : end] = value
        self.count = end


@dataclass(frozen=True)
class EvictionRules:
    """What a cache that evicts is made for, checked; None stands for a default that depends on the keys."""

    slopes: tuple[float, ...]
    max_query_norm: float
    scale: float | None = None
    window_size: int | None = None
    tolerance: float | None = None
    room: int = 64  # tokens, at least, that a group of heads makes room for at a time

    @classmethod
    def check(
        cls, slopes: Any, values: Any, max_query_norm: Any, *, scale: Any, window_size: Any, tolerance: Any
    ) -> EvictionRules:
        """Check the arguments that the evicting caches of all backends have, as they were given.

        ``values`` are the slopes in NumPy; None if they cannot be read.
        """
        if len(getattr(slopes, "shape", ())) != 1:
            raise TypeError(f"slopes must be an array of one axis, got {getattr(slopes, 'shape', slopes)}")
        checks.floating_array(namespace_of(slopes), "slopes", slopes)
        if values is None:
            raise ValueError("slopes must be known when the cache is made, got an array whose values are not")
        checks.slopes_values("slopes", values, allow_negative=False)
        return cls(
            tuple(values.tolist()),
            checks.positive_number("max_query_norm", max_query_norm),
            None if scale is None else checks.real_number("scale", scale),
            None if window_size is None else checks.window(window_size),
            None if tolerance is None else checks.non_negative_number("tolerance", tolerance),
        )

    def policy(self, num_kv_heads: int, head_dim: int, dtype_name: str) -> EvictionPolicy:
        """Return the policy for keys of these sizes and this dtype: float32, say."""
        num_heads = len(self.slopes)
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads, {num_heads} (slopes), got {num_kv_heads}")
        share = num_heads // num_kv_heads
        least = [min(self.slopes[head * share : (head + 1) * share]) for head in range(num_kv_heads)]
        members: dict[int | None, list[int]] = {}
        for head, slope in enumerate(least):
            members.setdefault(math.frexp(slope)[1] if slope > 0 else None, []).append(head)
        groups = tuple(
            HeadGroup(
                tuple(heads),
                tuple(head * share + i for head in heads for i in range(share)),
                min(least[head] for head in heads),
            )
            for heads in members.values()
        )
        tolerance = UNIT_ROUNDOFF[dtype_name] if self.tolerance is None else self.tolerance
        limit = self.max_query_norm * (1 + 2 * (head_dim + 8) * EPS) + 2 * (head_dim * TINY) ** 0.5
        return EvictionPolicy(
            groups=groups,
            max_query_norm=self.max_query_norm,
            measured_limit=min(limit, (2 - EPS) * 2.0**127),  # or infinity would be within it
            scale=head_dim**-0.5 if self.scale is None else self.scale,
            window_size=self.window_size,
            tolerance=min(tolerance, LARGEST_TOLERANCE),
            room=self.room,
        )


@dataclass(frozen=True)
class EvictionPolicy:
    """Which keys may be dropped, how much room is made, and what is refused.

    Let no query's norm exceed ``Q``. When a key ``j`` is dropped, before the token at position ``p`` is appended, no
    key so far exceeds some norm ``K``, and ``j`` is at least ``w`` tokens before the last of them, ``p - 1``. To any
    query from then on, the scaled score of ``j`` is at most ``scale * Q * K``, that of the key at ``p - 1`` at least
    minus that, and ``j`` is at least ``w`` tokens further away. So all keys dropped together weigh at most
    ``exp(2 * scale * Q * K) * exp(-slope * w) / (1 - exp(-slope))`` times that key, which is what
    :func:`alibi_core.horizon` makes as small as the tolerance. Keys dropped at another time are bounded by another
    such key, and the keys that bound do not weigh more than all: the share left out never exceeds the tolerance,
    whatever keys are to come.
    """

    groups: tuple[HeadGroup, ...]  # the key/value heads, by their slopes
    max_query_norm: float  # what no query's norm exceeds
    measured_limit: float  # what float32 may measure of a query as long as that, at most
    scale: float
    window_size: int | None
    tolerance: float  # the share of softmax weight that may be left out
    room: int  # tokens, at least, that a group of heads makes room for at a time

    @property
    def share_dropped(self) -> float:
        """The share of weight that dropped keys may have: half. Attention to the rest may leave out the other."""
        return self.tolerance / 2

    def score_range(self, key_norm: Any) -> Any:
        """Return how far apart two scores may be, for keys of at most this norm: a number or an array."""
        return 2 * abs(self.scale) * self.measured_limit * key_norm

    def reach(self, group: HeadGroup, key_norm: float, length: int, added_range: float = 0.0) -> int:
        """Return how many of the last keys of ``length`` may matter to queries that are to come.

        No norm of the heads' keys so far exceeds ``key_norm``; ``added_range`` is how far apart two numbers may be that
        are added to the bias of keys.
        """
        excess, reach = self.score_range(key_norm) + added_range, length
        if group.slope > 0 and math.isfinite(excess):
            reach = min(reach, horizon(np.asarray([group.slope]), excess, tolerance=self.share_dropped).item())
        return int(reach if self.window_size is None else min(reach, self.window_size))

    def storage(self, need: int, new: int, most: float) -> int:
        """Return for how many tokens to have storage: ``need`` stay, ``new`` are added, ``most`` are allowed."""
        return int(min(need + new + max(self.room, (need + new) // 4), most))

    def check_rules(self, *, mask: Any, segment_ids: Any, window_size: Any, scale: Any, tolerance: Any) -> None:
        """Check that a call of attention has the rules by which the cache dropped keys."""
        for name, given in (("mask", mask), ("segment_ids", segment_ids)):
            if given is not None:
                raise ValueError(f"{name} must be None with a cache that evicts; make it with evict=False")
        for name, given in (("window_size", window_size), ("scale", scale), ("tolerance", tolerance)):
            if given is not None and given != getattr(self, name):
                raise ValueError(f"{name} must be what the cache was made for, {getattr(self, name)}, got {given}")

    def check_query_norm(self, measured: float, limit: float) -> None:
        """Check that a query, whose norm was measured, is as short as was promised."""
        if not measured <= limit:
            raise ValueError(
                f"query must have norms of at most max_query_norm, {self.max_query_norm:g}, for which keys are kept, "
                f"got {measured:g}; make the cache with a larger one, or one that does not evict"
            )


def check_new_tokens(
    xp: Namespace, key: Any, value: Any, sizes: tuple[int, ...], dtype: Any, length_axis: int = 2
) -> None:
    """Check that new keys and values fit each other and a cache, in all but their number.

    ``sizes`` are the cache's ``(batch, num_kv_heads, head_dim of keys, head_dim of values)``; ``length_axis`` is the
    one of the four axes that counts tokens.
    """
    for name, new in (("key", key), ("value", value)):
        if len(getattr(new, "shape", ())) != 4:
            raise TypeError(f"{name} must be an array of four axes, got {getattr(new, 'shape', type(new).__name__)}")
        checks.floating_array(namespace_of(new, xp=xp, names=(name,)), name, new)
    axes = "batch, num_kv_heads, length, head_dim" if length_axis == 2 else "batch, length, num_kv_heads, head_dim"
    for name, new, head_dim in (("key", key, sizes[2]), ("value", value, sizes[3])):
        expected = [sizes[0], sizes[1], head_dim]
        expected.insert(length_axis, key.shape[length_axis])
        if tuple(new.shape) != tuple(expected):
            raise ValueError(
                f"{name} must have shape {tuple(expected)} ({axes}) to fit the cache, got {tuple(new.shape)}"
            )
        if new.dtype != dtype:
            raise ValueError(f"{name} must be {dtype} as the cache is, got {new.dtype}")


@dataclass(frozen=True)
class RowTokens:
    """New tokens of rows that hold different numbers of them, and where they go; all in NumPy."""

    rows: np.ndarray[Any, Any]  # of each token that counts
    columns: np.ndarray[Any, Any]  # where it lies among the new tokens of its row
    slots: np.ndarray[Any, Any]  # where it goes in the cache
    ends: np.ndarray[Any, Any]  # [batch]: how many tokens each row then holds

    @classmethod
    def of(cls, held: Any, counts: np.ndarray[Any, Any]) -> RowTokens:
        """Return the places of the first ``counts`` tokens of each row, of which ``held`` are held."""
        rows, columns = np.nonzero(np.arange(counts.max(initial=0)) < counts[:, None])
        starts = np.broadcast_to(np.asarray(held, np.int64), counts.shape)
        return cls(rows, columns, starts[rows] + columns, starts + counts)


def check_lengths(xp: Namespace, name: str, lengths: Any, batch_size: int, most: int = checks.MAX_POSITION) -> Any:
    """Return numbers of tokens, ``[batch_size]`` integers from 0 to ``most``, checked as far as values can be seen."""
    namespace = namespace_of(checks.array(name, lengths), xp=xp, names=(name,))
    shape = tuple(checks.integer_array(namespace, name, lengths).shape)
    if shape != (batch_size,):
        raise ValueError(f"{name} must have shape ({batch_size},) (batch_size), got {shape}")
    values = host_values(lengths)
    if values is not None and not np.all((values >= 0) & (values <= most)):
        raise ValueError(f"{name} must be from 0 to the number of tokens, {most}, got {values.astype(int).tolist()}")
    return lengths


def check_indices(xp: Namespace, indices: Any, batch_size: int) -> Any:
    """Return which sequences to keep, checked as far as values can be seen: libraries read others at a wrong index."""
    namespace = namespace_of(checks.array("indices", indices), xp=xp, names=("indices",))
    values = host_values(checks.integer_array(namespace, "indices", indices))
    if values is not None and not np.all((values >= -batch_size) & (values < batch_size)):
        found = values.astype(int).tolist()
        raise IndexError(f"indices must be those of sequences, of which there are {batch_size}, got {found}")
    return indices


def check_room(new: int, max_length: float, held: Any) -> None:
    """Check that ``new`` tokens fit beside those that a cache has to hold, whose number may be unknown (None)."""
    if (held or 0) + new > max_length:
        raise ValueError(
            f"cache must have room for {new} more tokens, got max_length {max_length} with "
            f"{'an unknown number' if held is None else held} in use; make it longer with make_cache"
        )


def check_span(length: int, q_len: int, evicted: int = 0) -> None:
    """Check that the keys that ``q_len`` queries may need are held, those before ``evicted`` having been dropped."""
    if length == 0 < q_len:
        raise ValueError("cache must hold the tokens that query is of, got an empty one; see append")
    if length - q_len < evicted:
        raise ValueError(
            f"query must be of the {length - evicted} last tokens, whose keys are all held, got q_len {q_len}"
        )


def check_truncated(length: Any, evicted: int) -> int:
    """Check for a length that a cache can go back to, none of whose last keys have been dropped."""
    if checks.non_negative_int("length", length) < evicted:
        raise ValueError(f"length must be at least {evicted}, before which keys were dropped, got {length}")
    return int(length)


def cache_summary(name: str, shape: tuple[int, ...], length: Any, capacity: Any, nbytes: int) -> str:
    """Return how a cache prints itself; ``shape`` is ``(batch, num_kv_heads, head_dim)``."""
    batch, heads, head_dim = shape
    return (
        f"{name}(batch_size={batch}, num_kv_heads={heads}, head_dim={head_dim}, length={length}, "
        f"max_length={capacity}, nbytes={nbytes})"
    )
