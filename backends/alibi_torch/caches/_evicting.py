"""A cache that forgets the keys that no query to come can need."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import array_api_compat.torch as xp
import torch
import torch.nn.functional as F
from torch import Tensor

from alibi_core import AttentionCall
from alibi_core.backend import (
    EvictionRules,
    HeldTokens,
    check_room,
    check_span,
    check_truncated,
    explains_keywords,
    one_of,
    positive_int,
)
from alibi_torch._attention import run
from alibi_torch._cpu import SIZES, norm_bounds
from alibi_torch._dispatch import IMPLEMENTATIONS
from alibi_torch.caches._kv_cache import KVCache, check_appended, guarded


class EvictingKVCache(KVCache):
    """A key/value cache whose heads keep no more keys than their horizons allow.

    It drops keys that weigh no more than the tolerance for any query whose norm is at most ``max_query_norm``,
    whatever keys are to come; the proof is that of :class:`alibi_core.backend.EvictionPolicy`. Heads of similar slopes
    share their storage. The keys of all tokens appended at once are kept until the next are.

    Attributes:
        length: Tokens appended.

    Example:
        >>> cache = EvictingKVCache(1, 2, 200, 4, slopes=torch.tensor([2.0, 0.0]), max_query_norm=1.0)
        >>> for _ in range(200):
        ...     cache.append(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4))
        >>> cache.length, cache.kept[0] < 90, cache.kept[1]
        (200, True, 200)
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
        query = self.key.new_zeros(self.key.shape[0], len(slopes), *self.key.shape[2:])
        # A copy, as the horizons are of these: a layer may change its own in place.
        self._slopes = AttentionCall.check(query, self.key, self.value, slopes, xp=xp).slopes.detach().clone()
        options = {"scale": scale, "window_size": window_size, "tolerance": tolerance}
        rules = EvictionRules.check(slopes, self._slopes.double().cpu().numpy(), max_query_norm, **options)
        self._policy = rules.policy(self.key.shape[1], self.key.shape[3], str(self.key.dtype).removeprefix("torch."))
        self._key_bias = key_bias
        self._largest_norms = [0.0] * self.key.shape[1]
        self._before = 0, self._largest_norms  # the length before the last tokens, and the norms then
        self._evicted = 0  # the position up to which queries would miss keys
        empty = self.key[:, :, :0]
        self.groups = [_Group(x, empty[:, list(x.heads)], empty[:, list(x.heads)]) for x in self._policy.groups]

    @property
    def max_length(self) -> int:
        """Capacity of a head, in tokens."""
        return self._max_length

    @property
    def kept(self) -> list[int]:
        """Tokens that each key/value head holds."""
        counts = {head: group.count for group in self.groups for head in group.which.heads}
        return [counts[head] for head in sorted(counts)]

    @property
    def nbytes(self) -> int:
        """Memory of keys and values, room for more included."""
        return sum(x.nbytes for group in self.groups for x in (group.key, group.value))

    @explains_keywords
    def append(self, key: Tensor, value: Tensor) -> None:  # type: ignore[override]
        """Drop what no query of these tokens, or later ones, can need, and store their keys and values.

        Args:
            key: ``[batch_size, num_kv_heads, new, head_dim]``.
            value: Likewise.

        Raises:
            TypeError: If an argument is no floating tensor of four axes.
            ValueError: If a head would hold more than ``max_length`` tokens, or the cache holds another batch, dtype or
                device.
        """
        check_appended(key, value, self.key)
        new = key.shape[2]
        needs = [min(group.count, self._reach(group)) for group in self.groups]
        check_room(new, self._max_length, max(needs))
        for group, need in zip(self.groups, needs, strict=True):
            if group.make_room(need, new, self._policy.storage(need, new, self._max_length)):
                self._evicted = self.length
            group.add(key[:, list(group.which.heads)], value[:, list(group.which.heads)])
        self._before = self.length, self._largest_norms
        norms = norm_bounds(key.detach()).amax(dim=(0, 2)).tolist() if new else [0.0] * key.shape[1]
        pairs = zip(self._largest_norms, norms, strict=True)
        self._largest_norms = [max(known, norm) if norm == norm else math.inf for known, norm in pairs]
        self.length += new

    def _reach(self, group: _Group) -> int:
        """Return how many of the last keys so far may matter to queries that are to come."""
        added_range = 0.0
        if self._key_bias is not None and group.count > 0:
            least, most = torch.aminmax(self._added_to(group), dim=-1)
            added_range = (most - least).amax().item()
        largest = max(self._largest_norms[head] for head in group.which.heads)
        return self._policy.reach(group.which, largest, self.length, added_range)

    @explains_keywords
    def attend(
        self,
        query: Tensor,
        slopes: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        segment_ids: tuple[Tensor, Tensor] | None = None,
        window_size: int | None = None,
        scale: float | None = None,
        tolerance: float | None = None,
        implementation: str | None = None,
    ) -> Tensor:
        """Return the causal attention of the last tokens appended over all tokens so far.

        Args:
            query: ``[batch_size, num_heads, q_len, head_dim]``.
            slopes: None, or what the cache was made for.
            mask: None: a key that hides another from a query cannot tell that the other no longer matters.
            segment_ids: None, likewise.
            window_size: None, or what the cache was made for.
            scale: Likewise.
            tolerance: Likewise.
            implementation: As for :func:`alibi_torch.attention`.

        Returns:
            ``[batch_size, num_heads, q_len, head_dim]``.

        Raises:
            TypeError: If an argument is of the wrong kind.
            ValueError: If the cache is empty, if a query's norm exceeds ``max_query_norm``, if keys that a query needs
                have been dropped, or if shapes, slopes or masks are not those that the cache was made for.
        """
        if implementation is not None:
            one_of("implementation", implementation, IMPLEMENTATIONS)
        policy = self._policy
        policy.check_rules(
            mask=mask, segment_ids=segment_ids, window_size=window_size, scale=scale, tolerance=tolerance
        )
        self._check_query(query, slopes)
        result = torch.empty_like(query)
        # Few queries are not worth a second look: what is kept is about what they need.
        rules: dict[str, Any] = {"tolerance": 0.0 if query.shape[2] <= SIZES.few else policy.share_dropped}
        rules |= {"window_size": policy.window_size, "scale": policy.scale}
        for group in self.groups:
            heads = list(group.which.query_heads)
            key, value = group.held
            part = query[:, heads]
            call = AttentionCall.check(part, key, value, self._slopes[heads], xp=xp, **rules)
            if self._key_bias is not None:
                call = replace(call, added_key_bias=self._added_to(group))
            result[:, heads] = run(call, part, key, value, implementation, None)
        return guarded(result, [group.key for group in self.groups])

    def _added_to(self, group: _Group) -> Tensor:
        """Return what is added to the bias of the keys that a group holds, ``[heads, count]``."""
        assert self._key_bias is not None  # or it would not be asked for
        positions = torch.arange(self.length - group.count, self.length, device=self.key.device)
        return self._key_bias(positions)[list(group.which.query_heads)].to(self._slopes.dtype)

    def _check_query(self, query: Tensor, slopes: Any) -> None:
        """Check that a query is of the last tokens, of the heads and slopes of this cache, and no longer than told."""
        call = AttentionCall.check(query, self.key, self.value, self._slopes if slopes is None else slopes, xp=xp)
        if not torch.equal(call.slopes, self._slopes):
            raise ValueError("slopes must be those that the cache was made for; make a new one")
        check_span(self.length, query.shape[2], self._evicted)
        largest = torch.linalg.vector_norm(query.detach().double(), dim=-1).amax().item() if query.numel() else 0.0
        self._policy.check_query_norm(largest, self._policy.max_query_norm)

    def select_batch(self, indices: Tensor) -> None:
        """Keep the sequences at ``indices`` of the batch axis, as :meth:`KVCache.select_batch`."""
        indices = self._sequences(indices)
        super().select_batch(indices)
        for group in self.groups:
            group.key, group.value = (x.index_select(0, indices) for x in (group.key, group.value))

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
        if self.length <= self._before[0]:
            self._largest_norms = self._before[1]  # what a refused call brought widens no horizon


class _Group(HeldTokens):
    @staticmethod
    def moved(array: Tensor, last: slice, room: int) -> Tensor:
        kept = array[:, :, last]
        if room <= array.shape[2] <= 4 * room:
            array[:, :, : kept.shape[2]] = kept.clone()  # they overlap
            return array
        return F.pad(kept, (0, 0, 0, room - kept.shape[2]))
