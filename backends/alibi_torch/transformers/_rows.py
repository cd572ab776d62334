"""What a padding mask and position ids say of an encoder's rows, in a form that its code carries to its attention.

A model of transformers hands a mask of four axes from layer to layer as it is. So this travels as one, ``[batch, 1, 1,
length]``: booleans, True for text and False for padding; or integers, the number of each token's sequence where a row
holds several, 0 for padding; or no length at all, where each row is one sequence without padding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from alibi_torch.transformers._facts import has_no_values, is_recorded


def encoded(attention_mask: Any, position_ids: Any, tokens: Tensor) -> Tensor:
    """Return what is known of the rows of a call.

    Args:
        attention_mask: ``[batch, length]``, 0 for padding, anywhere in a row; or None.
        position_ids: ``[batch or 1, length]``, 0 where another sequence of a row begins; or None.
        tokens: ``[batch, length, ...]``.

    Raises:
        TypeError: If a mask is no tensor.
        ValueError: If a shape is wrong, or positions are not those of the tokens in their sequences.
    """
    shape, text, sequences = tuple(tokens.shape[:2]), None, None
    given = [x for x in (attention_mask, position_ids) if isinstance(x, Tensor)]
    looks = not (is_recorded(given) or any(map(has_no_values, given)))  # at the values
    if attention_mask is not None:
        _check("attention_mask", attention_mask, shape, "(batch, length), 0 for padding")
        text = attention_mask != 0
        if looks and bool(text.all()):
            text = None
    if position_ids is not None:
        _check("position_ids", position_ids, shape, "(batch or 1, length)", may_be_shared=True)
        positions = position_ids.expand(shape)
        begins = positions == 0 if text is None else (positions == 0) & text
        if not looks or _has_several(positions, begins, text):
            sequences = 1 + begins.cumsum(dim=-1)
    if sequences is not None:
        row = sequences if text is None else torch.where(text, sequences, 0)
    elif text is not None:
        row = text
    else:
        return torch.ones(1, 1, 1, 0, dtype=torch.bool, device=tokens.device)
    return row[:, None, None, :]


def decoded(mask: Any, device: torch.device) -> dict[str, Tensor]:
    """Return the arguments of attention that say the same.

    Padding in a row of one sequence sees the text, as in BERT; in a row of several, padding alone.

    Raises:
        ValueError: If the mask is not encoded.
    """
    if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.shape[1:3] != (1, 1) or mask.is_floating_point():
        raise ValueError("attention must get its mask through the model; call the model, not a layer of it")
    if mask.shape[-1] == 0:
        return {}
    mask = mask.to(device)
    return {"mask": mask} if mask.dtype == torch.bool else {"segment_ids": mask[:, 0, 0]}


def _check(name: str, value: Any, shape: tuple[int, ...], axes: str, *, may_be_shared: bool = False) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    batch, length = shape
    # Each number by itself: torch.compile cannot look for a tuple of symbols among others.
    fits = value.ndim == 2 and value.shape[1] == length
    if not fits or not (value.shape[0] == batch or (may_be_shared and value.shape[0] == 1)):
        raise ValueError(f"{name} must be of shape {shape} {axes}, got {tuple(value.shape)}")


def _has_several(positions: Tensor, begins: Tensor, text: Tensor | None) -> bool:
    """Whether a row holds more than one sequence; checks that positions count the columns of each."""
    columns = torch.arange(positions.shape[-1], device=positions.device)
    first = torch.zeros_like(positions[:, :1]) if text is None else text.long().argmax(dim=-1, keepdim=True)
    anchors = torch.where(begins, columns, first).cummax(dim=-1).values
    shift = positions - columns
    wrong = shift != shift.gather(-1, anchors)
    if bool((wrong if text is None else wrong & text).any()):
        raise ValueError(
            "position_ids must count the tokens of a row one by one, padding among them too, and from 0 where another "
            "sequence begins, as distances are counted so"
        )
    return bool((begins & (columns != first)).any())
