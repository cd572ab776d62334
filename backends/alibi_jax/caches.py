"""A key/value cache for decoding: an immutable pytree, which a longer cache replaces."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alibi_core.backend import AttentionCall, checks
from alibi_core.backend.caches import (
    cache_summary,
    check_covered,
    check_indices,
    check_lengths,
    check_new_gates,
    check_new_tokens,
    check_room,
    check_span,
    over_keys,
)
from alibi_core.backend.checks import explains_keywords, host_values, known, non_negative_int, positive_int
from alibi_core.backend.horizon import norm_bounds
from alibi_jax._attention import run
from alibi_jax._call import floating_dtype
from alibi_jax._compatible import broadcasting
from alibi_jax._dispatch import Implementation, checked
from alibi_jax._plan import NORM_BLOCK

__all__ = ["KVCache"]


@dataclass(frozen=True, init=False, repr=False, eq=False)
class KVCache:
    """A key/value cache of fixed size: a pytree to pass through ``jax.jit`` or carry through ``jax.lax.scan``.

    Its shapes are constant, so one compiled step serves an entire decoding loop. Caches are immutable: each operation
    returns a new cache.

    Traced values (under ``jax.jit``, for example) cannot raise errors. Instead, a cache that overflows, or gets invalid
    lengths, returns NaN from then on.

    Attributes:
        keys: ``[batch_size, num_kv_heads, max_length, head_dim]``; slots from ``length`` on are unused. Heads come
            first, so that the keys of one head are contiguous.
        values: ``[batch_size, num_kv_heads, max_length, head_dim]``, in use as ``keys``.
        key_norms: ``[batch_size, num_kv_heads, blocks]``, float32 (float64 for float64 keys): upper bounds of the norms
            of each block of 128 keys, from which the horizon of a query follows.
        log_gates: ``[batch_size, gate_heads, max_length]``, logarithms of forget gates, in the dtype of ``key_norms``;
            None without ``gate_heads``.

    Args:
        batch_size: Number of sequences.
        num_kv_heads: Number of key/value heads.
        max_length: Capacity, in tokens. Above 128 it is rounded up to a multiple of 128: whole blocks, which the TPU
            kernel reads in place.
        head_dim: Features per head.
        dtype: Dtype of keys and values.
        gate_heads: Number of query heads whose forget gates are cached beside the keys. Default: none,
            unless gates are appended to the empty cache; ``jax.jit`` and ``jax.lax.scan`` must know the number before.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a size is less than 1.

    Example:
        >>> cache = KVCache(1, 2, 5, 4).append(jnp.ones((1, 3, 2, 4)), jnp.ones((1, 3, 2, 4)))
        >>> cache.attend(jnp.ones((1, 1, 2, 4))).shape
        (1, 1, 2, 4)
        >>> cache
        KVCache(batch_size=1, num_kv_heads=2, head_dim=4, length=3, max_length=5, nbytes=320)
    """

    keys: jax.Array
    values: jax.Array
    key_norms: jax.Array
    log_gates: jax.Array | None
    _ends: jax.Array  # number of cached tokens, int32: a scalar, or [batch_size] if the lengths of rows differ

    def __init__(
        self,
        batch_size: int,
        num_kv_heads: int,
        max_length: int,
        head_dim: int,
        *,
        dtype: Any = jnp.float32,
        gate_heads: int | None = None,
    ) -> None:
        sizes = {"batch_size": batch_size, "num_kv_heads": num_kv_heads, "max_length": max_length, "head_dim": head_dim}
        shape = [positive_int(name, n) for name, n in sizes.items()]
        known("max_length", max_length)
        shape[2] += -shape[2] % NORM_BLOCK if shape[2] > NORM_BLOCK else 0
        dtype = floating_dtype("dtype", dtype)
        norms = jnp.zeros((*shape[:2], -(-shape[2] // NORM_BLOCK)), np.promote_types(dtype, np.float32))
        gates = None
        if gate_heads is not None:
            gates = jnp.zeros((shape[0], positive_int("gate_heads", gate_heads), shape[2]), norms.dtype)
        self._set(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), norms, gates, jnp.zeros((), jnp.int32))

    def _set(self, *leaves: Any) -> KVCache:
        vars(self).update(zip(_LEAVES, leaves, strict=True))
        return self

    @property
    def length(self) -> jax.Array:
        """Number of cached tokens, int32; of the longest row, if the lengths of rows differ."""
        return self._ends if self.lengths is None else jnp.max(self._ends)

    @property
    def lengths(self) -> jax.Array | None:
        """The length of each row, ``[batch_size]`` int32; None while all rows have equal lengths."""
        return self._ends if getattr(self._ends, "ndim", 0) else None

    @property
    def max_length(self) -> int:
        """Capacity, in tokens."""
        return int(self.keys.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, unused capacity included."""
        return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in (self.keys, self.values))

    def __repr__(self) -> str:
        if len(getattr(self.keys, "shape", ())) != 4:  # a pytree with other leaves, such as shardings
            return f"KVCache({', '.join(f'{name}={x!r}' for name, x in vars(self).items())})"
        batch_size, num_kv_heads, max_length, head_dim = self.keys.shape
        held = _concrete(self.length)
        sizes, length = (batch_size, num_kv_heads, head_dim), "traced" if held is None else held
        return cache_summary("KVCache", sizes, length, max_length, self.nbytes)

    def append(
        self,
        key: jax.Array,
        value: jax.Array,
        *,
        lengths: jax.Array | None = None,
        log_gates: jax.Array | None = None,
    ) -> KVCache:
        """Return the cache with the keys and values of new tokens appended.

        Args:
            key: ``[batch, new, num_kv_heads, head_dim]``.
            value: ``[batch, new, num_kv_heads, head_dim]``.
            lengths: ``[batch]`` integers: the number of new tokens in each row, for prompts of different lengths with
                padding at the end. Later tokens follow them directly. Default: all ``new`` tokens.
            log_gates: ``[batch, new, gate_heads]``, the logarithms of the new tokens' forget gates; required if the
                cache has them.

        Raises:
            TypeError: If an argument is no floating array, or key or value lacks four axes.
            ValueError: If sizes or dtype differ from the cache's, or the cache is full (if its length is not traced).
        """
        if self.keys.ndim != 4:
            raise ValueError(
                f"cache.keys must have shape (batch, num_kv_heads, max_length, head_dim), got {self.keys.shape}"
            )
        batch_size, num_kv_heads, max_length, head_dim = self.keys.shape
        sizes = batch_size, num_kv_heads, head_dim, head_dim
        check_new_tokens(jnp, key, value, sizes, self.keys.dtype, length_axis=1)
        new = key.shape[1]
        held_heads = None if self.log_gates is None else self.log_gates.shape[1]
        rules: dict[str, Any] = {"is_empty": _concrete(self.length) == 0, "length_axis": 1, "fix": "; see gate_heads"}
        check_new_gates(jnp, log_gates, (batch_size, num_kv_heads, new), held_heads, **rules)
        if self.log_gates is None and log_gates is not None:
            gates = jnp.zeros((batch_size, log_gates.shape[2], max_length), self.key_norms.dtype)
            empty = _cache(self.keys, self.values, self.key_norms, gates, self._ends)
            return empty.append(key, value, lengths=lengths, log_gates=log_gates)
        key, value = (jnp.swapaxes(x, 1, 2) for x in (key, value))
        gates = None
        if log_gates is not None:
            gates = jnp.swapaxes(log_gates, 1, 2).astype(self.log_gates.dtype)
        if lengths is not None or self.lengths is not None:
            return self._append_by_row((key, value, gates), _counts(lengths, batch_size, new, max_length))
        check_room(new, max_length, _concrete(self._ends))
        norms = norm_bounds(key.astype(self.key_norms.dtype))  # [batch, num_kv_heads, new]
        blocks = (self._ends + jnp.arange(new)) // NORM_BLOCK
        keys, values, gates = (
            None if x is None else jax.lax.dynamic_update_slice_in_dim(held, x, self._ends, axis=2)
            for held, x in ((self.keys, key), (self.values, value), (self.log_gates, gates))
        )
        key_norms = jnp.asarray(self.key_norms).at[:, :, blocks].max(jax.lax.stop_gradient(norms), mode="drop")
        return _cache(keys, values, key_norms, gates, self._ends + new)

    def _append_by_row(self, tokens: tuple[Any, ...], counts: jax.Array) -> KVCache:
        length = self._ends + counts  # [batch]
        held, most = _concrete(self.length), _concrete(jnp.max(length))
        if held is not None and most is not None:
            check_room(most - held, self.max_length, held)
        # jax.vmap requires equal shardings of the mapped axis: derive starts and counts from an array of the cache.
        like = jnp.zeros_like(self.key_norms, jnp.int32).max(axis=(1, 2))  # [batch]
        starts = like + (length - counts)

        def appended(held: tuple[Any, ...], tokens: tuple[Any, ...], start: Any, count: Any) -> Any:
            # [num_kv_heads, max_length, head_dim], [num_kv_heads, blocks] and [gate_heads, max_length]
            held_keys, held_values, key_norms, held_gates = held
            key, value, gates = tokens
            norms = jax.lax.stop_gradient(norm_bounds(key.astype(key_norms.dtype)))  # [num_kv_heads, new]
            places = jnp.arange(key.shape[1])  # of the new tokens
            # Padding gets an out-of-range slot and block, so that mode="drop" ignores it.
            slots = jnp.where(places < count, start + places, self.max_length)
            blocks = jnp.where(slots < self.max_length, slots // NORM_BLOCK, key_norms.shape[1])
            return (
                held_keys.at[:, slots].set(key, mode="drop"),
                held_values.at[:, slots].set(value, mode="drop"),
                key_norms.at[:, blocks].max(norms, mode="drop"),
                None if gates is None else held_gates.at[:, slots].set(gates, mode="drop"),
            )

        held = jax.tree.map(jnp.asarray, (self.keys, self.values, self.key_norms, self.log_gates))
        return _cache(*jax.vmap(appended)(held, tokens, starts, like + counts), starts + counts)

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
        lengths: jax.Array | None = None,
        law: str = "linear",
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Return the causal attention of the last cached tokens over all cached tokens; read only the needed keys.

        A cache with forget gates applies them; ``slopes`` then default to zeros.

        Arguments that are not listed are those of :func:`alibi_jax.attention`.

        - ``query``: ``[batch, q_len, num_heads, head_dim]``, the queries of the last ``q_len`` tokens.
        - ``mask``: Booleans over all cached tokens; ``segment_ids``: a pair, for the queries and for all cached tokens.
          Both may go on over unused slots, which are masked anyway: arrays over all ``max_length`` slots serve a
          decoding loop in one compiled step.
        - ``lengths``: ``[batch]`` integers: the number of queries in each row, as given to :meth:`append`; results of
          the padding are undefined. Default: all ``q_len`` queries.

        Returns:
            ``[batch, q_len, num_heads, head_dim]``; NaN if the length is traced and the cache has overflowed or has
            fewer tokens than there are queries, or more than the mask or segment ids are of.

        Raises:
            TypeError: If an argument is of the wrong kind.
            ValueError: If there are more queries than cached tokens, or a value or a shape is wrong.
        """
        checked(implementation)
        widths = [self.max_length]  # the columns of arrays over keys

        def over_slots(array: Any) -> Any:
            columns, held = array.shape[-1], _concrete(self.length)
            if columns == 1 != held:
                return array  # AttentionCall.check refuses one value for all keys, in words
            widths.append(columns)
            check_covered(columns, held)
            return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, max(self.max_length - columns, 0))])

        rules = {"window_size": window_size, "scale": scale, "law": law, "log_gates": self.log_gates, "sinks": sinks}
        rules |= over_keys(over_slots, mask, segment_ids)
        # Validate in heads-first layout: transposing the cache would copy it.
        heads_first = jnp.swapaxes(checks.array("query", query), -3, -2) if len(query.shape) == 4 else query
        q_len = heads_first.shape[-2]
        counts = q_len if lengths is None else _counts(lengths, self.keys.shape[0], q_len, self.max_length)
        offset = self._ends - counts
        call = AttentionCall.check(
            heads_first, self.keys, self.values, slopes, q_offset=offset, tolerance=tolerance, xp=jnp, **rules
        )
        held = _concrete(self._ends) if offset.ndim == 0 else None
        if held is not None and held <= self.max_length:
            check_span(held, call.q_len)
        result = run(call, heads_first, self.keys, self.values, implementation, self.key_norms)
        result = jnp.swapaxes(result, 1, 2)
        if held is not None and held <= self.max_length:
            return result
        # Traced lengths cannot raise: return NaN after an overflow, or if there are too few tokens.
        is_right = (self._ends <= min(widths)) & (offset >= 0)
        return jnp.where(is_right if is_right.ndim == 0 else is_right[:, None, None, None], result, jnp.nan)

    def truncate(self, length: int | jax.Array) -> KVCache:
        """Return the cache of the first ``length`` tokens of each row: a number, or ``[batch]`` integers.

        Shorter rows are unchanged. A cache that has overflowed stays invalid.

        Raises:
            TypeError: If ``length`` is of the wrong kind.
            ValueError: If ``length`` is negative or has the wrong shape.
        """
        if getattr(length, "ndim", 0):
            length = check_lengths(jnp, "length", length, self.keys.shape[0])
        elif not isinstance(length, jax.Array) or host_values(checks.integer_array(jnp, "length", length)) is not None:
            length = min(
                non_negative_int("length", int(length) if isinstance(length, jax.Array) else length),
                checks.MAX_POSITION,
            )
        length = jnp.asarray(length, jnp.int32)
        # A negative length is traced, or it would have raised: it makes the cache invalid.
        kept = jnp.where(length < 0, self.max_length + 1, jnp.minimum(self._ends, length))
        length = jnp.where(self._ends > self.max_length, self._ends, kept)
        gates = None if self.log_gates is None else _of_first(self.log_gates, length)
        return _cache(self.keys, _of_first(self.values, length), self.key_norms, gates, length)

    def select_batch(self, indices: jax.Array) -> KVCache:
        """Return the cache of the sequences at ``indices``, ``[new batch]`` integers, which may repeat.

        Raises:
            TypeError: If ``indices`` are no integers.
            IndexError: If an index is out of range (if it is not traced).
        """
        indices = check_indices(jnp, jnp.asarray(indices), self.keys.shape[0])

        def chosen(array: jax.Array) -> jax.Array:
            """Return the rows of an array, with the array's sharding."""
            array = jnp.asarray(array)
            return array.at[indices].get(out_sharding=jax.typeof(array).sharding) if array.ndim else array

        return jax.tree.map(chosen, self)


_LEAVES = tuple(KVCache.__annotations__)


def _cache(*leaves: Any) -> KVCache:
    """Return the cache of these leaves, whatever they are."""
    return object.__new__(KVCache)._set(*leaves)


jax.tree_util.register_pytree_with_keys(
    KVCache,
    lambda cache: ([(jax.tree_util.GetAttrKey(name), leaf) for name, leaf in vars(cache).items()], None),
    lambda _, leaves: _cache(*leaves),
)


@broadcasting
def _of_first(values: jax.Array, length: jax.Array) -> jax.Array:
    """Return values, or gates, with zeros from ``length``, ``[]`` or ``[batch]``, on.

    Masked slots have a weight of 0, but 0 * NaN and 0 * inf are NaN; gates of NaN are refused.
    """
    is_held = jnp.arange(values.shape[2]) < length[..., None]  # [slots] or [batch, slots]
    return jnp.where(is_held.reshape(-1, 1, values.shape[2], *[1] * (values.ndim - 3)), values, 0)


def _counts(lengths: jax.Array | None, batch_size: int, new: int, max_length: int) -> jax.Array:
    """Return the number of new tokens in each row; invalid traced lengths become more than the capacity (NaN later)."""
    if lengths is None:
        return jnp.full((batch_size,), new, jnp.int32)
    lengths = check_lengths(jnp, "lengths", lengths, batch_size, new)
    return jnp.where((lengths >= 0) & (lengths <= new), lengths.astype(jnp.int32), max_length + 1)


def _concrete(number: Any) -> int | None:
    """Return a number of a cache as an int, or None if it is traced."""
    try:
        return int(number)
    except (jax.errors.ConcretizationTypeError, TypeError):  # TypeError: not a scalar, inside jax.vmap
        return None
