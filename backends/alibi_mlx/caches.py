"""A key/value cache for decoding."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np

from alibi_core.backend import AttentionCall
from alibi_core.backend.caches import (
    RowTokens,
    cache_summary,
    check_indices,
    check_new_gates,
    check_new_tokens,
    check_room,
    check_span,
    counts_of_rows,
    over_keys,
    read_lengths,
)
from alibi_core.backend.checks import (
    explains_keywords,
    floating_dtype,
    non_negative_int,
    one_of,
    positive_int,
)
from alibi_core.backend.horizon import KeyNorms
from alibi_mlx import _attention
from alibi_mlx._plan import norm_bounds, reads_all
from alibi_mlx._step import NextStep, arguments_of

__all__ = ["KVCache"]

STEP = 256  # The cache grows by this many tokens at a time, so that it is not copied for each token.
BLOCK = 128  # The cache stores one upper bound of norms for each block of this many keys.


class KVCache:
    """A growing key/value cache with the protocol of mlx-lm's caches.

    It also stores bounds of key norms, from which :meth:`attend` derives the horizon.

    Attributes:
        keys: ``[batch_size, num_kv_heads, capacity, head_dim]``; the first ``length`` positions are in use. None while
            the cache is empty.
        values: ``[batch_size, num_kv_heads, capacity, head_dim]``, in use as ``keys``.
        lengths: The length of each row, ``[batch_size]`` int32; None while all rows have equal lengths.
        max_length: The argument ``max_length``.
        offset: mlx-lm's name of ``length``.

    Args:
        batch_size: Number of sequences. Default: that of the first keys.
        num_kv_heads: Number of key/value heads. Default: that of the first keys.
        max_length: Capacity, in tokens. Default: unlimited.
        head_dim: Features per head. Default: those of the first keys and values, which may differ.
        dtype: Dtype of keys and values. Default: that of the first keys.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a size is less than 1.

    Example:
        >>> cache = KVCache(max_length=5)
        >>> keys, values = cache.append(mx.zeros((2, 4, 3, 8)), mx.zeros((2, 4, 3, 8)))
        >>> keys, values = cache.append(mx.zeros((2, 4, 1, 8)), mx.zeros((2, 4, 1, 8)))
        >>> keys.shape, cache.length
        ((2, 4, 4, 8), 4)
        >>> cache.attend(mx.zeros((2, 8, 1, 8))).shape
        (2, 8, 1, 8)
    """

    def __init__(
        self,
        batch_size: int | None = None,
        num_kv_heads: int | None = None,
        max_length: int | None = None,
        head_dim: int | None = None,
        *,
        dtype: mx.Dtype | None = None,
    ) -> None:
        sizes = {"batch_size": batch_size, "num_kv_heads": num_kv_heads, "max_length": max_length, "head_dim": head_dim}
        given = {name: size if size is None else positive_int(name, size) for name, size in sizes.items()}
        self.max_length = given.pop("max_length")
        self._sizes = tuple(given.values())
        self._dtype = None if dtype is None else floating_dtype(mx, "dtype", dtype)
        self._forget()

    def append(
        self,
        key: mx.array,
        value: mx.array,
        *,
        lengths: mx.array | None = None,
        log_gates: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        """Store the keys and values of new tokens and return those of all tokens so far.

        Args:
            key: ``[batch, num_kv_heads, new, head_dim]``. The returned arrays have this shape, with all tokens.
            value: ``[batch, num_kv_heads, new, head_dim]``; ``head_dim`` may differ from that of ``key``.
            lengths: ``[batch]`` integers: the number of new tokens in each row, for prompts of different lengths with
                padding at the end. Later tokens follow them directly. Default: all ``new`` tokens.
            log_gates: ``[batch, num_heads, new]``, for :meth:`attend`: of all tokens of a cache or of none.

        Raises:
            TypeError: If an argument is no floating MLX array, or key or value lacks four axes.
            ValueError: If the cache is full, has gates or not, or has another batch size, shape or dtype.
        """
        if self.offset == 0:
            self._forget()  # an empty cache accepts any keys that its arguments admit, also after truncation
        self._check_new(key, value)
        held_heads, sizes = None if self._gates is None else self._gates.shape[1], key.shape[:3]
        check_new_gates(mx, log_gates, sizes, held_heads, is_empty=self.keys is None)
        new = [key, value]
        if log_gates is not None:  # as one feature
            new.append(log_gates[..., None].astype(mx.float64 if key.dtype == mx.float64 else mx.float32))
        start, end = self.offset, self.offset + key.shape[-2]
        if lengths is None and self.lengths is None:
            for held, x in zip(self._with_room(new, end), new, strict=True):
                held[..., start:end, :] = x
            self.offset, self._measured = end, min(self._measured, start)
            return self.state[:2]
        counts = counts_of_rows(mx, lengths, *key.shape[:3:2])
        tokens = RowTokens.of(self._held(counts.size), counts)
        end = int(tokens.ends.max(initial=0))
        rows, columns, slots = (mx.array(x.astype(np.int32)) for x in (tokens.rows, tokens.columns, tokens.slots))
        for held, x in zip(self._with_room(new, end), new, strict=True):
            held[..., start:end, :] = 0.0  # padding of shorter rows is read with weight 0, and 0 * NaN is NaN
            if tokens.rows.size:
                held[rows, :, slots] = x[rows, :, columns]
        self._hold(tokens.ends)
        self._measured = int((tokens.ends - counts).min(initial=self._measured))
        return self.state[:2]

    @property
    def key_norms(self) -> mx.array | None:
        """Upper bounds of the norms of each block of 128 keys, ``[batch, num_kv_heads, blocks]`` float32, or None.

        Reading this property measures the keys that are new since the last time, so models that do not use it do not
        pay for it.
        """
        if self.keys is not None and self._measured < self.offset:
            first = self._measured // BLOCK  # the first block that is not measured completely
            norms = norm_bounds(self.keys[..., first * BLOCK : self.offset, :])
            norms = mx.pad(norms, [(0, 0), (0, 0), (0, -norms.shape[-1] % BLOCK)])
            # [batch, num_kv_heads, blocks, BLOCK] -> [batch, num_kv_heads, blocks]
            norms = mx.unflatten(norms, -1, (-1, BLOCK)).max(axis=-1)
            before = [] if self._norms is None else [self._norms[..., :first]]
            self._norms, self._measured = mx.concatenate([*before, norms], axis=-1), self.offset
        return None if self.keys is None or self._norms is None else self._norms[..., : -(-self.offset // BLOCK)]

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
        lengths: mx.array | None = None,
        law: str = "linear",
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Return the causal attention of the last cached tokens over all cached tokens, shaped as ``query``.

        It equals :func:`alibi_mlx.attention` on the arrays that :meth:`append` returned, with the same arguments, but
        uses the cached norms, so it need not read all keys to measure them. Cached gates are its ``log_gates``.

        Args:
            query: ``[batch, num_heads, q_len, head_dim]``, the queries of the last ``q_len`` tokens.
            mask: Booleans over all cached tokens. ``segment_ids`` are a pair, for queries and for all cached tokens.
                Both may go on over unused slots.
            lengths: ``[batch]`` integers: the number of queries in each row, as given to :meth:`append`; results of
                the padding are undefined. Default: all ``q_len`` queries.

        Raises:
            TypeError: If an argument is of the wrong kind.
            ValueError: If the cache is empty, or a value or shape is wrong.
        """
        if implementation is not None:
            one_of("implementation", implementation, _attention.IMPLEMENTATIONS)
        self._check_offset()
        if self.keys is None:
            raise ValueError("cache must hold the tokens that query is of, got an empty one; see append")
        key, value = self.state[:2]
        arguments, step = None, self._next_step
        is_plain = mask is segment_ids is lengths is self.lengths is self._gates is sinks is None
        if is_plain and implementation in (None, "tiled"):
            arguments = arguments_of(query, key, value, slopes, window_size, scale, tolerance, law)
            if step is not None and arguments is not None and self.offset and step.takes(arguments, self.offset):
                return step.attend(query, key, value)
        rules = over_keys(lambda array: array[..., : self.offset], mask, segment_ids)
        rules |= {"window_size": window_size, "law": law, "log_gates": self.log_gates, "sinks": sinks}
        if lengths is not None or self.lengths is not None:
            offsets = self._held(query.shape[0]) - counts_of_rows(mx, lengths, *query.shape[:3:2])
            check_span(self.offset, self.offset - int(offsets.min(initial=self.offset)))
            rules["q_offset"] = mx.array(offsets.astype(np.int32))
        call = AttentionCall.check(query, key, value, slopes, scale=scale, tolerance=tolerance, xp=mx, **rules)
        if not call.has_offset_array:
            check_span(self.offset, query.shape[2])
        if arguments is not None and not call.is_empty and call.dtype != mx.float64 and reads_all(call, call.kv_len):
            step = self._next_step = NextStep.of(arguments, call)
            return step.attend(query, key, value)
        # Pass norms lazily: an unevaluated norms array would keep a reference to the keys, which the next append would
        # then have to copy.
        return _attention.run(call, query, key, value, implementation, lambda: KeyNorms(self.key_norms, BLOCK))

    def truncate(self, length: int | mx.array) -> None:
        """Remove all tokens after the first ``length`` of each row: a number, or ``[batch]`` integers.

        Speculative decoding uses it to remove rejected tokens, whose number differs between rows.
        """
        if isinstance(length, mx.array):
            batch_size = length.size if self.keys is None else self.keys.shape[0]
            self._keep(read_lengths(mx, "length", length, batch_size))
        elif self.lengths is not None:
            self._keep(np.asarray(non_negative_int("length", length)))
        else:
            self.offset = min(self.offset, non_negative_int("length", length))

    def select_batch(self, indices: mx.array) -> None:
        """Replace the batch by the sequences at ``indices``, in that order; indices may repeat.

        Beam search uses it to drop and to duplicate candidates. ``indices`` are ``[new batch]`` integers; an index out
        of range raises an IndexError.
        """
        if self.keys is not None:
            check_indices(mx, indices, self.keys.shape[0])
            self._stores = [mx.take(x, indices, axis=0) for x in self._stores]
        self._norms = None if self._norms is None else mx.take(self._norms, indices, axis=0)
        self._sizes = None if self._sizes[0] is None else len(indices), *self._sizes[1:]
        if self.lengths is not None:
            self._hold(self._held()[np.asarray(indices)])

    @property
    def length(self) -> int:
        """Number of cached tokens."""
        return self.offset

    @property
    def log_gates(self) -> mx.array | None:
        """Logarithms of forget gates, ``[batch_size, num_heads, length]``; None if there are none."""
        return None if self._gates is None else self._gates[:, :, : self.offset, 0]

    def __repr__(self) -> str:
        sizes = self._sizes
        if self.keys is not None:
            sizes = self.keys.shape[0], self.keys.shape[1], self.keys.shape[3]
        return cache_summary(type(self).__name__, sizes, self.length, self.max_length, self.nbytes)

    # --- The protocol of mlx-lm ---------------------------------------------------------------------------------------

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store new tokens and return all, as :meth:`append` does."""
        return self.append(keys, values)

    @property
    def state(self) -> tuple[Any, ...]:
        """Keys and values in use, and ``offset``; None, None and 0 while the cache is empty. Assign it to restore one.

        If the lengths of rows differ, or there are gates, ``lengths`` and ``log_gates`` follow, which mlx-lm's
        ``load_prompt_cache`` refuses. A state may also come from mlx-lm's ``KVCache``.
        """
        if self.keys is None or self.values is None:
            return None, None, 0  # mlx-lm's save_prompt_cache would leave out ()
        own = (x for x in (self.lengths, self.log_gates) if x is not None)
        return self.keys[..., : self.offset, :], self.values[..., : self.offset, :], self.offset, *own

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        self._forget()
        if state and state[0] is not None:
            keys, values, *offset = state
            keys, values = (x[..., : int(offset[0]), :] if offset else x for x in (keys, values))
            own = {x.ndim: x for x in offset[1:]}
            self.append(keys, values, lengths=own.get(1), log_gates=own.get(3))

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, unused capacity included."""
        return sum(x.nbytes for x in (self.keys, self.values) if x is not None)

    @classmethod
    def merge(cls, caches: list[KVCache]) -> Any:
        """Return mlx-lm's ``BatchKVCache`` made from these caches, one text each, which must have no gates."""
        from mlx_lm.models.cache import BatchKVCache

        if any(cache.log_gates is not None for cache in caches):
            raise ValueError("caches must have no log_gates, as mlx-lm's BatchKVCache holds none, got some")
        return BatchKVCache.merge(caches)

    def size(self) -> int:
        """Return the number of cached tokens."""
        return self.offset

    def empty(self) -> bool:
        """Return whether the cache has no tokens."""
        return self.offset == 0

    def is_trimmable(self) -> bool:
        """Return True."""
        return True

    def trim(self, n: int) -> int:
        """Remove the last ``n`` tokens, or all if there are fewer, and return the number of removed tokens."""
        before, n = self.offset, non_negative_int("n", n)
        if self.lengths is None:
            self.offset = max(before - n, 0)
        else:
            self._keep(np.maximum(self._held() - n, 0))
        return before - self.offset

    def make_mask(self, length: int, *, return_array: bool = False, window_size: int | None = None) -> Any:
        """Return mlx-lm's mask for ``length`` new tokens: ``[length, offset + length]``, None or ``"causal"``.

        ``window_size`` includes the token itself. The mask is None for one token without a window, which sees
        everything, and ``"causal"`` for several tokens unless an array is required.
        """
        from mlx_lm.models.cache import create_attention_mask

        if self.lengths is not None:
            raise ValueError("cache must have rows of one length for a mask that all share, got lengths; see attend")
        return create_attention_mask(length, self.offset, return_array, window_size)

    # --- Storage ------------------------------------------------------------------------------------------------------

    @property
    def _stores(self) -> list[mx.array]:
        """Keys, values and, if there are some, gates, ``[batch_size, heads, capacity, features]``."""
        return [x for x in (self.keys, self.values, self._gates) if x is not None]

    @_stores.setter
    def _stores(self, stores: list[mx.array]) -> None:
        self.keys, self.values, self._gates = (*stores, None)[:3]

    def _forget(self) -> None:
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self._gates: mx.array | None = None
        self.lengths: mx.array | None = None
        self.offset = 0
        self._norms: mx.array | None = None
        self._next_step: NextStep | None = None
        self._measured = 0  # the norms of the first this many tokens are in _norms

    def _held(self, batch_size: int = 1) -> np.ndarray[Any, Any]:
        """Return the number of cached tokens in each row."""
        return np.full(batch_size, self.offset) if self.lengths is None else np.asarray(self.lengths)

    def _hold(self, lengths: np.ndarray[Any, Any]) -> None:
        self.lengths, self.offset = mx.array(lengths.astype(np.int32)), int(lengths.max(initial=0))

    def _keep(self, most: np.ndarray[Any, Any]) -> None:
        """Truncate each row to ``most`` tokens; zero the removed slots, which are still read with weight 0."""
        held = self._held(most.size)
        lengths = np.minimum(held, most)
        forgotten = RowTokens.of(lengths, held - lengths)
        if forgotten.rows.size:
            rows, slots = (mx.array(x.astype(np.int32)) for x in (forgotten.rows, forgotten.slots))
            for held in self._stores:
                held[rows, :, slots] = 0.0
        self._hold(lengths)

    def _check_new(self, key: mx.array, value: mx.array) -> None:
        """Check that new keys and values have the shape (except the length) and dtype of the cache, if it has any."""
        like = (key, value) if self.keys is None else (self.keys, self.values)
        sizes = (0, 0, 0, 0)  # placeholder for arrays without four axes, which check_new_tokens refuses first
        if all(len(getattr(x, "shape", ())) == 4 for x in like):
            found = (*like[0].shape[:2], like[0].shape[3], like[1].shape[3])
            sizes = tuple(given or size for given, size in zip((*self._sizes, self._sizes[2]), found, strict=True))
        check_new_tokens(mx, key, value, sizes, self._dtype or getattr(like[0], "dtype", None))
        self._check_offset()

    def _check_offset(self) -> None:
        capacity = 0 if self.keys is None else self.keys.shape[2]
        if not 0 <= self.offset <= capacity:
            raise ValueError(f"offset must be at most the cache's capacity, {capacity} tokens, got {self.offset}")

    def _with_room(self, tokens: list[mx.array], end: int) -> list[mx.array]:
        """Grow the cache to a capacity of at least ``end`` tokens if needed, and return its stores of these tokens."""
        check_room(end - self.offset, math.inf if self.max_length is None else self.max_length, self.offset)
        if self.keys is None or end > self.keys.shape[-2]:
            capacity = min(-(-end // STEP) * STEP, self.max_length or math.inf)
            space = [mx.zeros((*x.shape[:-2], capacity - self.offset, x.shape[-1]), dtype=x.dtype) for x in tokens]
            held = zip(self._stores or tokens, space, strict=True)  # an empty cache takes nothing of the tokens
            self._stores = [mx.concatenate([x[..., : self.offset, :], y], axis=-2) for x, y in held]
        return self._stores
