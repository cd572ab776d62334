"""Sequence-parallel ALiBi attention in a process group."""

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
from alibi_core.backend.sharding import HALO_SHARE, Shards, check_shard_slopes
from alibi_torch._attention import run
from alibi_torch._dispatch import IMPLEMENTATIONS, autocasted
from alibi_torch._internals import in_transform, skipped_by_compilers
from alibi_torch.parallel._group import agree, check_device, place_of
from alibi_torch.parallel._halo import GatherHalo, Halo, gathered
from alibi_torch.parallel._reach import needed_tokens


# Exchanged values decide the shapes of tensors, so torch.compile must not trace this call: it breaks the graph here.
@skipped_by_compilers
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

    The result equals that of :func:`alibi_torch.attention` on the whole sequence up to rounding, with gradients of
    query, key, value and slopes. All processes of the group must make the call; if one runs the backward pass, all
    must.

    Each process receives only the keys and values that its queries need: for each key/value head, the tokens within
    its horizon. The horizons are computed from the largest norms of queries and keys, which are exchanged first.

    Padding at the end of the sequence (see ``length``) is ignored, and its results are zeros. The gradient of slopes
    belongs to this process's results; sum it over the group to get the full gradient.

    Arguments that are not listed are those of :func:`alibi_torch.attention`.

    - ``query``: ``[batch, num_heads, shard_len, head_dim]``, this process's shard: the tokens after those of the
      process with the rank before, and this process's heads. ``shard_len`` is equal on all processes. ``key``,
      ``value`` and ``segment_ids`` (``[batch, shard_len]``) belong to the same tokens.
    - ``slopes``, ``future_slopes``: ``[num_heads]``, the slopes of *all* processes' heads. Default: the canonical
      slopes for the number of heads of all processes together.
    - ``group``: The processes that share the sequence, or a mesh. Default: all processes.
    - ``axis_name``: The mesh dimension along which tokens are sharded; required if the mesh has several.
    - ``head_axis``: The mesh dimension along which heads are sharded; None if they are not.
    - ``length``: Number of tokens of the sequence. Default: the number of tokens of all shards.
    - ``tolerance``: The share of softmax weight that may be skipped, keys that are not sent and keys that are not
      computed taken together. With 0, all keys are sent and computed.

    Returns:
        ``[batch, num_heads, shard_len, head_dim]``, with the dtype and device of ``query``.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value, shape or device is wrong, or differs between processes.
        NotImplementedError: If ``implementation`` cannot run the call, or inside a transform of ``torch.func``.
        RuntimeError: If ``torch.distributed`` is not initialized, or another process does not answer within the group's
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
    if in_transform(unknown=False):  # its exchange refuses transforms by itself, less clearly
        raise NotImplementedError("parallel.attention has gradients by torch.autograd, and no torch.func transforms")
    place = place_of(group, axis_name, head_axis)
    query, key, value = autocasted(query, key, value)
    if checks.array("query", query).ndim != 4:
        raise ValueError(f"query must have shape (batch, heads, shard_len, head_dim), got {tuple(query.shape)}")
    if implementation is not None:
        checks.one_of("implementation", implementation, IMPLEMENTATIONS)
    heads = query.shape[1]
    if slopes is None:
        slopes = canonical_slopes(heads * place.head_shards, xp=xp, device=query.device)
    rates = {"slopes": slopes, "future_slopes": future_slopes}
    for name, given in rates.items():
        if given is not None:  # of all processes' heads; this process computes its own
            check_shard_slopes(name, given, heads, place.head_shards, "processes")
            rates[name] = given[place.head_rank * heads :][:heads]
    call = AttentionCall.check(
        query,
        key,
        value,
        **rates,
        is_causal=is_causal,
        segment_ids=segment_ids,
        window_size=window_size,
        scale=scale,
        tolerance=tolerance,
        allow_negative_slopes=allow_negative_slopes,
        xp=xp,
    )
    if call.kv_len != call.q_len:
        raise ValueError(f"key must have the shard_len of query, {call.q_len}, got {call.kv_len}")
    check_device(place, query)
    shards = Shards(place.size, query.shape[2], length)
    place = agree(place, query.device, _facts_of(call, shards, key, value, implementation))
    if call.is_empty:
        return query + key.sum() + value.sum()  # no elements, but connected to the autograd graph
    nothing = (0,) * call.num_kv_heads
    needed = (nothing, nothing) if place.size == 1 else needed_tokens(place, call, shards, query, key)
    call = replace(call, tolerance=(1 - HALO_SHARE) * call.tolerance)
    return _attend(call, Halo(place, shards, *needed), query, key, value, implementation)


def _attend(
    call: AttentionCall, halo: Halo, query: Tensor, key: Tensor, value: Tensor, implementation: str | None
) -> Tensor:
    """Return this shard's attention to its own keys and to the keys received from other processes."""
    # On the CPU, compute in the working dtype, so that key gradients are not rounded before they are summed.
    dtype = call.working_dtype if query.device.type == "cpu" else call.dtype
    ids = _segments(call, halo)
    seen = GatherHalo.apply(key, value, halo, dtype)
    count, group = len(halo.stretches), call.num_heads // call.num_kv_heads
    first = halo.place.rank * halo.shards.shard_len
    rows = slice(0, halo.shards.tokens(halo.place.rank))
    results = []
    for index, stretch in enumerate(halo.stretches):
        # Query heads of these key/value heads; `seen` holds all keys first, then all values.
        heads = slice(stretch.heads.start * group, stretch.heads.stop * group)
        keys, values = seen[index], seen[count + index]
        part = replace(
            call.tile(heads=heads, queries=rows, keys=rows),
            kv_len=keys.shape[2],
            num_kv_heads=keys.shape[1],
            q_offset=first - stretch.first,
            kv_segment_ids=None if ids is None else ids[index],
            dtype=dtype,
        )
        results.append(run(part, query[:, heads, rows].to(dtype), keys, values, implementation, None))
    if not results:  # the shard is all padding: no rows, but connected to the autograd graph
        inputs = [x for x in (key, value, call.slopes, call.future_slopes) if x is not None]
        results = [query[:, :, :0] + sum(x.flatten()[:0].sum() for x in inputs)]
    return F.pad(torch.cat(results, dim=1), (0, 0, 0, call.q_len - rows.stop)).to(query.dtype)


def _segments(call: AttentionCall, halo: Halo) -> list[Tensor] | None:
    """Return the segment ids of each stretch's keys, ``[batch, length]``, gathered from all processes."""
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
    """Return the properties of a call that must be equal on all processes of the group, by name."""
    differentiated = torch.is_grad_enabled() and (key.requires_grad or value.requires_grad)
    segments = None if call.q_segment_ids is None else call.q_segment_ids.dtype
    return {
        "query's shape": (*call.batch, call.num_heads, call.q_len, call.head_dim),
        "key's shape": tuple(key.shape),
        "length": shards.length,
        "slopes": call.slopes.tolist(),
        "future_slopes": None if call.future_slopes is None else call.future_slopes.tolist(),
        "segment_ids' dtype": segments,
        "implementation": implementation,
        "whether key or value requires gradients": differentiated,
    } | {name: getattr(call, name) for name in ("dtype", "is_causal", "window_size", "scale", "tolerance")}
