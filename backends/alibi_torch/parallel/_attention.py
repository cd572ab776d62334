"""Sequence-parallel ALiBi attention of a process group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import array_api_compat.torch as xp
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from alibi_core import slopes as canonical_slopes
from alibi_core.backend import AttentionCall, checks
from alibi_core.backend.horizon import LARGEST_TOLERANCE, tolerance_of
from alibi_core.backend.sharding import HALO_SHARE, Shards
from alibi_torch._attention import run
from alibi_torch._dispatch import IMPLEMENTATIONS
from alibi_torch._internals import in_transform
from alibi_torch.parallel._group import agree, check_device, local_slopes, place_of
from alibi_torch.parallel._halo import GatherHalo, Halo, gathered
from alibi_torch.parallel._reach import needed_tokens


# What processes tell each other decides what is computed: torch.compile leaves the call as it is, between its graphs.
@torch._disable_dynamo
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Tensor | None = None,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    axis_name: str | None = None,
    head_axis: str | None = None,
    length: int | None = None,
    is_causal: bool = True,
    future_slopes: Tensor | None = None,
    segment_ids: Tensor | None = None,
    window_size: int | None = None,
    scale: float | None = None,
    tolerance: float | None = None,
    allow_negative_slopes: bool = False,
    implementation: str | None = None,
) -> Tensor:
    """Return this process's part of ALiBi self-attention over a sequence that is divided among processes.

    The result is that of :func:`alibi_torch.attention` on the whole sequence, to rounding, with gradients of query,
    key, value and slopes. All processes of the group have to make the call, and to go backward through it if one does.

    Each process gets the keys and values that its queries need, and no others: of each key/value head as many tokens
    as its horizon reaches. That follows from norms of queries and keys, the largest of which processes tell each other
    first.

    Padding at the end of the sequence, of which ``length`` tells, is not looked at, and its results are zeros. A
    gradient by slopes is that of this process's results: summed over the group, it is that of all.

    Arguments that are not listed are those of :func:`alibi_torch.attention`.

    - ``query``: ``[batch, num_heads, shard_len, head_dim]``, this process's shard: tokens that follow those of the
      process before, and this process's heads. ``shard_len`` is the same on all processes. ``key``, ``value`` and
      ``segment_ids`` (``[batch, shard_len]``) are of the same tokens.
    - ``slopes``, ``future_slopes``: ``[num_heads]``, those of *all* processes' heads. Default: the canonical slopes of
      as many heads as all processes have together.
    - ``group``: The processes that share the sequence, or a mesh. Default: all processes.
    - ``axis_name``: The mesh dimension that tokens are divided along, where the mesh has several.
    - ``head_axis``: The mesh dimension that heads are divided along; None if they are not.
    - ``length``: Tokens of the sequence. Default: those of all shards.
    - ``tolerance``: The share of softmax weight that may be left out, by what is not sent and not computed together.
      With 0 all is sent and computed.

    Returns:
        ``[batch, num_heads, shard_len, head_dim]``, of the dtype and on the device of ``query``.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value, shape or device is wrong, or another than on other processes.
        NotImplementedError: If the implementation named cannot run the call, or a transform of ``torch.func`` is to.
        RuntimeError: If ``torch.distributed`` was not initialized, or another process does not answer in the group's
            timeout.

    Example:
        On one process of two, with half of a sequence of 8,192 tokens each::

            query, key, value = torch.randn(3, 1, 8, 4096, 64).unbind()
            result = attention(query, key, value)  # [1, 8, 4096, 64]

        In a group of one process, it is the attention of that process:

        >>> import alibi_torch
        >>> from torch import distributed
        >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        >>> query, key, value = torch.ones(3, 1, 2, 6, 4).unbind()
        >>> torch.allclose(attention(query, key, value), alibi_torch.attention(query, key, value))
        True
        >>> distributed.destroy_process_group()

    References:
        Press, Smith, Lewis, "Train Short, Test Long", arXiv 2108.12409; Liu, Zaharia, Abbeel, "Ring Attention with
        Blockwise Transformers", arXiv 2310.01889.
    """
    if in_transform():
        raise NotImplementedError("parallel.attention has gradients by torch.autograd, and no torch.func transforms")
    place = place_of(group, axis_name, head_axis)
    for name, tensor in (("query", query), ("key", key)):
        if checks.array(name, tensor).ndim != 4:
            raise ValueError(f"{name} must have shape (batch, heads, shard_len, head_dim), got {tuple(tensor.shape)}")
    if key.shape[2] != query.shape[2]:
        raise ValueError(f"key must have the shard_len of query, {query.shape[2]}, got {key.shape[2]}")
    if implementation is not None:
        checks.one_of("implementation", implementation, IMPLEMENTATIONS)
    heads = query.shape[1]
    if slopes is None:
        slopes = canonical_slopes(heads * place.head_shards, xp=xp, device=query.device)
    own_slopes, own_future = (
        local_slopes(name, given, heads, place)
        for name, given in (("slopes", slopes), ("future_slopes", future_slopes))
    )
    call = AttentionCall.check(
        query,
        key,
        value,
        own_slopes,
        is_causal=is_causal,
        future_slopes=own_future,
        segment_ids=segment_ids,
        window_size=window_size,
        scale=scale,
        tolerance=tolerance,
        allow_negative_slopes=allow_negative_slopes,
        xp=xp,
    )
    check_device(place, group, query)
    shards = Shards(place.size, query.shape[2], length)
    share = min(tolerance_of(call), LARGEST_TOLERANCE)
    place = agree(place, query.device, _facts_of(call, shards, key, value, implementation))
    if call.is_empty:
        return query + key.sum() + value.sum()  # of no elements, but a part of the graph
    nothing = (0,) * call.num_kv_heads
    needed = (nothing, nothing) if place.size == 1 else needed_tokens(place, call, shards, query, key, share)
    return _attend(call, Halo(place, shards, *needed), query, key, value, (1 - HALO_SHARE) * share, implementation)


def _attend(
    call: AttentionCall,
    halo: Halo,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tolerance: float,
    implementation: str | None,
) -> Tensor:
    """Return attention to own keys and those that arrive."""
    # On the CPU the parts of a key's gradient, from several processes, are not rounded before they are added.
    dtype = call.working_dtype if query.device.type == "cpu" else call.dtype
    ids = _segments(call, halo)
    seen = GatherHalo.apply(key, value, halo, dtype)
    count, group = len(halo.stretches), call.num_heads // call.num_kv_heads
    first = halo.place.rank * halo.shards.shard_len
    rows = slice(0, halo.shards.tokens(halo.place.rank))
    results = []
    for index, stretch in enumerate(halo.stretches):
        heads = slice(stretch.heads.start * group, stretch.heads.stop * group)
        keys, values = seen[index], seen[count + index]
        part = replace(
            call.tile(batch=slice(0, call.batch[0]), heads=heads, queries=rows, keys=rows),
            kv_len=keys.shape[2],
            num_kv_heads=keys.shape[1],
            q_offset=first - stretch.first,
            kv_segment_ids=None if ids is None else ids[index],
            dtype=dtype,
            tolerance=tolerance,
        )
        results.append(run(part, query[:, heads, rows].to(dtype), keys, values, implementation, None))
    if not results:  # padding alone, but a part of the graph
        inputs = [x for x in (key, value, call.slopes, call.future_slopes) if x is not None]
        results = [query[:, :, :0] + sum(x.flatten()[:0].sum() for x in inputs)]
    return F.pad(torch.cat(results, dim=1), (0, 0, 0, call.q_len - rows.stop)).to(query.dtype)


def _segments(call: AttentionCall, halo: Halo) -> list[Tensor] | None:
    """Return the segments of the keys of each stretch, ``[batch, length]``."""
    if call.q_segment_ids is None:
        return None
    widest = Halo(halo.place, halo.shards, (max(halo.past),), (max(halo.future),))
    ids = call.q_segment_ids.expand(call.batch[0], -1)[:, None, :, None]
    (found,) = gathered(widest, (ids,), ids.dtype)
    starts = [seen.first - widest.stretches[0].first for seen in halo.stretches]
    lengths = [seen.stop - seen.first for seen in halo.stretches]
    return [found[0][:, 0, start : start + length, 0] for start, length in zip(starts, lengths, strict=True)]


def _facts_of(
    call: AttentionCall, shards: Shards, key: Tensor, value: Tensor, implementation: str | None
) -> dict[str, Any]:
    """Return what must be the same on all processes of a group."""
    differentiated = torch.is_grad_enabled() and (key.requires_grad or value.requires_grad)
    segments = None if call.q_segment_ids is None else call.q_segment_ids.dtype
    return {
        "query's shape": (*call.batch, call.num_heads, call.q_len, call.head_dim),
        "key's shape": tuple(key.shape),
        "dtype": call.dtype,
        "length": shards.length,
        "slopes": call.slopes.tolist(),
        "future_slopes": None if call.future_slopes is None else call.future_slopes.tolist(),
        "is_causal": call.is_causal,
        "window_size": call.window_size,
        "scale": call.scale,
        "tolerance": call.tolerance,
        "segment_ids' dtype": segments,
        "implementation": implementation,
        "whether key or value requires gradients": differentiated,
    }
