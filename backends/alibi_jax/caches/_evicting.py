"""A cache that forgets the keys that no query to come can need, in arrays of fixed shapes."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alibi_core import AttentionCall
from alibi_core.backend import (
    EvictionPolicy,
    EvictionRules,
    cache_summary,
    check_indices,
    check_new_tokens,
    check_room,
    check_span,
    check_truncated,
    checks,
    explains_keywords,
    positive_number,
    reach,
)
from alibi_jax._attention import run
from alibi_jax._call import NORM_BLOCK, as_slopes, floating_dtype, norm_bounds
from alibi_jax._dispatch import Implementation, checked
from alibi_jax.caches._kv_cache import bytes_of, cache_shape, known, of_first, rows_at, whole_number


@functools.partial(jax.tree_util.register_dataclass, data_fields=["key", "value", "count"], meta_fields=[])
@dataclass(frozen=True)
class Held:
    """The keys and values of some heads, ``[batch, heads, slots, head_dim]``: the last ``count`` tokens, in order."""

    key: jax.Array
    value: jax.Array
    count: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["groups", "largest_norms", "length", "evicted", "fits"],
    meta_fields=["policy", "slopes", "max_length"],
)
@dataclass(frozen=True, repr=False)
class EvictingKVCache:
    """A key/value cache whose heads keep no more keys than their horizons allow: a pytree of fixed shapes.

    It drops keys that weigh no more than the tolerance for any query whose norm is at most ``max_query_norm``,
    whatever keys are to come; the proof is that of :class:`alibi_core.backend.EvictionPolicy`. Heads of similar slopes
    share their storage. Nothing changes in place: each operation returns the cache that it leads to. :meth:`make`
    makes one.

    The slots of a head are as many as the cache was made with. They fill in order; when they are full, those keys that
    still matter move to the front. So a step costs no copy but one in dozens.

    Nothing can be raised where arrays are traced (under ``jax.jit``, say). There, a cache whose heads need more keys
    than they have slots answers with NaN, then and ever after; so does :meth:`attend` for a query of too large a norm,
    for slopes that the cache was not made for, and for queries whose keys have been dropped.

    Attributes:
        groups: Keys and values, by groups of heads.
        largest_norms: ``[num_kv_heads]``: what no key's norm so far exceeds.
        length: Tokens appended, int32 scalar.
        evicted: The position up to which queries would miss keys, int32 scalar.
        fits: Whether no head ever needed more than its slots, boolean scalar.
        policy: When keys may be dropped.
        slopes: Those that the cache was made for.
        max_length: Tokens that a head may hold at a time.

    Example:
        >>> cache = EvictingKVCache.make(1, 2, 100, 4, slopes=jnp.ones(2), max_query_norm=2.0, max_key_norm=2.0)
        >>> for _ in range(200):
        ...     cache = cache.append(jnp.ones((1, 1, 2, 4)), jnp.ones((1, 1, 2, 4)))
        >>> int(cache.length), max(cache.kept) < 100
        (200, True)
    """

    groups: tuple[Held, ...]
    largest_norms: jax.Array
    length: jax.Array
    evicted: jax.Array
    fits: jax.Array
    policy: EvictionPolicy
    slopes: tuple[float, ...]
    max_length: int

    @classmethod
    def make(
        cls,
        batch_size: int,
        num_kv_heads: int,
        max_length: int,
        head_dim: int,
        *,
        slopes: jax.Array,
        max_query_norm: float,
        max_key_norm: float | None = None,
        scale: float | None = None,
        window_size: int | None = None,
        tolerance: float | None = None,
        dtype: Any = jnp.float32,
    ) -> EvictingKVCache:
        """Return a cache that holds nothing yet.

        Args:
            batch_size: Sequences.
            num_kv_heads: Key/value heads.
            max_length: Tokens that a head may hold at a time. Sequences may be longer where horizons are shorter.
            head_dim: Features a head.
            slopes: ``[num_heads]``, not negative, not traced. Heads whose slope is 0 keep everything.
            max_query_norm: What no query's norm will exceed. A query that does is refused.
            max_key_norm: What no key's norm is expected to exceed. Heads get the slots that their horizons then need,
                if these are fewer than ``max_length``. Keys are measured all the same: should they be larger, and need
                more slots, the cache is refused rather than wrong. Default: ``max_length`` slots a head.
            scale: Factor of the scores. Default ``head_dim ** -0.5``.
            window_size: Keys farther than this many tokens are masked.
            tolerance: The share of softmax weight that may be left out. Default the rounding error of ``dtype``.
            dtype: Of keys and values.

        Raises:
            TypeError: If an argument is of the wrong kind.
            ValueError: If a value or a shape is wrong, or slopes are traced.
        """
        batch_size, num_kv_heads, max_length, head_dim = cache_shape(batch_size, num_kv_heads, max_length, head_dim)
        dtype = floating_dtype("dtype", dtype)
        options = {"scale": scale, "window_size": window_size, "tolerance": tolerance}
        rules = EvictionRules.check(slopes, _on_host(slopes), max_query_norm, **options)
        policy = rules.policy(num_kv_heads, head_dim, dtype.name)
        largest = None if max_key_norm is None else positive_number("max_key_norm", max_key_norm)

        def empty_group(which: Any) -> Held:
            slots = max_length
            if largest is not None:
                need = policy.reach(which, largest * (1 + 4 * (head_dim + 8) * 2.0**-23), checks.MAX_POSITION)
                slots = policy.storage(need, 1, max_length)
            shape = batch_size, len(which.heads), slots, head_dim
            return Held(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((), jnp.int32))

        return cls(
            groups=tuple(map(empty_group, policy.groups)),
            largest_norms=jnp.zeros(num_kv_heads, np.promote_types(dtype, np.float32)),
            length=jnp.zeros((), jnp.int32),
            evicted=jnp.zeros((), jnp.int32),
            fits=jnp.ones((), bool),
            policy=policy,
            slopes=rules.slopes,
            max_length=max_length,
        )

    @property
    def kept(self) -> list[int]:
        """Tokens that each key/value head holds; not under ``jax.jit``, where that is not known."""
        pairs = zip(self.policy.groups, self.groups, strict=True)
        counts = {head: int(held.count) for which, held in pairs for head in which.heads}
        return [counts[head] for head in sorted(counts)]

    @property
    def nbytes(self) -> int:
        """Memory of keys and values, room for more included."""
        return sum(bytes_of(x) for held in self.groups for x in (held.key, held.value))

    def __repr__(self) -> str:
        if len(getattr(getattr(self.groups[0], "key", None), "shape", ())) != 4:  # a tree of what goes with a cache
            return f"EvictingKVCache(groups={self.groups!r}, length={self.length!r})"
        sizes = self._sizes[:3]
        return cache_summary("EvictingKVCache", sizes, known(self.length, "traced"), self.max_length, self.nbytes)

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        batch_size, _, _, head_dim = self.groups[0].key.shape
        return batch_size, self.largest_norms.shape[0], head_dim, head_dim

    @explains_keywords
    def append(self, key: jax.Array, value: jax.Array) -> EvictingKVCache:
        """Return the cache with the keys and values of further tokens, less what no query of these can need, or later.

        Args:
            key: ``[batch, new, num_kv_heads, head_dim]``.
            value: Likewise.

        Raises:
            TypeError: If an argument is no floating array of four axes.
            ValueError: If more tokens come at once than a head has slots, if a head would need more slots than it has,
                as far as that is known, or if the cache is of another size or dtype.
        """
        check_new_tokens(jnp, key, value, self._sizes, self.groups[0].key.dtype, length_axis=1)
        new, slots = key.shape[1], min(held.key.shape[2] for held in self.groups)
        if slots < new <= self.max_length:
            raise ValueError(f"key must be of at most {slots} tokens at a time, as many as a head has slots, got {new}")
        check_room(new, self.max_length, 0)
        longer, needs = _appended(self, key, value)
        if known(self.fits) and known(longer.fits) == 0:
            at_fault = max(range(len(needs)), key=lambda i: int(needs[i]) - self.groups[i].key.shape[2])
            slots, held = self.groups[at_fault].key.shape[2], int(needs[at_fault])
            if slots < self.max_length:
                raise ValueError(
                    f"cache must have room for {new} more tokens, got {slots} slots with {held} in use, for "
                    "max_key_norm; append fewer tokens at a time, or make it without max_key_norm or with a larger one"
                )
            check_room(new, slots, held)
        return longer

    @explains_keywords
    def attend(
        self,
        query: jax.Array,
        slopes: jax.Array | None = None,
        *,
        mask: jax.Array | None = None,
        segment_ids: tuple[jax.Array, jax.Array] | None = None,
        window_size: int | None = None,
        scale: float | None = None,
        tolerance: float | None = None,
        implementation: Implementation | None = None,
    ) -> jax.Array:
        """Return the causal attention of the last tokens appended over all tokens so far.

        Args:
            query: ``[batch, q_len, num_heads, head_dim]``.
            slopes: None, or what the cache was made for.
            mask: None: a key that hides another from a query cannot tell that the other no longer matters.
            segment_ids: None, likewise.
            window_size: None, or what the cache was made for.
            scale: Likewise.
            tolerance: Likewise.
            implementation: As for :func:`alibi_jax.attention`.

        Returns:
            ``[batch, q_len, num_heads, head_dim]``; NaN where arrays are traced and an error would be raised else.

        Raises:
            TypeError: If an argument is of the wrong kind.
            ValueError: If the cache is empty, if a query's norm exceeds ``max_query_norm``, if keys that a query needs
                have been dropped, or if shapes, slopes or masks are not those that the cache was made for.
        """
        checked(implementation)
        policy = self.policy
        policy.check_rules(
            mask=mask, segment_ids=segment_ids, window_size=window_size, scale=scale, tolerance=tolerance
        )
        slopes = as_slopes(slopes)
        own_slopes = self._check_query(query, slopes)
        measured = jnp.max(_upper_norms(query, self.largest_norms.dtype), initial=0)
        sound = self.fits & (self.length - query.shape[1] >= self.evicted) & (measured <= policy.measured_limit)
        if slopes is not None:
            sound &= jnp.all(jnp.asarray(slopes) == own_slopes)
            own_slopes = jnp.asarray(slopes, own_slopes.dtype)  # the same numbers, and these may be differentiated
        if known(sound) is not None and known(self.fits):
            check_span(int(self.length), query.shape[1], int(self.evicted))
            policy.check_query_norm(float(measured), policy.measured_limit)
        rules = {"window_size": policy.window_size, "scale": policy.scale, "tolerance": policy.share_dropped}
        parts: list[jax.Array] = []
        for which, held in zip(policy.groups, self.groups, strict=True):
            heads = np.asarray(which.query_heads)
            part = query[:, :, heads]
            offset = held.count - query.shape[1]
            call = AttentionCall.check(
                jnp.swapaxes(part, 1, 2), held.key, held.value, own_slopes[..., heads], q_offset=offset, xp=jnp, **rules
            )
            norms = self.largest_norms[np.asarray(which.heads)]
            norms = jnp.broadcast_to(norms[:, None], (*held.key.shape[:2], -(-held.key.shape[2] // NORM_BLOCK)))
            parts.append(run(call, part, held.key, held.value, implementation, norms))
        order = np.argsort(np.concatenate([x.query_heads for x in policy.groups]))
        return jnp.where(sound, jnp.concatenate(parts, axis=2)[:, :, order], jnp.nan)

    def _check_query(self, query: Any, slopes: Any) -> jax.Array:
        """Check a query and slopes as far as they are known, and return the slopes of this cache."""
        batch_size, num_kv_heads, head_dim, _ = self._sizes
        like = jnp.zeros((batch_size, num_kv_heads, 1, head_dim), self.groups[0].key.dtype)
        heads_first = query
        if len(getattr(query, "shape", ())) == 4:
            heads_first = jnp.swapaxes(query, 1, 2)
        call = AttentionCall.check(heads_first, like, like, slopes, q_offset=0, xp=jnp)
        if call.num_heads != len(self.slopes):
            raise ValueError(f"query must have {len(self.slopes)} heads, as many as the cache, got {call.num_heads}")
        if slopes is not None:
            values = _on_host(slopes)
            if checks.is_int(slopes) or (values is not None and values.tolist() != list(self.slopes)):
                raise ValueError("slopes must be those that the cache was made for; make a new one")
        return jnp.asarray(np.asarray(self.slopes), call.working_dtype)

    def truncate(self, length: int | jax.Array) -> EvictingKVCache:
        """Return the cache of the first ``length`` tokens; of all, if there are no more. An overflow is not undone.

        Raises:
            TypeError: If ``length`` is no integer.
            ValueError: If keys that then were among the last have been dropped, as far as that is known.
        """
        evicted = known(self.evicted)
        if evicted is not None and known(whole_number(length)) is not None:
            check_truncated(int(length), evicted)
        length = whole_number(length)
        dropped = jnp.maximum(self.length - length, 0)
        counts = [held.count - dropped for held in self.groups]
        return replace(
            self,
            groups=tuple(
                replace(held, value=of_first(held.value, count), count=count)
                for held, count in zip(self.groups, counts, strict=True)
            ),
            length=self.length - dropped,
            fits=self.fits & (length >= self.evicted),
        )

    def select_batch(self, indices: jax.Array) -> EvictingKVCache:
        """Return the cache of the sequences at ``indices`` of the batch axis, as :meth:`KVCache.select_batch`."""
        indices = check_indices(jnp, jnp.asarray(indices), self.groups[0].key.shape[0])
        chosen = (
            replace(held, key=rows_at(held.key, indices), value=rows_at(held.value, indices)) for held in self.groups
        )
        return replace(self, groups=tuple(chosen))


@jax.jit  # outside of it, too, it is compiled as one
def _appended(
    cache: EvictingKVCache, key: jax.Array, value: jax.Array
) -> tuple[EvictingKVCache, tuple[jax.Array, ...]]:
    """Return the longer cache, and how many of the keys that were held each group of heads has to keep."""
    new, policy = key.shape[1], cache.policy
    key, value = (jnp.swapaxes(x, 1, 2) for x in (key, value))
    groups, needs, fits, evicted = [], [], cache.fits, cache.evicted
    for which, held in zip(policy.groups, cache.groups, strict=True):
        heads, slots = np.asarray(which.heads), held.key.shape[2]
        need = jnp.minimum(held.count, _reach(cache, which))
        is_full = held.count + new > slots
        fits &= ~is_full | (need + new <= slots)
        evicted = jnp.where(is_full & (need < held.count), cache.length, evicted)
        start = jnp.where(is_full, held.count - need, 0)
        count = held.count - start

        def stored(old: jax.Array, tokens: jax.Array, start: jax.Array = start, count: jax.Array = count) -> jax.Array:
            moved = jax.lax.cond(start > 0, lambda x: jnp.roll(x, -start, axis=2), lambda x: x, old)
            return jax.lax.dynamic_update_slice_in_dim(moved, tokens, count, axis=2)

        groups.append(Held(stored(held.key, key[:, heads]), stored(held.value, value[:, heads]), count + new))
        needs.append(need)
    norms = _upper_norms(key, cache.largest_norms.dtype)
    largest = jnp.maximum(cache.largest_norms, jnp.max(norms, axis=(0, 2), initial=0))
    longer = replace(
        cache, groups=tuple(groups), largest_norms=largest, length=cache.length + new, evicted=evicted, fits=fits
    )
    return longer, tuple(needs)


def _reach(cache: EvictingKVCache, which: Any) -> jax.Array:
    """Return how many of the last keys so far may matter to the group's queries to come, as the core's policy does."""
    policy, dtype = cache.policy, cache.largest_norms.dtype
    tokens = cache.length
    if which.slope > 0 and policy.share_dropped > 0:
        largest = jnp.max(cache.largest_norms[np.asarray(which.heads)])
        far = reach(jnp, jnp.asarray(which.slope, dtype), policy.score_range(largest), policy.share_dropped)
        tokens = jnp.minimum(tokens, jnp.minimum(far, 2.0**30).astype(jnp.int32))
    return tokens if policy.window_size is None else jnp.minimum(tokens, policy.window_size)


def _upper_norms(vectors: jax.Array, dtype: Any) -> jax.Array:
    """Return what no norm of ``[..., head_dim]`` exceeds, in ``dtype``, which is no low precision."""
    return jax.lax.stop_gradient(norm_bounds(vectors.astype(dtype)))


def _on_host(slopes: Any) -> np.ndarray | None:
    """Return a copy in float64; None of what is traced, or no array of floats."""
    if isinstance(slopes, jax.core.Tracer) or not jnp.issubdtype(getattr(slopes, "dtype", int), jnp.floating):
        return None
    return np.array(slopes, dtype=np.float64)
