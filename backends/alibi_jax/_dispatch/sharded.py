"""Attention on sharded arrays.

Inside ``jax.shard_map``, an array's type has the mesh axes that it varies over. With explicit mesh axes
(``AxisType.Explicit``), the type has the sharding of the array's axes. With automatic mesh axes the type has neither,
and XLA partitions the program.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from alibi_jax._call import Operands
from alibi_jax._compatible import varying_alike
from alibi_jax._dispatch.choice import Implementation
from alibi_jax._dispatch.derivatives import differentiable
from alibi_jax._dispatch.primitive import backward, forward


def attend(operands: Operands, implementation: Implementation | None) -> jax.Array:
    """Return attention; with explicitly sharded arrays, each device computes its own batch entries and heads.

    Raises:
        NotImplementedError: If an explicitly sharded query is sharded along tokens or features.
    """
    sharding = jax.typeof(operands.query).sharding
    mesh = sharding.mesh
    explicit = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}

    def call(operands: Operands) -> jax.Array:
        return _attend(implementation, varying_alike(operands.fitted()))

    if not explicit:
        return call(operands)
    batch, heads, tokens, features = (*sharding.spec, None, None, None, None)[:4]
    if tokens is not None or features is not None:
        given = PartitionSpec(batch, tokens, heads, features)
        raise NotImplementedError(
            f"query must be sharded along batch and heads alone, got {given}; jax.sharding.reshard it"
        )

    def spec(array: Any, has_heads: bool) -> PartitionSpec:
        """Return the sharding of an array; axes of length 1, which broadcast, are not sharded."""
        wanted = (batch, heads) if has_heads else (batch,)
        return PartitionSpec(*(None if n == 1 else axis for axis, n in zip(wanted, array.shape, strict=False)))

    of_call = {name: spec(x, name in ("slopes", "future_slopes", "mask")) for name, x in operands.call.arrays.items()}
    specs = jax.tree.map(lambda x: spec(x, True), operands)._replace(call=replace(operands.call, **of_call))
    operands = jax.tree.map(lambda x, to: jax.sharding.reshard(x, NamedSharding(mesh, to)), operands, specs)
    # Under jax.vmap with spmd_axis_name, mapped mesh axes must not be named; an empty set means all remaining axes.
    names = explicit if len(explicit) < len(mesh.axis_names) else set()
    return jax.shard_map(call, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(batch, heads), axis_names=names)(
        operands
    )


_attend = differentiable(forward, backward)
