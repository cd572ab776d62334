"""What padding and position ids say of the tokens, in a form that a model's own code carries to its attention.

A model of transformers hands its attention mask from layer to layer, and takes one of four axes as it is. So what the
attention needs to know travels as such a mask, ``[batch, kind, 1, length]``: the length of its second axis tells what
the row means that it repeats. In other masks that is 1 or the number of heads, which no model has so many of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import get_proxy_mode

# What the row of an encoded mask holds. Plain numbers, which torch.compile can compare with a symbol.
ENDS = 211  # 1 for text, 0 for padding, which lies at the ends of a row; or no length at all, without padding
HOLES = 223  # 0 for padding, which lies anywhere, and for text what the model was given, perhaps rounded or above 1
PACKED = 227  # 1 where a sequence begins
UNSEEING = 233  # the row of HOLES, where padding that no text precedes gets zeros, not the mean of all values
PACKED_HOLES = 229  # the row of HOLES, then that of PACKED


@dataclass(frozen=True)
class Facts:
    """What is known of the tokens of a batch besides how many there are.

    Attributes:
        text: ``[batch, kv_len]`` booleans, False for padding; None where there is none.
        sequences: ``[batch, kv_len]`` integers, one number for each of the sequences packed into a row; None where each
            row is one.
        columns: ``[kv_len]`` or ``[batch, kv_len]`` integers: columns from the first text of a sequence. Those of
            padding before it are negative.
        positions: Likewise: tokens of text before them in the sequence, by the numbers of the mask. The same tensor as
            ``columns`` where no padding lies between text.
        blind: ``[batch, q_len]`` booleans, True for padding that no text precedes, which gets the mean of all values;
            None where there is none.
    """

    text: Tensor | None
    sequences: Tensor | None
    columns: Tensor
    positions: Tensor
    blind: Tensor | None = None


def is_unreadable(tensor: Tensor) -> bool:
    """Whether nobody can look at a tensor's values: it has none yet, or has them for several calls at once."""
    if torch.compiler.is_compiling() or tensor.is_meta:
        return True
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_recorded(tensors: list[Tensor]) -> bool:
    """Whether a call with such tensors is recorded, to be run with others, whose values may differ."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or get_proxy_mode() is not None:
        return True
    return detect_fake_mode(tensors) is not None


def has_no_values(tensor: Tensor) -> bool:
    """Whether a tensor has no values of this call alone: it is on the meta device, or ``vmap`` maps it somewhere."""
    if tensor.is_meta:
        return True
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def nothing(device: torch.device) -> Tensor:
    """Return the mask that says nothing: each row is one sequence without padding."""
    return torch.zeros(1, ENDS, 1, 0, dtype=torch.uint8, device=device)


def of_padding(mask: Tensor, q_len: int, past: Any, *, is_rounded: bool = False, is_unseeing: bool = False) -> Tensor:
    """Return what a padding mask ``[batch, tokens]``, 0 for padding, says, encoded.

    Args:
        mask: In the numbers that positions are sums of.
        q_len: Of the call, in tokens.
        past: Tokens in the cache before.
        is_rounded: Whether sums in its dtype are rounded so that even text alone is counted in another way.
        is_unseeing: Whether padding that no text precedes gets zeros.
    """
    general = UNSEEING if is_unseeing else HOLES
    if is_rounded or is_unreadable(mask) or mask.requires_grad:
        return _encoded(mask, general)
    seen = mask[:, : int(past) + q_len]
    if bool((seen == 1).all()):
        return nothing(mask.device)
    text = seen != 0
    changes = (text[:, 1:] != text[:, :-1]).sum(dim=1)
    has_holes = (changes > 1 + (~text[:, 0] & ~text[:, -1]).long())[:, None] | (seen != text)
    return _encoded(mask, general if is_unseeing or bool(has_holes.any()) else ENDS)


def of_positions(position_ids: Tensor, batch: int, q_len: int, past: Any, numbers: Tensor | None) -> Tensor | None:
    """Return what position ids say of sequences packed into rows, encoded; None if each row is known to be one.

    A sequence begins where they are 0. Other jumps mean nothing, as to the models.

    Args:
        position_ids: ``[batch or 1, q_len]``; those of padding say nothing.
        batch: Of the call.
        q_len: Of the call, in tokens.
        past: Tokens in the cache before.
        numbers: ``[batch, q_len]``, 0 for padding, those that positions are sums of; None where there is no mask.

    Raises:
        ValueError: If their shape is wrong, or they restart after tokens in a cache.
    """
    shape = tuple(position_ids.shape)
    if shape[-1:] != (q_len,) or shape[:-1] not in ((), (1,), (batch,)):
        raise ValueError(f"position_ids must be of shape ({batch}, {q_len}) (batch, tokens), got {shape}")
    starts, text = position_ids.expand(batch, q_len) == 0, None if numbers is None else numbers != 0
    if text is not None:
        starts = starts & text
    if not is_unreadable(position_ids):
        column = torch.arange(1, q_len + 1, device=starts.device) if text is None else text.cumsum(dim=-1)
        if not bool((starts & (column > 1)).any()):
            return None
        if int(past) > 0:
            raise ValueError(
                "position_ids must not restart after tokens in a cache, which do not tell their sequences; "
                "use one row for each sequence"
            )
    if numbers is None:
        return _encoded(starts, PACKED)
    return _encoded(torch.cat([numbers, starts.to(numbers.dtype)], dim=-1), PACKED_HOLES)


def is_encoded(mask: Any) -> bool:
    """Whether a mask says what it says in this form."""
    if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.shape[2] != 1:
        return False
    return any(mask.shape[1] == kind for kind in (ENDS, HOLES, UNSEEING, PACKED, PACKED_HOLES))


def says_nothing(mask: Tensor) -> bool:
    """Whether an encoded mask is known to be of one sequence a row, without padding."""
    return mask.shape[-1] == 0


def is_packed(mask: Tensor) -> bool:
    """Whether an encoded mask is of several sequences in a row."""
    return mask.shape[1] in (PACKED, PACKED_HOLES)


def decode(mask: Tensor, q_len: int, kv_len: int, past: Any, device: torch.device) -> Facts:
    """Return what an encoded mask says of ``kv_len`` tokens. It may have become booleans on its way.

    Args:
        mask: Encoded.
        q_len: Queries, in tokens.
        kv_len: Keys; perhaps more than there are tokens, which nothing sees.
        past: Tokens before the first query, an int or a tensor of one element.
        device: Where the facts are needed.
    """
    columns = torch.arange(kv_len, device=device)
    if says_nothing(mask):
        return Facts(None, None, columns, columns)
    kind, row = mask.shape[1], mask[:, 0, 0].to(device)
    numbers, text, starts = row, None, None
    if kind == PACKED_HOLES:
        numbers, starts = row.chunk(2, dim=-1)
    elif kind == PACKED:
        numbers, starts = None, row
    if numbers is not None:
        numbers = F.pad(numbers, (0, max(kv_len - numbers.shape[-1], 0)), value=1)[:, :kv_len]
        text = numbers != 0
        begins = text.int().argmax(dim=-1, keepdim=True)
    if starts is not None:
        starts = F.pad(starts, (0, max(kv_len - starts.shape[-1], 0)))[:, :kv_len].bool()
        begins = torch.where(starts, columns, 0).cummax(dim=-1).values
    columns = positions = columns - begins
    if kind in (HOLES, UNSEEING, PACKED_HOLES):
        counts = numbers.cumsum(dim=-1)
        if kind == PACKED_HOLES:
            counts = counts - (counts - numbers.to(counts.dtype)).gather(-1, begins.expand(numbers.shape))
        positions = (counts - 1) * numbers  # as the models do
    sequences = None if starts is None else starts.cumsum(dim=-1)
    blind = None if kind == UNSEEING else _blind(text, q_len, past)
    return Facts(text, sequences, columns, positions, blind)


def _blind(text: Tensor | None, q_len: int, past: Any) -> Tensor | None:
    """Return which queries are padding that no text precedes, ``[batch, q_len]``; None where there are none."""
    if text is None:
        return None
    queries = past + torch.arange(q_len, device=text.device)
    blind = (text.cumsum(dim=-1) == 0)[:, queries.clamp(max=text.shape[-1] - 1)]
    return blind if is_unreadable(blind) or bool(blind.any()) else None


def _encoded(row: Tensor, kind: int) -> Tensor:
    is_counted = kind in (HOLES, UNSEEING, PACKED_HOLES) and row.dtype != torch.bool
    return (row if is_counted else row.to(torch.uint8))[:, None, None, :].expand(-1, kind, -1, -1)
