"""A cache that forgets the keys that no query to come can need."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from alibi_core import AttentionCall, horizon
from alibi_core.backend import LARGEST_TOLERANCE, UNIT_ROUNDOFF, checks, namespace_of
from alibi_mlx import _attention
from alibi_mlx._tiled import EPS, TINY, norm_bounds
from alibi_mlx.caches._kv_cache import check_appended

ROOM = 64  # tokens, at least, that a group of heads makes room for at a time
LARGEST_FLOAT = (2 - EPS) * 2.0**127  # of float32
FEW = 16  # queries; so few are not worth a second look: what is kept is about what they need


class EvictingKVCache:
    """A key/value cache whose heads keep no more keys than their horizons allow.

    Let no query's norm exceed ``Q``. When a key ``j`` is dropped, before the token at position ``p`` is appended, no
    key so far exceeds some norm ``K``, and ``j`` is at least ``w`` tokens before the last of them, ``p - 1``. To any
    query from then on, the scaled score of ``j`` is at most ``scale * Q * K``, that of the key at ``p - 1`` at least
    minus that, and ``j`` is at least ``w`` tokens further away. So all keys dropped together weigh at most
    ``exp(2 * scale * Q * K) * exp(-slope * w) / (1 - exp(-slope))`` times that key, which is what
    :func:`alibi_core.horizon` makes as small as the tolerance. Keys dropped at another time are bounded by another
    such key, and the keys that bound do not weigh more than all: the share left out never exceeds the tolerance,
    whatever keys are to come.

    Heads of similar slopes share their storage. The keys of all tokens appended at once are kept until the next are.
    Norms are read, and keys dropped, only where room has to be made: at the first step, after a long one, and at
    every 64th or so. Only there is a query of too large a norm refused with an error; elsewhere the results from then
    on are NaN, and the next append that makes room raises the error.

    Attributes:
        length: Tokens appended.

    Args:
        slopes: ``[num_heads]``, not negative. Heads whose slope is 0 keep everything.
        max_query_norm: What no query's norm will exceed.
        batch_size: Sequences. Default: as many as the first keys are of.
        max_length: Tokens that a head may hold at a time; sequences may be longer where horizons are shorter. Default:
            any number.
        scale: Factor of the scores. Default ``head_dim ** -0.5``.
        window_size: Keys farther than this many tokens are masked.
        tolerance: The share of softmax weight that may be left out. Default the rounding error of the keys' dtype.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value or a shape is wrong.

    Example:
        >>> cache = EvictingKVCache(slopes=mx.array([2.0, 0.0]), max_query_norm=1.0)
        >>> for _ in range(200):
        ...     cache.append(mx.ones((1, 2, 1, 4)), mx.ones((1, 2, 1, 4)))
        >>> cache.length, cache.kept[0] < 90, cache.kept[1]
        (200, True, 200)
    """

    def __init__(
        self,
        *,
        slopes: mx.array,
        max_query_norm: float,
        batch_size: int | None = None,
        max_length: int | None = None,
        scale: float | None = None,
        window_size: int | None = None,
        tolerance: float | None = None,
    ) -> None:
        if not isinstance(slopes, mx.array) or slopes.ndim != 1:
            raise TypeError(f"slopes must be an MLX array of one axis, got {getattr(slopes, 'shape', slopes)}")
        checks.floating_array(namespace_of(xp=mx), "slopes", slopes)
        checks.slopes_values("slopes", slopes, allow_negative=False)
        self._slopes = _on_host(slopes)  # a copy, as the horizons are of these
        self._slopes_dtype = str(slopes.dtype).rpartition(".")[2]  # a name, for dtypes cannot be copied
        self._max_query_norm = checks.positive_number("max_query_norm", max_query_norm)
        self.batch_size = None if batch_size is None else checks.positive_int("batch_size", batch_size)
        self.max_length = None if max_length is None else checks.positive_int("max_length", max_length)
        self._given_scale = None if scale is None else checks.real_number("scale", scale)
        self._window_size = None if window_size is None else checks.window(window_size)
        self._given_tolerance = None if tolerance is None else checks.non_negative_number("tolerance", tolerance)
        self._forget()

    def _forget(self) -> None:
        self.length = 0
        self._groups: list[_Group] = []
        self._largest = np.zeros(0)  # norm of a key, by key/value head, of the first `_known` tokens
        self._known = 0
        self._evicted = 0  # the position up to which queries would miss keys
        self._looks_next = False  # whether the next append reads norms even if there is room
        self._looked = False  # whether the last one did
        self._query_norm = mx.array(0.0)  # the largest since it was last read

    @property
    def offset(self) -> int:
        """Tokens appended, as mlx-lm calls them."""
        return self.length

    @property
    def kept(self) -> list[int]:
        """Tokens that each key/value head holds."""
        counts = {head: group.count for group in self._groups for head in group.heads}
        return [counts[head] for head in sorted(counts)]

    @property
    def nbytes(self) -> int:
        """Memory of keys and values, room for more included."""
        return sum(x.nbytes for x in self.state)

    @property
    def state(self) -> list[mx.array]:
        """All arrays held, for ``mx.eval``."""
        return [x for group in self._groups for x in (group.key, group.value)]

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Drop what no query of these tokens, or later ones, can need, and store their keys and values.

        Args:
            keys: ``[batch, num_kv_heads, new, head_dim]``.
            values: Likewise.

        Raises:
            TypeError: If an argument is no floating MLX array of four axes.
            ValueError: If a head would hold more than ``max_length`` tokens, the cache holds another batch, shape or
                dtype, or a query since the last append that made room was of too large a norm.
        """
        if self.length == 0:
            self._forget()  # whatever a refused call brought decides nothing
        like = self._like() if self._groups else None
        check_appended(keys, values, like, like, self.batch_size)
        if values.shape[3] != keys.shape[3]:
            raise ValueError(f"values must have the head_dim of keys, {keys.shape[3]}, got {values.shape[3]}")
        groups = self._groups or self._grouped(keys)
        new = keys.shape[2]
        looks = self._looks_next or any(group.count + new > group.key.shape[2] for group in groups)
        if looks:
            self._make_room(groups, new)
        for group in groups:
            group.add(_of_heads(keys, group.heads), _of_heads(values, group.heads))
        self._groups, self._looked, self._looks_next = groups, looks, new > ROOM
        self.length += new

    def _grouped(self, keys: mx.array) -> list[_Group]:
        """Return groups, still empty, of the key/value heads whose least slopes are within a factor of 2."""
        num_heads, num_kv_heads = len(self._slopes), keys.shape[1]
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads, {num_heads} (slopes), got {num_kv_heads}")
        head_dim, tolerance = keys.shape[3], self._given_tolerance
        self._scale = head_dim**-0.5 if self._given_scale is None else self._given_scale
        if tolerance is None:
            tolerance = UNIT_ROUNDOFF[str(keys.dtype).removeprefix("mlx.core.")]
        # One half is for what is dropped, the other for what the attention over the rest leaves out.
        self._tolerance = min(tolerance, LARGEST_TOLERANCE) / 2
        # What norm_bounds says at most of a query that is as long as allowed.
        limit = self._max_query_norm * (1 + 2 * (head_dim + 8) * EPS) + 2 * (head_dim * TINY) ** 0.5
        self._query_limit = min(limit, LARGEST_FLOAT)  # or infinity would be within it
        self._largest = np.zeros(num_kv_heads)
        by_kv_head = self._slopes.reshape(num_kv_heads, -1)
        least = by_kv_head.min(axis=1).tolist()
        members: dict[int | None, list[int]] = {}
        for head, slope in enumerate(least):
            members.setdefault(math.frexp(slope)[1] if slope > 0 else None, []).append(head)
        return [
            _Group(
                heads,
                min(least[head] for head in heads),
                mx.array(by_kv_head[heads].reshape(-1), dtype=getattr(mx, self._slopes_dtype)),
                *(mx.zeros((keys.shape[0], len(heads), 0, head_dim), keys.dtype) for _ in range(2)),
            )
            for heads in members.values()
        ]

    def _make_room(self, groups: list[_Group], new: int) -> None:
        """Read the norms that were not known yet, and make room for ``new`` tokens beside those that may be needed."""
        query_norm = self._query_norm.item()
        if query_norm > self._query_limit:
            self._query_norm = mx.array(0.0)  # this is how that is told
            raise ValueError(self._refusal(query_norm) + "; the results since then are NaN")
        largest = self._largest.copy()
        if self._known < self.length:  # and those tokens are all held yet
            unknown = [group.key[:, :, group.count - (self.length - self._known) : group.count] for group in groups]
            norms = [norm_bounds(keys).max(axis=(0, 2)) for keys in unknown]
            mx.eval(norms)
            for group, found in zip(groups, norms, strict=True):
                largest[group.heads] = np.maximum(largest[group.heads], found.tolist())
        needs = [min(group.count, self._reach(group, largest)) for group in groups]
        most = math.inf if self.max_length is None else self.max_length
        if max(needs) + new > most:
            raise ValueError(
                f"cache must have room for {new} more tokens, got max_length {most} with {max(needs)} in use; make it "
                "longer with make_cache"
            )
        self._largest, self._known = largest, self.length
        for group, need in zip(groups, needs, strict=True):
            if group.make_room(need, new, most):
                self._evicted = self.length

    def _reach(self, group: _Group, largest: np.ndarray) -> int:
        """Return how many of the last keys so far may matter to queries that are to come."""
        score_range = 2 * abs(self._scale) * self._query_limit * largest[group.heads].max().item()
        reach = self.length
        if group.slope > 0 and math.isfinite(score_range):
            reach = min(reach, horizon(np.asarray([group.slope]), score_range, tolerance=self._tolerance).item())
        return int(reach if self._window_size is None else min(reach, self._window_size))

    def attend(
        self,
        query: mx.array,
        slopes: mx.array | None = None,
        *,
        mask: mx.array | None = None,
        segment_ids: tuple[mx.array, mx.array] | None = None,
        window_size: int | None = None,
        implementation: str | None = None,
    ) -> mx.array:
        """Return the causal attention of the last tokens appended over all tokens so far.

        Args:
            query: ``[batch, num_heads, q_len, head_dim]``.
            slopes: None, or what the cache was made for.
            mask: None: a key that hides another from a query cannot tell that the other no longer matters.
            segment_ids: None, likewise.
            window_size: None, or what the cache was made for.
            implementation: As for :func:`alibi_mlx.attention`.

        Returns:
            ``[batch, num_heads, q_len, head_dim]``; NaN if a query's norm exceeds ``max_query_norm`` where no room was
            made.

        Raises:
            TypeError: If an argument is of the wrong kind.
            ValueError: If a query's norm exceeds ``max_query_norm`` where room was made, if keys that a query needs
                have been dropped, or if shapes, slopes or masks are not those that the cache was made for.
        """
        if implementation is not None:
            checks.one_of("implementation", implementation, _attention.IMPLEMENTATIONS)
        self._check_attend(query, slopes, mask, segment_ids, window_size)
        query_norm = norm_bounds(query).max() if query.size else mx.array(0.0)
        if self._looked and query_norm.item() > self._query_limit:  # the host has waited anyway
            self._looks_next = True  # so that another try is told so too
            raise ValueError(self._refusal(query_norm.item()))
        share = len(self._slopes) // len(self._largest)  # query heads a key/value head
        tolerance = 0.0 if query.shape[2] <= FEW else self._tolerance
        rules: dict[str, Any] = {"window_size": self._window_size, "scale": self._scale, "tolerance": tolerance}
        parts, order = [], []
        for group in self._groups:
            heads = [head * share + i for head in group.heads for i in range(share)]
            part, (key, value) = _of_heads(query, heads), group.held
            call = AttentionCall.check(part, key, value, group.slopes, xp=mx, **rules)
            parts.append(_attention.run(call, part, key, value, implementation, None))
            order += heads
        result = _of_heads(mx.concatenate(parts, axis=1), np.argsort(order).tolist())
        self._query_norm = mx.maximum(self._query_norm, query_norm)
        return mx.where(self._query_norm <= self._query_limit, result, mx.nan)

    def _like(self) -> mx.array:
        """Return an array of the shape and dtype of one token's keys."""
        one = self._groups[0].key[:, :1, :1]
        return mx.broadcast_to(one, (one.shape[0], len(self._largest), *one.shape[2:]))

    def _refusal(self, query_norm: float) -> str:
        return (
            f"query must have norms of at most max_query_norm, {self._max_query_norm:g}, for which keys are kept, got "
            f"{query_norm:g}; make the cache with a larger one"
        )

    def _check_attend(self, query: mx.array, slopes: Any, mask: Any, segment_ids: Any, window_size: int | None) -> None:
        for name, given in (("mask", mask), ("segment_ids", segment_ids)):
            if given is not None:
                raise ValueError(f"{name} must be None with a cache that evicts; make it with evict=False")
        if not self._groups or self.length == 0:
            raise ValueError("cache must hold the tokens that query is of, got an empty one; see append")
        like = self._like()
        call = AttentionCall.check(query, like, like, slopes, xp=mx)
        if call.num_heads != len(self._slopes):
            raise ValueError(f"query must have {len(self._slopes)} heads, as many as the cache, got {call.num_heads}")
        if slopes is not None and not (isinstance(slopes, mx.array) and np.array_equal(_on_host(slopes), self._slopes)):
            raise ValueError("slopes must be those that the cache was made for; make a new one")
        if window_size is not None and window_size != self._window_size:
            raise ValueError(f"window_size must be what the cache was made for, {self._window_size}, got {window_size}")
        if self.length - query.shape[2] < self._evicted:
            raise ValueError(
                f"query must be of the {self.length - self._evicted} last tokens, whose keys are all held, "
                f"got q_len {query.shape[2]}"
            )

    def truncate(self, length: int) -> None:
        """Forget the last tokens, so that ``length`` remain.

        Raises:
            TypeError: If ``length`` is no integer.
            ValueError: If keys that then were among the last have been dropped.
        """
        checks.non_negative_int("length", length)
        if length < self._evicted:
            raise ValueError(f"length must be at least {self._evicted}, before which keys were dropped, got {length}")
        for group in self._groups:
            group.count -= max(self.length - length, 0)
        self.length = min(self.length, length)
        self._known = min(self._known, self.length)

    def trim(self, n: int) -> int:
        """Forget the last ``n`` tokens, as mlx-lm calls it, and return how many those were."""
        before = self.length
        self.truncate(max(before - checks.non_negative_int("n", n), 0))
        return before - self.length


