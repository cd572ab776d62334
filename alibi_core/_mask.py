"""The mask, as booleans that broadcast to the scores. What could be read in two ways is refused.

Integers are a tokenizer's mask. They must be 0 or 1 where their values can be read: not those of traced arrays and of
arrays on an accelerator. Floating masks are refused, even of ones and zeros: additive masks are floating, too.
"""

from __future__ import annotations

from typing import Any

from alibi_core._arrays import Namespace, checks, host_values, is_exporting, is_kind, signed


def boolean_mask(xp: Namespace, mask: Any, batch: dict[str, int], scores: dict[str, int]) -> Any:
    """Return ``mask`` as booleans with axes that broadcast to the scores; integers are True where they are not 0.

    Integers with one axis beside the batch's are ``[*batch, kv_len]``, also where ``[q_len, kv_len]`` would fit.
    """
    is_tokenizers = is_kind(xp, mask.dtype, "integral")
    if is_tokenizers:
        mask = signed(xp, mask)  # PyTorch does not compare most unsigned integers
        is_binary = host_values(xp.all(xp.logical_or(mask == 0, mask == 1)))
        if is_binary is not None and not is_binary:
            raise ValueError(
                "mask must be booleans, or integers 0 and 1 (1 where a query may look), got other integers; numbers of "
                "sequences are segment_ids; if it is 0 where a query may look, use mask == 0"
            )
        mask = mask != 0
    if not is_kind(xp, mask.dtype, "bool"):
        raise TypeError(
            f"mask must be booleans, or integers 0 and 1 (1 where a query may look), got {mask.dtype}; leave out an "
            "ALiBi bias; if it is 1 where a query may look and 0 elsewhere, use mask != 0; if it is 0 where a query "
            "may look and -inf or the like elsewhere, use mask == 0"
        )
    return with_score_axes(xp, "mask", mask, batch, scores, is_tokenizers)


def with_score_axes(
    xp: Namespace, name: str, array: Any, batch: dict[str, int], scores: dict[str, int], is_tokenizers: bool = False
) -> Any:
    """Return an array with axes that broadcast to the scores, having checked that they can be read in one way only.

    Broadcasting aligns the last axes. An array with batch axes first, such as a tokenizer's mask ``[batch, kv_len]``,
    lacks ``num_heads`` and maybe ``q_len``: it gets these axes. If its sizes also fit the aligned axes, it is refused.
    The last axis does not broadcast: a single value for all keys is rather the mask of new tokens without the cache's.
    ``batch`` and ``scores`` are the sizes of the scores' axes, by name: the batch axes, and the last three.
    """
    shape, target = tuple(array.shape), (*batch.values(), *scores.values())
    axes, count = [*batch, *scores], len(batch)
    if not shape:
        raise ValueError(f"{name} must have at least the axis kv_len, got shape ()")
    if shape[-1] == 1 != scores["kv_len"]:
        raise ValueError(
            f"{name} must have all {scores['kv_len']} keys in its last axis, those of earlier tokens too, got {shape}; "
            "broadcast it to all keys if a single value for all of them is meant"
        )
    if is_tokenizers and len(shape) == count + 1:
        sizes = {**batch, "kv_len": scores["kv_len"]}
        checks.broadcastable("mask of integers", shape, tuple(sizes.values()), ", ".join(sizes))
        return xp.reshape(array, (*shape[:-1], 1, 1, shape[-1]))
    missing = len(target) - len(shape)
    # The shape if batch axes come first, and the shape as broadcasting reads it.
    batch_first, aligned = shape[:count] + (1,) * missing + shape[count:], (1,) * missing + shape
    is_recorded = is_exporting()  # torch.export would turn a comparison of dynamic sizes into a guard
    may_be_first = missing in (1, 2) and batch_first != aligned and not is_recorded
    if not may_be_first or shape[:count] != target[:count] or not checks.broadcasts(batch_first, target):
        fix = "; while torch.export records, give all axes: {}[:, None, None, :] if it is padding"
        checks.broadcastable(name, shape, target, ", ".join(axes), fix.format(name) if is_recorded and missing else "")
        return array
    if checks.broadcasts(shape, target):
        spelled = f"{name}[{', '.join([':'] * count + ['None'] * missing + [':'] * (missing == 2))}]"
        raise ValueError(
            f"{name} must have axes that cannot be mistaken, got {shape} for scores of {target} ({', '.join(axes)}); "
            f"use {spelled} if they are [{', '.join([*batch, *axes[count + missing :]])}], or "
            f"{name}[{', '.join(['None'] * missing)}] if they are [{', '.join(axes[missing:])}]"
        )
    return xp.reshape(array, batch_first)
