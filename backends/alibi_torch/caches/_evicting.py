"""A cache that forgets the keys that no query to come can need."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor

from alibi_core import AttentionCall, horizon
from alibi_core.backend import LARGEST_TOLERANCE, UNIT_ROUNDOFF, non_negative_int, one_of, positive_int, positive_number
from alibi_torch._attention import run
from alibi_torch._dispatch import IMPLEMENTATIONS
from alibi_torch._tiled import SIZES, norm_bounds
from alibi_torch.caches._kv_cache import KVCache, check_appended

ROOM = 64  # tokens, at least, that a group of heads makes room for at a time


class EvictingKVCache(KVCache):
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

    Attributes:
        length: Tokens appended.
    """

    def __init__(
        self,
        batch_size: int,
        num_kv_heads: int,
        max_length: int,
        head_dim: int,
        *,
        slopes: Tensor,
        max_query_norm: float,
        scale: float | None = None,
        window_size: int | None = None,
        tolerance: float | None = None,
        key_bias: Callable[[Tensor], Tensor] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make an empty cache.

        Args:
            batch_size: Sequences.
            num_kv_heads: Key/value heads.
            max_length: Tokens that a head may hold at a time. Sequences may be longer where horizons are shorter.
            head_dim: Features a head.
            slopes: ``[num_heads]``, not negative. Heads whose slope is 0 keep everything.
            max_query_norm: What no query's norm will exceed. A query that does is refused.
            scale: Factor of the scores. Default ``head_dim ** -0.5``.
            window_size: Keys farther than this many tokens are masked.
            tolerance: The share of softmax weight that may be left out. Default the rounding error of ``dtype``.
            key_bias: What is added to the bias of the keys at positions ``[n]``: a function that returns it,
                ``[num_heads, n]``. So models keep the bias that a rule of their own rounds.
            device: Where keys and values live.
            dtype: Theirs.

        Raises:
            TypeError: If an argument is of the wrong kind.
            ValueError: If a value or a shape is wrong.
        """
        super().__init__(batch_size, num_kv_heads, 1, head_dim, device=device, dtype=dtype)
        self._max_length = positive_int("max_length", max_length)
        if not isinstance(slopes, Tensor) or slopes.ndim != 1:
            raise TypeError(f"slopes must be a tensor of one axis, got {getattr(slopes, 'shape', slopes)}")
        self._rules: dict[str, Any] = {"window_size": window_size, "scale": scale}
        query = self.key.new_zeros(self.key.shape[0], len(slopes), *self.key.shape[2:])
        call = AttentionCall.check(query, self.key, self.value, slopes, tolerance=tolerance, xp=xp, **self._rules)
        # A copy, as the horizons are of these: a layer may change its own in place.
        self._slopes = call.slopes.detach().clone()
        self._max_query_norm = positive_number("max_query_norm", max_query_norm)
        self._scale = call.scale
        self._window_size = window_size
        self._key_bias = key_bias
        if tolerance is None:
            tolerance = UNIT_ROUNDOFF[str(self.key.dtype).removeprefix("torch.")]
        # One half is for what is dropped, the other for what the attention over the rest leaves out.
        self._tolerance = min(tolerance, LARGEST_TOLERANCE) / 2
        self._largest_norms = [0.0] * self.key.shape[1]
        self._before = 0, self._largest_norms  # the length before the last tokens, and the norms then
        self._evicted = 0  # the position up to which queries would miss keys
        self._groups = self._grouped(self._slopes.cpu().double())

    def _grouped(self, slopes: Tensor) -> list[_Group]:
        """Return groups of the key/value heads whose least slopes are within a factor of 2."""
        num_kv_heads = self.key.shape[1]
        least = slopes.reshape(num_kv_heads, -1).amin(dim=1).tolist()
        members: dict[int | None, list[int]] = {}
        for head, slope in enumerate(least):
            members.setdefault(math.frexp(slope)[1] if slope > 0 else None, []).append(head)
        empty = self.key[:, :, :0]
        return [
            _Group(heads, min(least[h] for h in heads), empty[:, heads], empty[:, heads]) for heads in members.values()
        ]

    @property
    def max_length(self) -> int:
        """Capacity of a head, in tokens."""
        return self._max_length

    @property
    def kept(self) -> list[int]:
        """Tokens that each key/value head holds."""
        counts = {head: group.count for group in self._groups for head in group.heads}
        return [counts[head] for head in sorted(counts)]

    @property
    def nbytes(self) -> int:
        """Memory of keys and values, room for more included."""
        return sum(x.nbytes for group in self._groups for x in (group.key, group.value))

    def append(self, key: Tensor, value: Tensor) -> None:  # type: ignore[override]
        """Drop what no query of these tokens, or later ones, can need, and store their keys and values.

        Args:
            key: ``[batch_size, num_kv_heads, new, head_dim]``.
            value: Likewise.

        Raises:
            TypeError: If an argument is no tensor of four axes.
            ValueError: If a head would hold more than ``max_length`` tokens, or the cache holds another batch, dtype or
                device.
        """
        check_appended(key, value, self.key)
        new = key.shape[2]
        needs = [min(group.count, self._reach(group)) for group in self._groups]
        if max(needs) + new > self._max_length:
            raise ValueError(
                f"cache must have room for {new} more tokens, got max_length {self._max_length} with {max(needs)} in "
                "use; make it longer with make_cache"
            )
        for group, need in zip(self._groups, needs, strict=True):
            if group.make_room(need, new, self._max_length):
                self._evicted = self.length
            group.add(key[:, group.heads], value[:, group.heads])
        self._before = self.length, self._largest_norms
        norms = norm_bounds(key.detach()).amax(dim=(0, 2)).tolist() if new else [0.0] * key.shape[1]
        pairs = zip(self._largest_norms, norms, strict=True)
        self._largest_norms = [max(known, norm) if norm == norm else math.inf for known, norm in pairs]
        self.length += new

    def _reach(self, group: _Group) -> int:
        """Return how many of the last keys so far may matter to queries that are to come."""
        largest = max(self._largest_norms[head] for head in group.heads)
        score_range = 2 * abs(self._scale) * self._max_query_norm * largest
        if self._key_bias is not None and group.count > 0:
            least, most = torch.aminmax(self._added_to(group), dim=-1)
            score_range += (most - least).amax().item()
        reach = self.length
        if group.slope > 0 and math.isfinite(score_range):
            slope = torch.tensor([group.slope], dtype=torch.float64)
            reach = min(reach, horizon(slope, score_range, tolerance=self._tolerance).item())
        return int(reach if self._window_size is None else min(reach, self._window_size))

    def attend(  # type: ignore[override]
        self,
        query: Tensor,
        slopes: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        segment_ids: tuple[Tensor, Tensor] | None = None,
        window_size: int | None = None,
        implementation: str | None = None,
    ) -> Tensor:
        """Return the causal attention of the last tokens appended over all tokens so far.

        Args:
            query: ``[batch_size, num_heads, q_len, head_dim]``.
            slopes: None, or what the cache was made for.
            mask: None: a key that hides another from a query cannot tell that the other no longer matters.
            segment_ids: None, likewise.
            window_size: None, or what the cache was made for.
            implementation: As for :func:`alibi_torch.attention`.

        Returns:
            ``[batch_size, num_heads, q_len, head_dim]``.

        Raises:
            TypeError: If an argument is of the wrong kind.
            ValueError: If a query's norm exceeds ``max_query_norm``, if keys that a query needs have been dropped, or
                if shapes, slopes or masks are not those that the cache was made for.
        """
        if implementation is not None:
            one_of("implementation", implementation, IMPLEMENTATIONS)
        self._check_attend(query, slopes, mask, segment_ids, window_size)
        result = torch.empty_like(query)
        # Few queries are not worth a second look: what is kept is about what they need.
        tolerance = 0.0 if query.shape[2] <= SIZES.few else self._tolerance
        for group in self._groups:
            heads = self._query_heads(group)
            key, value = group.held
            part = query[:, heads]
            call = AttentionCall.check(part, key, value, self._slopes[heads], tolerance=tolerance, xp=xp, **self._rules)
            if self._key_bias is not None:
                call = replace(call, key_bias=self._added_to(group))
            result[:, heads] = run(call, part, key, value, implementation, None)
        return result

    def _query_heads(self, group: _Group) -> list[int]:
        share = len(self._slopes) // self.key.shape[1]  # query heads a key/value head
        return [head * share + i for head in group.heads for i in range(share)]

    def _added_to(self, group: _Group) -> Tensor:
        """Return what is added to the bias of the keys that a group holds, ``[heads, count]``."""
        assert self._key_bias is not None  # or it would not be asked for
        positions = torch.arange(self.length - group.count, self.length, device=self.key.device)
        return self._key_bias(positions)[self._query_heads(group)].to(self._slopes.dtype)

    def _check_attend(self, query: Tensor, slopes: Any, mask: Any, segment_ids: Any, window_size: int | None) -> None:
        for name, given in (("mask", mask), ("segment_ids", segment_ids)):
            if given is not None:
                raise ValueError(f"{name} must be None with a cache that evicts; make it with evict=False")
        given = self._slopes if slopes is None else slopes
        call = AttentionCall.check(query, self.key, self.value, given, xp=xp)
        if not torch.equal(call.slopes, self._slopes):
            raise ValueError("slopes must be those that the cache was made for; make a new one")
        if window_size is not None and window_size != self._window_size:
            raise ValueError(f"window_size must be what the cache was made for, {self._window_size}, got {window_size}")
        if self.length - query.shape[2] < self._evicted:
            raise ValueError(
                f"query must be of the {self.length - self._evicted} last tokens, whose keys are all held, "
                f"got q_len {query.shape[2]}"
            )
        largest = torch.linalg.vector_norm(query.detach().double(), dim=-1).amax().item() if query.numel() else 0.0
        if not largest <= self._max_query_norm:
            raise ValueError(
                f"query must have norms of at most max_query_norm, {self._max_query_norm:g}, for which keys are kept, "
                f"got {largest:g}; make the cache with a larger one"
            )

    def select_batch(self, indices: Tensor) -> None:
        """Keep the sequences at ``indices`` of the batch axis, as :meth:`KVCache.select_batch`."""
        super().select_batch(indices)
        for group in self._groups:
            group.key, group.value = (x.index_select(0, indices.to(x.device)) for x in (group.key, group.value))

    def truncate(self, length: int) -> None:
        """Forget the last tokens, so that ``length`` remain.

        Raises:
            ValueError: If keys that then were among the last have been dropped.
        """
        non_negative_int("length", length)
        if length < self._evicted:
            raise ValueError(f"length must be at least {self._evicted}, before which keys were dropped, got {length}")
        for group in self._groups:
            group.count -= max(self.length - length, 0)
        self.length = min(self.length, length)
        if self.length <= self._before[0]:
            self._largest_norms = self._before[1]  # what a refused call brought widens no horizon


@dataclass
class _Group:
    """The keys and values of some heads: the last ``count`` tokens, in order, with room for more behind them."""

    heads: list[int]
    slope: float  # the least
    key: Tensor
    value: Tensor
    count: int = 0

    @property
    def held(self) -> tuple[Tensor, Tensor]:
        return self.key[:, :, : self.count], self.value[:, :, : self.count]

    def make_room(self, need: int, new: int, most: int) -> bool:
        """Make room for ``new`` tokens beside the last ``need``, and return whether others were dropped for it."""
        room = self.key.shape[2]
        wanted = min(need + new + max(ROOM, (need + new) // 4), most)
        if self.count + new <= room <= 4 * wanted:
            return False
        kept = [x[:, :, self.count - need : self.count] for x in (self.key, self.value)]
        if wanted <= room <= 4 * wanted:
            for tensor, last in zip((self.key, self.value), kept, strict=True):
                tensor[:, :, :need] = last.clone()  # they overlap
        else:
            self.key, self.value = (torch.cat([x, _zeros(x, wanted - need)], dim=2) for x in kept)
        dropped, self.count = self.count > need, need
        return dropped

    def add(self, key: Tensor, value: Tensor) -> None:
        end = self.count + key.shape[2]
        self.key[:, :, self.count : end] = key
        self.value[:, :, self.count : end] = value
        self.count = end


def _zeros(like: Tensor, length: int) -> Tensor:
    return like.new_zeros(*like.shape[:2], length, like.shape[3])
