"""Attention problems for golden files: small descriptions, and arrays whose bits depend on no machine."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from alibi_core._slopes import slope_values
from alibi_core.conformance._cases import FAR, Rules, Sizes, Values, penalties
from alibi_core.conformance._golden.exact import default_scale

STEPS = {"query": 32, "key": 32, "value": 16, "grad_output": 32}  # tensors are whole numbers over these


@dataclass(frozen=True)
class Problem:
    """One attention problem, or one bias.

    Attributes:
        name: In golden files.
        description: What it is, in words.
        sizes: Axis sizes.
        is_causal, window_size, scale: As in ``attention``; a scale of None is the default.
        q_offset: As in ``attention``, all defaults filled in; a tuple has one for each batch entry.
        slopes: Repeated over heads. Default, the canonical ones, rounded to float32.
        future_slopes: The same; None for none.
        slopes_per_batch: Whether slopes are ``[batch, num_heads]``: the second entry's are half the first's, and so on.
        segments: Whether rows are packed.
        masking: None, or which mask: ``"padding"``, ``"left padding"``, ``"by query"`` or ``"by head"``.
        loud: What keys are multiplied with; scores lie farther apart.
    """

    name: str
    description: str
    sizes: Sizes
    is_causal: bool = True
    q_offset: int | tuple[int, ...] | None = None
    window_size: int | None = None
    scale: float | None = None
    slopes: tuple[float, ...] | None = None
    future_slopes: tuple[float, ...] | None = None
    slopes_per_batch: bool = False
    segments: bool = False
    masking: str | None = None
    loud: int = 1

    @property
    def num_heads(self) -> int:
        """How many query heads there are."""
        return self.sizes.num_kv_heads * self.sizes.group

    @property
    def resolved_scale(self) -> float:
        """The scale, default filled in."""
        return default_scale(self.sizes.head_dim) if self.scale is None else self.scale

    @cached_property
    def tensors(self) -> dict[str, Values]:
        """Query, key, value and grad_output, in numbers that all dtypes hold: of at most 8 significant bits."""
        size, (q_len, kv_len) = self.sizes, self.sizes.lengths
        heads = {"query": self.num_heads, "grad_output": self.num_heads}
        lengths = {"query": q_len, "grad_output": q_len}
        return {
            name: self._drawn(
                name, (size.batch, heads.get(name, size.num_kv_heads), lengths.get(name, kv_len), size.head_dim)
            )
            / np.float32(step / (self.loud if name == "key" else 1))
            for name, step in STEPS.items()
        }

    @cached_property
    def options(self) -> dict[str, Values]:
        """The arguments that are arrays; slopes always."""
        (q_len, kv_len), batch = self.sizes.lengths, self.sizes.batch
        own = self.slopes or tuple(slope_values(self.num_heads))
        options = {"slopes": self._slopes(own)}
        if self.future_slopes is not None:
            options["future_slopes"] = self._slopes(self.future_slopes)
        if isinstance(self.q_offset, tuple):
            options["q_offset"] = np.asarray(self.q_offset, np.int32)
        if self.segments:
            ids = np.sort(self._drawn("segment_ids", (batch, max(q_len, kv_len))) % 3, axis=-1).astype(np.int32)
            options |= {"q_segment_ids": ids[:, ids.shape[1] - q_len :], "kv_segment_ids": ids[:, -kv_len:]}
        if self.masking is not None:
            options["mask"] = self._mask(batch, q_len, kv_len)
        return options

    @property
    def rules(self) -> Rules:
        """The same for the oracle."""
        (q_len, kv_len), options = self.sizes.lengths, dict(self.options)
        offset: Any = kv_len - q_len if self.q_offset is None else self.q_offset
        options.setdefault("q_offset", offset)
        return Rules(**options, is_causal=self.is_causal, window_size=self.window_size)

    @property
    def features(self) -> list[str]:
        """Those of the kit's ``FEATURES`` that an implementation must offer to be held to this problem."""
        (q_len, kv_len), offset = self.sizes.lengths, self.q_offset
        bias = penalties(self.rules, self.sizes.batch, self.num_heads, q_len, kv_len)
        found = {
            "lengths": q_len != kv_len,
            "offset": offset not in (None, kv_len - q_len),
            "batch_offsets": isinstance(offset, tuple),
            "far": isinstance(offset, int) and abs(offset) >= FAR,
            "symmetric": not self.is_causal,
            "asymmetric": self.future_slopes is not None,
            "grouped": self.sizes.group > 1,
            "window": self.window_size is not None,
            "segments": self.segments,
            "mask": self.masking is not None,
            "batch_slopes": self.slopes_per_batch,
            "scale": self.scale is not None,
            "nowhere": bias.size > 0 and not bool(np.isfinite(bias).any(axis=-1).all()),
            "empty": 0 in (q_len, kv_len),
        }
        return sorted(name for name, is_used in found.items() if is_used)

    @property
    def has_default_slopes(self) -> bool:
        """Whether the slopes are the canonical ones, to the last bit of float64."""
        return not self.slopes_per_batch and self.options["slopes"].tolist() == slope_values(self.num_heads)

    def _slopes(self, values: tuple[float, ...]) -> Values:
        row = np.resize(np.asarray(values, np.float32), self.num_heads)
        if not self.slopes_per_batch:
            return row
        return np.stack([row * np.float32(2.0**-entry) for entry in range(self.sizes.batch)])

    def _mask(self, batch: int, q_len: int, kv_len: int) -> Values:
        keys, lost = np.arange(kv_len), 2 * np.arange(batch)[:, None, None, None] + 1
        if self.masking == "padding":
            return np.asarray(keys < kv_len - lost)
        if self.masking == "left padding":
            return np.asarray(keys >= lost)
        shape = (batch, self.num_heads if self.masking == "by head" else 1, q_len, kv_len)
        own = keys == np.arange(q_len)[:, None] + kv_len - q_len  # so that every query sees one key at least
        return np.asarray((self._drawn("mask", shape) % 8 < 5) | own)

    def _drawn(self, name: str, shape: tuple[int, ...]) -> Values:
        """Return whole numbers from -64 to 63: raw bits of PCG64, a stream that is the same in every NumPy."""
        bits = np.random.PCG64(zlib.crc32(f"{self.name}/{name}".encode()))
        raw = np.asarray(bits.random_raw(int(np.prod(shape))), np.uint64)
        return (raw >> np.uint64(57)).astype(np.int64).reshape(shape) - 64
