"""The encoder of all backends: its forward pass, and the packing of texts that avoids computing padding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from alibi_core._arrays import (
    arange,
    asarray,
    astype,
    checks,
    device_of,
    explains_keywords,
    host_values,
    is_exporting,
    is_kind,
    namespace_of,
    running_sum,
)
from alibi_core._bias import working_dtype
from alibi_core._models.transformer import BaseTextModel, check_in_table, check_tokens

Numbers = np.ndarray[Any, Any]
POOLING = ("mean", "cls")
# Up to this many tokens are packed into one row: few on a CPU, for its caches and its allocator; many on an
# accelerator, to keep it busy.
MOST_PACKED = {"cpu": 2048, "accelerator": 65_536}


@dataclass(frozen=True)
class TextRows:
    """Which tokens of a batch are text."""

    text: Numbers  # [batch, length] booleans, False for padding

    @classmethod
    def check(cls, shape: tuple[int, ...], lengths: Any | None, mask: Any | None) -> TextRows:
        """Check the ``lengths`` or the ``mask`` of tokens, lists or arrays, by reading their values on the host."""
        lengths, mask = (
            None if x is None else checks.read(name, x) for name, x in (("lengths", lengths), ("mask", mask))
        )
        cls.check_form(shape, lengths, mask)
        if lengths is not None:
            if lengths.size and not 0 <= lengths.min() <= lengths.max() <= shape[1]:
                raise ValueError(f"lengths must be from 0 to the length of tokens, {shape[1]}, got {lengths.tolist()}")
            return cls(np.arange(shape[1]) < lengths[:, None])
        return cls(np.ones(shape, bool) if mask is None else mask != 0)

    @staticmethod
    def check_form(shape: tuple[int, ...], lengths: Any | None, mask: Any | None) -> None:
        """Check kinds and shapes of arrays of any library, without values."""
        if len(shape) != 2:
            raise ValueError(f"tokens must have shape (batch, length), got {shape}")
        if lengths is not None and mask is not None:
            raise ValueError("lengths must be None where a mask is given, got both")
        for name, given, kinds, words in (
            ("lengths", lengths, ("integral",), "integers"),
            ("mask", mask, ("bool", "integral"), "booleans, or integers"),
        ):
            # The dtype of an empty list is float64: only check arrays with elements.
            if given is None or 0 in given.shape:
                continue
            if not any(is_kind(namespace_of(given), given.dtype, kind) for kind in kinds):
                raise TypeError(f"{name} must be {words}, got {given.dtype}")
        if lengths is not None and tuple(lengths.shape) != shape[:1]:
            raise ValueError(f"lengths must have shape (batch {shape[0]},), got {tuple(lengths.shape)}")
        if mask is not None and tuple(mask.shape) != shape:
            raise ValueError(f"mask must have the shape of tokens, {shape}, got {tuple(mask.shape)}")

    def check_in_table(self, name: str, numbers: Any, size: int) -> None:
        """Check that ids of text are rows of a table of ``size`` embeddings; ids in padding may be any.

        With wrong ids JAX returns NaN, and MLX reads foreign memory. Ids on an accelerator are not checked: the host
        would have to wait for them.
        """
        values = None if numbers is None or not self.text.any() else host_values(numbers)
        check_in_table(name, None if values is None else values[self.text], size)

    @property
    def is_full(self) -> bool:
        """Whether there is no padding."""
        return bool(self.text.all())

    @property
    def has_gaps(self) -> bool:
        """Whether a row has padding between tokens of text. Distances count it, so the batch cannot be packed."""
        # True where a run of text starts; more than one run in a row is a gap.
        starts = np.diff(self.text.astype(np.int8), prepend=0, axis=1) == 1
        return bool((starts.sum(axis=1) > 1).any())

    @property
    def counts(self) -> list[int]:
        """Number of tokens of text in each row."""
        return [int(count) for count in self.text.sum(axis=1)]

    @property
    def places(self) -> Numbers:
        """Indices of text in the flattened batch, ``[tokens of text]``."""
        return np.flatnonzero(self.text)

    @property
    def row_of_place(self) -> Numbers:
        """The row of each token of text, ``[tokens of text]`` int32: segment ids where rows are packed."""
        return np.nonzero(self.text)[0].astype(np.int32)

    def packs(self, most: int) -> Iterator[tuple[Numbers, Numbers]]:
        """Yield ``places`` and ``row_of_place`` in parts of consecutive rows: at most ``most`` tokens, or one row."""
        starts, size = [0], 0
        for row, count in enumerate(self.counts):
            if size > 0 and size + count > most:
                starts.append(row)
                size = 0
            size += count
        # Row indices are sorted, so each pack is a slice.
        edges = np.searchsorted(self.row_of_place, [*starts[1:]])
        yield from zip(np.split(self.places, edges), np.split(self.row_of_place, edges), strict=True)


def text_of(tokens: Any, lengths: Any | None, mask: Any | None) -> Any:
    """Return which tokens are text, ``[batch, length]`` booleans, where a compiler hides the values of arrays."""
    TextRows.check_form(tuple(tokens.shape), lengths, mask)
    if lengths is not None:
        xp = namespace_of(lengths)
        return arange(xp, tokens.shape[1], device_of(xp, lengths))[None] < lengths[:, None]
    if mask is None:
        return tokens == tokens
    return mask if is_kind(namespace_of(mask), mask.dtype, "bool") else mask != 0


class BaseEncoder(BaseTextModel):
    """Base of the encoders of all backends."""

    _most_packed: Any  # of a backend: (tokens) gives the most tokens in a pack

    @explains_keywords
    def __call__(
        self,
        tokens: Any,
        *,
        mask: Any | None = None,
        segment_ids: Any | None = None,
        token_types: Any | None = None,
        positions: Any | None = None,
    ) -> Any:
        """Return a vector for each token.

        Args:
            tokens: ``[batch, length]`` integers below ``vocab_size``.
            mask, segment_ids, positions: As in :class:`AlibiTransformer`: visible keys, packed sequences and explicit
                positions. All ``tokens`` are computed, padding too; :meth:`encode` avoids that.
            token_types: ``[batch, length]`` integers below ``config.token_types``. Default: all 0.

        Returns:
            ``[batch, length, embed_dim]``.

        Raises:
            ValueError: If ``token_types`` have another shape than ``tokens``, or the model has no token types.
        """
        x = self.embed(tokens, token_types=token_types)
        return self.transformer(x, mask=mask, segment_ids=segment_ids, positions=positions)

    def embed(self, tokens: Any, *, token_types: Any | None = None) -> Any:
        """Return the transformer's input for ``tokens``, ``[batch, length]``: ``[batch, length, embed_dim]``."""
        self._check(tokens, token_types)
        return self._embed(tokens, token_types)

    @explains_keywords
    def encode(
        self,
        tokens: Any,
        *,
        lengths: Any | None = None,
        mask: Any | None = None,
        token_types: Any | None = None,
        pooling: str = "mean",
    ) -> Any:
        """Return a vector for each text.

        Padding is not computed: texts of different lengths are packed into rows. Padding between tokens of one text
        counts in the distances and is computed. The host must read where padding is, so an accelerator is synchronised
        once. An exported program computes padding and masks it.

        Args:
            tokens: ``[batch, length]`` integers below ``vocab_size``; ids in padding may be any.
            lengths: ``[batch]`` integers, the number of tokens of text at the start of each row.
            mask: ``[batch, length]`` booleans or integers, 0 for padding, in place of lengths.
            token_types: ``[batch, length]`` integers below ``config.token_types``. Default: all 0.
            pooling: ``"mean"``: the mean of the vectors of a text's tokens. ``"cls"``: the vector of its first token.

        Returns:
            ``[batch, embed_dim]``, float32 or float64; zeros for a row without text.

        Raises:
            TypeError: If an argument is of the wrong kind.
            ValueError: If both ``lengths`` and ``mask`` are given, an argument does not fit ``tokens``, or the model
                has no embedding of a token of text.
        """
        checks.one_of("pooling", pooling, POOLING)
        self._check(tokens, token_types)
        return self._encode(tokens, token_types, lengths, mask, pooling)

    def _check(self, tokens: Any, token_types: Any | None) -> None:
        check_tokens(tokens, self._xp)
        if token_types is None:
            return
        if not self.config.token_types:
            raise ValueError("token_types must be None for a model whose config has none, got some")
        xp = namespace_of(checks.array("token_types", token_types), xp=self._xp, names=("token_types",))
        shape = tuple(checks.integer_array(xp, "token_types", token_types).shape)
        if shape != tuple(tokens.shape):
            raise ValueError(f"token_types must have the shape of tokens, {tuple(tokens.shape)}, got {shape}")

    def _text_rows(self, tokens: Any, token_types: Any | None, lengths: Any | None, mask: Any | None) -> TextRows:
        rows = TextRows.check(tuple(tokens.shape), lengths, mask)
        rows.check_in_table("tokens", tokens, self._vocab_size)
        rows.check_in_table("token_types", token_types, self.config.token_types)
        return rows

    def _encode(self, tokens: Any, token_types: Any | None, lengths: Any, mask: Any, pooling: str) -> Any:
        """Return the vectors of texts, ``[batch, embed_dim]``; JAX compiles this."""
        given = {"tokens": tokens, "token_types": token_types}
        if is_exporting():  # a program for texts of all lengths
            return self._encode_padded(given, text_of(tokens, lengths, mask), pooling)
        calls, text, rows = self._packed(given, lengths, mask)
        if text is not None:
            return self._encode_padded(given, text, pooling)
        # [tokens of text, embed_dim], row by row
        vectors = self._xp.concatenate([self(**call).reshape(-1, self.config.embed_dim) for call in calls])
        return self._pooled(vectors, rows, pooling)

    def _packed(
        self, given: dict[str, Any], lengths: Any, mask: Any
    ) -> tuple[list[dict[str, Any]], Any | None, TextRows]:
        """Return the arguments of calls of the model whose results are text alone, None, and the rows.

        If padding is between tokens of text, which cannot be packed, return where text is in place of None. This is
        work for the host, which PyTorch's compiler skips: it cannot guard NumPy arrays.
        """
        tokens = given["tokens"]
        rows, xp = self._text_rows(**given, lengths=lengths, mask=mask), namespace_of(tokens)
        text = asarray(xp, rows.text, None, device_of(xp, tokens)) if rows.has_gaps else None
        # Without padding, one call on the batch as it is.
        if rows.is_full or text is not None:
            return [given], text, rows
        calls = []
        for places, segment_ids in rows.packs(self._most_packed(tokens)):
            index, ids = (asarray(xp, x, None, device_of(xp, tokens)) for x in (places, segment_ids))
            # [1, tokens of text]: one packed row
            packed = {name: None if x is None else x.reshape(-1)[index][None] for name, x in given.items()}
            calls.append(packed | {"segment_ids": ids[None]})
        return calls, None, rows

    def _encode_padded(self, given: dict[str, Any], text: Any, pooling: str) -> Any:
        """Return the vectors of padded texts, ``[batch, embed_dim]``; ``text``, ``[batch, length]``, says what is text.

        Padding is computed and masked: where it is may be unknown, or it may count in distances.
        """
        xp = namespace_of(text)
        # Ids in padding may be out of range, for which JAX returns NaN: replace them by 0.
        given = {name: None if x is None else xp.where(text, x, 0) for name, x in given.items()}
        vectors = self(**given, mask=text[:, None, None])
        vectors = astype(xp, vectors, working_dtype(xp, vectors.dtype))
        if pooling == "cls":
            text = xp.logical_and(text, running_sum(xp, astype(xp, text, xp.int32)) == 1)  # the first token of text
        vectors = xp.where(text[..., None], vectors, 0.0)  # padding may be NaN, and 0 * NaN is NaN
        counts = xp.sum(astype(xp, text, vectors.dtype), axis=1)
        return xp.sum(vectors, axis=1) / xp.where(counts == 0, 1.0, counts)[:, None]

    def _pooled(self, vectors: Any, rows: TextRows, pooling: str) -> Any:
        """Return the vectors of texts, ``[batch, embed_dim]``, from those of their tokens, row by row."""
        xp = namespace_of(vectors)
        # Means are computed in float32 at least.
        vectors = astype(xp, vectors, working_dtype(xp, vectors.dtype))
        pooled, start = [], 0
        for count in rows.counts:
            text = vectors[start : start + count]
            pooled.append(text[0] if pooling == "cls" and count else text.sum(axis=0) / max(count, 1))
            start += count
        return xp.stack(pooled) if pooled else vectors
