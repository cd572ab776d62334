"""The tokens of one forward pass: which are padding, which begin a sequence, how many lie in the cache.

A model's ``forward`` reads its arguments once, into :class:`Tokens`. Its attention layers take them from the mask that
the model's own code hands from layer to layer: :func:`carrier` makes one of four axes, which that code leaves alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.utils.import_utils import is_tracing

from alibi_torch._internals import has_dispatch_mode, in_transform


@dataclass(frozen=True)
class Tokens:
    """What one forward pass knows of the tokens so far.

    Attributes:
        past: Tokens in the cache before the first query; an int, or a tensor of one element in a compiled static cache.
        kv_len: Tokens so far, those of the pass included; all places of a compiled static cache.
        mask: ``[batch, kv_len]``, 0 for padding; None without padding. Models count positions by its numbers.
        origins: ``[batch, kv_len or 1]`` integers, the column where a token's sequence begins; None if all begin at 0.
        sequences: ``[batch, kv_len]`` integers, the number of a token's sequence in its row; None if rows are one.
        shared: Values that all layers of the pass need, by what they depend on.
    """

    past: Any
    kv_len: Any
    mask: Tensor | None = None
    origins: Tensor | None = None
    sequences: Tensor | None = None
    shared: dict[Any, Any] = field(default_factory=dict, compare=False)

    @staticmethod
    def read(past: Any, kv_len: Any, mask: Tensor | None, starts: Tensor | None) -> Tokens:
        """Return the tokens for a mask and the places where sequences start, ``[batch, kv_len]`` booleans."""
        origins = sequences = None
        if starts is not None:
            columns = torch.arange(kv_len, device=starts.device)
            origins = torch.where(starts, columns, 0).cummax(dim=-1).values
            sequences = starts.cumsum(dim=-1)
        elif mask is not None:
            origins = (mask != 0).int().argmax(dim=-1, keepdim=True)
        return Tokens(past, kv_len, mask, origins, sequences)

    def beside(self, key: Tensor) -> Tokens:
        """Return the same on the device of keys ``[batch, num_kv_heads, kv_len, head_dim]``, and as long."""
        kv_len = key.shape[2]

        def fitted(rows: Tensor | None) -> Tensor | None:
            if rows is None or not torch.compiler.is_compiling():
                return None if rows is None else rows.to(key.device)
            # A compiler may know the two lengths as different symbols, which no check would find equal.
            return F.pad(rows, (0, max(kv_len - rows.shape[-1], 0)))[:, :kv_len]

        origins = self.origins if self.sequences is None else fitted(self.origins)
        origins = None if origins is None else origins.to(key.device)
        return Tokens(self.past, kv_len, fitted(self.mask), origins, fitted(self.sequences))

    @property
    def text(self) -> Tensor | None:
        """``[batch, kv_len]`` booleans, False for padding; None without padding."""
        return None if self.mask is None else self.mask != 0

    def offsets(self, device: torch.device) -> Tensor:
        """Return how many columns each token stands after the first of its sequence, ``[batch or 1, kv_len]``."""
        columns = torch.arange(self.kv_len, device=device)[None]
        return columns if self.origins is None else columns - self.origins

    def counts(self, device: torch.device) -> Tensor:
        """Return the same in tokens of text alone; 0 for padding."""
        text = self.text
        if text is None or self.origins is None:
            return self.offsets(device)
        counts = text.cumsum(dim=-1)
        before = (counts - text.long()).gather(-1, self.origins.expand(len(counts), -1))
        return (counts - before - 1) * text

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what ``make`` returns, computed by the first layer that asks and shared with the others."""
        # A compiler merges equal operations by itself. Under a dispatch mode, as that of selective checkpointing, a
        # layer must do the same operations again when it is computed a second time.
        if torch.compiler.is_compiling() or has_dispatch_mode():
            return make()
        if key not in self.shared:
            self.shared[key] = make()
        return self.shared[key]


# --- Reading arguments ----------------------------------------------------------------------------------------------


def is_unreadable(tensor: Tensor) -> bool:
    """Whether a tensor's values cannot be looked at: a compiler, tracer or ``vmap`` is at work, or it has none."""
    return tensor.is_meta or is_tracing(tensor) or in_transform()


def without_full_mask(mask: Tensor | None) -> Tensor | None:
    """Return the mask; None if it is known to be 1 for each token."""
    if mask is None or is_unreadable(mask) or mask.requires_grad:
        return mask
    return None if bool((mask == 1).all()) else mask


def starts_of(position_ids: Tensor, batch: int, q_len: int, past: Any, mask: Tensor | None) -> Tensor | None:
    """Return where sequences packed into rows begin, ``[batch, q_len]``; None if each row is known to be one.

    A sequence begins where the position of a text token is 0. Other jumps mean nothing, as to the models.
    """
    if not isinstance(position_ids, Tensor):
        raise TypeError(f"position_ids must be a tensor, got {type(position_ids).__name__}")
    shape = tuple(position_ids.shape)
    if shape[-1:] != (q_len,) or shape[:-1] not in ((), (1,), (batch,)):
        raise ValueError(f"position_ids must be of shape ({batch}, {q_len}) (batch, tokens), got {shape}")
    starts = position_ids.expand(batch, q_len) == 0
    if mask is not None:
        starts = starts & (mask != 0)
    if is_unreadable(position_ids):  # tokens behind others in a cache are taken for the same sequence
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


# --- The mask that carries them -------------------------------------------------------------------------------------


def carrier(tokens: Tokens, device: torch.device) -> Tensor:
    """Return a mask of four axes that carries the tokens of a pass, and that fails in any code that would add it."""
    mask = torch.zeros(1, 1, 1, 0, dtype=torch.bool, device=device)
    if not torch.compiler.is_dynamo_compiling():  # which cannot follow an attribute through the model
        mask.alibi_tokens = tokens  # type: ignore[attr-defined]
    return mask


def is_carrier(mask: Any) -> bool:
    """Whether a mask is one of :func:`carrier`."""
    return isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[-1] == 0


def carried(mask: Tensor, under_way: Tokens | None) -> Tokens:
    """Return the tokens that a carrier has; those of the pass under way if it lost them."""
    own = None if torch.compiler.is_dynamo_compiling() else getattr(mask, "alibi_tokens", None)
    tokens = own or under_way
    if tokens is None:
        raise ValueError(
            "attention_mask must come from the model's pass under way, got one of a pass that has ended; undo with "
            "restore, or report how the layer was called"
        )
    return tokens
