"""The tokens of one forward pass: which are padding, which begin a sequence, how many lie in the cache.

A model's ``forward`` reads its arguments once, into :class:`Tokens`. Its attention layers find them by the mask that
the model's own code hands from layer to layer: :func:`carrier` makes one of four axes, which that code takes as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from alibi_torch._internals import has_dispatch_mode, in_transform


@dataclass(frozen=True)
class Tokens:
    """What the arguments of one forward pass say of the tokens so far.

    Attributes:
        past: Tokens in the cache before the first query; an int, or a tensor of one element in a compiled static cache.
        mask: ``[batch, tokens]``, 0 for padding; None without padding. Models count positions by its numbers.
        starts: ``[batch, tokens]`` booleans, True where one of several sequences of a row begins; None if rows are one.
        shared: Values that all layers of the pass need, by what they depend on.
    """

    past: Any
    mask: Tensor | None = None
    starts: Tensor | None = None
    shared: dict[Any, Any] = field(default_factory=dict, compare=False)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what ``make`` returns, computed by the first layer that asks and kept for the others."""
        # A compiler merges equal operations by itself. Under a dispatch mode, as that of selective checkpointing, a
        # layer must do the same operations again when it is computed a second time.
        if torch.compiler.is_compiling() or has_dispatch_mode():
            return make()
        key = (*key, torch.is_inference_mode_enabled())  # gradients cannot be taken through its tensors later
        if key not in self.shared:
            self.shared[key] = make()
        return self.shared[key]

    def layout(self, kv_len: int, device: torch.device) -> Layout:
        """Return where ``kv_len`` tokens stand; those beyond the mask are places of a static cache not yet in use."""
        columns = torch.arange(kv_len, device=device)
        mask, starts = (None if x is None else _resized(x.to(device), kv_len) for x in (self.mask, self.starts))
        text = None if mask is None else mask != 0
        if starts is not None:
            origins = torch.where(starts, columns, 0).cummax(dim=-1).values
            return Layout(mask, text, columns, origins, starts.cumsum(dim=-1))
        origins = columns.new_zeros(1, 1) if text is None else text.int().argmax(dim=-1, keepdim=True)
        return Layout(mask, text, columns, origins, None)


@dataclass(frozen=True)
class Layout:
    """Where the tokens of each row stand.

    Attributes:
        mask: As in :class:`Tokens`, ``[batch, kv_len]``.
        text: ``[batch, kv_len]`` booleans, False for padding; None without padding.
        columns: ``[kv_len]`` integers from 0.
        origins: ``[batch or 1, kv_len or 1]`` integers, the column where a token's sequence begins.
        sequences: ``[batch, kv_len]`` integers, the number of a token's sequence in its row; None if rows are one.
    """

    mask: Tensor | None
    text: Tensor | None
    columns: Tensor
    origins: Tensor
    sequences: Tensor | None

    def counts(self) -> Tensor:
        """Return how many tokens of text stand before each in its sequence, ``[batch or 1, kv_len]``; 0 for padding."""
        if self.text is None:
            return self.columns - self.origins
        counts = self.text.cumsum(dim=-1)
        before = (counts - self.text.long()).gather(-1, self.origins.expand(len(counts), -1))
        return (counts - before - 1) * self.text


def _resized(rows: Tensor, kv_len: int) -> Tensor:
    """Return ``[batch, kv_len]`` of ``[batch, tokens]``: unused places of a static cache count as text."""
    return F.pad(rows, (0, max(kv_len - rows.shape[-1], 0)), value=1)[:, :kv_len]


# --- Reading arguments ----------------------------------------------------------------------------------------------


def is_unreadable(tensor: Tensor) -> bool:
    """Whether a tensor's values cannot be looked at: a compiler or ``vmap`` is at work, or it is on the meta device."""
    if torch.compiler.is_compiling() or tensor.is_meta:
        return True
    return in_transform()


def without_full_mask(mask: Tensor | None, length: Any) -> Tensor | None:
    """Return the mask; None if it is known to be 1 for each of the first ``length`` tokens."""
    if mask is None or is_unreadable(mask) or mask.requires_grad:
        return mask
    return None if bool((mask[:, :length] == 1).all()) else mask


def starts_of(position_ids: Tensor, batch: int, q_len: int, past: Any, mask: Tensor | None) -> Tensor | None:
    """Return where sequences packed into rows begin, ``[batch, q_len]``; None if each row is known to be one.

    A sequence begins where the position is 0. Other jumps mean nothing, as to the models.

    Args:
        position_ids: ``[batch or 1, q_len]``; those of padding say nothing.
        batch: Rows of the call.
        q_len: Tokens of the call.
        past: Tokens in the cache before.
        mask: ``[batch, q_len]`` of these tokens, 0 for padding; None without padding.

    Raises:
        TypeError: If ``position_ids`` is no tensor.
        ValueError: If its shape is wrong, or positions restart after tokens in a cache.
    """
    if not isinstance(position_ids, Tensor):
        raise TypeError(f"position_ids must be a tensor, got {type(position_ids).__name__}")
    shape = tuple(position_ids.shape)
    if shape[-1:] != (q_len,) or shape[:-1] not in ((), (1,), (batch,)):
        raise ValueError(f"position_ids must be of shape ({batch}, {q_len}) (batch, tokens), got {shape}")
    starts = position_ids.expand(batch, q_len) == 0
    if mask is not None:
        starts = starts & (mask != 0)
    if is_unreadable(position_ids):
        return starts
    column = torch.arange(1, q_len + 1, device=starts.device) if mask is None else (mask != 0).cumsum(dim=-1)
    if not bool((starts & (column > 1)).any()):
        return None
    if int(past) > 0:
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


def carried(mask: Any) -> Tokens | None:
    """Return the tokens that a mask carries; None if it carries none, or was moved to another device."""
    return None if torch.compiler.is_dynamo_compiling() else getattr(mask, "alibi_tokens", None)
