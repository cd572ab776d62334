"""The processes that share a sequence, and the check that their calls are equal."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from alibi_core.backend.sharding import check_shard_slopes

LARGEST_TAG = 2**24  # Tags of messages are taken modulo this.


@dataclass(frozen=True)
class Place:
    """The rank of this process among the processes that share a sequence, and its shard of the heads.

    Attributes:
        group: The processes that share the sequence.
        rank: This process's rank in the group.
        size: Number of processes in the group.
        head_shards: Number of shards of the heads.
        head_rank: Index of this process's shard of the heads.
        tag: Tag of the messages of one call and of its backward pass, so that calls cannot receive each other's.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    head_shards: int = 1
    head_rank: int = 0
    tag: int = 0

    def all_reduced(self, tensor: Tensor, operation: Any = dist.ReduceOp.MAX) -> Tensor:
        """Return a tensor reduced over the group; the argument may be overwritten."""
        tensor = tensor.contiguous()
        if self.size > 1:
            dist.all_reduce(tensor, operation, group=self.group)
        return tensor


def place_of(group: Any, axis_name: str | None, head_axis: str | None) -> Place:
    """Validate these arguments of ``attention`` and return this process's place."""
    for name, axis in (("axis_name", axis_name), ("head_axis", head_axis)):
        if axis is not None and not isinstance(axis, str):
            raise TypeError(f"{name} must be the name of one mesh dimension, got {axis!r}")
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed must be initialized, as by torch.distributed.init_process_group")
    if isinstance(group, DeviceMesh):
        return _place_in_mesh(group, axis_name, head_axis)
    for name, axis in (("axis_name", axis_name), ("head_axis", head_axis)):
        if axis is not None:
            raise ValueError(f"{name} must be None where group is no torch.distributed.DeviceMesh, got {axis!r}")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "group must be a torch.distributed.ProcessGroup that this process is in, a DeviceMesh or None, got "
            f"{type(group).__name__}"
        )
    return Place(group, dist.get_rank(group), dist.get_world_size(group))


def _place_in_mesh(mesh: DeviceMesh, axis_name: str | None, head_axis: str | None) -> Place:
    names = tuple(mesh.mesh_dim_names or ())
    if mesh.get_coordinate() is None:
        raise ValueError(f"group must be a mesh that this process is in, got {mesh}")
    if axis_name is None:
        if mesh.ndim != 1:
            raise ValueError(f"axis_name must name a dimension of a mesh that has several, {names}, got None")
        if head_axis is not None:
            raise ValueError(
                f"head_axis must be None where axis_name is: tokens have the mesh's only dimension, got {head_axis!r}"
            )
        return Place(mesh.get_group(), mesh.get_local_rank(), mesh.size())
    for name, axis in (("axis_name", axis_name), ("head_axis", head_axis)):
        if axis is not None and axis not in names:
            raise ValueError(f"{name} must name a dimension of the mesh, {names}, got {axis!r}")
    if axis_name == head_axis:
        raise ValueError(f"axis_name and head_axis must differ, got {axis_name!r} for both")
    place = Place(mesh.get_group(axis_name), mesh.get_local_rank(axis_name), mesh.size(names.index(axis_name)))
    if head_axis is None:
        return place
    return Place(place.group, place.rank, place.size, mesh.size(names.index(head_axis)), mesh.get_local_rank(head_axis))


def check_device(place: Place, group: Any, tensor: Tensor) -> None:
    """Check that the group can send tensors from this tensor's device."""
    kind = tensor.device.type
    if isinstance(group, DeviceMesh) and group.device_type != kind:
        raise ValueError(f"query must be on {group.device_type}, as the mesh is, got {kind}")
    try:
        place.group._get_backend(tensor.device)
    except RuntimeError as error:
        raise ValueError(f"query must be on a device that the process group has a backend for, got {kind}") from error


def local_slopes(name: str, slopes: Any, heads: int, place: Place) -> Any:
    """Return the slopes of this process's heads, a slice of the slopes of all heads."""
    if slopes is None:
        return None
    check_shard_slopes(name, slopes, heads, place.head_shards, "processes")
    return slopes[place.head_rank * heads :][:heads]


_tags = count()


def agree(place: Place, device: torch.device, facts: dict[str, Any]) -> Place:
    """Check that ``facts`` are equal (by ``repr``) on all processes of the group; if not, all raise a ValueError.

    Returns:
        The place with a new tag, equal on all processes.
    """
    global _tags
    if place.size == 1:
        return place
    # One all_gather of 64-bit digests, and each process's next tag.
    digests = [hashlib.blake2b(repr(fact).encode(), digest_size=8).digest() for fact in facts.values()]
    numbers = [int.from_bytes(x, "little", signed=True) for x in digests]
    mine = torch.tensor([*numbers, next(_tags)], device=device)
    found = [torch.empty_like(mine) for _ in range(place.size)]
    dist.all_gather(found, mine, group=place.group)
    everywhere = torch.stack(found)
    # Processes may have made different numbers of calls in other groups: agree on the largest counter.
    tag = int(everywhere[:, -1].max())
    _tags = count(tag + 1)
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
