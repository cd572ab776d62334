"""Decoding with a cache whose tokens are divided among processes."""

from __future__ import annotations

from dataclasses import replace

import array_api_compat.torch as xp
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from alibi_core import AttentionCall
from alibi_core.backend import (
    LARGEST_TOLERANCE,
    array,
    non_negative_int,
    positive_int,
    reach,
    score_rounding,
    tolerance_of,
)
from alibi_core.backend import slopes as canonical_slopes
from alibi_torch._cpu import attention_with_sums as tiled_attention_with_sums
from alibi_torch._cpu import norm_bounds
from alibi_torch.caches import KVCache, check_appended
from alibi_torch.parallel._group import agree, check_device, local_slopes, mark_of, place_of


class ShardedKVCache:
    """A key/value cache whose slots are divided among the processes of a group, contiguously.

    Every process is given all new tokens, as all of them compute the layers before, and keeps those that it has a slot
    for. What processes send each other while they decode does not grow with the cache.

    Args:
        batch_size: Sequences.
        num_kv_heads: Key/value heads of this process.
        max_length: Tokens that all processes can hold together.
        head_dim: Features a head.
        group: The processes that share the cache, or a mesh. Default: all processes.
        axis_name: The mesh dimension that slots are divided along, where the mesh has several.
        head_axis: The mesh dimension that heads are divided along; None if they are not.
        device: Where the cache lives.
        dtype: Of keys and values.

    Attributes:
        length: Tokens that all processes hold together.
        attended: How often this process had keys within the horizon, and so attention to compute.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a size is out of range, another than on other processes, or there is no such mesh dimension.
        RuntimeError: If ``torch.distributed`` was not initialized.

    Example:
        On each of some processes::

            cache = ShardedKVCache(1, 8, 65_536, 64)
            cache.append(key, value)  # [1, 8, new, 64], the same on all processes
            result = cache.attend(query)  # [1, 8, new, 64], likewise

        In a group of one process, which has all slots:

        >>> from torch import distributed
        >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        >>> cache = ShardedKVCache(1, 2, 16, 4)
        >>> cache.append(torch.ones(1, 2, 6, 4), torch.ones(1, 2, 6, 4))
        >>> cache.attend(torch.ones(1, 2, 1, 4)).shape, cache.length
        (torch.Size([1, 2, 1, 4]), 6)
        >>> distributed.destroy_process_group()
    """

    def __init__(
        self,
        batch_size: int,
        num_kv_heads: int,
        max_length: int,
        head_dim: int,
        *,
        group: ProcessGroup | DeviceMesh | None = None,
        axis_name: str | None = None,
        head_axis: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.place = place_of(group, axis_name, head_axis)
        shard_len = -(-positive_int("max_length", max_length) // self.place.size)
        self.max_length = max_length
        self.local = KVCache(batch_size, num_kv_heads, shard_len, head_dim, device=device, dtype=dtype)
        key = self.local.key
        check_device(self.place, group, key)
        facts = {"batch_size": batch_size, "num_kv_heads": num_kv_heads, "max_length": max_length}
        agree(self.place, key.device, facts | {"head_dim": head_dim, "dtype": key.dtype})
        # Bounds of the norms of all keys, wherever they are: every process sees them go by.
        self.max_norms = torch.zeros_like(self.local.key_norms[..., 0])  # [batch_size, num_kv_heads]
        self.length = self.attended = 0

    def append(self, key: Tensor, value: Tensor) -> None:
        """Store the keys and values of further tokens, each on the process that has its slot.

        Args:
            key: ``[batch_size, num_kv_heads, new, head_dim]``, the same on all processes of the group.
            value: Likewise.

        Raises:
            TypeError: If an argument is no tensor of four axes.
            ValueError: If the cache is full, or holds another batch, dtype or device.
        """
        check_appended(key, value, self.local.key)
        new = key.shape[2]
        if self.length + new > self.max_length:
            raise ValueError(
                f"cache must have room for {new} more tokens, got max_length {self.max_length} with {self.length} in "
                "use; make it longer"
            )
        if new == 0:
            return
        self.max_norms = torch.maximum(self.max_norms, norm_bounds(key.detach()).amax(dim=-1))
        start = self.place.rank * self.local.max_length - self.length  # of this process's slots, among the new tokens
        mine = slice(max(start, 0), max(start + self.local.max_length, 0))
        self.local.append(key[:, :, mine], value[:, :, mine])
        self.length += new

    def truncate(self, length: int) -> None:
        """Forget all tokens but the first ``length``."""
        self.length = min(self.length, non_negative_int("length", length))
        self.local.truncate(max(self.length - self.place.rank * self.local.max_length, 0))

    @torch._disable_dynamo
    @torch.no_grad()
    def attend(
        self,
        query: Tensor,
        slopes: Tensor | None = None,
        *,
        window_size: int | None = None,
        scale: float | None = None,
        tolerance: float | None = None,
    ) -> Tensor:
        """Return the causal attention of the last tokens held over all tokens held, without gradients.

        Each process attends to its own tokens if any lies within the horizon of one of its heads, which norms of
        queries and keys decide; the others do nothing. Results are merged by log-sum-exps. All processes have to make
        the call.

        Args:
            query: ``[batch_size, num_heads, q_len, head_dim]``, of the last ``q_len`` tokens, the same everywhere.
            slopes: ``[num_heads]``, those of *all* processes' heads. Default: the canonical slopes.
            window_size: Mask keys farther than this many tokens: with 4 a query sees 5 keys, its own among them.
            scale: Factor of the scores. Default ``head_dim ** -0.5``.
            tolerance: The share of softmax weight that may be left out. Default: the dtype's rounding error.

        Returns:
            ``[batch_size, num_heads, q_len, head_dim]``, the same on all processes.

        Raises:
            TypeError: If an argument is of the wrong kind.
            ValueError: If a value or shape is wrong, there are more queries than tokens, or processes do not ask for
                the same.
        """
        held = self.local.length
        key, value = self.local.key[:, :, :held], self.local.value[:, :, :held]
        if array("query", query).ndim != 4:
            raise ValueError(f"query must have shape (batch, heads, q_len, head_dim), got {tuple(query.shape)}")
        heads, q_len = query.shape[1:3]
        if q_len > self.length:
            raise ValueError(f"query must have no more tokens than the cache holds, {self.length}, got {q_len}")
        if slopes is None:
            slopes = canonical_slopes(heads * self.place.head_shards, xp=xp, device=query.device)
        call = AttentionCall.check(
            query,
            key,
            value,
            local_slopes("slopes", slopes, heads, self.place),
            q_offset=self.length - q_len - self.place.rank * self.local.max_length,
            window_size=window_size,
            scale=scale,
            tolerance=tolerance,
            xp=xp,
        )
        # Half of the tolerance is for the processes that do nothing, the rest for what the others leave out.
        share = min(tolerance_of(call), LARGEST_TOLERANCE) / 2
        result = torch.zeros_like(query, dtype=call.working_dtype)
        sums = torch.full(query.shape[:-1], -torch.inf, dtype=call.working_dtype, device=query.device)
        if held and q_len and self._sees(call, query, share):
            self.attended += 1
            result, sums = _part(call, query, key, value, share)
        if self.place.size == 1:
            return result.to(query.dtype)
        facts = {
            "length": self.length,
            "window_size": call.window_size,
            "scale": call.scale,
            "tolerance": call.tolerance,
        }
        mark = mark_of(facts | {"slopes": call.slopes.tolist()})
        reduced = self.place.all_reduced(torch.cat([sums.flatten(), sums.new_tensor([mark, -mark])]))
        if reduced[-2] != -reduced[-1]:
            raise ValueError(
                f"{', '.join(facts)} and slopes must be the same on all processes of the group, got "
                f"{', '.join(map(str, facts.values()))} and {call.slopes.tolist()} on process {self.place.rank}"
            )
        highest = reduced[:-2].view(sums.shape)
        weights = torch.exp(sums - torch.where(highest == -torch.inf, 0.0, highest))[..., None]
        both = self.place.all_reduced(torch.cat([result * weights, weights], dim=-1), dist.ReduceOp.SUM)
        total = both[..., -1:]
        return (both[..., :-1] / torch.where(total == 0, 1.0, total)).to(query.dtype)

    def _sees(self, call: AttentionCall, query: Tensor, share: float) -> bool:
        """Return whether any query may see a key of this process that counts."""
        group = call.num_heads // call.num_kv_heads
        norms = self.max_norms.repeat_interleave(group, dim=1)[..., None]
        bound = norm_bounds(query).to(call.working_dtype) * abs(call.scale) * norms
        # A query's own key is in the cache, so that its log-sum-exp is no less than that key's score.
        far = reach(xp, call.slopes[:, None], 2 * bound * (1 + 2 * score_rounding(call.head_dim)), share)
        nearest = call.q_offset + torch.arange(call.q_len, device=query.device) - (call.kv_len - 1)
        sees = (nearest > -call.kv_len) & ~(nearest >= far)  # a NaN compares as within
        if call.window_size is not None:
            sees = sees & (nearest <= call.window_size)
        return bool(sees.any())


def _part(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """Return attention to some of the keys, and log-sum-exps of scores whose distances are counted from the query.

    These are -inf for queries that see nothing.
    """
    if query.device.type == "cpu":
        result, sums = tiled_attention_with_sums(replace(call, tolerance=tolerance), query, key, value)
    else:
        result, sums = _dense_part(call, query, key, value)
    # Those of the operator count from the nearest key that there is.
    nearest = (call.q_offset + torch.arange(call.q_len, device=query.device) - (call.kv_len - 1)).clamp(min=0)
    sums = sums - call.slopes[:, None] * nearest
    return result, torch.where(sums == torch.inf, -torch.inf, sums)


def _dense_part(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the same from whole scores, which are few where queries are."""
    group = call.num_heads // call.num_kv_heads
    key, value = (x.repeat_interleave(group, dim=1).to(call.working_dtype) for x in (key, value))
    bias, attends = call.bias()
    scores = query.to(call.working_dtype) @ key.mT * call.scale + bias
    sums = scores.logsumexp(dim=-1)
    result = torch.exp(scores - sums[..., None]) @ value
    if attends is None:
        return result, sums
    return torch.where(attends, result, 0.0), torch.where(attends[..., 0], sums, torch.inf)
