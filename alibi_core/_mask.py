"""The mask: boolean, with axes that can be read in one way only.

A mask of integers is refused, even of ones and zeros: the values of traced arrays and arrays on an accelerator cannot
be read, so an additive mask of 0 and -10000, or segment ids, would be taken for a boolean mask silently. Float masks of
ones and zeros are refused because additive masks are floats too.
"""

from __future__ import annotations

from typing import Any

from alibi_core._arrays import Namespace, boolean_hint, checks, is_exporting, is_kind


def check_mask(xp: Namespace, mask: Any, batch: dict[str, int], scores: dict[str, int]) -> None:
    """Check that ``mask`` is boolean and broadcasts to the scores, and that its axes cannot be read in two ways."""
    if not is_kind(xp, mask.dtype, "bool"):
        raise TypeError(
            f"mask must be boolean (True where a query may look), got {mask.dtype}; an ALiBi bias is left out, and "
            "numbers of sequences are segment_ids; if it is 1 where a query may look and 0 elsewhere, use "
            f"{boolean_hint(xp)}; if it is 0 where a query may look and -inf or the like elsewhere, use mask == 0"
        )
    check_score_axes("mask", mask, batch, scores)


def check_score_axes(name: str, array: Any, batch: dict[str, int], scores: dict[str, int]) -> None:
    """Check that an array broadcasts to the scores, and that its axes cannot be read in two ways.

    Broadcasting aligns the last axes. A mask with batch axes first, such as a tokenizer's ``[batch, kv_len]``, would be
    aligned wrongly, and silently where sizes happen to agree.

    Args:
        name: Name of the argument.
        array: A mask, or a bias that is added to scores.
        batch: Sizes of the batch axes, by name.
        scores: Sizes of the axes ``num_heads``, ``q_len`` and ``kv_len``, by name.
    """
    shape, target = tuple(array.shape), (*batch.values(), *scores.values())
    axes = [*batch, *scores]
    if not shape:
        raise ValueError(f"{name} must have at least the axis kv_len, got shape ()")
    listed = ", ".join(axes)
    for missing in () if is_exporting() else (2, 1):  # without num_heads and q_len, or without num_heads
        own = [*batch, *axes[len(batch) + missing :]]
        # The shape if batch axes come first, and the shape as broadcasting reads it.
        as_meant = shape[: len(batch)] + (1,) * missing + shape[len(batch) :]
        aligned = (1,) * (len(target) - len(shape)) + shape
        if len(shape) != len(own) or as_meant == aligned or shape[: len(batch)] != target[: len(batch)]:
            continue
        if not checks.broadcasts(as_meant, target):
            continue
        meant = f"{name}[{', '.join([':'] * len(batch) + ['None'] * missing + [':'] * (missing == 2))}]"
        # Broadcasting fails, but batch axes first would fit: suggest the fix.
        if not checks.broadcasts(shape, target):
            raise ValueError(
                f"{name} must broadcast to {target} ({listed}), got {shape}; of axes [{', '.join(own)}], use {meant}"
            )
        # Both readings fit: refuse, and give the spelling of each.
        plain = f"{name}[{', '.join(['None'] * (len(target) - len(shape)))}]"
        raise ValueError(
            f"{name} must have axes that cannot be mistaken, got {shape} for scores of {target} ({listed}); use "
            f"{meant} if they are [{', '.join(own)}], or {plain} if they are [{', '.join(axes[-len(shape) :])}]"
        )
    checks.broadcastable(name, shape, target, listed)