@dataclass
class _Group:
    """The keys and values of some heads: the last ``count`` tokens, in order, with room for more behind them."""

    heads: list[int]
    slope: float  # the least
    slopes: mx.array  # of their query heads
    key: mx.array
    value: mx.array
    count: int = 0

    @property
    def held(self) -> tuple[mx.array, mx.array]:
        return self.key[:, :, : self.count], self.value[:, :, : self.count]

    def make_room(self, need: int, new: int, most: float) -> bool:
        """Make room for ``new`` tokens beside the last ``need``, and return whether others were dropped for it."""
        room = self.key.shape[2]
        wanted = int(min(need + new + max(ROOM, (need + new) // 4), most))
        if self.count + new <= room <= 4 * wanted:
            return False
        self.key, self.value = (
            mx.pad(x[:, :, self.count - need : self.count], [(0, 0), (0, 0), (0, wanted - need), (0, 0)])
            for x in (self.key, self.value)
        )
        dropped, self.count = self.count > need, need
        return dropped

    def add(self, key: mx.array, value: mx.array) -> None:
        end = self.count + key.shape[2]
        self.key[:, :, self.count : end] = key
        self.value[:, :, self.count : end] = value
        self.count = end


def _of_heads(array: mx.array, heads: list[int]) -> mx.array:
    """Return those heads of ``[batch, heads, ...]``: a view where they follow one another."""
    if heads == list(range(heads[0], heads[0] + len(heads))):
        return array[:, heads[0] : heads[0] + len(heads)]
    return mx.take(array, mx.array(heads), axis=1)


def _on_host(slopes: mx.array) -> np.ndarray:
    """Return slopes as float64; MLX 0.29 makes no list of that, and NumPy has no bfloat16."""
    return np.array(slopes if slopes.dtype == mx.float64 else slopes.astype(mx.float32), dtype=np.float64)
