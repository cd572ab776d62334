"""The mask: boolean, and of axes that can be read in one way only.

A mask of integers is refused, plain though the meaning of ones and zeros is: values of traced arrays and of those on an
accelerator cannot be looked at, so a mask of 0 and -10000, or of the numbers of packed sequences, would be taken for
one without a word. And float masks of ones and zeros would have to be refused still, for additive ones are floats.
"""

from __future__ import annotations

from typing import Any

from alibi_core._arrays import Namespace, boolean_hint, checks, is_exporting, is_kind


def check_mask(xp: Namespace, mask: Any, batch: dict[str, int], scores: dict[str, int]) -> None:
    """Check that ``mask`` is boolean, and broadcasts to the scores in no other way than it may be meant."""
    if not is_kind(xp, mask.dtype, "bool"):
        raise TypeError(
            f"mask must be boolean (True where a query may look), got {mask.dtype}; an ALiBi bias is left out, and "
            "numbers of sequences are segment_ids; if it is 1 where a query may look and 0 elsewhere, use "
            f"{boolean_hint(xp)}; if it is 0 where a query may look and -inf or the like elsewhere, use mask == 0"
        )
    check_score_axes("mask", mask, batch, scores)


def check_score_axes(name: str, array: Any, batch: dict[str, int], scores: dict[str, int]) -> None:
    """Check that an array broadcasts to the scores in no other way than it may be meant.

    Arrays broadcast from the last axis on. Of a mask with batch axes first that lacks some of the others, as a
    tokenizer's ``[batch, kv_len]`` does, that makes nonsense, in silence where sizes happen to agree.

    Args:
        name: Of the argument.
        array: A mask, or what is added to scores.
        batch: Sizes of the batch axes, by name.
        scores: Those of ``num_heads``, ``q_len`` and ``kv_len``.
    """
    shape, target = tuple(array.shape), (*batch.values(), *scores.values())
    axes = [*batch, *scores]
    if not shape:
        raise ValueError(f"{name} must have at least the axis kv_len, got shape ()")
    listed = ", ".join(axes)
    for missing in () if is_exporting() else (2, 1):  # without num_heads and q_len, or without num_heads
        own = [*batch, *axes[len(batch) + missing :]]
        as_meant = shape[: len(batch)] + (1,) * missing + shape[len(batch) :]
        aligned = (1,) * (len(target) - len(shape)) + shape
        if len(shape) != len(own) or as_meant == aligned or shape[: len(batch)] != target[: len(batch)]:
            continue
        if not checks.broadcasts(as_meant, target):
            continue
        meant = f"{name}[{', '.join([':'] * len(batch) + ['None'] * missing + [':'] * (missing == 2))}]"
        if not checks.broadcasts(shape, target):
            raise ValueError(
                f"{name} must broadcast to {target} ({listed}), got {shape}; of axes [{', '.join(own)}], use {meant}"
            )
        plain = f"{name}[{', '.join(['None'] * (len(target) - len(shape)))}]"
        raise ValueError(
            f"{name} must have axes that cannot be mistaken, got {shape} for scores of {target} ({listed}); use "
            f"{meant} if they are [{', '.join(own)}], or {plain} if they are [{', '.join(axes[-len(shape) :])}]"
        )
    checks.broadcastable(name, shape, target, listed)
