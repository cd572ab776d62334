"""How many tokens beyond its chunks a process's queries need, from what is measured of queries and keys."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from alibi_core import AttentionCall
from alibi_core.backend import HALO_SHARE, lower_bounds, score_rounding, tokens_beyond
from alibi_torch._cpu import norm_bounds, tiling
from alibi_torch.parallel._group import Place
from alibi_torch.parallel._halo import Halo


@torch.no_grad()
def needed_tokens(
    place: Place, call: AttentionCall, halo: Halo, query: Tensor, key: Tensor, tolerance: float
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return how many tokens before a chunk its queries need, and after: of each key/value head, anywhere at most.

    All processes of the group have to take part, and all get the same answer. How far ``halo`` reaches does not matter,
    nor what there is in place of padding. ``tolerance`` is the share of softmax weight that may be left out in all.
    """
    shards, group, statistics = halo.shards, call.num_heads // call.num_kv_heads, call.working_dtype
    size, side = shards.chunk_len, HALO_SHARE * tolerance * (1.0 if call.is_causal else 0.5)
    chunks = [
        (chunk, slice(slot * size, slot * size + halo.tokens(chunk)))
        for slot, chunk in enumerate(shards.chunks(place.rank))
        if halo.tokens(chunk)
    ]
    # Softmax does not notice a vector taken from every key; without their mean they are smaller.
    total = key.new_zeros(call.batch[0], call.num_kv_heads, 1, call.head_dim, dtype=statistics)
    for _, tokens in chunks:
        total += key[:, :, tokens].to(statistics).sum(dim=2, keepdim=True)
    centre = place.all_reduced(total, dist.ReduceOp.SUM) / shards.length
    norms = key.new_zeros(2, call.batch[0], call.num_kv_heads, dtype=statistics)
    for _, tokens in chunks:
        keys = key[:, :, tokens].to(statistics)
        found = torch.stack([norm_bounds(x).amax(dim=-1) for x in (keys - centre, keys)])
        norms = torch.maximum(norms, found)
    # What is not finite becomes infinite: how processes compare a NaN is not laid down.
    norms = place.all_reduced(norms.nan_to_num(nan=math.inf, posinf=math.inf))
    centred, plain = norms.repeat_interleave(group, dim=2)[..., None]  # [batch, num_heads, 1]
    rounding = score_rounding(call.head_dim)

    needs = torch.zeros(2, call.num_heads, dtype=torch.int64, device=query.device)
    future_slopes = call.slopes if call.future_slopes is None else call.future_slopes
    for chunk, tokens in chunks:
        queries, keys = query[:, :, tokens].to(statistics), key[:, :, tokens].to(statistics) - centre
        sizes = norm_bounds(queries) * abs(call.scale)
        lower = _log_sum_exps_at_least(call, query, key, queries, keys, centre, tokens)
        excess = sizes * centred * (1 + rounding) - (lower - sizes * plain * 2 * rounding)
        inside = torch.arange(excess.shape[-1], device=query.device)
        before, after = chunk * size, max(shards.length - (chunk + 1) * size, 0)  # tokens that there are
        sides = [(call.slopes, inside, before), (future_slopes, size - 1 - inside, after)]
        for row, (slopes, within, exist) in enumerate(sides[: 1 if call.is_causal else 2]):
            limit = exist if call.window_size is None else min(exist, call.window_size)
            far = tokens_beyond(call.xp, slopes[:, None], excess, side, within, limit)
            needs[row] = torch.maximum(needs[row], far.amax(dim=(0, 2)).long())
    by_kv_head = needs.unflatten(1, (-1, group)).amax(dim=-1)
    past, future = place.all_reduced(by_kv_head).tolist()
    return tuple(past), tuple(future)


def _log_sum_exps_at_least(
    call: AttentionCall, query: Tensor, key: Tensor, queries: Tensor, keys: Tensor, centre: Tensor, tokens: slice
) -> Tensor:
    """Return lower bounds of a chunk's log-sum-exps, ``[batch, num_heads, tokens]``, with centred keys.

    Each is the score with the query's own key, or what the keys of the chunk before it weigh by their mean.
    """
    group = call.num_heads // call.num_kv_heads
    own = (queries.unflatten(1, (-1, group)) * keys[:, :, None]).sum(dim=-1).flatten(1, 2) * call.scale
    for index in range(call.batch[0]):
        one = slice(index, index + 1)
        part = call.tile(batch=one, heads=slice(0, call.num_heads), queries=tokens, keys=tokens)
        means = lower_bounds(part, query[one, :, tokens], key[one, :, tokens], centre[one], tiling().measuring)
        if means is not None:
            own[one] = torch.maximum(own[one], means)
    return own
