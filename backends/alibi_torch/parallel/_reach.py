"""The number of tokens beyond its shard that a process needs, measured from queries and keys."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from alibi_core.backend import AttentionCall
from alibi_core.backend.horizon import lower_bounds, score_rounding
from alibi_core.backend.sharding import HALO_SHARE, Shards, tokens_beyond
from alibi_torch._cpu import norm_bounds, tiling
from alibi_torch.parallel._group import Place


@torch.no_grad()
def needed_tokens(
    place: Place, call: AttentionCall, shards: Shards, query: Tensor, key: Tensor
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return, for each key/value head, how many tokens before and after its shard a process needs at most.

    All processes of the group must call it; all get the same result, the maximum over processes. Padding is ignored.
    """
    group, dtype = call.num_heads // call.num_kv_heads, call.working_dtype
    rank, size = place.rank, shards.shard_len
    tokens = slice(0, shards.tokens(rank))
    queries, keys = query[:, :, tokens].to(dtype), key[:, :, tokens].to(dtype)
    # A vector subtracted from every key cancels in softmax; without their mean, keys have smaller norms.
    centre = place.all_reduced(keys.sum(dim=2, keepdim=True), dist.ReduceOp.SUM) / shards.length
    norms = key.new_zeros(2, call.batch[0], call.num_kv_heads, dtype=dtype)
    if tokens.stop:
        norms = torch.stack([norm_bounds(x).amax(dim=-1) for x in (keys - centre, keys)])
    # Replace NaN by inf first: how processes compare a NaN is not specified.
    norms = place.all_reduced(norms.nan_to_num(nan=math.inf, posinf=math.inf))
    needs = torch.zeros(2, call.num_heads, dtype=torch.int64, device=query.device)
    if tokens.stop:
        centred, plain = norms.repeat_interleave(group, dim=2)[..., None]  # [batch, num_heads, 1]
        rounding = score_rounding(call.head_dim)
        sizes = norm_bounds(queries) * abs(call.scale)
        lower = _lower_bounds(call, query, key, queries, keys - centre, centre, tokens)
        excess = sizes * centred * (1 + rounding) - (lower - sizes * plain * 2 * rounding)
        inside = torch.arange(excess.shape[-1], device=query.device)
        future_slopes = call.slopes if call.future_slopes is None else call.future_slopes
        before, after = rank * size, max(shards.length - (rank + 1) * size, 0)  # tokens that exist
        sides = [(call.slopes, inside, before), (future_slopes, size - 1 - inside, after)]
        side_tolerance = HALO_SHARE * call.tolerance * (1.0 if call.is_causal else 0.5)
        for side, (slopes, within, exist) in enumerate(sides[: 1 if call.is_causal else 2]):
            # No more than the tokens that exist on this side, or that the window shows.
            limit = exist if call.window_size is None else min(exist, call.window_size)
            far = tokens_beyond(call.xp, slopes[:, None], excess, side_tolerance, within, limit)
            needs[side] = far.amax(dim=(0, 2)).long()
    past, future = place.all_reduced(needs.unflatten(1, (-1, group)).amax(dim=-1)).tolist()
    return tuple(past), tuple(future)


def _lower_bounds(
    call: AttentionCall, query: Tensor, key: Tensor, queries: Tensor, keys: Tensor, centre: Tensor, tokens: slice
) -> Tensor:
    """Return lower bounds of the shard's log-sum-exps, ``[batch, num_heads, tokens]``, with centred keys.

    Each is the larger of two bounds: the score with the query's own key, and a bound from the means of the shard's keys
    before it.
    """
    group = call.num_heads // call.num_kv_heads
    # [batch, num_kv_heads, group, tokens, head_dim] * [batch, num_kv_heads, 1, tokens, head_dim], summed over features
    lower = (queries.unflatten(1, (-1, group)) * keys[:, :, None]).sum(dim=-1).flatten(1, 2) * call.scale
    for index in range(call.batch[0]):
        one = slice(index, index + 1)
        part = call.tile(batch=one, queries=tokens, keys=tokens)
        means = lower_bounds(part, query[one, :, tokens], key[one, :, tokens], centre[one], tiling())
        if means is not None:
            lower[one] = torch.maximum(lower[one], means)
    return lower
