"""Where the text of a padded batch is, and how it is packed, so that no padding is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from alibi_core._arrays import checks, host_values

Numbers = np.ndarray[Any, Any]
POOLING = ("mean", "cls")
# Tokens that are packed together at most: so few that a CPU's caches and its allocator do well, or so many that an
# accelerator is busy.
MOST_PACKED = {"cpu": 2048, "accelerator": 65_536}


@dataclass(frozen=True)
class TextRows:
    """Which tokens of a batch are text.

    Attributes:
        text: ``[batch, length]`` booleans, False for padding.
    """

    text: Numbers

    @classmethod
    def check(cls, shape: tuple[int, ...], lengths: Any | None, mask: Any | None) -> TextRows:
        """Check what a call says of its padding.

        Args:
            shape: Of the tokens: ``(batch, length)``.
            lengths: ``[batch]`` integers, how many tokens of each row are text, from the first on; NumPy's, or a list.
            mask: ``[batch, length]`` booleans or integers, 0 for padding, anywhere in a row.

        Raises:
            TypeError: If an argument is of the wrong kind.
            ValueError: If both are given, a shape is wrong, or a row is shorter than its text.
        """
        lengths, mask = (None if x is None else np.asarray(x) for x in (lengths, mask))
        cls.check_form(shape, lengths, mask)
        if lengths is not None:
            if lengths.size and not 0 <= lengths.min() <= lengths.max() <= shape[1]:
                raise ValueError(f"lengths must be from 0 to the length of tokens, {shape[1]}, got {lengths.tolist()}")
            return cls(np.arange(shape[1]) < lengths[:, None])
        return cls(np.ones(shape, bool) if mask is None else mask != 0)

    @staticmethod
    def check_form(shape: tuple[int, ...], lengths: Any | None, mask: Any | None) -> None:
        """Check what :meth:`check` does, but for values: of arrays of any library that has NumPy's dtypes.

        Raises:
            TypeError: If an argument is of the wrong kind.
            ValueError: If both are given, or a shape is wrong.
        """
        if len(shape) != 2:
            raise ValueError(f"tokens must have shape (batch, length), got {shape}")
        if lengths is not None and mask is not None:
            raise ValueError("lengths must be None where a mask is given, got both")
        for name, given, kinds, words in (
            ("lengths", lengths, "iu", "integers"),
            ("mask", mask, "biu", "booleans, or integers"),
        ):
            # Of an empty list, the kind says nothing.
            if given is not None and given.size and given.dtype.kind not in kinds:
                raise TypeError(f"{name} must be {words}, got {given.dtype}")
        if lengths is not None and lengths.shape != shape[:1]:
            raise ValueError(f"lengths must have shape (batch {shape[0]},), got {lengths.shape}")
        if mask is not None and mask.shape != shape:
            raise ValueError(f"mask must have the shape of tokens, {shape}, got {mask.shape}")

    def check_in_table(self, name: str, numbers: Any, size: int) -> None:
        """Check that a table of embeddings has a row for each number of text. Those of padding may be any.

        Args:
            name: What a message calls them.
            numbers: ``[batch, length]`` integers of any library, or None. They are not looked at where that would make
                the host wait for an accelerator.
            size: Number of rows.

        Raises:
            ValueError: If it has not. JAX would make NaN of them, MLX would read memory that is something else.
        """
        values = None if numbers is None or not self.text.any() else host_values(numbers)
        checks.in_table(name, None if values is None else values[self.text], size)

    @property
    def is_full(self) -> bool:
        """Whether there is no padding."""
        return bool(self.text.all())

    @property
    def has_gaps(self) -> bool:
        """Whether padding stands between text somewhere, where distances count it: such rows cannot be packed."""
        starts = np.diff(self.text.astype(np.int8), prepend=0, axis=1) == 1
        return bool((starts.sum(axis=1) > 1).any())

    @property
    def counts(self) -> list[int]:
        """How many tokens of each row are text."""
        return [int(count) for count in self.text.sum(axis=1)]

    @property
    def places(self) -> Numbers:
        """Where text stands in the batch, ``[tokens of text]``, rows counted through."""
        return np.flatnonzero(self.text)

    @property
    def row_of_place(self) -> Numbers:
        """The row of each token of text, ``[tokens of text]`` int32: segment ids where rows are packed."""
        return np.nonzero(self.text)[0].astype(np.int32)

    def packs(self, most: int) -> Iterator[tuple[Numbers, Numbers]]:
        """Yield ``places`` and ``row_of_place`` in parts: as many rows as have ``most`` tokens together, or one row."""
        starts, size = [0], 0
        for row, count in enumerate(self.counts):
            if size > 0 and size + count > most:
                starts.append(row)
                size = 0
            size += count
        edges = np.searchsorted(self.row_of_place, [*starts[1:]])
        yield from zip(np.split(self.places, edges), np.split(self.row_of_place, edges), strict=True)
