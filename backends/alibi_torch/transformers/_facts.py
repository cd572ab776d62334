"""What padding and position ids say of the tokens, in a form that a model's own code carries to its attention.

A model of transformers hands its attention mask from layer to layer, and takes one of four axes as it is. So what the
attention needs to know travels as such a mask, ``[batch, kind, 1, length]``: its second axis, which is 1 in any other
mask, tells by its length what the one row that it repeats means.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PADDED, PACKED = 2, 3  # the row is 1 for text and 0 for padding; it is 1 where a sequence begins after another


@dataclass(frozen=True)
class Facts:
    """What is known of the tokens of a batch besides how many there are.

    Attributes:
        text: ``[batch, kv_len]`` booleans, False for padding; None where there is none.
        sequences: ``[batch, kv_len]`` integers, one number for each of the sequences packed into a row; None where each
            row is one.
        positions: ``[kv_len]`` or ``[batch, kv_len]`` integers: of every token in its sequence, counted from the first
            that is no padding. Padding before has negative ones.
    """

    text: Tensor | None
    sequences: Tensor | None
    positions: Tensor

    @property
    def has_one_sequence(self) -> bool:
        """Whether each row is known to be one sequence without padding."""
        return self.text is None and self.sequences is None


def nothing(device: torch.device) -> Tensor:
    """Return the mask that says nothing: each row is one sequence without padding."""
    return torch.zeros(1, PADDED, 1, 0, dtype=torch.uint8, device=device)


def of_padding(attention_mask: Tensor, batch: int, q_len: int, past: Any, longest: int) -> Tensor:
    """Return what a padding mask says, encoded.

    Args:
        attention_mask: ``[batch, past + q_len]``, 0 for padding; as long as the cache if that is longer.
        batch: Of the call.
        q_len: Of the call, in tokens.
        past: Tokens in the cache before, an int or a tensor.
        longest: Tokens that the cache can hold; -1 for any number.

    Raises:
        ValueError: If its shape is wrong, or padding is not at the ends of a row alone.
    """
    shape = tuple(attention_mask.shape)
    is_known = not (torch.compiler.is_compiling() and isinstance(past, Tensor))
    lengths = {longest} | ({int(past) + q_len} if is_known else set())
    if len(shape) != 2 or shape[0] != batch or shape[1] not in lengths - {-1}:
        raise ValueError(
            f"attention_mask must be of shape ({batch}, {min(lengths - {-1})}) (batch, tokens so far), 0 for padding, "
            f"got {shape}; a model with masks of another kind must be undone with restore"
        )
    text = attention_mask != 0
    if not torch.compiler.is_compiling():
        seen = text[:, : int(past) + q_len]
        if bool(seen.all()):
            return nothing(text.device)
        changes = (seen[:, 1:] != seen[:, :-1]).sum(dim=1)
        if bool((changes > 1 + (~seen[:, 0] & ~seen[:, -1]).long()).any()):
            raise ValueError(
                "attention_mask must hide the ends of a row alone, got a hole among its tokens; take those tokens out "
                "of the row and pad it, or undo with restore"
            )
    return _encoded(text, PADDED)


def of_positions(
    position_ids: Tensor, batch: int, q_len: int, past: Any, text: Tensor | None, of_mask: Tensor
) -> Tensor:
    """Return what position ids say of sequences packed into rows, encoded; what the mask says if there are none.

    Args:
        position_ids: ``[batch or 1, q_len]``; those of padding say nothing.
        batch: Of the call.
        q_len: Of the call, in tokens.
        past: Tokens in the cache before.
        text: ``[batch, q_len]`` booleans, False for padding at the ends of a row; None where there is none.
        of_mask: What the mask says, encoded.

    Raises:
        ValueError: If their shape is wrong, they neither count up by one nor restart from 0, or restart after tokens in
            a cache.
    """
    shape = tuple(position_ids.shape)
    if shape[-1:] != (q_len,) or shape[:-1] not in ((), (1,), (batch,)):
        raise ValueError(f"position_ids must be of shape ({batch}, {q_len}) (batch, tokens), got {shape}")
    position_ids = position_ids.expand(batch, q_len)
    starts = F.pad(position_ids.diff(dim=-1) != 1, (1, 0))
    if text is not None:
        before = F.pad(text[:, :-1], (1, 0))
        starts = starts & text & before
    if not torch.compiler.is_compiling():
        if not bool(starts.any()):
            return of_mask
        if bool((position_ids[starts] != 0).any()):
            raise ValueError(
                "position_ids must count up by one, and from 0 where another sequence begins; a batch with padding "
                "needs attention_mask instead"
            )
        if int(past) > 0:
            raise ValueError(
                "position_ids must not restart after tokens in a cache, which do not tell their sequences; "
                "use one row for each sequence"
            )
    if text is not None:  # nothing sees padding behind it, and padding before is as another sequence
        starts = starts | (text & ~before)
    return _encoded(starts, PACKED)


def is_encoded(mask: Any) -> bool:
    """Whether a mask says what it says in this form."""
    return isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[1] in (PADDED, PACKED) and mask.shape[2] == 1


def is_packed(mask: Tensor) -> bool:
    """Whether an encoded mask is of several sequences in a row."""
    return mask.shape[1] == PACKED


def decode(mask: Any, kv_len: int, device: torch.device) -> Facts:
    """Return what an encoded mask says of ``kv_len`` tokens. It may have become booleans on its way.

    Raises:
        ValueError: If it is none.
    """
    if not is_encoded(mask):
        raise ValueError(
            "attention must get its mask through the model; call model(...), not model.forward(...) or one of its "
            "layers, or undo with restore"
        )
    columns = torch.arange(kv_len, device=device)
    if mask.shape[-1] == 0:
        return Facts(None, None, columns)
    row = mask[:, 0, 0].to(device, torch.bool)
    if is_packed(mask):
        begins = torch.where(row, columns, 0).cummax(dim=-1).values
        return Facts(None, row.cumsum(dim=-1), columns - begins)
    text = F.pad(row, (0, max(kv_len - row.shape[-1], 0)), value=True)[:, :kv_len]
    return Facts(text, None, columns - text.int().argmax(dim=-1, keepdim=True))


def _encoded(row: Tensor, kind: int) -> Tensor:
    return row.to(torch.uint8)[:, None, None, :].expand(-1, kind, -1, -1)
