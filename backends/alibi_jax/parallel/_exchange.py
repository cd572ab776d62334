"""Keys and values on their way between devices, of each head as many tokens as it needs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from alibi_core import Shards


def exchange(
    shards: Shards, axis_name: str, array: jax.Array, distance: int, *, back: bool = False, cyclic: bool = False
) -> jax.Array:
    """Return, for each chunk of this device, what the chunk ``distance`` before it has; zeros where there is none.

    Args:
        shards: How the sequence is divided.
        axis_name: Of the mesh axis that it is divided along.
        array: ``[slots, ...]``, a part of each of this device's chunks.
        distance: In chunks; negative for the chunk after.
        back: Send the other way: return what the chunk ``distance`` after it has got for it.
        cyclic: Whether the last chunk comes before the first.
    """
    received = [jnp.zeros_like(array[0])] * shards.slots
    for source, target in itertools.product(range(shards.slots), repeat=2):
        pairs = shards.pairs(distance, source, target, cyclic=cyclic)
        if back:
            pairs = tuple((there, here) for here, there in pairs)
            source, target = target, source
        moved = _moved(axis_name, array[source], pairs)
        if moved is not None:
            received[target] = received[target] + moved
    return jnp.stack(received)


def _moved(axis_name: str, array: jax.Array, pairs: tuple[tuple[int, int], ...]) -> jax.Array | None:
    """Send an array from each pair's first device to its second; None if there are no pairs."""
    found = None
    if any(here != there for here, there in pairs):
        found = lax.ppermute(array, axis_name, [pair for pair in pairs if pair[0] != pair[1]])
    staying = [here for here, there in pairs if here == there]
    if staying:
        stays = jnp.isin(lax.axis_index(axis_name), jnp.asarray(staying))
        own = jnp.where(stays, array, jnp.zeros_like(array))
        found = own if found is None else found + own
    return found


@dataclass(frozen=True)
class Halo:
    """How many tokens of each key/value head travel in one hop: the last ones of a chunk, or the first.

    Packed, they are ``[..., all tokens of all heads, features]``. Unpacked, they are ``[..., length, heads, features]``
    of those heads that send any, with something else where a head sends fewer than others, farthest from who receives
    them.
    """

    tokens: tuple[int, ...]
    is_past: bool

    @property
    def heads(self) -> tuple[int, ...]:
        """The heads that send any tokens."""
        return tuple(head for head, tokens in enumerate(self.tokens) if tokens)

    @property
    def length(self) -> int:
        """Tokens of the head that sends the most."""
        return max(self.tokens)

    @property
    def tokens_sent(self) -> slice:
        """The tokens of a chunk that any head sends."""
        return slice(-self.length, None) if self.is_past else slice(0, self.length)

    def cut(self, array: jax.Array) -> jax.Array:
        """Return the part of ``[..., chunk_len, heads, features]`` that is unpacked of all heads."""
        return take(array[..., self.tokens_sent, :, :], self.heads, -2)

    def pack(self, array: jax.Array) -> jax.Array:
        """Pack what is unpacked."""
        parts = []
        for first, stop, tokens in self._runs():
            part = array[..., first:stop, :]
            part = part[..., self.length - tokens :, :, :] if self.is_past else part[..., :tokens, :, :]
            parts.append(part.reshape(*part.shape[:-3], -1, part.shape[-1]))
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-2)

    def unpack(self, array: jax.Array, filling: str = "edge") -> jax.Array:
        """Unpack what is packed, with something else where a head sends fewer tokens than others.

        That is zeros with ``filling="constant"``. With ``"edge"`` it is the farthest token that the head sends: it lies
        beyond the horizon there, and its scores are those of a key, so that it weighs nothing; zeros might score more
        than all keys.
        """
        parts, start = [], 0
        for first, stop, tokens in self._runs():
            size = (stop - first) * tokens
            part = array[..., start : start + size, :].reshape(*array.shape[:-2], tokens, stop - first, array.shape[-1])
            missing = self.length - tokens
            widths = [(0, 0)] * (part.ndim - 3) + [(missing, 0) if self.is_past else (0, missing), (0, 0), (0, 0)]
            parts.append(jnp.pad(part, widths, mode=filling))
            start += size
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-2)

    def _runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield neighbours, among the heads that send any, that send as many: the first, the one after, and tokens."""
        start = 0
        for tokens, run in itertools.groupby(n for n in self.tokens if n):
            stop = start + len(list(run))
            yield start, stop, tokens
            start = stop


def take(array: jax.Array, index: tuple[int, ...], axis: int) -> jax.Array:
    """Return these elements along an axis, of which the compiler knows where they are."""
    if index == tuple(range(array.shape[axis])):
        return array
    if index == tuple(range(index[0], index[-1] + 1)):
        return lax.slice_in_dim(array, index[0], index[-1] + 1, axis=axis)
    return jnp.take(array, jnp.asarray(index), axis=axis, mode="clip", unique_indices=True, indices_are_sorted=True)
