"""The tokens of one forward pass: padding, the first token of each sequence, the number of cached tokens.

A model's ``forward`` reads its arguments once, into :class:`Tokens`. The attention layers receive them as an attribute
of the mask that the model's code passes to every layer: :func:`carrier` makes a mask with four axes, which that code
does not change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from alibi_torch._internals import has_dispatch_mode, is_unreadable


@dataclass(frozen=True)
class Tokens:
    """The tokens of one forward pass and the cached tokens before them."""

    past: Any  # number of tokens before the first query: an int, or a one-element tensor (compiled static cache)
    kv_len: Any  # number of tokens including this pass; with a compiled static cache, the number of slots
    # [batch, kv_len], 0 for padding; None without padding. BLOOM and Falcon make positions of its cumulative sums; MPT
    # counts columns.
    mask: Tensor | None = None
    origins: Tensor | None = None  # [batch, kv_len or 1], column where a token's sequence begins; None if all are 0
    sequences: Tensor | None = None  # [batch, kv_len], number of a token's sequence; None if each row is one sequence
    shared: dict[Any, Any] = field(default_factory=dict, compare=False)  # values that all layers of the pass use

    @staticmethod
    def read(past: Any, kv_len: Any, mask: Tensor | None, starts: Tensor | None) -> Tokens:
        """Return the tokens for a mask and ``starts``, ``[batch, kv_len]``, True where a sequence begins."""
        origins = sequences = None
        if starts is not None:
            columns = torch.arange(kv_len, device=starts.device)
            origins = torch.where(starts, columns, 0).cummax(dim=-1).values
            sequences = starts.cumsum(dim=-1)
        elif mask is not None:
            origins = (mask != 0).int().argmax(dim=-1, keepdim=True)
        return Tokens(past, kv_len, mask, origins, sequences)

    def beside(self, key: Tensor) -> Tokens:
        """Return the tokens on the device and with the length of keys ``[batch, num_kv_heads, kv_len, head_dim]``."""
        kv_len = key.shape[2]

        def fitted(rows: Tensor | None) -> Tensor | None:
            if rows is None or not torch.compiler.is_compiling():
                return None if rows is None else rows.to(key.device)
            # torch.compile may have two different symbols for the equal lengths: pad and slice to the keys' length.
            return F.pad(rows, (0, max(kv_len - rows.shape[-1], 0)))[:, :kv_len]

        origins = self.origins if self.sequences is None else fitted(self.origins)
        origins = None if origins is None else origins.to(key.device)
        return Tokens(self.past, kv_len, fitted(self.mask), origins, fitted(self.sequences))

    @property
    def text(self) -> Tensor | None:
        """``[batch, kv_len]`` booleans, False for padding; None without padding."""
        return None if self.mask is None else self.mask != 0

    def offsets(self, device: torch.device) -> Tensor:
        """Return each token's distance, in columns, from the first of its sequence, ``[batch or 1, kv_len]``."""
        columns = torch.arange(self.kv_len, device=device)[None]
        return columns if self.origins is None else columns - self.origins

    def counts(self, device: torch.device) -> Tensor:
        """Return the offsets counted in text tokens only, ``[batch or 1, kv_len]``; 0 for padding."""
        text = self.text
        if text is None or self.origins is None:
            return self.offsets(device)
        counts = text.cumsum(dim=-1)
        before = (counts - text.long()).gather(-1, self.origins.expand(counts.shape[0], -1))
        return (counts - before - 1) * text

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return ``make()``, computed by the first layer and cached for the others."""
        # A compiler merges equal operations itself. Under a dispatch mode, such as that of selective checkpointing, a
        # recomputed layer must run the same operations again.
        if torch.compiler.is_compiling() or has_dispatch_mode():
            return make()
        if key not in self.shared:
            self.shared[key] = make()
        return self.shared[key]


# --- Reading arguments ----------------------------------------------------------------------------------------------


def starts_of(position_ids: Tensor, batch: int, q_len: int, past: Any, mask: Tensor | None) -> Tensor | None:
    """Return where packed sequences begin, ``[batch, q_len]`` booleans; None if each row is known to be one sequence.

    A sequence begins where the position of a text token is 0. Other jumps are ignored, as the models ignore them.
    """
    if not isinstance(position_ids, Tensor):
        raise TypeError(f"position_ids must be a tensor, got {type(position_ids).__name__}")
    shape = tuple(position_ids.shape)
    if shape[-1:] != (q_len,) or shape[:-1] not in ((), (1,), (batch,)):
        raise ValueError(f"position_ids must be of shape ({batch}, {q_len}) (batch, tokens), got {shape}")
    starts = position_ids.expand(batch, q_len) == 0
    if mask is not None:
        starts = starts & (mask != 0)
    if is_unreadable(position_ids):  # assume that tokens after cached ones continue their sequence
        return starts if isinstance(past, int) and past == 0 else None
    column = torch.arange(1, q_len + 1, device=starts.device) if mask is None else (mask != 0).cumsum(dim=-1)
    if not bool((starts & (column > 1)).any()):
        return None
    if past > 0:
        raise ValueError(
            "position_ids must not restart after tokens in a cache, which do not tell their sequences; "
            "use one row for each sequence"
        )
    return starts


# --- The mask that carries the tokens -------------------------------------------------------------------------------


def carrier(tokens: Tokens, device: torch.device) -> Tensor:
    """Return an empty mask of four axes that carries the tokens of a pass; adding it to scores raises."""
    mask = torch.zeros(1, 1, 1, 0, dtype=torch.bool, device=device)
    if not torch.compiler.is_dynamo_compiling():  # Dynamo does not track attributes of tensors
        mask.alibi_tokens = tokens  # type: ignore[attr-defined]
    return mask


def is_carrier(mask: Any) -> bool:
    """Whether a mask was made by :func:`carrier`."""
    return isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[-1] == 0


def carried(mask: Tensor, under_way: Tokens | None) -> Tokens:
    """Return the tokens of a carrier; those of the current pass if it has lost its attribute."""
    own = None if torch.compiler.is_dynamo_compiling() else getattr(mask, "alibi_tokens", None)
    tokens = own or under_way
    if tokens is None:
        raise ValueError(
            "attention_mask must come from the model's pass under way, got one of a pass that has ended; undo with "
            "restore, or report how the layer was called"
        )
    return tokens
