"""The plan as a ``BlockMask``: the blocks of keys that FlexAttention visits, computed without a host sync."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from alibi_core.backend import AttentionCall
from alibi_core.backend.horizon import KeyNorms, ScoreBounds, Tiling, key_ranges, measure, nearest_keys
from alibi_torch._cpu import norm_bounds

BLOCK = 128  # Queries, and keys, per block: a multiple of the tile sizes of all FlexAttention kernels.
MEASURING = Tiling(q_block=BLOCK, kv_block=BLOCK, most_blocks=None, norm_bounds=norm_bounds)


def block_mask(
    call: AttentionCall,
    query: Tensor,
    key: Tensor,
    mask_mod: Callable[..., Tensor],
    norms: KeyNorms | None,
    seq_lengths: tuple[int, int],
    has_gradients: bool,
) -> BlockMask:
    """Return the needed blocks: full ones, where every query sees every key, and partial ones, which use ``mask_mod``.

    All computation is on the device of ``query``; the host reads no values. ``seq_lengths`` include padding.
    Gradients need the blocks by block of keys too.
    """
    if is_ordered := call.is_causal and call.q_points is not None:
        # Any block may hold keys before and after a query: visit all, and mask each score.
        call = replace(call, is_causal=False)
    first, stop = needed_blocks(call, query, key, norms)
    q_blocks, kv_blocks = (-(-n // BLOCK) for n in (call.q_len, call.kv_len))
    step = torch.arange(kv_blocks, dtype=torch.int32, device=query.device)

    def run(starts: Tensor) -> Tensor:
        """Return consecutive block indices from ``starts [..., q_blocks]`` on, ``[..., q_blocks, kv_blocks]``."""
        return (starts[..., None] + step).clamp(max=kv_blocks - 1).to(torch.int32).contiguous()

    counts: list[Tensor | None] = [stop - first, None]
    indices: list[Tensor | None] = [run(first), None]
    # With a mask or segments, finding full blocks would mean reading them. The kernel for a single query splits only
    # the needed blocks among multiprocessors if there is no list of full blocks; with such a list it splits all keys.
    if call.mask is None and call.q_segment_ids is None and seq_lengths[0] > 1 and not is_ordered:
        full_first, full_stop = _full_blocks(call, first, stop, q_blocks)
        counts = [stop - first - (full_stop - full_first), full_stop - full_first]
        # Partial blocks lie before and after the full ones.
        before = (full_first - first)[..., None]
        indices = [torch.where(step < before, run(first), run(full_stop - before[..., 0])), run(full_first)]
    partial, full = (None if x is None else x.to(torch.int32).contiguous() for x in counts)
    lists = partial, indices[0], full, indices[1]
    options = {"mask_mod": mask_mod, "seq_lengths": seq_lengths, "compute_q_blocks": has_gradients}
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK, **options)


def needed_blocks(
    call: AttentionCall, query: Tensor, key: Tensor, norms: KeyNorms | None = None
) -> tuple[Tensor, Tensor]:
    """Return, for each block of queries, the first needed block of keys, and the block after the last needed one.

    Both are int32, ``[batch or 1, num_heads or 1, q_blocks]``.
    """
    if call.tolerance == 0:  # nothing to measure
        bounds = ScoreBounds.unmeasured(call, q_block=BLOCK, kv_block=BLOCK)
    else:
        tensors = query.detach(), key.detach()
        measured = measure(call, *tensors, MEASURING, norms)
        measured = replace(measured, lower=_bounds_by_means(call, *tensors, measured.centre))
        bounds = measured.bounds(call, nearest_keys(call))
    ranges = key_ranges(call, bounds)
    # From keys to blocks: round the start down and the end up.
    first = torch.div(ranges.first, BLOCK, rounding_mode="floor")
    stop = torch.div(ranges.stop + (BLOCK - 1), BLOCK, rounding_mode="floor")
    return first, torch.where(ranges.first < ranges.stop, stop, first)


def _bounds_by_means(call: AttentionCall, query: Tensor, key: Tensor, centre: Tensor | None) -> Tensor | None:
    """Return lower bounds of log-sum-exps, ``[batch, num_heads, q_len]``, from the keys before each block of queries.

    The exponential is convex: BLOCK keys weigh at least BLOCK times the exponential of their mean score. None where
    those keys may be hidden; -inf where there are fewer.
    """
    is_near = call.window_size is not None and call.window_size < 2 * BLOCK
    if is_near or call.mask is not None or call.q_segment_ids is not None or call.has_offset_array:
        return None
    rows = torch.arange(call.q_len, device=query.device)
    block = rows >> BLOCK.bit_length() - 1  # a shift, see KVCache.key_norms
    begins = torch.arange(-(-call.q_len // BLOCK), device=query.device) * BLOCK + call.q_offset  # [q_blocks]
    before = begins[:, None] + torch.arange(-BLOCK, 0, device=query.device)
    # [batch, num_kv_heads, q_blocks, head_dim]
    means = key[:, :, before.clamp(0, call.kv_len - 1)].to(call.working_dtype).mean(dim=-2)
    means = means if centre is None else means - centre
    # [batch, num_kv_heads, heads of a group, q_len, head_dim]
    grouped = query.to(call.working_dtype).unflatten(1, (call.num_kv_heads, -1))
    scores = (grouped * means[:, :, None, block]).sum(dim=-1).flatten(1, 2) * call.scale
    distance = rows - block * BLOCK + (BLOCK + 1) / 2  # of the mean
    bounds = scores - call.slopes[..., None] * distance + math.log(BLOCK)
    exist = ((begins >= BLOCK) & (begins <= call.kv_len))[block]
    return torch.where(exist & (bounds < math.inf), bounds, -math.inf)


def _full_blocks(call: AttentionCall, first: Tensor, stop: Tensor, q_blocks: int) -> tuple[Tensor, Tensor]:
    """Return the first needed block of keys that all queries of a block see entirely, and the block after the last."""
    starts = torch.arange(q_blocks, dtype=torch.int32, device=first.device) * BLOCK
    offset = call.q_offset[:, None, None] if call.has_offset_array else call.q_offset
    lowest, highest = starts + offset, (starts + BLOCK).clamp(max=call.q_len) - 1 + offset  # positions
    lowest, highest = lowest.clamp(max=call.kv_len), highest.clamp(min=0)
    full_first, full_stop = first, stop.clamp(max=call.kv_len // BLOCK)
    reach = 0 if call.is_causal else call.window_size  # tokens ahead of a query that are visible; None: all
    if reach is not None:
        reach = min(reach, 2**31 - 2 - call.kv_len)  # so that positions do not overflow int32
        full_stop = torch.minimum(full_stop, torch.div(lowest + (reach + 1), BLOCK, rounding_mode="floor"))
    if call.window_size is not None:
        # The last query of the block must still see the block's first key.
        visible = torch.div(highest - call.window_size - 1, BLOCK, rounding_mode="floor") + 1
        full_first = torch.maximum(full_first, visible)
    count = (full_stop - full_first).clamp(min=0)
    full_first = torch.where(count > 0, full_first, stop)
    return full_first, full_first + count
