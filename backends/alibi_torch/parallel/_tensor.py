"""Tensor parallelism: the heads of an attention layer, and their slopes, sharded among processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from alibi_torch.nn import AlibiAttention


class TensorParallelAttention(ParallelStyle):
    """Shard the heads of an :class:`alibi_torch.AlibiAttention` among the processes of a one-dimensional mesh.

    ``q_proj``, ``k_proj`` and ``v_proj`` are sharded by output features, ``out_proj`` by input features, and each
    process gets the slopes of its heads. Input and output are replicated. Parameters, ``log_slopes`` included, become
    ``DTensor``s with unchanged names, so that optimizers, ``fully_shard`` and checkpoints see full parameters. A
    process's caches hold only its own heads.

    Example:
        On each of 4 processes::

            mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("heads",))
            layer = parallelize_module(AlibiAttention(512, 8), mesh, TensorParallelAttention())

        On one process, which keeps all heads:

        >>> from torch import distributed
        >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        >>> mesh = distributed.init_device_mesh("cpu", (1,))
        >>> layer = parallelize_module(AlibiAttention(16, 2), mesh, TensorParallelAttention())
        >>> type(layer.q_proj.weight).__name__, layer.shape.num_heads
        ('DTensor', 2)
        >>> distributed.destroy_process_group()
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is not AlibiAttention:
            # A subclass's own computation would be lost, or would not know that heads are sharded.
            name = type(module).__name__
            raise TypeError(f"module must be an alibi_torch.AlibiAttention itself, of no derived class, got {name}")
        if getattr(module, "forget_proj", None) is not None or getattr(module, "sinks", None) is not None:
            raise ValueError(f"module must have neither a forget gate nor sinks, whose heads stay whole, got {module}")
        if device_mesh.ndim != 1:
            raise ValueError(
                f"device_mesh must have one dimension, such as mesh['heads'], got {device_mesh.mesh_dim_names}"
            )
        size, rank = device_mesh.size(), device_mesh.get_local_rank()
        for name in ("num_heads", "num_kv_heads"):
            heads = getattr(module.shape, name)
            if heads % size:
                raise ValueError(f"{name} must be divisible by the {size} processes of the mesh, got {heads}")
        plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
        parallelize_module(module, device_mesh, plan | {"out_proj": RowwiseParallel()})
        # From here on the module has only this process's heads: slopes, shape and class.
        shape = module.shape
        heads, kv_heads = shape.num_heads // size, shape.num_kv_heads // size
        mine = slice(rank * heads, (rank + 1) * heads)
        fields: dict[str, Any] = {"num_heads": heads, "num_kv_heads": kv_heads}
        for name in ("slopes", "future_slopes"):
            values, slopes = getattr(shape, name), getattr(module, name)
            fields[name] = None if values is None else values[mine]
            if slopes is not None:
                setattr(module, name, slopes[mine].clone())
        module.shape = replace(shape, **fields)
        if module.log_slopes is not None:
            whole = module.log_slopes
            divided = distribute_tensor(whole.detach(), device_mesh, [Shard(0)])
            module.log_slopes = nn.Parameter(divided, requires_grad=whole.requires_grad)
        module.__class__ = ShardedAttention
        return module


def tensor_parallel_plan(module: nn.Module) -> dict[str, ParallelStyle]:
    """Return a plan for ``parallelize_module`` that shards the heads of every attention layer of a model.

    Args:
        module: A model, or an :class:`alibi_torch.AlibiAttention` itself.

    Raises:
        ValueError: If ``module`` contains no :class:`alibi_torch.AlibiAttention`.

    Example:
        >>> plan = tensor_parallel_plan(nn.Sequential(AlibiAttention(64, 8), nn.Linear(64, 64)))
        >>> list(plan)
        ['0']
    """
    plan: dict[str, ParallelStyle] = {
        name: TensorParallelAttention() for name, part in module.named_modules() if isinstance(part, AlibiAttention)
    }
    if not plan:
        raise ValueError("module must have an alibi_torch.AlibiAttention in it, got none")
    return plan


class ShardedAttention(AlibiAttention):
    """An attention layer with this process's shard of the heads, made by :class:`TensorParallelAttention`."""

    @property
    def _current_slopes(self) -> Tensor:
        log_slopes = self.log_slopes  # a DTensor; its local shard has this process's heads
        return self.slopes if log_slopes is None else log_slopes.to_local().exp()
