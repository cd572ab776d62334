"""The processes that share a sequence, and the check that their calls are equal."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from alibi_torch._internals import has_backend

LARGEST_TAG = 2**24  # Tags of messages are taken modulo this.


@dataclass(frozen=True)
class Place:
    """The rank of this process among the processes that share a sequence, and its shard of the heads."""

    group: dist.ProcessGroup  # the processes that share the sequence
    rank: int  # in the group
    size: int  # number of processes in the group
    head_shards: int = 1  # number of shards of the heads
    head_rank: int = 0  # index of this process's shard of the heads
    tag: int = 0  # of the messages of one call and of its backward pass, so that calls cannot receive each other's

    def all_reduced(self, tensor: Tensor, operation: Any = dist.ReduceOp.MAX) -> Tensor:
        """Return a tensor reduced over the group; the argument may be overwritten."""
        tensor = tensor.contiguous()
        if self.size > 1:
            dist.all_reduce(tensor, operation, group=self.group)
        return tensor


def place_of(group: Any, axis_name: str | None, head_axis: str | None) -> Place:
    """Validate these arguments of ``attention`` and return this process's place."""
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed must be initialized, as by torch.distributed.init_process_group")
    group = dist.group.WORLD if group is None else group
    is_mesh = isinstance(group, DeviceMesh)
    if not is_mesh and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "group must be a torch.distributed.ProcessGroup that this process is in, a DeviceMesh or None, got "
            f"{type(group).__name__}"
        )
    names = tuple(group.mesh_dim_names or ()) if is_mesh else ()
    for name, axis in (("axis_name", axis_name), ("head_axis", head_axis)):
        if axis is None:
            continue
        if not isinstance(axis, str):
            raise TypeError(f"{name} must be the name of one mesh dimension, got {axis!r}")
        if not is_mesh:
            raise ValueError(f"{name} must be None where group is no torch.distributed.DeviceMesh, got {axis!r}")
        if axis not in names:
            raise ValueError(f"{name} must name a dimension of the mesh, {names}, got {axis!r}")
    if not is_mesh:
        return Place(group, dist.get_rank(group), dist.get_world_size(group))
    if group.get_coordinate() is None:
        raise ValueError(f"group must be a mesh that this process is in, got {group}")
    if axis_name is None and group.ndim != 1:
        raise ValueError(f"axis_name must name a dimension of a mesh that has several, {names}, got None")
    tokens = 0 if axis_name is None else names.index(axis_name)
    place = Place(group.get_group(tokens), group.get_local_rank(tokens), group.size(tokens))
    if head_axis is None:
        return place
    heads = names.index(head_axis)
    if heads == tokens:
        raise ValueError(f"axis_name and head_axis must differ, got {head_axis!r} for both")
    return replace(place, head_shards=group.size(heads), head_rank=group.get_local_rank(heads))


def check_device(place: Place, tensor: Tensor) -> None:
    """Check that the group can send tensors from this tensor's device."""
    if not has_backend(place.group, tensor.device):
        kind = tensor.device.type
        raise ValueError(f"query must be on a device that the process group has a backend for, got {kind}")


_next_tag, _counting = 0, threading.Lock()


def agree(place: Place, device: torch.device, facts: dict[str, Any]) -> Place:
    """Return the place with a new tag, equal on all processes; raise on all if ``facts`` differ, by ``repr``."""
    global _next_tag
    if place.size == 1:
        return place
    # One all_gather of 64-bit digests, and each process's next tag.
    digests = [hashlib.blake2b(repr(fact).encode(), digest_size=8).digest() for fact in facts.values()]
    numbers = [int.from_bytes(x, "little", signed=True) for x in digests]
    mine = torch.tensor([*numbers, _next_tag], device=device)
    found = [torch.empty_like(mine) for _ in range(place.size)]
    dist.all_gather(found, mine, group=place.group)
    everywhere = torch.stack(found)
    # Processes may have made different numbers of calls in other groups: agree on the largest counter.
    tag = int(everywhere[:, -1].max())
    with _counting:  # threads may call in other groups
        _next_tag = max(_next_tag, tag + 1)
    differs = everywhere[:, :-1] != everywhere[0, :-1]
    if not differs.any():
        return replace(place, tag=tag % LARGEST_TAG)
    index = int(differs.any(dim=0).nonzero()[0])
    others = differs[:, index].nonzero().flatten().tolist()
    name, fact = list(facts.items())[index]
    raise ValueError(
        f"{name} must be the same on all processes of the group, got {fact} on process {place.rank} and another than "
        f"on process 0 on {', '.join(map(str, others))}"
    )
