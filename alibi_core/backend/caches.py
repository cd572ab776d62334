"""Checks and bookkeeping that the key/value caches of all backends share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from alibi_core._arrays import Namespace, checks, host_values, namespace_of

PLAIN = (bool, int, float, str, type(None))  # types of arguments that are no arrays


def check_new_tokens(
    xp: Namespace, key: Any, value: Any, sizes: tuple[int, ...], dtype: Any, length_axis: int = 2
) -> None:
    """Check that new keys and values fit each other and a cache; their number of tokens is not checked.

    ``sizes`` are the cache's ``(batch, num_kv_heads, head_dim of keys, head_dim of values)``; ``length_axis`` is the
    axis of tokens, 1 or 2.
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


def check_new_gates(
    xp: Namespace,
    log_gates: Any | None,
    sizes: tuple[int, int, int],
    held_heads: int | None,
    *,
    is_empty: bool,
    length_axis: int = 2,
    fix: str = "",
) -> None:
    """Check that all tokens of a cache have forget gates, or none has, and that gates of new tokens fit the cache.

    ``sizes`` are ``(batch, num_kv_heads, new)``; ``held_heads`` are those of the cache's gates, None without. An empty
    cache without gates takes some. ``length_axis`` is as in :func:`check_new_tokens`; ``fix`` ends the message.
    """
    if (log_gates is None) != (held_heads is None) and not (is_empty and held_heads is None):
        raise ValueError(f"log_gates must be given for all tokens of a cache or for none, got them for some{fix}")
    if log_gates is None:
        return
    given = tuple(checks.floating_array(xp, "log_gates", log_gates).shape)
    batch, num_kv_heads, new = sizes
    heads = held_heads or (given[3 - length_axis] if len(given) == 3 else num_kv_heads)
    axes, expected = "batch, num_heads, length", (batch, heads, new)
    if length_axis == 1:
        axes, expected = "batch, length, num_heads", (batch, new, heads)
    if given != expected or heads % num_kv_heads:
        rule = f"{expected} ({axes}; a multiple of {num_kv_heads} heads)"
        raise ValueError(f"log_gates must have shape {rule} to fit the cache, got {given}")


@dataclass(frozen=True)
class RowTokens:
    """Indices for appending a padded batch of new tokens to a cache whose rows have different lengths; in NumPy."""

    rows: np.ndarray[Any, Any]  # [new tokens without padding]: the batch row of each
    columns: np.ndarray[Any, Any]  # its index among the new tokens of its row
    slots: np.ndarray[Any, Any]  # its index in the cache
    ends: np.ndarray[Any, Any]  # [batch]: the length of each row in the cache afterwards

    @classmethod
    def of(cls, held: Any, counts: np.ndarray[Any, Any]) -> RowTokens:
        """Return the indices of the first ``counts`` new tokens of each row; the cache holds ``held`` tokens a row."""
        # One index pair for each token without padding, row by row.
        rows, columns = np.nonzero(np.arange(counts.max(initial=0)) < counts[:, None])
        starts = np.broadcast_to(np.asarray(held, np.int64), counts.shape)
        return cls(rows, columns, starts[rows] + columns, starts + counts)


def check_lengths(xp: Namespace, name: str, lengths: Any, batch_size: int, most: int = checks.MAX_POSITION) -> Any:
    """Check lengths, ``[batch_size]`` integers from 0 to ``most``, and return them. Traced values are not checked."""
    namespace = namespace_of(checks.array(name, lengths), xp=xp, names=(name,))
    shape = tuple(checks.integer_array(namespace, name, lengths).shape)
    if shape != (batch_size,):
        raise ValueError(f"{name} must have shape ({batch_size},) (batch_size), got {shape}")
    values = host_values(lengths)
    if values is not None and not np.all((values >= 0) & (values <= most)):
        raise ValueError(f"{name} must be from 0 to the number of tokens, {most}, got {values.astype(int).tolist()}")
    return lengths


def read_lengths(*lengths: Any) -> np.ndarray[Any, Any]:
    """Return the lengths that :func:`check_lengths` takes as NumPy's int64; refuse traced ones."""
    return checks.read(lengths[1], check_lengths(*lengths)).astype(np.int64)


def counts_of_rows(xp: Namespace, lengths: Any | None, batch_size: int, new: int) -> np.ndarray[Any, Any]:
    """Return the number of new tokens in each row, read on the host; ``new`` without ``lengths``, which are checked."""
    return np.full(batch_size, new) if lengths is None else read_lengths(xp, "lengths", lengths, batch_size, new)


def check_indices(xp: Namespace, indices: Any, batch_size: int) -> Any:
    """Check indices of sequences, and return them: not every library raises for an out-of-range index.

    Traced values are not checked.
    """
    namespace = namespace_of(checks.array("indices", indices), xp=xp, names=("indices",))
    values = host_values(checks.integer_array(namespace, "indices", indices))
    if values is not None and not np.all((values >= -batch_size) & (values < batch_size)):
        found = values.astype(int).tolist()
        raise IndexError(f"indices must be those of sequences, of which there are {batch_size}, got {found}")
    return indices


def check_room(new: int, max_length: float, held: Any) -> None:
    """Check that ``new`` tokens fit into a cache that holds ``held`` tokens (None if unknown)."""
    if (held or 0) + new > max_length:
        raise ValueError(
            f"cache must have room for {new} more tokens, got max_length {max_length} with "
            f"{'an unknown number' if held is None else held} in use; make it longer with make_cache"
        )


def check_span(length: int, q_len: int) -> None:
    """Check that a cache of ``length`` tokens holds the keys of all ``q_len`` queries."""
    if length == 0 < q_len:
        raise ValueError("cache must hold the tokens that query is of, got an empty one; see append")
    if length < q_len:
        raise ValueError(f"query must be of the {length} last tokens, whose keys are all held, got q_len {q_len}")


def plain_rules(*rules: Any) -> tuple[Any, ...] | None:
    """Return rules with their types, to compare a step of decoding with later ones; None if one is no plain value.

    Types come first, and values then compare without fail: True is no window of 1.
    """
    kinds = tuple(map(type, rules))
    return (kinds, rules) if all(kind in PLAIN for kind in kinds) else None


def over_keys(fit: Callable[[Any], Any], mask: Any, segment_ids: Any) -> dict[str, Any]:
    """Return ``mask`` and ``segment_ids`` with ``fit`` applied to the arrays whose last axis is that of cached keys."""

    def fitted(array: Any) -> Any:
        return fit(array) if getattr(array, "shape", ()) else array

    if isinstance(segment_ids, tuple) and len(segment_ids) == 2:
        segment_ids = segment_ids[0], fitted(segment_ids[1])
    return {"mask": fitted(mask), "segment_ids": segment_ids}


def check_covered(columns: int, length: int | None) -> None:
    """Check that a mask or segment ids of ``columns`` keys are of all ``length`` cached tokens (None if unknown)."""
    if length is not None and columns < length:
        raise ValueError(f"mask and segment_ids must be of all {length} cached tokens, got {columns}")


def cache_summary(name: str, shape: tuple[int, ...], length: Any, capacity: Any, nbytes: int) -> str:
    """Return the ``repr`` of a cache; ``shape`` is ``(batch, num_kv_heads, head_dim)``."""
    batch, heads, head_dim = shape
    return (
        f"{name}(batch_size={batch}, num_kv_heads={heads}, head_dim={head_dim}, length={length}, "
        f"max_length={capacity}, nbytes={nbytes})"
    )
