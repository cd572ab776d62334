"""Keys and values of the tokens seen so far, for decoding."""

from __future__ import annotations

import mlx.core as mx

from alibi_core._checks import positive_int

STEP = 256  # tokens; the cache grows by as many at a time, so that it is not copied with each token


class KVCache:
    """A growing key/value cache, with the protocol that the models of mlx-lm expect of one.

    Attributes:
        keys: ``[batch, num_kv_heads, capacity, head_dim]``, of which the first ``offset`` positions are in use; None
            while the cache is empty.
        values: Likewise.
        offset: Tokens held.

    Args:
        batch_size: Sequences. Default: as many as the first keys are of.
        max_length: Tokens that may be held. Default: any number.

    Raises:
        TypeError: If an argument is no integer.
        ValueError: If one is less than 1.

    Example:
        >>> cache = KVCache(max_length=5)
        >>> keys, values = cache.update_and_fetch(mx.zeros((2, 4, 3, 8)), mx.zeros((2, 4, 3, 8)))
        >>> keys, values = cache.update_and_fetch(mx.zeros((2, 4, 1, 8)), mx.zeros((2, 4, 1, 8)))
        >>> keys.shape, cache.offset
        ((2, 4, 4, 8), 4)
    """

    def __init__(self, *, batch_size: int | None = None, max_length: int | None = None) -> None:
        self.batch_size = None if batch_size is None else positive_int("batch_size", batch_size)
        self.max_length = None if max_length is None else positive_int("max_length", max_length)
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store the keys and values of further tokens and return those of all tokens so far.

        Args:
            keys: ``[batch, num_kv_heads, new, head_dim]``.
            values: Likewise.

        Returns:
            Keys and values, ``[batch, num_kv_heads, offset, head_dim]`` each.

        Raises:
            ValueError: If there is no room, or what is held is of another batch size, shape or dtype.
        """
        self._check(keys, values)
        start, end = self.offset, self.offset + keys.shape[-2]
        self.keys, self.values = (
            self._with_room(held, new, end) for held, new in ((self.keys, keys), (self.values, values))
        )
        self.keys[..., start:end, :] = keys
        self.values[..., start:end, :] = values
        self.offset = end
        return self.keys[..., :end, :], self.values[..., :end, :]

    @property
    def state(self) -> tuple[mx.array, ...]:
        """The keys and values in use, ``()`` if there are none. Set it to put them back, or some of them."""
        if self.keys is None or self.values is None:
            return ()
        return self.keys[..., : self.offset, :], self.values[..., : self.offset, :]

    @state.setter
    def state(self, state: tuple[mx.array, ...]) -> None:
        self.keys, self.values, self.offset = None, None, 0
        if state:
            self.update_and_fetch(*state)

    def _check(self, keys: mx.array, values: mx.array) -> None:
        held = keys if self.keys is None else self.keys
        batch_size = held.shape[0] if self.batch_size is None else self.batch_size
        length = keys.shape[-2]
        expected = (batch_size, *held.shape[1:-2], length, held.shape[-1])
        for name, new in (("keys", keys), ("values", values)):
            if new.shape != expected or new.dtype != held.dtype:
                raise ValueError(
                    f"{name} must be {held.dtype} of shape {expected} (batch, num_kv_heads, length, head_dim) to fit "
                    f"the cache, got {new.dtype} of shape {new.shape}"
                )
        if self.max_length is not None and self.offset + length > self.max_length:
            raise ValueError(
                f"cache must have room for {length} more tokens, got max_length {self.max_length} with "
                f"{self.offset} in use; make it longer with make_cache"
            )

    def _with_room(self, held: mx.array | None, new: mx.array, end: int) -> mx.array:
        """Return ``held``, or a longer array that begins with it, with room for ``end`` tokens."""
        if held is not None and end <= held.shape[-2]:
            return held
        capacity = -(-end // STEP) * STEP
        if self.max_length is not None:
            capacity = min(capacity, self.max_length)
        space = mx.zeros((*new.shape[:-2], capacity - self.offset, new.shape[-1]), dtype=new.dtype)
        return space if held is None else mx.concatenate([held[..., : self.offset, :], space], axis=-2)
