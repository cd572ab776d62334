"""A cache that forgets the keys that no query to come can need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from alibi_core import AttentionCall
from alibi_core.backend import (
    EvictionRules,
    HeldTokens,
    cache_summary,
    check_indices,
    check_room,
    check_span,
    check_truncated,
    checks,
    explains_keywords,
)
from alibi_mlx import _attention
from alibi_mlx._tiled import norm_bounds
from alibi_mlx.caches._kv_cache import check_appended

FEW = 16  # queries; so few are not worth a second look: what is kept is about what they need


class EvictingKVCache:
    """A key/value cache whose heads keep no more keys than their horizons allow.

    It drops keys that weigh no more than the tolerance for any query whose norm is at most ``max_query_norm``,
    whatever keys are to come; the proof is that of :class:`alibi_core.backend.EvictionPolicy`.

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
        if not isinstance(slopes, mx.array):
            raise TypeError(f"slopes must be an MLX array of one axis, got {getattr(slopes, 'shape', slopes)}")
        options = {"scale": scale, "window_size": window_size, "tolerance": tolerance}
        self._rules = EvictionRules.check(slopes, _on_host(slopes), max_query_norm, **options)
        self._slopes_dtype = str(slopes.dtype).rpartition(".")[2]  # a name, for dtypes cannot be copied
        self.batch_size = None if batch_size is None else checks.positive_int("batch_size", batch_size)
        self.max_length = None if max_length is None else checks.positive_int("max_length", max_length)
        self._forget()

    def _forget(self) -> None:
        self.length = 0
        self.groups: list[_Group] = []
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
        counts = {head: group.count for group in self.groups for head in group.which.heads}
        return [counts[head] for head in sorted(counts)]

    @property
    def nbytes(self) -> int:
        """Memory of keys and values, room for more included."""
        return sum(x.nbytes for x in self.state)

    @property
    def state(self) -> list[mx.array]:
        """All arrays held, for ``mx.eval``."""
        return [x for group in self.groups for x in (group.key, group.value)]

    def __repr__(self) -> str:
        sizes = (self.batch_size, None, None)
        if self.groups:
            like = self.groups[0].key
            sizes = like.shape[0], len(self._largest), like.shape[3]
        return cache_summary(type(self).__name__, sizes, self.length, self.max_length, self.nbytes)

    @explains_keywords
    def append(self, key: mx.array, value: mx.array) -> None:
        """Drop what no query of these tokens, or later ones, can need, and store their keys and values.

        Args:
            key, value: ``[batch, num_kv_heads, new, head_dim]``.

        Raises:
            TypeError: If an argument is no floating MLX array of four axes.
            ValueError: If a head would hold more than ``max_length`` tokens, the cache holds another batch, shape or
                dtype, or a query since the last append that made room was of too large a norm.
        """
        if self.length == 0:
            self._forget()  # whatever a refused call brought decides nothing
        like = self._like() if self.groups else None
        check_appended(key, value, like, like, self.batch_size)
        if value.shape[3] != key.shape[3]:
            raise ValueError(f"value must have the head_dim of key, {key.shape[3]}, got {value.shape[3]}")
        groups = self.groups or self._grouped(key)
        new = key.shape[2]
        looks = self._looks_next or any(group.count + new > group.key.shape[2] for group in groups)
        if looks:
            self._make_room(groups, new)
        for group in groups:
            group.add(_of_heads(key, group.which.heads), _of_heads(value, group.which.heads))
        self.groups, self._looked, self._looks_next = groups, looks, new > self._policy.room
        self.length += new

    def _grouped(self, key: mx.array) -> list[_Group]:
        """Return groups, still empty, of the key/value heads of these keys."""
        batch_size, num_kv_heads, _, head_dim = key.shape
        self._policy = self._rules.policy(num_kv_heads, head_dim, str(key.dtype).removeprefix("mlx.core."))
        self._largest = np.zeros(num_kv_heads)
        slopes, dtype = np.asarray(self._rules.slopes), getattr(mx, self._slopes_dtype)
        return [
            _Group(
                which,
                *(mx.zeros((batch_size, len(which.heads), 0, head_dim), key.dtype) for _ in range(2)),
                slopes=mx.array(slopes[list(which.query_heads)], dtype=dtype),
            )
            for which in self._policy.groups
        ]

    def _make_room(self, groups: list[_Group], new: int) -> None:
        """Read the norms that were not known yet, and make room for ``new`` tokens beside those that may be needed."""
        query_norm = self._query_norm.item()
        if query_norm > self._policy.measured_limit:
            self._query_norm = mx.array(0.0)  # this is how that is told
            self._check_query_norm(query_norm, "; the results since then are NaN")
        largest = self._largest.copy()
        if self._known < self.length:  # and those tokens are all held yet
            unknown = [group.key[:, :, group.count - (self.length - self._known) : group.count] for group in groups]
            norms = [norm_bounds(keys).max(axis=(0, 2)) for keys in unknown]
            mx.eval(norms)
            for group, found in zip(groups, norms, strict=True):
                heads = list(group.which.heads)
                largest[heads] = np.maximum(largest[heads], found.tolist())
        needs = [min(group.count, self._reach(group, largest)) for group in groups]
        most = math.inf if self.max_length is None else self.max_length
        check_room(new, most, max(needs))
        self._largest, self._known = largest, self.length
        for group, need in zip(groups, needs, strict=True):
            if group.make_room(need, new, self._policy.storage(need, new, most)):
                self._evicted = self.length

    def _reach(self, group: _Group, largest: np.ndarray) -> int:
        """Return how many of the last keys so far may matter to queries that are to come."""
        return self._policy.reach(group.which, largest[list(group.which.heads)].max().item(), self.length)

    @explains_keywords
    def attend(
        self,
        query: mx.array,
        slopes: mx.array | None = None,
        *,
        mask: mx.array | None = None,
        segment_ids: tuple[mx.array, mx.array] | None = None,
        window_size: int | None = None,
        scale: float | None = None,
        tolerance: float | None = None,
        implementation: str | None = None,
    ) -> mx.array:
        """Return the causal attention of the last tokens appended over all tokens so far.

        Args:
            query: ``[batch, num_heads, q_len, head_dim]``.
            slopes, window_size, scale, tolerance: None, or what the cache was made for.
            mask, segment_ids: None: a key hidden from a query cannot tell that another no longer matters.
            implementation: As for :func:`alibi_mlx.attention`.

        Returns:
            ``[batch, num_heads, q_len, head_dim]``; NaN if a query's norm exceeds ``max_query_norm`` where no room was
            made.

        Raises:
            TypeError: If an argument is of the wrong kind.
            ValueError: If the cache is empty, if a query's norm exceeds ``max_query_norm`` where room was made, if keys
                that a query needs have been dropped, or if shapes, slopes or masks are not those that the cache was
                made for.
        """
        if implementation is not None:
            checks.one_of("implementation", implementation, _attention.IMPLEMENTATIONS)
        if not self.groups:
            raise ValueError("cache must hold the tokens that query is of, got an empty one; see append")
        policy = self._policy
        policy.check_rules(
            mask=mask, segment_ids=segment_ids, window_size=window_size, scale=scale, tolerance=tolerance
        )
        self._check_query(query, slopes)
        query_norm = norm_bounds(query).max() if query.size else mx.array(0.0)
        if self._looked and query_norm.item() > policy.measured_limit:  # the host has waited anyway
            self._looks_next = True  # so that another try is told so too
            self._check_query_norm(query_norm.item())
        rules: dict[str, Any] = {"tolerance": 0.0 if query.shape[2] <= FEW else policy.share_dropped}
        rules |= {"window_size": policy.window_size, "scale": policy.scale}
        parts, order = [], []
        for group in self.groups:
            part, (key, value) = _of_heads(query, group.which.query_heads), group.held
            call = AttentionCall.check(part, key, value, group.slopes, xp=mx, **rules)
            parts.append(_attention.run(call, part, key, value, implementation, None))
            order += group.which.query_heads
        result = _of_heads(mx.concatenate(parts, axis=1), np.argsort(order).tolist())
        self._query_norm = mx.maximum(self._query_norm, query_norm)
        return mx.where(self._query_norm <= policy.measured_limit, result, mx.nan)

    def _like(self) -> mx.array:
        """Return an array of the shape and dtype of one token's keys."""
        one = self.groups[0].key[:, :1, :1]
        return mx.broadcast_to(one, (one.shape[0], len(self._largest), *one.shape[2:]))

    def _check_query_norm(self, measured: float, consequence: str = "") -> None:
        try:
            self._policy.check_query_norm(measured, self._policy.measured_limit)
        except ValueError as error:
            raise ValueError(f"{error}{consequence}") from None

    def _check_query(self, query: mx.array, slopes: Any) -> None:
        """Check that a query is of the last tokens, and of the heads and slopes of this cache."""
        like = self._like()
        call = AttentionCall.check(query, like, like, slopes, xp=mx)
        known = np.asarray(self._rules.slopes)
        if call.num_heads != len(known):
            raise ValueError(f"query must have {len(known)} heads, as many as the cache, got {call.num_heads}")
        if slopes is not None and not (isinstance(slopes, mx.array) and np.array_equal(_on_host(slopes), known)):
            raise ValueError("slopes must be those that the cache was made for; make a new one")
        check_span(self.length, query.shape[2], self._evicted)

    def select_batch(self, indices: mx.array) -> None:
        """Keep the sequences at ``indices`` of the batch axis, as :meth:`KVCache.select_batch`."""
        if self.groups:
            check_indices(mx, indices, self.groups[0].key.shape[0])
        for group in self.groups:
            group.key, group.value = (mx.take(x, indices, axis=0) for x in (group.key, group.value))
        self.batch_size = None if self.batch_size is None else len(indices)

    def truncate(self, length: int) -> None:
        """Forget the last tokens, so that ``length`` remain.

        Raises:
            TypeError: If ``length`` is no integer.
            ValueError: If keys that then were among the last have been dropped.
        """
        length = check_truncated(length, self._evicted)
        for group in self.groups:
            group.count -= max(self.length - length, 0)
        self.length = min(self.length, length)
        self._known = min(self._known, self.length)

    def trim(self, n: int) -> int:
        """Forget the last ``n`` tokens, as mlx-lm calls it, and return how many those were."""
        before = self.length
        self.truncate(max(before - checks.non_negative_int("n", n), 0))
        return before - self.length


@dataclass
class _Group(HeldTokens):
    slopes: mx.array | None = None  # of their query heads

    @staticmethod
    def moved(array: mx.array, last: slice, room: int) -> mx.array:
        kept = array[:, :, last]
        return mx.pad(kept, [(0, 0), (0, 0), (0, room - kept.shape[2]), (0, 0)])


def _of_heads(array: mx.array, heads: Sequence[int]) -> mx.array:
    """Return those heads of ``[batch, heads, ...]``: a view where they follow one another."""
    if list(heads) == list(range(heads[0], heads[0] + len(heads))):
        return array[:, heads[0] : heads[0] + len(heads)]
    return mx.take(array, mx.array(list(heads)), axis=1)


def _on_host(slopes: mx.array) -> np.ndarray | None:
    """Return a copy in float64, None of what is no number; MLX 0.29 makes no list of that, NumPy has no bfloat16."""
    if not mx.issubdtype(slopes.dtype, mx.floating):
        return None
    return np.array(slopes if slopes.dtype == mx.float64 else slopes.astype(mx.float32), dtype=np.float64)
