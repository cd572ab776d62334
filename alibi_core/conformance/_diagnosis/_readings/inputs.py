"""What readings start from: a case with every default filled in, and the ways to take its offsets and scale."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from alibi_core.conformance._cases import Case, Values, rounded

MOST_KEPT = 3000  # elements of a bias that is kept for the next reading


@dataclass(frozen=True)
class Inputs:
    """A case in float64, rounded to the dtype of the adapter, defaults filled in.

    Shapes: query ``[batch, num_heads, q_len, head_dim]``, key and value ``[batch, num_kv_heads, kv_len, head_dim]``,
    slopes and future_slopes ``[batch, num_heads]``, offsets ``[batch]``, ids ``[batch, q_len]`` and
    ``[batch, kv_len]``, mask ``[batch, num_heads, q_len, kv_len]``.
    """

    query: Values
    key: Values
    value: Values
    slopes: Values
    future_slopes: Values | None
    offsets: Values
    is_causal: bool
    window_size: int | None
    ids: tuple[Values, Values] | None
    mask: Values | None
    scale: float
    dtype: str
    first: int = 0  # which query the first is, of as many as ...
    total: int = 0  # ... there were in the call
    _kept: dict[object, Values] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, case: Case, dtype: str) -> Inputs:
        """Resolve a case."""
        arguments = {"scale": case.scale} | case.arguments
        if "segment_ids" in arguments:
            arguments["segment_ids"] = case.segment_ids
        query, key, value = (rounded(case.arrays[name], dtype) for name in ("query", "key", "value"))
        return cls.given(query, key, value, case.arrays["slopes"], dtype=dtype, **arguments)

    @classmethod
    def given(
        cls, query: Values, key: Values, value: Values, slopes: Values, *, dtype: str, **arguments: Any
    ) -> Inputs:
        """Resolve the arguments of an adapter's attention, tensors as its dtype holds them."""
        (batch, num_heads, q_len, head_dim), kv_len = query.shape, key.shape[2]
        heads, kept = (batch, num_heads), "float64" if dtype == "float64" else "float32"
        future, mask, scale = (arguments.get(name) for name in ("future_slopes", "mask", "scale"))
        return cls(
            query=np.asarray(query, np.float64),
            key=np.asarray(key, np.float64),
            value=np.asarray(value, np.float64),
            slopes=np.broadcast_to(rounded(slopes, kept), heads),
            future_slopes=None if future is None else np.broadcast_to(rounded(future, kept), heads),
            offsets=np.broadcast_to(arguments.get("q_offset", kv_len - q_len), heads[:1]).astype(np.float64),
            is_causal=arguments.get("is_causal", True),
            window_size=arguments.get("window_size"),
            ids=arguments.get("segment_ids"),
            mask=None if mask is None else np.broadcast_to(mask, (*heads, q_len, kv_len)),
            scale=head_dim**-0.5 if scale is None else float(scale),
            dtype=dtype,
            total=q_len,
        )

    def only(self, first: int, count: int) -> Inputs:
        """Return the same, for some of the queries alone."""
        rows = slice(first, first + count)
        ids = None if self.ids is None else (self.ids[0][:, rows], self.ids[1])
        mask = None if self.mask is None else self.mask[:, :, rows]
        return dataclasses.replace(self, query=self.query[:, :, rows], ids=ids, mask=mask, first=first, _kept={})

    def padded(self, multiple: int) -> Inputs:
        """Return the same with keys and values of zeros up to a multiple of so many, which nothing hides but order."""
        extra = -self.kv_len % multiple
        widths = ((0, 0), (0, 0), (0, extra), (0, 0))
        ids = None if self.ids is None else (self.ids[0], np.pad(self.ids[1], ((0, 0), (0, extra)), mode="edge"))
        mask = None if self.mask is None else np.pad(self.mask, (*widths[:2], *widths[1:3]), constant_values=True)
        key, value = np.pad(self.key, widths), np.pad(self.value, widths)
        return dataclasses.replace(self, key=key, value=value, ids=ids, mask=mask, _kept={})

    def kept(self, key: object, compute: Callable[[], Values]) -> Values:
        """Return what was computed for that key, or compute it; what is large is not kept."""
        if self.batch * self.num_heads * self.q_len * self.kv_len > MOST_KEPT:
            return compute()
        if key not in self._kept:
            self._kept[key] = compute()
        return self._kept[key]

    def q_positions(self, offset: str) -> Values:
        """Return the positions of queries, with one of ``OFFSETS``, ``[batch, 1, q_len, 1]``."""
        first = OFFSETS[offset](self.offsets, self) + self.first
        return np.asarray(first[:, None, None, None] + np.arange(self.q_len)[:, None])

    batch = property(lambda self: self.query.shape[0])
    num_heads = property(lambda self: self.query.shape[1])
    num_kv_heads = property(lambda self: self.key.shape[1])
    group = property(lambda self: self.num_heads // self.num_kv_heads)
    q_len = property(lambda self: self.query.shape[2])
    kv_len = property(lambda self: self.key.shape[2])
    head_dim = property(lambda self: self.query.shape[3])

    @cached_property
    def products(self) -> Values:
        """Query times key, ``[batch, num_heads, q_len, kv_len]``, by the right key/value head."""
        return np.asarray(self.query @ self.key.repeat(self.group, axis=1).swapaxes(-1, -2))

    @cached_property
    def product_size(self) -> Values:
        """The largest sum of the sizes of a product's terms, in each row, ``[batch, num_heads, q_len, 1]``."""
        largest = np.abs(self.key).max(axis=2, keepdims=True, initial=0).repeat(self.group, axis=1)
        return np.asarray((np.abs(self.query) * largest).sum(axis=-1, keepdims=True))


# Where the first query stands, [batch].
OFFSETS: dict[str, Callable[[Values, Inputs], Values]] = {
    "given": lambda x, i: x,
    "top-left": lambda x, i: x * 0,
    "bottom-right": lambda x, i: x * 0 + (i.kv_len - i.total),
    "offset one more": lambda x, i: x + 1,
    "offset one less": lambda x, i: x - 1,
    "first batch offset": lambda x, i: x[:1] + x * 0,
    "last batch offset": lambda x, i: x[-1:] + x * 0,
    "negative offset cut": lambda x, i: np.maximum(x, 0),
    "offset negated": lambda x, i: -x,
    "offset counted twice": lambda x, i: x + (i.kv_len - i.total),
    "offset 0 as none": lambda x, i: np.where(x == 0, i.kv_len - i.total, x),
    "q_offset doubled": lambda x, i: 2 * x,
    "offset kv_len": lambda x, i: x * 0 + i.kv_len,
}

SCALES: dict[str, Callable[[Inputs], float]] = {
    "given": lambda i: i.scale,
    "scale ignored": lambda i: i.head_dim**-0.5,
    "scale missing": lambda i: 1.0,
    "scaled by d_model": lambda i: (i.head_dim * i.num_heads) ** -0.5,
    "scaled by kv d_model": lambda i: (i.head_dim * i.num_kv_heads) ** -0.5,
    "scaled twice": lambda i: i.scale**2,
    "scaled by the default too": lambda i: i.scale * i.head_dim**-0.5,
    "root of scale": lambda i: math.sqrt(abs(i.scale)),
    "scaled by head_dim": lambda i: 1 / i.head_dim,
    "scale inverted": lambda i: 1 / i.scale if i.scale else 0.0,
    "scaled by kv_len": lambda i: i.kv_len**-0.5,
    "scores in base 2": lambda i: i.scale * math.log(2),
    "scores times log2 e": lambda i: i.scale / math.log(2),
    "scores negated": lambda i: -i.scale,
}

FACTORS: dict[str, Callable[[Inputs], float]] = {
    "bias lost": lambda i: 0.0,
    "negated bias": lambda i: -1.0,
    "bias halved": lambda i: 0.5,
    "bias doubled": lambda i: 2.0,
    "bias scaled": lambda i: i.scale,
    "bias scaled twice": lambda i: i.scale**2,
    "bias scaled up": lambda i: 1 / i.scale if i.scale else 0.0,
    "bias scaled by default": lambda i: i.head_dim**-0.5,
    "bias scaled by d_model": lambda i: (i.head_dim * i.num_heads) ** -0.5,
    "bias over head_dim": lambda i: 1 / i.head_dim,
    "bias over kv_len": lambda i: 1 / i.kv_len,
    "bias over num_heads": lambda i: 1 / i.num_heads,
    "bias summed over the group": lambda i: i.group,
    "bias in base 2": lambda i: math.log(2),
    "bias times log2 e": lambda i: 1 / math.log(2),
}
